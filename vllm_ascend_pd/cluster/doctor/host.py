# SPDX-License-Identifier: Apache-2.0
"""Checks of the host that they run on: patches, versions, libraries, ports."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

import vllm_ascend_pd
from vllm_ascend_pd.backends.rdma_cards import CARDS, VERBS, port_states, usable_ports
from vllm_ascend_pd.cluster.doctor.findings import Finding, fail, ok, skipped, warn
from vllm_ascend_pd.cluster.machine import can_listen, port_owner
from vllm_ascend_pd.patching import patch_tool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COMMAND_TIMEOUT_S = 60.0
_OUR_DISTRIBUTION = "vllm-ascend-pd"

_LIBRARY_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "libgomp.so.1": "libgomp1",
}
"""Debian and Ubuntu packages of libraries that Mooncake needs from the system."""


async def run_command(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; code 124 when it takes too long."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as e:
        return 127, "", str(e)
    try:
        out, err = await asyncio.wait_for(process.communicate(), _COMMAND_TIMEOUT_S)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return 124, "", f"{argv[0]} did not end within {_COMMAND_TIMEOUT_S:g} s"
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


class Patches:
    """Whether the installed engine carries our patches, by the blob ids of its files."""

    name = "patches"

    def __init__(self, tool: Path | None = None, python: str = sys.executable) -> None:
        self._tool = tool or patch_tool()
        self._python = python

    async def run(self) -> Sequence[Finding]:
        if importlib.util.find_spec("vllm") is None:
            return [skipped(self.name, "vLLM is not installed in this environment")]
        code, out, err = await run_command(self._python, str(self._tool), "status", "--json")
        try:
            report: list[dict[str, Any]] = json.loads(out)
        except ValueError:
            said = err.strip().splitlines()[-1:] or [f"exit code {code}"]
            reinstall = f"pip install {shlex.quote(_engine_pin() or 'vllm')}"
            return [fail(self.name, f"their state cannot be told: {said[0]}", reinstall)]
        return [self._judge(entry) for entry in report]

    def _judge(self, entry: dict[str, Any]) -> Finding:
        what = f"{entry['series']}: {entry['verdict']}"
        if entry["verdict"] == "applied":
            return ok(self.name, f"{what}, {len(entry['files'])} files", **entry)
        apply = shlex.join([self._python, str(self._tool), "apply"])
        if entry["verdict"] in ("pristine", "interrupted", "outdated"):
            return fail(self.name, f"{what} in {entry['root']}", apply, **entry)
        wrong = [path for path, state in entry["files"].items() if state not in ("applied",)]
        found = f"{what} in {entry['root']}: {', '.join(wrong[:3])}" + (" …" * (len(wrong) > 3))
        pin = _engine_pin(entry["version"]) or f"{entry['package']}=={entry['version']}"
        fix = f"pip install --force-reinstall --no-deps {shlex.quote(pin)} && {apply}"
        return fail(self.name, found, fix, **entry)


def _requirements() -> dict[str, list[Requirement]]:
    """The pins of our extras, by extra."""
    found: dict[str, list[Requirement]] = {}
    for line in importlib.metadata.requires(_OUR_DISTRIBUTION) or ():
        requirement = Requirement(line)
        for extra in ("cpu", "cuda", "ascend"):
            marker = requirement.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                found.setdefault(extra, []).append(requirement)
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_extra(pins: dict[str, list[Requirement]]) -> str | None:
    """The extra of which most is installed here."""

    def share(extra: str) -> float:
        return sum(_version(pin.name) is not None for pin in pins[extra]) / len(pins[extra])

    best = max(pins, key=share, default=None)
    return best if best is not None and share(best) > 0 else None


def _engine_pin(version: str = "") -> str | None:
    """The engine's distribution, at that version or at one that is supported."""
    pins = _requirements()
    extra = _installed_extra(pins)
    for pin in pins.get(extra or "", ()):
        if pin.name.startswith("vllm") and pin.name != "vllm-ascend":
            return f"{pin.name}{f'=={version}' if version else pin.specifier}"
    return None


class Versions:
    """Whether the engine and Mooncake are the versions that this package was made for."""

    name = "versions"

    async def run(self) -> Sequence[Finding]:
        ours = _version(_OUR_DISTRIBUTION) or vllm_ascend_pd.__version__
        pins = _requirements()
        extra = _installed_extra(pins)
        if extra is None:
            return [skipped(self.name, f"{_OUR_DISTRIBUTION} {ours}; no engine is installed here")]
        return [
            self.judge(ours, extra, pins[extra], {p.name: _version(p.name) for p in pins[extra]})
        ]

    def judge(
        self, ours: str, extra: str, pins: Iterable[Requirement], have: dict[str, str | None]
    ) -> Finding:
        """``have``: the installed version of each pinned distribution."""
        wrong = [
            pin
            for pin in pins
            if not pin.specifier.contains(have[pin.name] or "0", prereleases=True)
        ]
        listed = [f"{_OUR_DISTRIBUTION} {ours}"]
        listed += [f"{name} {version or 'missing'}" for name, version in have.items()]
        found = ", ".join(listed)
        if not wrong:
            return ok(self.name, found, **have)
        fix = "pip install " + " ".join(shlex.quote(f"{pin.name}{pin.specifier}") for pin in wrong)
        wanted = ", ".join(f"{pin.name}{pin.specifier}" for pin in wrong)
        return fail(self.name, f"{found}; pinned for {extra}: {wanted}", fix, **have)


class NativeExtension:
    """Whether pages are copied by native code."""

    name = "native extension"

    def __init__(self, module: str = "vllm_ascend_pd._C") -> None:
        self._module = module

    async def run(self) -> Sequence[Finding]:
        code, _, err = await run_command(sys.executable, "-c", f"import {self._module}")
        if code == 0:
            return [ok(self.name, "loads")]
        reason = (err.strip().splitlines() or ["?"])[-1]
        return [
            warn(
                self.name,
                f"not there, so KV is copied by Python, slowly ({reason})",
                "in a checkout: make venv, which says what the compiler lacks; else install a wheel"
                " that make wheel has built",
            )
        ]


class Compiler:
    """Whether torch can compile where the engine is vLLM's build for CPUs: it compiles the sampler
    at the first request with a temperature, and an engine that cannot ends there
    (``torch/_inductor/cpp_builder.py``, ``get_cpp_compiler``).
    """

    name = "C++ compiler"

    def __init__(self, compiler: str | None = None) -> None:
        """``compiler``: the command, by default torch's own choice."""
        self._compiler = compiler or os.environ.get("CXX", "g++")

    async def run(self) -> Sequence[Finding]:
        if _installed_extra(_requirements()) != "cpu":
            return [skipped(self.name, "only vLLM's build for CPUs needs one")]
        headers = sysconfig.get_path("include")
        source = ["-x", "c++", "-fsyntax-only", "-I", headers, "-include", "Python.h", os.devnull]
        code, _, err = await run_command(self._compiler, *source)
        if code == 0:
            return [ok(self.name, f"{self._compiler}, with the headers of Python")]
        reason = (err.strip().splitlines() or ["?"])[0]
        found = f"the engine would end at its first request with a temperature ({reason})"
        return [fail(self.name, found, "apt-get install g++ python3-dev")]


class MooncakeLibraries:
    """Whether every shared library that Mooncake is linked with can be found."""

    name = "Mooncake libraries"

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: that of the package ``mooncake``, by default the installed one."""
        if folder is None:
            spec = importlib.util.find_spec("mooncake")
            places = spec.submodule_search_locations if spec is not None else None
            folder = Path(next(iter(places))) if places else None
        self._folder = folder

    async def run(self) -> Sequence[Finding]:
        if self._folder is None:
            return [skipped(self.name, "Mooncake is not installed in this environment")]
        parts = [*sorted(self._folder.glob("engine*.so")), *sorted(self._folder.glob("store*.so"))]
        missing: dict[str, str] = {}
        for part in parts:
            code, out, err = await run_command("ldd", str(part))
            if code != 0:
                return [
                    fail(
                        self.name,
                        f"ldd {part}: {(err or out).strip()}",
                        "pip install --force-reinstall --no-deps mooncake-transfer-engine",
                    )
                ]
            for name in re.findall(r"^\s*(\S+) => not found", out, re.MULTILINE):
                missing[name] = part.name
        if not parts:
            return [
                fail(
                    self.name,
                    f"no engine*.so in {self._folder}",
                    "pip install --force-reinstall mooncake-transfer-engine",
                )
            ]
        if not missing:
            names = ", ".join(part.name for part in parts)
            findings = [ok(self.name, f"all are found ({names})")]
            is_for_npus = (self._folder / "ascend_transport.so").exists()
            if is_for_npus and "MC_FORCE_TCP" in os.environ:
                found = "MC_FORCE_TCP is set: no engine with transfer.protocol ascend starts"
                findings.append(warn(self.name, found, "unset MC_FORCE_TCP"))
            return findings
        packages = sorted(_LIBRARY_PACKAGES.get(name, "") for name in missing)
        known = [package for package in packages if package]
        fix = f"apt-get install {' '.join(known)}" if known else "install the package that has it"
        listed = ", ".join(f"{name} (for {part})" for name, part in sorted(missing.items()))
        return [fail(self.name, f"not found: {listed}", fix, missing=sorted(missing))]


class RdmaCards:
    """Whether engines with ``transfer.protocol`` ``rdma`` would find a card."""

    name = "RDMA cards"

    async def run(self) -> Sequence[Finding]:
        states = port_states()
        if not states:
            return [skipped(self.name, f"none in {CARDS}: transfer.protocol rdma would be refused")]
        listed = ", ".join(f"{name} {state}" for name, state in states.items())
        if not usable_ports():
            fix = f"bring a port up (ip link, ibstat); to a container pass --device {VERBS}"
            return [warn(self.name, f"{listed}: transfer.protocol rdma would be refused", fix)]
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY:
            found = f"{listed}; {limit >> 20} MiB may be locked, and staging and pool memory is"
            return [warn(self.name, found, "ulimit -l unlimited; docker run --ulimit memlock=-1")]
        return [ok(self.name, listed)]


class Ports:
    """Whether the ports that a deployment would take are free, and who has them."""

    name = "ports"

    def __init__(self, wanted: dict[str, tuple[str, int]]) -> None:
        """``wanted``: address and port by what it is for."""
        self._wanted = wanted

    async def run(self) -> Sequence[Finding]:
        findings = []
        for purpose, (address, port) in self._wanted.items():
            if can_listen(address, port):
                findings.append(ok(self.name, f"{address}:{port} ({purpose}) is free", port=port))
                continue
            owner = await asyncio.to_thread(port_owner, port)
            findings.append(
                warn(
                    self.name,
                    f"{address}:{port} ({purpose}) is used by {owner or 'another process'}",
                    f"end that process, or choose another port; see ss -ltnp 'sport = :{port}'",
                    port=port,
                    owner=owner,
                )
            )
        return findings

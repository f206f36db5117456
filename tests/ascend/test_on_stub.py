# SPDX-License-Identifier: Apache-2.0
"""Runs tests/ascend/on_stub in a process of its own: the patched vllm-ascend on a stub torch_npu.

It changes vLLM and torch where it is imported, so no other test may share a process with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "on_stub").glob("test_*.py"))


def test_there_are_tests_to_run() -> None:
    assert len(FILES) >= 4


@pytest.fixture(scope="module")
def output(patched: Path) -> str:
    env = {**os.environ, "PD_ASCEND_TREE": str(patched), "VLLM_LOGGING_LEVEL": "ERROR"}
    env.pop("PYTEST_ADDOPTS", None)  # the lines below are those of its own options
    env["PYTHONPATH"] = os.pathsep.join([str(HERE / "stub"), str(patched)])
    options = ["-o", "filterwarnings=", "-p", "no:cacheprovider", "-rA", "--no-header"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / "on_stub")],
        env=env,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", FILES)
def test_file_passes_on_the_stub(output: str, name: str) -> None:
    here = [line for line in output.splitlines() if f"on_stub/{name}::" in line]
    assert [line for line in here if line.startswith("PASSED")], output[-6000:]
    assert [line for line in here if not line.startswith("PASSED")] == [], output[-6000:]

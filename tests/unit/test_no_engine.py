# SPDX-License-Identifier: Apache-2.0
"""The tests of this folder run where vLLM is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
COLLECT = """
import sys
sys.modules["vllm"] = None
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_units_are_collected_without_vllm() -> None:
    folders = [str(HERE), str(HERE.parent / "contract")]
    command = [sys.executable, "-c", COLLECT, *folders]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

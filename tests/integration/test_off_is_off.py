# SPDX-License-Identifier: Apache-2.0
"""Unpatched, patched and switched off, patched and idle: three engines, the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.testing.tiny_model import main as make_model

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "off_is_off.py"


@pytest.mark.engine
def test_tokens_are_those_of_the_unpatched_engine(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(["--out", str(model), "--size", "tiny"])
    command = [sys.executable, str(BENCHMARK), "--model", str(model), "--rounds", "1", "--json"]
    command += ["--batch", "4", "--tokens", "32", "--kv-cache-mb", "128"]
    # Each process would import vLLM again.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1])["equal"]

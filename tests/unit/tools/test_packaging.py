# SPDX-License-Identifier: Apache-2.0
"""An installed package carries the patches and the tool that applies them."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

from vllm_ascend_pd.cluster.doctor.findings import Verdict
from vllm_ascend_pd.cluster.doctor.host import Patches

ROOT = Path(__file__).parents[3]


def test_the_doctor_finds_the_patch_state_from_an_installed_package(tmp_path: Path) -> None:
    source, built = tmp_path / "source", tmp_path / "built"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("patches", "tools", "vllm_ascend_pd"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    shutil.rmtree(source)
    tool = built / "vllm_ascend_pd" / "_patching" / "tools" / "apply_patches.py"
    assert {finding.verdict for finding in asyncio.run(Patches(tool).run())} == {Verdict.OK}

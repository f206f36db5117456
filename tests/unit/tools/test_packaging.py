# SPDX-License-Identifier: Apache-2.0
"""An installed package carries the patches and the tool that applies them."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.cluster.doctor.findings import Verdict
from vllm_ascend_pd.cluster.doctor.host import Patches

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel holds, less the native extension; the source that it was made from is gone."""
    folder = tmp_path_factory.mktemp("packaging")
    source, built = folder / "source", folder / "built"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("patches", "tools", "vllm_ascend_pd"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=600)
    shutil.rmtree(source)
    return built


def vllm_pd(built: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(built)!r}); sys.argv[0] = 'vllm-pd'; "
    code += "from vllm_ascend_pd.cli.main import app; app()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=built, capture_output=True, text=True, timeout=600)


def test_the_doctor_finds_the_patch_state_from_an_installed_package(built: Path) -> None:
    tool = built / "vllm_ascend_pd" / "_patching" / "tools" / "apply_patches.py"
    assert {finding.verdict for finding in asyncio.run(Patches(tool).run())} == {Verdict.OK}


def test_an_installed_package_patches_and_reverts_an_engine(built: Path, tmp_path: Path) -> None:
    listed = vllm_pd(built, "patch", "status", "--json", "--series", "vllm-0.30.0")
    [engine] = json.loads(listed.stdout)
    for name in engine["files"]:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(engine["root"]) / name, target)
    place = ("--series", "vllm-0.30.0", "--source-tree", str(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in engine["files"]}
    for command, verdict in (("revert", "pristine"), ("apply", "applied")):
        done = vllm_pd(built, "patch", command, *place)
        assert done.returncode == 0, done.stderr
        [report] = json.loads(vllm_pd(built, "patch", "status", "--json", *place).stdout)
        assert report["verdict"] == verdict
    assert {name: (tmp_path / name).read_bytes() for name in engine["files"]} == before
    checked = vllm_pd(built, "patch", "check", *place)
    assert "vllm-0.30.0: ok" in checked.stdout, checked.stderr
    assert checked.returncode == 0


def test_what_the_tool_refuses_is_the_exit_code_of_the_command(built: Path, tmp_path: Path) -> None:
    done = vllm_pd(built, "patch", "apply", "--source-tree", str(tmp_path))
    assert done.returncode == 3
    assert "no package to patch found" in done.stderr


def test_an_installed_package_has_the_alert_rules_and_the_routers_page(built: Path) -> None:
    for name in ("cluster/alerts.yaml", "router/page.html"):
        assert (built / "vllm_ascend_pd" / name).read_bytes() == (
            ROOT / "vllm_ascend_pd" / name
        ).read_bytes()

# SPDX-License-Identifier: Apache-2.0
"""An engine that another version of this package has patched does not start with this one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

from vllm_ascend_pd import hooks, patching
from vllm_ascend_pd.errors import ConfigError

SITE = Path(vllm.__file__).parents[1]
RECEIPT = next(SITE.glob(".vllm_ascend_pd-vllm-*.json"))
SERIES = RECEIPT.stem.removeprefix(".vllm_ascend_pd-")
REFUSED = "the patches of another version of vllm-ascend-pd"


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """Where the patched files of the installed engine are, and no others."""
    root = tmp_path / "engine"
    for text in json.loads(RECEIPT.read_text())["patches"].values():
        for path in (line.split(" b/")[1] for line in text.splitlines() if "diff --git" in line):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(SITE / path, root / path)
    shutil.copyfile(RECEIPT, root / RECEIPT.name)
    return root


def run_tool(command: str, engine: Path, patches: Path) -> None:
    tool = [sys.executable, str(patching.patch_tool()), command, "--series", SERIES]
    subprocess.run([*tool, "--patches-dir", patches, "--source-tree", engine], check=True)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The patches of a version that had one less."""
    patches = tmp_path / "patches"
    shutil.copytree(patching.patch_tool().parents[1] / "patches", patches)
    order = patches / SERIES / "series"
    *others, last = order.read_text().splitlines()
    order.write_text("\n".join(others))
    (patches / SERIES / last).unlink()
    return patches


def test_patches_of_this_version_are_not_refused(engine: Path) -> None:
    patching.refuse_other_patches([engine])
    patching.refuse_other_patches()


def test_those_of_another_version_are_until_its_tool_takes_them_off(
    engine: Path, older: Path
) -> None:
    run_tool("apply", engine, older)
    with pytest.raises(ConfigError, match=REFUSED):
        patching.refuse_other_patches([engine])
    run_tool("apply", engine, patching.patch_tool().parents[1] / "patches")
    patching.refuse_other_patches([engine])


def test_a_part_of_them_is_refused(engine: Path) -> None:
    receipt = engine / RECEIPT.name
    receipt.write_text(json.dumps(json.loads(RECEIPT.read_text()) | {"complete": False}))
    with pytest.raises(ConfigError, match=REFUSED):
        patching.refuse_other_patches([engine])


def test_what_is_noted_of_files_that_are_gone_says_nothing(engine: Path, older: Path) -> None:
    run_tool("apply", engine, older)
    next((engine / "vllm").rglob("*.py")).write_text("# of another version\n")
    patching.refuse_other_patches([engine])


def test_an_engine_asks_before_anything_else(
    engine: Path, older: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_tool("apply", engine, older)
    monkeypatch.setattr(vllm.__spec__, "submodule_search_locations", [str(engine / "vllm")])
    transfer = SimpleNamespace(kv_connector=hooks.IN_ENGINE)
    with pytest.raises(ConfigError, match=REFUSED):
        hooks.check_config(SimpleNamespace(kv_transfer_config=transfer))  # type: ignore[arg-type]

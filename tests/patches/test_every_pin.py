# SPDX-License-Identifier: Apache-2.0
"""Each series on the released source that it is pinned to."""

from __future__ import annotations

from pathlib import Path

import apply_patches
import fetch_sdist
import pytest
from patch_series import BAD_PATCH, series_dirs

REPO = Path(__file__).resolve().parents[2]
PINS = [path.name for path in series_dirs(REPO / "patches")]


@pytest.fixture(scope="module")
def sdists() -> dict[str, Path]:
    return {name: fetch_sdist.fetch(name, REPO / ".cache" / "sdists") for name in PINS}


@pytest.mark.parametrize("name", PINS)
def test_series_applies_compiles_reverts_and_exports_byte_identical(
    name: str, sdists: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` does all of it on copies; at fuzz 0, by blob ids. And what our code takes of the
    package is there."""
    assert apply_patches.main(["check", "--series", name, "--sdist", str(sdists[name])]) == 0
    said = capsys.readouterr()
    assert f"{name}: ok, " in said.out
    assert said.err == ""


def test_a_name_that_a_version_lacks_is_told(
    sdists: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "vllm-0.30.0"
    code = tmp_path / "vllm_ascend_pd"
    code.mkdir()
    (code / "hooks.py").write_text("from vllm.v1.request import Request, Gone\n")
    places = ("--root", str(tmp_path), "--series", name, "--sdist", str(sdists[name]))
    assert apply_patches.main(["check", *places]) == BAD_PATCH
    assert "vllm/v1/request.py:Gone (vllm_ascend_pd/hooks.py:1)" in capsys.readouterr().err


def test_sdist_with_other_bytes_is_refused(sdists: dict[str, Path], tmp_path: Path) -> None:
    sdist = next(iter(sdists.values()))
    other = tmp_path / sdist.name
    other.write_bytes(sdist.read_bytes() + b"\0")
    assert apply_patches.main(["check", "--sdist", str(other)]) == BAD_PATCH

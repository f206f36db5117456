# SPDX-License-Identifier: Apache-2.0
"""The Ascend series on its pinned sdist, and the rule that both series go together."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

import apply_patches  # noqa: E402
import fetch_sdist  # noqa: E402
from patch_series import NO_PACKAGE, REFUSED, load_series  # noqa: E402
from patched_tree import find_tree, pristine_contents  # noqa: E402
from port_patches import read_sdist  # noqa: E402
from scratch_repo import write_files  # noqa: E402

ASCEND, VLLM = "vllm-ascend-0.30.0rc2", "vllm-0.30.0"

pytestmark = pytest.mark.skipif(
    not importlib.metadata.version("vllm").startswith("0.30.0"),
    reason="goes with the vLLM that vllm-ascend is made for",
)


@pytest.fixture(scope="session")
def sdist() -> Path:
    return fetch_sdist.fetch(ASCEND, REPO / ".cache" / "sdists")


def test_check_says_what_it_could_not_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert apply_patches.main(["check"]) == 0
    said = capsys.readouterr().out
    assert f"{VLLM}: ok, " in said
    assert f"{ASCEND}: only its form" in said


class Site:
    """A site-packages directory with the touched files of both packages, as released."""

    def __init__(self, root: Path, sdist: Path) -> None:
        self.root = root
        for name in (VLLM, ASCEND):
            series = load_series(REPO / "patches" / name)
            if name == ASCEND:
                files = read_sdist(sdist, series.pin.package)
                contents = {path: files[path] for path in series.chains}
            else:
                tree = find_tree("vllm", None)
                assert tree is not None
                contents = pristine_contents(series, tree)
            write_files(root, contents)
            self.install(series.pin.package, series.pin.version)

    def install(self, package: str, version: str) -> None:
        for info in self.root.glob(f"{package}-*.dist-info"):
            shutil.rmtree(info)
        (self.root / package / "__init__.py").touch()
        info = self.root / f"{package}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {package}\nVersion: {version}\n"
        )
        (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/RECORD,,\n")

    def __call__(self, command: str, *options: str) -> int:
        return apply_patches.main([command, "--source-tree", str(self.root), *options])

    def snapshot(self) -> dict[str, bytes]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}


@pytest.fixture
def site(sdist: Path, tmp_path: Path) -> Site:
    return Site(tmp_path / "site", sdist)


def test_one_call_applies_and_reverts_both(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.snapshot()
    assert site("apply") == 0
    said = capsys.readouterr().out
    assert said.index(f"{VLLM}: now applied") < said.index(f"{ASCEND}: now applied")
    assert site("status") == 0
    assert site("apply") == 0
    capsys.readouterr()
    assert site("revert") == 0
    said = capsys.readouterr().out
    assert said.index(f"{ASCEND}: now pristine") < said.index(f"{VLLM}: now pristine")
    assert site.snapshot() == before


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.30.1"), ("vllm_ascend", "0.30.0rc1")])
def test_pair_of_versions_that_does_not_fit_is_refused(
    site: Site, package: str, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    site.install(package, version)
    before = site.snapshot()
    assert site("apply") == NO_PACKAGE
    assert f"{package} {version}" in capsys.readouterr().err
    assert site.snapshot() == before


def test_vllm_ascend_alone_is_not_patched(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.snapshot()
    assert site("apply", "--series", ASCEND) == REFUSED
    assert f"{ASCEND} calls what {VLLM} adds" in capsys.readouterr().err
    assert site.snapshot() == before
    shutil.rmtree(site.root / "vllm")
    before = site.snapshot()
    assert site("apply") == REFUSED
    assert site.snapshot() == before


def test_vllm_is_not_reverted_under_a_patched_vllm_ascend(site: Site) -> None:
    assert site("apply") == 0
    before = site.snapshot()
    assert site("revert", "--series", VLLM) == REFUSED
    assert site.snapshot() == before
    assert site("revert", "--series", ASCEND) == 0
    assert site("revert", "--series", VLLM) == 0


def test_second_series_can_follow_the_first(site: Site) -> None:
    assert site("apply", "--series", VLLM) == 0
    assert site("apply", "--series", ASCEND) == 0
    assert site("status") == 0


def test_status_names_a_torn_pair(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a reinstall of vLLM only."""
    before = site.snapshot()
    assert site("apply") == 0
    for path, content in before.items():
        if path.startswith("vllm/"):
            (site.root / path).write_bytes(content)
    assert site("status") == REFUSED
    assert f"{ASCEND} calls what {VLLM} adds" in capsys.readouterr().err
    assert site("apply") == 0
    assert site("status") == 0


def test_host_without_vllm_ascend_hears_nothing_of_it(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(site.root / "vllm_ascend")
    assert site("apply") == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{VLLM}: now applied")
    assert len(said.out.splitlines()) == 1
    assert said.err == ""

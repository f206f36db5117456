# SPDX-License-Identifier: Apache-2.0
"""The pinned vllm-ascend as source: fetched once into the cache, released and patched."""

from __future__ import annotations

import hashlib
import sys
import tarfile
from pathlib import Path

import pytest
from filelock import FileLock

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tools"))

import apply_patches  # noqa: E402
import fetch_sdist  # noqa: E402
from patch_series import Series, load_series, walk_chain  # noqa: E402

CACHE = REPO / ".cache"
SERIES = "vllm-ascend-0.30.0rc2"


@pytest.fixture(scope="session")
def series() -> Series:
    return load_series(REPO / "patches" / SERIES)


@pytest.fixture(scope="session")
def sdist(series: Series) -> Path:
    return fetch_sdist.fetch(SERIES, CACHE / "sdists")


@pytest.fixture(scope="session")
def released(sdist: Path, series: Series) -> Path:
    """A directory that holds `vllm_ascend/` as released."""
    root = CACHE / "ascend" / series.pin.sdist_sha256[:12]
    with FileLock(f"{root}.lock"):
        if not (root / "complete").is_file():
            unpack(sdist, root)
            (root / "complete").touch()
    return root


@pytest.fixture(scope="session")
def patched(sdist: Path, series: Series) -> Path:
    """A directory that holds `vllm_ascend/` patched, and the file that its build would write."""
    digest = hashlib.sha256(b"".join(patch.text for patch in series.patches)).hexdigest()
    root = CACHE / "ascend" / f"patched-{digest[:12]}"
    with FileLock(f"{root}.lock"):
        if not (root / "complete").is_file():
            unpack(sdist, root)
            for path, chain in series.chains.items():
                target = root / path
                target.write_bytes(walk_chain(target.read_bytes(), chain, apply_patches.APPLIED))
            (root / "vllm_ascend" / "_build_info.py").write_text('__device_type__ = "A3"\n')
            (root / "complete").touch()
    return root


def unpack(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, _, path = member.name.partition("/")
            if member.isfile() and path.startswith("vllm_ascend/"):
                file = archive.extractfile(member)
                assert file is not None
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(file.read())

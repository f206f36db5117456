# SPDX-License-Identifier: Apache-2.0
"""Fetching a pinned sdist; the index is scripted. tests/patches fetches a real one."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import fetch_sdist
import pytest
from patch_series import PatchError, Pin, ToolError

CONTENT = b"the released source"
SERIES = "toy-pkg-1.2.0"
FILE = "toy_pkg-1.2.0.tar.gz"


class Index:
    def __init__(self) -> None:
        self.content: bytes | OSError = CONTENT
        self.num_asked = 0

    def __call__(self, pin: object) -> tuple[bytes, str]:
        self.num_asked += 1
        if isinstance(self.content, OSError):
            raise self.content
        return self.content, hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index()
    monkeypatch.setattr(fetch_sdist, "_download", index)
    return index


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    directory = tmp_path / "patches" / SERIES
    directory.mkdir(parents=True)
    (directory / "pin.toml").write_text(
        'package = "toy_pkg"\nversion = "1.2.0"\n'
        f'sdist_sha256 = "{hashlib.sha256(CONTENT).hexdigest()}"\n'
    )
    return directory.parent


def test_file_is_fetched_once(index: Index, patches: Path, tmp_path: Path) -> None:
    to = tmp_path / "cache"
    assert fetch_sdist.fetch(SERIES, to, patches) == to / FILE
    assert fetch_sdist.fetch(SERIES, to, patches).read_bytes() == CONTENT
    assert index.num_asked == 1
    assert [path.name for path in to.iterdir()] == [FILE]


def test_two_may_fetch_it_at_a_time(index: Index, patches: Path, tmp_path: Path) -> None:
    both_have_written, write = threading.Barrier(2), Path.write_bytes

    def write_and_wait(path: Path, data: bytes) -> int:
        num_bytes = write(path, data)
        both_have_written.wait(60)
        return num_bytes

    def fetch(_: int) -> Path:
        return fetch_sdist.fetch(SERIES, tmp_path, patches)

    with mock.patch.object(Path, "write_bytes", write_and_wait), ThreadPoolExecutor() as pool:
        for path in pool.map(fetch, range(2)):
            assert path.read_bytes() == CONTENT


def test_damaged_file_is_fetched_again(index: Index, patches: Path, tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"half of it")
    assert fetch_sdist.fetch(SERIES, tmp_path, patches).read_bytes() == CONTENT


def test_other_bytes_than_the_pin_says_are_not_kept(
    index: Index, patches: Path, tmp_path: Path
) -> None:
    index.content = b"something else"
    with pytest.raises(PatchError, match="have not the sha256"):
        fetch_sdist.fetch(SERIES, tmp_path, patches)
    assert not (tmp_path / FILE).exists()


def test_pin_without_a_sha256_gets_that_of_the_index(index: Index, tmp_path: Path) -> None:
    path, pin = fetch_sdist.fetch_pin(Pin("toy_pkg", "1.2.0", ""), tmp_path)
    assert path.read_bytes() == CONTENT
    assert pin == Pin("toy_pkg", "1.2.0", hashlib.sha256(CONTENT).hexdigest())
    index.content = b"something else"
    with pytest.raises(PatchError, match="have not the sha256"):
        fetch_sdist.fetch_pin(Pin("toy_pkg", "1.2.0", ""), tmp_path)


def test_host_without_an_index_is_told_where_to_put_the_file(
    index: Index, patches: Path, tmp_path: Path
) -> None:
    index.content = OSError("no route to host")
    with pytest.raises(ToolError, match="no route to host") as caught:
        fetch_sdist.fetch(SERIES, tmp_path, patches)
    assert FILE in str(caught.value)
    assert str(tmp_path) in str(caught.value)

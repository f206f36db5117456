# SPDX-License-Identifier: Apache-2.0
"""What two sets of files must have in common to count as the same weights."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_ascend_pd.engine import weight_files
from vllm_ascend_pd.engine.weight_files import content_digest

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vllm_ascend_pd" / "weights"


def write(file: Path, **changes: np.ndarray) -> Path:
    """40 tensors of 1 MiB each and some small ones; ``changes`` replace them by name."""
    tensors = {f"layer.{i}": np.full(MIB // 4, i, np.float32) for i in range(40)}
    tensors |= {f"norm.{i}": np.full(64, i, np.float32) for i in range(40)}
    save_file({**tensors, **{k.replace("_", "."): v for k, v in changes.items()}}, file)
    return file


def make(folder: Path, **changes: np.ndarray) -> str:
    folder.mkdir(exist_ok=True)
    return content_digest([write(folder / "model.safetensors", **changes)])


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    assert make(tmp_path / "a") == make(tmp_path / "b")


@pytest.mark.parametrize("name", ["layer_0", "layer_20", "layer_39"])
def test_every_large_tensor_counts(tmp_path: Path, name: str) -> None:
    other = {name: np.random.default_rng(0).standard_normal(MIB // 4).astype(np.float32)}
    assert make(tmp_path / "a") != make(tmp_path / "b", **other)


def test_one_value_of_a_small_tensor_counts(tmp_path: Path) -> None:
    other = np.full(64, 20, np.float32)
    other[33] += 1
    assert make(tmp_path / "a") != make(tmp_path / "b", norm_20=other)


def test_names_and_shapes_count(tmp_path: Path) -> None:
    values = np.zeros((2, 8), np.float32)
    files = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for file, tensors in zip(
        files, [{"x": values}, {"y": values}, {"x": values.reshape(4, 4)}], strict=True
    ):
        file.mkdir()
        save_file(tensors, file / "model.safetensors")
    assert len({content_digest([file / "model.safetensors"]) for file in files}) == 3


@pytest.mark.parametrize("name", ["model.bin", "model.gguf", "model.safetensors"])
@pytest.mark.parametrize("place", [0, 3 * MIB // 2, 3 * MIB - 1])
def test_64_changed_kib_of_any_file_count(tmp_path: Path, name: str, place: int) -> None:
    """The last one is called a safetensors file and is none."""
    content = np.random.default_rng(0).bytes(3 * MIB)
    begin = max(0, place - (64 << 10))
    changed = content[:begin] + bytes(64 << 10) + content[begin + (64 << 10) :]
    digests = []
    for folder, data in [("a", content), ("b", changed[: 3 * MIB])]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(data)
        digests.append(content_digest([tmp_path / folder / name]))
    assert digests[0] != digests[1]


def test_full_sees_a_single_byte(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors")
    before = content_digest([file], full=True), content_digest([file])
    with file.open("r+b") as opened:
        opened.seek(10 * MIB + 12345)
        opened.write(b"\x77")
    assert content_digest([file], full=True) != before[0]
    assert content_digest([file]) == before[1]


def test_a_header_that_leads_outside_is_read_as_bytes(tmp_path: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 99999999]}}'
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    before = content_digest([file])
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"xyz")
    assert content_digest([file]) != before


class Reads:
    """Counts the sets of files that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read = weight_files._read_digest

        def counted(*args: object) -> str:
            self.count += 1
            return read(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(weight_files, "_read_digest", counted)


def test_files_that_have_settled_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "model.safetensors")
    monkeypatch.setattr(weight_files, "_SETTLED_S", -1.0)
    reads = Reads(monkeypatch)
    with ThreadPoolExecutor(4) as threads:
        digests = set(threads.map(lambda _: content_digest([file]), range(4)))
    assert (len(digests), reads.count) == (1, 1)
    write(file, norm_0=np.ones(64, np.float32))
    assert content_digest([file]) not in digests
    assert reads.count == 2


def test_what_a_version_kept_that_looks_elsewhere_is_not_taken_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_SETTLED_S", -1.0)
    digest = make(tmp_path / "a")
    monkeypatch.setattr(weight_files, "_PIECES_PER_TENSOR", 6)
    assert content_digest([tmp_path / "a" / "model.safetensors"]) != digest


def test_files_that_were_just_written_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file system may not tell two writes apart that follow each other."""
    reads = Reads(monkeypatch)
    file = write(tmp_path / "model.safetensors")
    content_digest([file])
    content_digest([file])
    assert reads.count == 2


def test_without_a_cache_folder_they_are_read(tmp_path: Path, cache_folder: Path) -> None:
    cache_folder.parent.mkdir(parents=True)
    cache_folder.write_text("a file")
    assert make(tmp_path / "a") == make(tmp_path / "b")


@pytest.mark.parametrize("damaged", [b"", b"4bd0", b"\xff" * 32], ids=["empty", "cut", "garbage"])
def test_what_is_kept_of_files_and_damaged_is_read_anew(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, damaged: bytes
) -> None:
    monkeypatch.setattr(weight_files, "_SETTLED_S", -1.0)
    digest = make(tmp_path / "a")
    (kept,) = (file for file in cache_folder.iterdir() if not file.suffix)
    kept.write_bytes(damaged)
    assert content_digest([tmp_path / "a" / "model.safetensors"]) == digest
    assert kept.read_text() == digest


@pytest.mark.parametrize("num_threads", [0, 1])
def test_want_of_threads_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    files = [tmp_path / name for name in ("a", "b", "c")]
    for file in files:
        file.write_bytes(file.name.encode())
    expected, left = weight_files._read_digest(files, True), [None] * num_threads
    start = threading.Thread.start

    def want(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", want)
    assert weight_files._read_digest(files, True) == expected

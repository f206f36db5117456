# SPDX-License-Identifier: Apache-2.0
"""What lies in the files of a model or of an adapter, as one digest.

    safetensors   header (names, dtypes, shapes, places), and of every tensor 5 pieces of 4 KiB from
                  its first to its last byte, one more for each 16 MiB; all of it up to 20 KiB
    other files   4 KiB of every 64 KiB, and the last 4 KiB
    full          every byte of every file

Who trains a tensor changes nearly all of its bytes, so samples see it. A change of a few bytes of a
large tensor, made on purpose, is seen by ``full`` only.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from vllm_ascend_pd import envs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

_PIECE = 4096
_PIECES_PER_TENSOR = 5
_TENSOR_STRIDE = 16 << 20
_FILE_STRIDE = 64 << 10
_FULL_PIECE = 1 << 20
_MAX_HEADER = 100 << 20
"""What the format allows."""
_NUM_THREADS = 16
_SETTLED_S = 2.0
"""A file may be written twice within one tick of its clock; then it is read again next time."""
_KEPT_S = 90 * 86400.0
_IS_DIGEST = re.compile(rb"[0-9a-f]{32}").fullmatch


def content_digest(files: Sequence[Path], full: bool = False) -> str:
    """32 hex digits of what is in these files and how they are called; the same on every host.

    It is kept in the user's cache folder by inode, size and times of the files. Processes of one
    user that ask for the same files at the same time read them once.
    """
    key = stat_key(files, full)
    folder = envs.cache_folder() / "weights"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _kept_digest(files, full, folder / key)
    except OSError as e:
        logger.warning("weights are read without the cache in %s: %s", folder, e)
        return _read_digest(files, full)


def _kept_digest(files: Sequence[Path], full: bool, entry: Path) -> str:
    with suppress(FileNotFoundError):
        os.utime(entry)
        if _IS_DIGEST(known := entry.read_bytes()):  # else its host has lost power meanwhile
            return known.decode()
    digest = _read_digest(files, full)
    if time.time() - max(map(_changed_at, files), default=0.0) > _SETTLED_S:
        unfinished = entry.with_suffix(".new")
        unfinished.write_text(digest)
        unfinished.replace(entry)
    for other in entry.parent.iterdir():
        with suppress(OSError):
            if time.time() - other.stat().st_mtime > _KEPT_S:
                other.unlink()
    return digest


def _changed_at(file: Path) -> float:
    status = file.stat()
    return max(status.st_mtime, status.st_ctime)


def stat_key(files: Sequence[Path], full: bool = False) -> str:
    """Changes when one of them does, or what is looked at of them."""
    looked_at = "full" if full else (_PIECE, _PIECES_PER_TENSOR, _TENSOR_STRIDE, _FILE_STRIDE)
    digest = hashlib.sha256(repr(looked_at).encode())
    for file in files:
        s = file.stat()
        times = f"{s.st_mtime_ns} {s.st_ctime_ns}"
        digest.update(f"{file.name} {s.st_dev} {s.st_ino} {s.st_size} {times}\n".encode())
    return digest.hexdigest()[:32]


def _read_digest(files: Sequence[Path], full: bool) -> str:
    started = time.monotonic()
    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(_NUM_THREADS, "pd-identity") as threads:
            found = list(threads.map(lambda file: _file_digest(file, full), files))
    except RuntimeError as e:
        logger.warning("weights are read file by file: %s", e)  # no thread is left
        found = [_file_digest(file, full) for file in files]
    for file, (of_file, _) in sorted(zip(files, found, strict=True)):
        digest.update(f"{file.name} {of_file}\n".encode())
    logger.info(
        "weights: %d files of %.1f GB looked at by %d reads in %.1f s",
        len(files),
        sum(file.stat().st_size for file in files) / 1e9,
        sum(num_reads for _, num_reads in found),
        time.monotonic() - started,
    )
    return digest.hexdigest()[:32]


def _file_digest(file: Path, full: bool) -> tuple[str, int]:
    """Of one file; and by how many reads."""
    digest = hashlib.sha256()
    num_reads = 0
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        digest.update(str(size).encode())
        if not full:
            # What is read ahead of a sample is of no use.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for offset, length in _whole(size) if full else _samples(descriptor, size):
            digest.update(os.pread(descriptor, length, offset))
            num_reads += 1
    finally:
        os.close(descriptor)
    return digest.hexdigest(), num_reads


def _whole(size: int) -> Iterator[tuple[int, int]]:
    return ((offset, _FULL_PIECE) for offset in range(0, size, _FULL_PIECE))


def _samples(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """``(offset, length)`` of what is looked at."""
    header = _read_header(descriptor, size)
    if header is None:
        yield from ((offset, _PIECE) for offset in range(0, size, _FILE_STRIDE))
        yield max(0, size - _PIECE), _PIECE
        return
    data, places = header
    yield 0, data
    for begin, end in sorted(places.values()):
        length = end - begin
        if length <= _PIECES_PER_TENSOR * _PIECE:
            yield begin, length
            continue
        num_pieces = _PIECES_PER_TENSOR + length // _TENSOR_STRIDE
        for i in range(num_pieces):
            yield begin + i * (length - _PIECE) // (num_pieces - 1), _PIECE


def tensor_names(files: Sequence[Path]) -> frozenset[str] | None:
    """Of all that these safetensors files hold; ``None`` where one of them is no such file."""
    names: set[str] = set()
    for file in files:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = _read_header(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        if header is None:
            return None
        names.update(header[1])
    return frozenset(names)


def _read_header(descriptor: int, size: int) -> tuple[int, dict[str, tuple[int, int]]] | None:
    """Where the data of a safetensors file begins, and where each tensor lies, by name; ``None``
    where this is no such file, whatever it is called.
    """
    header_size = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    data = 8 + header_size
    if not 1 < header_size < min(size, _MAX_HEADER):
        return None
    try:
        header = json.loads(os.pread(descriptor, header_size, 8))
        places = {
            name: (data + begin, data + end)
            for name, entry in header.items()
            if name != "__metadata__"
            for begin, end in [entry["data_offsets"]]
        }
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if any(not data <= begin <= end <= size for begin, end in places.values()):
        return None
    return data, places

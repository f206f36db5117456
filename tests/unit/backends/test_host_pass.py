# SPDX-License-Identifier: Apache-2.0
"""Copies of several threads are those of one, checksums included."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from vllm_ascend_pd.backends import host_pass
from vllm_ascend_pd.backends.block_copy import (
    BlockCopier,
    NativeBlockCopier,
    PageLayout,
    Region,
    Values,
)
from vllm_ascend_pd.backends.host_pass import HostPass
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pass, "_MIN_BYTES", 64)


@pytest.fixture(params=[NativeBlockCopier, PythonBlockCopier])
def copier(request: pytest.FixtureRequest) -> BlockCopier:
    return request.param()


@pytest.fixture
def make_pass() -> Iterator[Callable[[BlockCopier, int], HostPass]]:
    made: list[HostPass] = []

    def make(copier: BlockCopier, num_threads: int) -> HostPass:
        made.append(HostPass(copier, num_threads))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Memory:
    def __init__(self, seed: int | None = None) -> None:
        self.bytes = np.zeros(1 << 14, dtype=np.uint8)
        if seed is not None:
            self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.size)
        self.region = Region(self.bytes.ctypes.data, self.bytes.nbytes)


class NotesThreads(NativeBlockCopier):
    """In which threads parts are copied, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def gather_layers(self, *args: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        return super().gather_layers(*args)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("num_rows", "row_bytes"), [(1, 64), (2, 64), (7, 136), (50, 72), (9, 61)])
def test_copy_and_its_checksum_are_those_of_one_thread(
    copier: BlockCopier,
    make_pass: Callable[[BlockCopier, int], HostPass],
    num_threads: int,
    num_rows: int,
    row_bytes: int,
) -> None:
    source, target = Memory(seed=1), Memory()
    copies = make_pass(copier, num_threads)
    checksum = copies.copy((source.region, 16), (target.region, 40), num_rows, row_bytes, 7)
    num_bytes = num_rows * row_bytes
    assert checksum == copier.checksum(source.region, 16, num_bytes, 7)
    expected = np.zeros_like(target.bytes)
    expected[40 : 40 + num_bytes] = source.bytes[16 : 16 + num_bytes]
    np.testing.assert_array_equal(target.bytes, expected)


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize(("start", "stop"), [(0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("num_blocks", [1, 2, 7])
def test_layers_and_their_sums_are_those_of_one_thread(
    copier: BlockCopier,
    make_pass: Callable[[BlockCopier, int], HostPass],
    num_threads: int,
    start: int,
    stop: int,
    num_blocks: int,
) -> None:
    source, target, expected = Memory(seed=1), Memory(), Memory()
    page, stride = 64, 3 * 64 + 24
    offsets = np.arange(3, dtype=np.int64) * page * num_blocks
    layout = PageLayout.packed(source.region, offsets, page)
    sums = make_pass(copier, num_threads).copy_layers(
        layout, start, stop, num_blocks, Values(target.region, 8, stride)
    )
    blocks = np.arange(num_blocks, dtype=np.int64)
    values = Values(expected.region, 8, stride)
    by_one = copier.gather_layers(layout, start, stop, blocks, values)
    np.testing.assert_array_equal(sums, by_one)
    np.testing.assert_array_equal(target.bytes, expected.bytes)


def test_all_threads_take_a_part_and_the_caller_is_one(
    make_pass: Callable[[BlockCopier, int], HostPass],
) -> None:
    copier, source, target = NotesThreads(), Memory(seed=1), Memory()
    copies = make_pass(copier, 3)
    copies.copy((source.region, 0), (target.region, 0), 30, 64, 7)
    assert len(copier.threads) == 3
    assert copier.threads.count(threading.current_thread().name) == 1
    copier.threads.clear()
    copies.copy((source.region, 0), (target.region, 0), 1, 64, 7)  # too small for more than one
    assert copier.threads == []


class FailsInTheMiddle(PythonBlockCopier):
    """The caller's part fails at once, the others go on for a while."""

    def __init__(self) -> None:
        self.num_ended = 0

    def gather_layers(self, layout: PageLayout, start: int, *args: Any) -> Any:
        if start == 0:
            raise ValueError("the first part")
        time.sleep(0.1)
        self.num_ended += 1
        return np.zeros(1, dtype=np.uint64)


def test_no_part_goes_on_after_a_copy_that_failed(
    make_pass: Callable[[BlockCopier, int], HostPass],
) -> None:
    """Else it would write into memory that is another's by then."""
    copier, source, target = FailsInTheMiddle(), Memory(seed=1), Memory()
    with pytest.raises(ValueError, match="the first part"):
        make_pass(copier, 3).copy((source.region, 0), (target.region, 0), 30, 64, 7)
    assert copier.num_ended == 2


def test_threads_that_copy_at_the_same_time_share_the_helpers(
    make_pass: Callable[[BlockCopier, int], HostPass],
) -> None:
    before = threading.active_count()
    copier, source = NativeBlockCopier(), Memory(seed=1)
    copies = make_pass(copier, 3)
    assert threading.active_count() == before + 2
    expected = copier.checksum(source.region, 0, 30 * 64, 7)
    found: list[int] = []

    def copy() -> None:
        target = Memory()
        for _ in range(20):
            found.append(copies.copy((source.region, 0), (target.region, 0), 30, 64, 7))

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert found == [expected] * 80
    copies.close()
    assert threading.active_count() == before


def test_want_of_threads_is_told_and_leaves_none_that_waits(
    copier: BlockCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the process would wait for it."""
    start, started = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        HostPass(copier, 3)
    started[0].join(LIMIT_S)
    assert not started[0].is_alive()

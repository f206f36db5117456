# SPDX-License-Identifier: Apache-2.0
"""Copies within the memory of a host, with the checksum, by several threads.

rows      |  0  |  1  |  2  |  3  |  4  |  5  |  6  |     each of the same size, side by side
threads   |<---- caller ---->|<---- helper --->|<-- helper
sums            s0           +       s1        +    s2     the checksum is that of one thread
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vllm_ascend_pd.backends.block_copy import PageLayout, Values, finish_checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import BlockCopier, Region

MAX_DEFAULT_THREADS = 4
"""Of one copy, if nothing is configured: some saturate the memory of a host."""
_MIN_BYTES = 1 << 20  # less is copied sooner than a thread is woken
_ONE_BLOCK = np.zeros(1, dtype=np.int64)
_Part = TypeVar("_Part")


class HostPass:
    """Any thread; blocks for the time of the copy. All callers share the helpers."""

    def __init__(self, copier: BlockCopier, num_threads: int) -> None:
        """``num_threads``: of one copy, the calling one among them."""
        self._copier = copier
        self._num_threads = num_threads
        num_helpers = max(1, num_threads - 1)
        self._helpers = ThreadPoolExecutor(num_helpers, "pd-copy")
        if num_threads > 1:
            # All of them now: a part whose thread cannot be started would be copied at some later
            # time, when its memory is another's.
            are_started = threading.Barrier(num_helpers)
            try:
                wait([self._helpers.submit(are_started.wait) for _ in range(num_helpers)])
            except RuntimeError:  # no thread is left: those that wait would never end
                are_started.abort()
                raise

    def copy(
        self,
        source: tuple[Region, int],
        target: tuple[Region, int],
        num_rows: int,
        row_bytes: int,
        seed: int,
    ) -> int:
        """Copy rows that lie side by side from one offset to another; their checksum."""
        region, offset = source
        num_bytes = num_rows * row_bytes
        if row_bytes % 8 or self._num_parts(num_rows, num_bytes) == 1:
            whole = PageLayout.packed(region, np.array([offset], dtype=np.int64), num_bytes)
            return self._copier.gather(whole, _ONE_BLOCK, *target, seed)
        offsets = offset + np.arange(num_rows, dtype=np.int64) * row_bytes
        rows = PageLayout.packed(region, offsets, row_bytes)

        def copy_part(start: int, stop: int) -> int:
            value = Values(*target, num_bytes)
            sums = self._copier.gather_layers(rows, start, stop, _ONE_BLOCK, value)
            return int(sums[0])

        total = sum(self._in_parts(copy_part, num_rows, num_bytes))
        return finish_checksum(total, num_bytes, seed)

    def copy_layers(
        self, layout: PageLayout, start: int, stop: int, num_blocks: int, values: Values
    ) -> NDArray[np.uint64]:
        """`BlockCopier.gather_layers` of the first ``num_blocks`` blocks."""
        num_bytes = layout.for_layers(start, stop).num_bytes(num_blocks)
        blocks = np.arange(num_blocks, dtype=np.int64)

        def copy_part(first: int, last: int) -> NDArray[np.uint64]:
            part = values._replace(offset=values.offset + first * values.stride)
            return self._copier.gather_layers(layout, start, stop, blocks[first:last], part)

        return np.concatenate(self._in_parts(copy_part, num_blocks, num_bytes))

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int) -> int:
        return self._copier.checksum(region, offset, num_bytes, seed)

    def close(self) -> None:
        """End the helpers; nothing is copied any more."""
        self._helpers.shutdown()

    def _num_parts(self, num_rows: int, num_bytes: int) -> int:
        return max(1, min(self._num_threads, num_rows, num_bytes // _MIN_BYTES))

    def _in_parts(
        self, work: Callable[[int, int], _Part], num_rows: int, num_bytes: int
    ) -> list[_Part]:
        """What ``work`` returns for each part of the rows. All of them have ended, also when one
        raises.
        """
        num_parts = self._num_parts(num_rows, num_bytes)
        ends = [num_rows * part // num_parts for part in range(num_parts + 1)]
        helped: list[Future[_Part]] = []
        try:
            for first, last in pairwise(ends[1:]):
                helped.append(self._helpers.submit(work, first, last))
            own = work(ends[0], ends[1])
        finally:
            wait(helped)
        return [own, *(part.result() for part in helped)]

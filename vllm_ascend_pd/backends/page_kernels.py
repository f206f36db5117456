# SPDX-License-Identifier: Apache-2.0
"""The kernels between the pages of a device and memory in which they lie side by side.

page  = rows of one memory       K: [K0|K1|K2|…] rows of K's bytes     V: rows of V's bytes
blocks 5, 2                      index [5, 2]                          index [5, 2]
packed                           [K5|V5][K2|V2]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.device_checksum import WORD_BYTES, sum_of_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import Ids
    from vllm_ascend_pd.backends.device_copy import DevicePageLayout

Cut: TypeAlias = tuple[int, int, int]
"""Offset, stride and size of a segment, in bytes."""


@dataclass(slots=True)
class Lane:
    """What one thread copies with: a stream, and memory on both sides."""

    stream: Any
    total: torch.Tensor
    """Pinned int64 []: the sum of what was copied last."""
    bounce: torch.Tensor
    """Pinned."""
    scratch: torch.Tensor
    index: torch.Tensor
    """Pinned int64."""
    device_index: torch.Tensor

    @property
    def region(self) -> Region:
        return Region(self.bounce.data_ptr(), self.bounce.numel())


class Rows(NamedTuple):
    """A cut of a memory into rows of equal size, such that every page is some of them."""

    num_bytes: int
    start: int
    stop: int
    """Those of all pages, block by block, are ``index[start:stop]``."""


def index_of(layout: DevicePageLayout, ids: Ids) -> tuple[NDArray[np.int64], dict[Cut, Rows]]:
    """The rows of these blocks' pages, for every cut that a segment of the layout has. Layers are
    mostly cut alike, so there are few.
    """
    rows: dict[Cut, Rows] = {}
    parts: list[NDArray[np.int64]] = []
    stop = 0
    for segment in chain.from_iterable(layout.segments):
        if segment.cut in rows:
            continue
        row_bytes = math.gcd(*segment.cut)
        first = (segment.offset + ids * segment.stride) // row_bytes
        each = np.arange(segment.num_bytes // row_bytes, dtype=np.int64)
        parts.append((first[:, None] + each).ravel())
        start, stop = stop, stop + len(parts[-1])
        rows[segment.cut] = Rows(row_bytes, start, stop)
    return np.concatenate(parts), rows


def pick(
    lane: Lane,
    layout: DevicePageLayout,
    num_blocks: int,
    rows: Mapping[Cut, Rows],
    memory: torch.Tensor,
) -> None:
    """Pages to pinned memory, in the order of staging. On the lane's stream."""
    for table, index, pages in _tables(lane, layout, num_blocks, rows):
        pages.copy_(table.index_select(0, index).view(pages.shape))
    memory.copy_(lane.scratch[: memory.numel()], non_blocking=True)


def put(
    lane: Lane,
    layout: DevicePageLayout,
    num_blocks: int,
    rows: Mapping[Cut, Rows],
    memory: torch.Tensor,
) -> None:
    """Pinned memory to pages. On the lane's stream."""
    lane.scratch[: memory.numel()].copy_(memory, non_blocking=True)
    for table, index, pages in _tables(lane, layout, num_blocks, rows):
        table.index_copy_(0, index, pages.reshape(len(index), -1))


def add_up(lane: Lane, num_bytes: int) -> None:
    """Sum what the scratch memory holds, which nobody else writes. On the lane's stream."""
    end = padded(num_bytes)
    if end > num_bytes:
        lane.scratch[num_bytes:end].zero_()
    lane.total.copy_(sum_of_words(lane.scratch[:end]), non_blocking=True)


def padded(num_bytes: int) -> int:
    """To whole words."""
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def _tables(
    lane: Lane, layout: DevicePageLayout, num_blocks: int, rows: Mapping[Cut, Rows]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For every segment: its memory as rows, which of them its pages are, and their place in the
    scratch memory, [num_blocks, words].
    """
    # Kernels for such copies exist for 32-bit words everywhere.
    is_aligned = all(each.num_bytes % 4 == 0 for each in rows.values())
    word = torch.int32 if is_aligned else torch.uint8
    num_index = max(each.stop for each in rows.values())
    lane.device_index[:num_index].copy_(lane.index[:num_index], non_blocking=True)
    scratch = lane.scratch[: layout.num_bytes(num_blocks)].view(word)
    for segments, packed in zip(
        layout.segments, scratch.view(len(layout.segments), num_blocks, -1), strict=True
    ):
        at = 0
        for segment in segments:
            row_bytes, start, stop = rows[segment.cut]
            memory = layout.memories[segment.memory]
            memory = memory[: memory.numel() // row_bytes * row_bytes].view(word)
            num_words = segment.num_bytes // word.itemsize
            yield (
                memory.view(-1, row_bytes // word.itemsize),
                lane.device_index[start:stop],
                packed[:, at : at + num_words],
            )
            at += num_words

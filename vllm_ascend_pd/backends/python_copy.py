# SPDX-License-Identifier: Apache-2.0
"""The copier without native code: slow, and with the GIL held."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.block_copy import (
    GOLDEN,
    BlockCopier,
    PageLayout,
    Region,
    finish_checksum,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import Ids, Values

_CHUNK_BYTES = 1 << 20  # bounds the temporaries; a multiple of 8


class PythonBlockCopier(BlockCopier):
    """numpy and ctypes only: the native one's reference, and the way out without a compiler."""

    def gather(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        num_bytes = _check_copy(layout, block_ids, staging, offset)
        start = staging.base + offset
        for page, addr in enumerate(_page_addresses(layout, block_ids)):
            ctypes.memmove(start + page * layout.page_bytes, addr, layout.page_bytes)
        return _checksum(start, num_bytes, seed)

    def gather_layers(
        self, layout: PageLayout, start: int, stop: int, block_ids: Ids, values: Values
    ) -> NDArray[np.uint64]:
        layers = layout.for_layers(start, stop)
        _check_values(layers, block_ids, start, values)
        sums = np.zeros(len(block_ids), dtype=np.uint64)
        first_word = start * layout.page_bytes // 8
        first = values.staging.base + values.offset + start * layout.page_bytes
        num_bytes = layers.num_bytes(1)
        for i in range(len(block_ids)):
            to = first + i * values.stride
            for page, addr in enumerate(_page_addresses(layers, block_ids[i : i + 1])):
                ctypes.memmove(to + page * layout.page_bytes, addr, layout.page_bytes)
            if num_bytes:
                sums[i] = _accumulate(_bytes_at(to, num_bytes).view("<u8"), first_word)
        return sums

    def scatter(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        num_bytes = _check_copy(layout, block_ids, staging, offset)
        if num_bytes == 0:
            return _checksum(staging.base, 0, seed)
        # A private copy, so that what is checksummed is what is stored.
        stored = _bytes_at(staging.base + offset, num_bytes).copy()
        start = stored.ctypes.data
        for page, addr in enumerate(_page_addresses(layout, block_ids)):
            ctypes.memmove(addr, start + page * layout.page_bytes, layout.page_bytes)
        return _checksum(start, num_bytes, seed)

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        _check_range("region", region, offset, num_bytes)
        return _checksum(region.base + offset, num_bytes, seed)


def _check_copy(layout: PageLayout, block_ids: Ids, staging: Region, offset: int) -> int:
    """Refuses what would leave either region; returns the number of staging bytes."""
    _check_pages(layout, block_ids)
    num_bytes = layout.num_bytes(len(block_ids))
    _check_staging(layout, staging, offset, num_bytes)
    return num_bytes


def _check_values(layers: PageLayout, block_ids: Ids, first_layer: int, values: Values) -> None:
    """What `gather_layers` refuses; ``layers`` are those from ``first_layer`` on."""
    staging, offset, stride = values
    _check_pages(layers, block_ids)
    if layers.page_bytes % 8:
        raise ValueError(f"page_bytes must be a multiple of 8, not {layers.page_bytes}")
    value_bytes = (first_layer + len(layers.layer_offsets)) * layers.page_bytes
    if first_layer < 0 or value_bytes > stride:
        raise ValueError(f"layers from {first_layer} on do not fit in a value of {stride} bytes")
    # What follows the pages of the last value is not touched.
    num_bytes = max(0, len(block_ids) * stride - (stride - value_bytes))
    _check_staging(layers, staging, offset, num_bytes if len(block_ids) else 0)


def _check_pages(layout: PageLayout, block_ids: Ids) -> None:
    region, page_bytes, strides = layout.region, layout.page_bytes, layout.block_strides
    _check_array("layer_offsets", layout.layer_offsets)
    _check_array("block_strides", strides)
    _check_array("block_ids", block_ids)
    if len(strides) != len(layout.layer_offsets):
        raise ValueError(f"{len(strides)} block_strides of {len(layout.layer_offsets)} layers")
    stride = int(strides.min(initial=1 << 62))
    if not 0 < page_bytes <= stride:
        raise ValueError(f"need 0 < page_bytes <= block_stride, got {page_bytes}, {stride}")
    last_start = region.size - page_bytes
    outside = (layout.layer_offsets < 0) | (layout.layer_offsets > last_start)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"layer_offsets[{i}] = {layout.layer_offsets[i]} puts a page of {page_bytes} bytes "
            f"outside the region of {region.size} bytes"
        )
    max_block_id = int(((last_start - layout.layer_offsets) // strides).min(initial=1 << 62))
    outside = (block_ids < 0) | (block_ids > max_block_id)
    if layout.layer_offsets.size and outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"block_ids[{i}] = {block_ids[i]} lies outside the region of {region.size} bytes, "
            f"which holds {max_block_id + 1} blocks"
        )


def _check_staging(layout: PageLayout, staging: Region, offset: int, num_bytes: int) -> None:
    region = layout.region
    _check_range("staging", staging, offset, num_bytes)
    if staging.base < region.base + region.size and region.base < staging.base + staging.size:
        raise ValueError("the staging region overlaps the region of the pages")


def _check_array(name: str, array: NDArray[np.int64]) -> None:
    if array.dtype != np.int64 or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(f"{name} must be a C-contiguous int64 vector")


def _check_range(name: str, region: Region, offset: int, num_bytes: int) -> None:
    if offset < 0 or num_bytes < 0 or offset + num_bytes > region.size:
        raise ValueError(
            f"{name} range of {num_bytes} bytes at offset {offset} leaves the region of "
            f"{region.size} bytes"
        )


def _page_addresses(layout: PageLayout, block_ids: Ids) -> list[int]:
    block_offsets = layout.block_strides[:, None] * block_ids[None, :]
    offsets = layout.layer_offsets[:, None] + block_offsets
    return [layout.region.base + offset for offset in offsets.ravel().tolist()]


def _bytes_at(addr: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view of foreign memory, uint8 [num_bytes]."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(addr))


def _checksum(addr: int, num_bytes: int, seed: int) -> int:
    total = 0
    for start in range(0, num_bytes, _CHUNK_BYTES):
        num_chunk_bytes = min(_CHUNK_BYTES, num_bytes - start)
        chunk = _bytes_at(addr + start, num_chunk_bytes)
        if tail := num_chunk_bytes % 8:
            chunk = np.concatenate([chunk, np.zeros(8 - tail, dtype=np.uint8)])
        total += _accumulate(chunk.view("<u8"), start // 8)
    return finish_checksum(total, num_bytes, seed)


def _accumulate(words: NDArray[np.uint64], first_index: int) -> int:
    """Sum over words; the first one has index `first_index`. uint64 arrays wrap silently."""
    low_half, half_bits = np.uint64(0xFFFFFFFF), np.uint64(32)
    counters = np.arange(first_index + 1, first_index + 1 + len(words), dtype=np.uint64)
    mixed = words ^ (counters * np.uint64(GOLDEN))
    products = (mixed & low_half) * (mixed >> half_bits)
    rotated = (words << half_bits) | (words >> half_bits)
    return int((products + rotated).sum(dtype=np.uint64))

# SPDX-License-Identifier: Apache-2.0
"""Copies between scattered KV pages and one contiguous staging buffer, with a checksum.

    pages (host memory)                                   staging
    base + layer_offsets[l] + block_ids[b] * block_stride
      layer 0:  [blk 0][blk 1][blk 2]...      gather      | l0 b0 | l0 b1 | ... | l1 b0 | ...
      layer 1:  [blk 0][blk 1][blk 2]...      ------>       one page of page_bytes each,
      ...                                     <------       layer-major, then in block_ids order
                                              scatter

The checksum is of the staging bytes, i.e. of the pages in that order. Over the little-endian 64-bit
words w_i of the bytes, the last one padded with zeros, and modulo 2**64:

    k_i  = (i + 1) * 0x9E3779B97F4A7C15        t_i = w_i ^ k_i
    acc  = mix(seed) + sum_i( rot32(w_i) + (t_i mod 2**32) * (t_i div 2**32) )
    sum  = mix(acc ^ (num_bytes * 0x9E3779B97F4A7C15))         mix = the splitmix64 finaliser

`gather_layers` packs block by block instead, for values that are stored apart, and returns what the
layers that it packed add to the sum over i; `finish_checksum` makes the checksum of the total.

This is the accumulate step of XXH3 (Collet), itself the NH family of UMAC (RFC 4418), with a
counter for the secret. It finds faults of memory and transport; it is no MAC.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.page_ring import RingPacker, RingPlacer
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from vllm_ascend_pd import _C

logger = logging.getLogger(__name__)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK_BYTES = 1 << 20  # bounds the temporaries of the Python fallback; a multiple of 8


@dataclass(frozen=True, slots=True)
class Region:
    """A range of host memory of this process. Null and empty ranges are refused."""

    base: int
    size: int

    def __post_init__(self) -> None:
        if self.base <= 0 or self.size <= 0 or self.base + self.size > 1 << 64:
            raise ValueError(f"not a memory region: base={self.base:#x}, size={self.size}")


@dataclass(frozen=True, slots=True, eq=False)
class PageLayout:
    """Where the KV pages of every (layer, block) lie inside one region.

    A layer that keeps K and V apart has two entries in `layer_offsets`. Layers in several
    allocations need one layout each; chain their checksums through `seed`.

    Attributes:
        region: The memory that holds all pages.
        layer_offsets: int64 [num_layers], bytes from the start of the region to block 0.
        block_stride: Bytes from one block to the next within a layer, at least `page_bytes`.
        page_bytes: Bytes of one block in one layer.
    """

    region: Region
    layer_offsets: NDArray[np.int64]
    block_stride: int
    page_bytes: int

    def for_layers(self, start: int, stop: int) -> PageLayout:
        """The same pages, only of layers [start, stop)."""
        return replace(self, layer_offsets=self.layer_offsets[start:stop])

    def divides(self, count: int) -> bool:
        """Whether a page is a run of `count` equal parts."""
        return count > 0 and self.page_bytes % count == 0

    def share(self, index: int, count: int) -> PageLayout:
        """Only part `index` of `count` equal parts of every page."""
        if count == 1:
            return self
        num_bytes = self.page_bytes // count
        offsets = self.layer_offsets + index * num_bytes
        return replace(self, layer_offsets=offsets, page_bytes=num_bytes)

    def num_bytes(self, num_blocks: int) -> int:
        """Staging bytes that `num_blocks` blocks of all layers take."""
        return len(self.layer_offsets) * num_blocks * self.page_bytes


class BlockCopier(ABC):
    """Moves KV pages to and from staging and checksums exactly the bytes that it stored.

    Threads: stateless, any thread. The native one releases the GIL once per call and never takes
    it back in between; the Python one holds it. Blocking: for the time of the copy.

    The caller guarantees that both regions stay mapped during the call and that nobody writes to
    the bytes being read, with one exception: staging may be hit by a late network write at any time
    during `scatter`. Then the checksum is still that of the bytes that reached the pages.

    All offsets, strides and sizes are bytes. `block_ids` is int64 [num_blocks], C-contiguous; other
    dtypes are a `TypeError`. A page or staging range outside its region, an overlap of the two
    regions in use, or an impossible layout is a `ValueError` that names the index at fault, and
    then nothing has been copied.
    """

    @abstractmethod
    def gather(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        """Copies pages to staging[staging_offset:] and returns their checksum."""

    @abstractmethod
    def gather_layers(
        self,
        layout: PageLayout,
        start: int,
        stop: int,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int,
        value_stride: int,
    ) -> NDArray[np.uint64]:
        """Copies the pages of layers [start, stop), of a multiple of 8 bytes each.

        Layer l of the b-th block goes to staging[staging_offset + b * value_stride + l *
        page_bytes :]. Returns what these layers add to the sum of each block, uint64 [num_blocks],
        for `finish_checksum`.
        """

    @abstractmethod
    def scatter(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        """Copies staging[staging_offset:] to pages and returns the checksum of what was stored."""

    @abstractmethod
    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        """Checksum of region[offset : offset + num_bytes]."""

    def settle(self, block_ids: NDArray[np.int64]) -> None:  # noqa: B027 -- nothing to wait for
        """Returns once nothing that the engine has launched reads or writes these blocks any more.

        Before a network reads or writes them itself. In host memory the engine launches nothing.
        """


class NativeBlockCopier(BlockCopier):
    """The extension `_C`: one pass over memory, without the GIL. Also `SupportsRing`."""

    def __init__(self) -> None:
        try:
            from vllm_ascend_pd import _C
        except ImportError as error:
            raise BackendError(f"the native extension is not available: {error}") from error
        if not hasattr(_C, "RingPacker"):
            raise BackendError("the native extension is older than this package; build it again")
        self._native = _C

    def gather(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        pages = self._pages(layout, block_ids)
        return self._native.gather(*pages, self._region(staging), staging_offset, seed)

    def gather_layers(
        self,
        layout: PageLayout,
        start: int,
        stop: int,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int,
        value_stride: int,
    ) -> NDArray[np.uint64]:
        pages = self._pages(layout.for_layers(start, stop), block_ids)
        return self._native.gather_layers(
            *pages, self._region(staging), staging_offset, value_stride, start
        )

    def scatter(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        pages = self._pages(layout, block_ids)
        return self._native.scatter(*pages, self._region(staging), staging_offset, seed)

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        return self._native.checksum(self._region(region), offset, num_bytes, seed)

    def fits_ring(self, memory: Region) -> bool:
        native = self._native
        return memory.size >= native.RING_MIN_BYTES and not memory.base % native.RING_ALIGNMENT

    def pack_ring(
        self, layout: PageLayout, block_ids: NDArray[np.int64], ring: Region, key: int
    ) -> RingPacker:
        pages = self._pages(layout, block_ids)
        return RingPacker(self._native.RingPacker(*pages, self._region(ring), key))

    def place_ring(
        self, layout: PageLayout, block_ids: NDArray[np.int64], ring: Region, key: int
    ) -> RingPlacer:
        pages = self._pages(layout, block_ids)
        return RingPlacer(self._native.RingPlacer(*pages, self._region(ring), key))

    def _region(self, region: Region) -> _C.Region:
        return self._native.Region(region.base, region.size)

    def _pages(
        self, layout: PageLayout, block_ids: NDArray[np.int64]
    ) -> tuple[_C.Region, NDArray[np.int64], NDArray[np.int64], int, int]:
        """What every copy of the extension begins with."""
        return (
            self._region(layout.region),
            layout.layer_offsets,
            block_ids,
            layout.block_stride,
            layout.page_bytes,
        )


class PythonBlockCopier(BlockCopier):
    """numpy and ctypes only: the native one's reference, and the way out without a compiler."""

    def gather(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        num_bytes = _check_copy(layout, block_ids, staging, staging_offset)
        start = staging.base + staging_offset
        for page, addr in enumerate(_page_addresses(layout, block_ids)):
            ctypes.memmove(start + page * layout.page_bytes, addr, layout.page_bytes)
        return _checksum(start, num_bytes, seed)

    def gather_layers(
        self,
        layout: PageLayout,
        start: int,
        stop: int,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int,
        value_stride: int,
    ) -> NDArray[np.uint64]:
        layers = layout.for_layers(start, stop)
        _check_values(layers, block_ids, start, staging, staging_offset, value_stride)
        sums = np.zeros(len(block_ids), dtype=np.uint64)
        first_word = start * layout.page_bytes // 8
        first = staging.base + staging_offset + start * layout.page_bytes
        num_bytes = layers.num_bytes(1)
        for i in range(len(block_ids)):
            to = first + i * value_stride
            for page, addr in enumerate(_page_addresses(layers, block_ids[i : i + 1])):
                ctypes.memmove(to + page * layout.page_bytes, addr, layout.page_bytes)
            if num_bytes:
                sums[i] = _accumulate(_bytes_at(to, num_bytes).view("<u8"), first_word)
        return sums

    def scatter(
        self,
        layout: PageLayout,
        block_ids: NDArray[np.int64],
        staging: Region,
        staging_offset: int = 0,
        seed: int = 0,
    ) -> int:
        num_bytes = _check_copy(layout, block_ids, staging, staging_offset)
        if num_bytes == 0:
            return _checksum(staging.base, 0, seed)
        # A private copy, so that what is checksummed is what is stored.
        stored = _bytes_at(staging.base + staging_offset, num_bytes).copy()
        start = stored.ctypes.data
        for page, addr in enumerate(_page_addresses(layout, block_ids)):
            ctypes.memmove(addr, start + page * layout.page_bytes, layout.page_bytes)
        return _checksum(start, num_bytes, seed)

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        _check_range("region", region, offset, num_bytes)
        return _checksum(region.base + offset, num_bytes, seed)


def make_block_copier() -> BlockCopier:
    """The native copier, or with one warning the Python one."""
    try:
        return NativeBlockCopier()
    except BackendError as error:
        logger.warning(
            "%s; KV is copied by Python, slowly and with the GIL held. "
            "Reinstall with a C++17 compiler present to get the native copy",
            error,
        )
    return PythonBlockCopier()


def finish_checksum(total: int, num_bytes: int, seed: int) -> int:
    """The checksum of ``num_bytes`` bytes, of which ``total`` is the inner sum modulo 2**64."""
    acc = (_mix(seed & _MASK) + total) & _MASK
    return _mix(acc ^ (num_bytes * _GOLDEN & _MASK))


def _check_copy(
    layout: PageLayout, block_ids: NDArray[np.int64], staging: Region, staging_offset: int
) -> int:
    """Refuses what would leave either region; returns the number of staging bytes."""
    _check_pages(layout, block_ids)
    num_bytes = layout.num_bytes(len(block_ids))
    _check_staging(layout, staging, staging_offset, num_bytes)
    return num_bytes


def _check_values(
    layers: PageLayout,
    block_ids: NDArray[np.int64],
    first_layer: int,
    staging: Region,
    staging_offset: int,
    value_stride: int,
) -> None:
    """What `gather_layers` refuses; ``layers`` are those from ``first_layer`` on."""
    _check_pages(layers, block_ids)
    if layers.page_bytes % 8:
        raise ValueError(f"page_bytes must be a multiple of 8, not {layers.page_bytes}")
    value_bytes = (first_layer + len(layers.layer_offsets)) * layers.page_bytes
    if first_layer < 0 or value_bytes > value_stride:
        raise ValueError(
            f"layers from {first_layer} on do not fit in a value of {value_stride} bytes"
        )
    # What follows the pages of the last value is not touched.
    num_bytes = max(0, len(block_ids) * value_stride - (value_stride - value_bytes))
    _check_staging(layers, staging, staging_offset, num_bytes if len(block_ids) else 0)


def _check_pages(layout: PageLayout, block_ids: NDArray[np.int64]) -> None:
    region, page_bytes, stride = layout.region, layout.page_bytes, layout.block_stride
    if not 0 < page_bytes <= stride:
        raise ValueError(f"need 0 < page_bytes <= block_stride, got {page_bytes}, {stride}")
    _check_array("layer_offsets", layout.layer_offsets)
    _check_array("block_ids", block_ids)
    last_start = region.size - page_bytes
    outside = (layout.layer_offsets < 0) | (layout.layer_offsets > last_start)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"layer_offsets[{i}] = {layout.layer_offsets[i]} puts a page of {page_bytes} bytes "
            f"outside the region of {region.size} bytes"
        )
    max_layer_offset = int(layout.layer_offsets.max(initial=0))
    max_block_id = (last_start - max_layer_offset) // stride
    outside = (block_ids < 0) | (block_ids > max_block_id)
    if layout.layer_offsets.size and outside.any():
        i = int(outside.argmax())
        raise ValueError(
            f"block_ids[{i}] = {block_ids[i]} lies outside the region of {region.size} bytes, "
            f"which holds {max_block_id + 1} blocks"
        )


def _check_staging(
    layout: PageLayout, staging: Region, staging_offset: int, num_bytes: int
) -> None:
    region = layout.region
    _check_range("staging", staging, staging_offset, num_bytes)
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


def _page_addresses(layout: PageLayout, block_ids: NDArray[np.int64]) -> list[int]:
    block_offsets = block_ids * layout.block_stride
    offsets = layout.layer_offsets[:, None] + block_offsets[None, :]
    return [layout.region.base + offset for offset in offsets.ravel().tolist()]


def _bytes_at(addr: int, num_bytes: int) -> NDArray[np.uint8]:
    """A view of foreign memory, uint8 [num_bytes]."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(addr))


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


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
    mixed = words ^ (counters * np.uint64(_GOLDEN))
    products = (mixed & low_half) * (mixed >> half_bits)
    rotated = (words << half_bits) | (words >> half_bits)
    return int((products + rotated).sum(dtype=np.uint64))

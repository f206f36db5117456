# SPDX-License-Identifier: Apache-2.0
"""Copies between scattered KV pages and one contiguous staging buffer, with a checksum.

    pages (host memory)                                   staging
    base + layer_offsets[l] + block_ids[b] * block_strides[l]
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

import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from vllm_ascend_pd.backends.page_ring import RingPacker, RingPlacer
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from vllm_ascend_pd import _C
    from vllm_ascend_pd.types import Layers

logger = logging.getLogger(__name__)

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_NATIVE_VERSION = 2
"""Of what the extension's functions take."""

Ids: TypeAlias = "NDArray[np.int64]"
"""Of blocks: int64 [num_blocks], C-contiguous."""


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
        block_strides: int64 [num_layers], bytes from one block to the next, at least `page_bytes`.
        page_bytes: Bytes of one block in one layer.
    """

    region: Region
    layer_offsets: NDArray[np.int64]
    block_strides: NDArray[np.int64]
    page_bytes: int

    @classmethod
    def packed(
        cls, region: Region, layer_offsets: NDArray[np.int64], page_bytes: int
    ) -> PageLayout:
        """Of layers whose blocks lie side by side."""
        return cls(region, layer_offsets, np.full_like(layer_offsets, page_bytes), page_bytes)

    def for_layers(self, start: int, stop: int) -> PageLayout:
        """The same pages, only of layers [start, stop)."""
        return replace(
            self,
            layer_offsets=self.layer_offsets[start:stop],
            block_strides=self.block_strides[start:stop],
        )

    def pick(self, layers: Sequence[int]) -> PageLayout:
        """The same pages, only of these layers."""
        return replace(
            self,
            layer_offsets=self.layer_offsets[list(layers)],
            block_strides=self.block_strides[list(layers)],
        )

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


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """The pages of one KV cache group, whose blocks are of ``block_size`` tokens, or hold
    ``states`` behind so many.

    ``layers[i]`` says which of the engine's attention layers layer i of ``layout`` is, counted in
    the order in which the model runs them.
    """

    block_size: int
    layout: PageLayout
    layers: tuple[int, ...]
    states: bool = False

    @classmethod
    def of(
        cls, layout: PageLayout, block_size: int, layers: Sequence[int], states: bool = False
    ) -> GroupPages:
        """``layout`` is that of all layers."""
        return cls(block_size, layout.pick(layers), tuple(layers), states)

    def between(self, first: int, stop: int) -> GroupPages:
        """Those of its layers that are among the engine's ``first`` to ``stop``."""
        first, stop = self.num_among(first), self.num_among(stop)
        layout = self.layout.for_layers(first, stop)
        return replace(self, layout=layout, layers=self.layers[first:stop])

    def num_among(self, num_layers: int) -> int:
        """How many of its layers are among the first ``num_layers`` of the engine."""
        return bisect_left(self.layers, num_layers)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPages:
    """The pages of one worker, by KV cache group, and what copies them."""

    copier: BlockCopier
    groups: Sequence[GroupPages]
    layers: Layers | None = None
    """Those of its pipeline stage, where there are several (``wire.Worker``)."""
    kernels: str = ""
    """How many tokens kernels take at once, where that decides what is where in a page."""


class Values(NamedTuple):
    """Where the value of each of some blocks begins: that of the b-th one at
    staging[offset + b * stride :], and its page l so many pages behind that.
    """

    staging: Region
    offset: int
    stride: int


class BlockCopier(ABC):
    """Moves KV pages to and from staging and checksums exactly the bytes that it stored.

    Threads: stateless, any thread. The native one releases the GIL once per call and never takes
    it back in between; the Python one holds it. Blocking: for the time of the copy.

    The caller guarantees that both regions stay mapped during the call and that nobody writes to
    the bytes being read, with one exception: staging may be hit by a late network write at any time
    during `scatter`. Then the checksum is still that of the bytes that reached the pages.

    All offsets, strides and sizes are bytes. `block_ids` are `Ids`; other dtypes are a `TypeError`.
    A page or staging range outside its region, an overlap of the two regions in use, or an
    impossible layout is a `ValueError` that names the index at fault, and then nothing has been
    copied.
    """

    @abstractmethod
    def gather(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        """Copies pages to staging[offset:] and returns their checksum."""

    @abstractmethod
    def gather_layers(
        self, layout: PageLayout, start: int, stop: int, block_ids: Ids, values: Values
    ) -> NDArray[np.uint64]:
        """Copies the pages of layers [start, stop), of a multiple of 8 bytes each.

        Layer l of the b-th block goes to page l of the b-th of `values`. Returns what these layers
        add to the sum of each block, uint64 [num_blocks], for `finish_checksum`.
        """

    @abstractmethod
    def scatter(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        """Copies staging[offset:] to pages and returns the checksum of what was stored."""

    @abstractmethod
    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        """Checksum of region[offset : offset + num_bytes]."""

    def settle(self, block_ids: Ids) -> None:  # noqa: B027 -- nothing to wait for
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
        if getattr(_C, "VERSION", 0) != _NATIVE_VERSION:
            raise BackendError("the native extension is older than this package; build it again")
        self._native = _C

    def gather(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        pages = self._pages(layout, block_ids)
        return self._native.gather(*pages, self._region(staging), offset, seed)

    def gather_layers(
        self, layout: PageLayout, start: int, stop: int, block_ids: Ids, values: Values
    ) -> NDArray[np.uint64]:
        pages = self._pages(layout.for_layers(start, stop), block_ids)
        return self._native.gather_layers(
            *pages, self._region(values.staging), values.offset, values.stride, start
        )

    def scatter(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        pages = self._pages(layout, block_ids)
        return self._native.scatter(*pages, self._region(staging), offset, seed)

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        return self._native.checksum(self._region(region), offset, num_bytes, seed)

    def fits_ring(self, memory: Region) -> bool:
        native = self._native
        return memory.size >= native.RING_MIN_BYTES and not memory.base % native.RING_ALIGNMENT

    def pack_ring(self, layout: PageLayout, block_ids: Ids, ring: Region, key: int) -> RingPacker:
        pages = self._pages(layout, block_ids)
        return RingPacker(self._native.RingPacker(*pages, self._region(ring), key))

    def place_ring(self, layout: PageLayout, block_ids: Ids, ring: Region, key: int) -> RingPlacer:
        pages = self._pages(layout, block_ids)
        return RingPlacer(self._native.RingPlacer(*pages, self._region(ring), key))

    def _region(self, region: Region) -> _C.Region:
        return self._native.Region(region.base, region.size)

    def _pages(
        self, layout: PageLayout, block_ids: Ids
    ) -> tuple[_C.Region, NDArray[np.int64], NDArray[np.int64], Ids, int]:
        """What every copy of the extension begins with."""
        return (
            self._region(layout.region),
            layout.layer_offsets,
            layout.block_strides,
            block_ids,
            layout.page_bytes,
        )


def make_block_copier() -> BlockCopier:
    """The native copier, or with one warning the Python one."""
    from vllm_ascend_pd.backends.python_copy import PythonBlockCopier

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
    acc = (mix(seed & MASK) + total) & MASK
    return mix(acc ^ (num_bytes * GOLDEN & MASK))


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)

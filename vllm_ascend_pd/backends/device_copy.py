# SPDX-License-Identifier: Apache-2.0
"""Copies between KV pages in an accelerator's memory and staging in host memory.

    device pages       by index    scratch                copy             staging, pinned
    one layer, one     -------->  [K|V][K|V]  ----------------------->  [K|V][K|V]
      block: K here,   <--------  checksum    <-----------------------
      V there                         |
                                      |  copy    pinned     the host's copier   staging, not pinned
                                      '------>  [K|V][K|V]  --------------->  [K|V][K|V]
                                       <------              <-- checksum ---

A page (one block in one layer) is one run of bytes or several: K and V apart, MLA's latent and RoPE
parts. In staging they lie side by side, so engines that cut a page differently understand each
other. Staging may be hit by a late network write at any time; what goes to the pages is therefore
copied out of it first, and the checksum is of that private copy: on the device where it may copy
from staging itself, else in a buffer of the host.

Pages are picked and put by index, some kernels for each layer whatever the number of blocks: a copy
for each run of bytes would cost the host more than the bytes cost the device.

What the engine has launched on its own stream and what is copied here would not wait for each other
by themselves. Fences order them, see `DeviceBlockCopier.fence`. What is packed for the pool waits
for the last whole step as well, see `DeviceBlockCopier.end_step`.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from vllm_ascend_pd.backends.block_copy import BlockCopier, PageLayout, Region, finish_checksum
from vllm_ascend_pd.backends.host_pass import HostPass
from vllm_ascend_pd.backends.page_kernels import Cut, Lane, add_up, index_of, padded, pick, put
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import Ids, Values

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of bytes that every block of one layer has.

    That of block b is ``memories[memory][offset + b * stride :][: num_bytes]``.
    """

    memory: int
    offset: int
    stride: int
    num_bytes: int

    @property
    def cut(self) -> Cut:
        return self.offset, self.stride, self.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class DevicePageLayout(PageLayout):
    """Where the pages of every (layer, block) lie in the memory of a device.

    The fields of `PageLayout` hold for the first segment of each layer; `page_bytes` is the sum of
    its segments, the same for all layers.

    Attributes:
        segments: For each layer, in the order in which they lie in staging.
        memories: Flat views of the device's allocations, each uint8 [size of the allocation].
        num_blocks: Blocks of each layer.
    """

    segments: tuple[tuple[Segment, ...], ...]
    memories: tuple[torch.Tensor, ...]
    num_blocks: int

    def __post_init__(self) -> None:
        for layer in self.segments:
            if sum(segment.num_bytes for segment in layer) != self.page_bytes:
                raise ValueError(f"segments {layer} do not make a page of {self.page_bytes} bytes")
            for segment in layer:
                end = segment.offset + (self.num_blocks - 1) * segment.stride + segment.num_bytes
                if segment.offset < 0 or end > self.memories[segment.memory].numel():
                    raise ValueError(f"{segment} leaves its memory of {self.num_blocks} blocks")

    def for_layers(self, start: int, stop: int) -> DevicePageLayout:
        return replace(
            self,
            layer_offsets=self.layer_offsets[start:stop],
            block_strides=self.block_strides[start:stop],
            segments=self.segments[start:stop],
        )

    def pick(self, layers: Sequence[int]) -> DevicePageLayout:
        return replace(
            self,
            layer_offsets=self.layer_offsets[list(layers)],
            block_strides=self.block_strides[list(layers)],
            segments=tuple(self.segments[layer] for layer in layers),
        )

    def divides(self, count: int) -> bool:
        return count == 1


class Device(Protocol):
    """Streams, events and memory of one accelerator, as far as copies need them.

    `run` only enqueues; nothing that was enqueued may be relied upon before `synchronize` of its
    stream has returned, which blocks without the GIL. Every method but `record` is for the calling
    thread's own stream.
    """

    def bind_thread(self) -> None:
        """Make the device current for the calling thread; before anything else there."""

    def new_stream(self) -> Any:
        """A stream for copies, beside the engine's."""

    def record(self) -> Any:
        """An event behind all that the calling thread has launched on its current stream."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is enqueued on `stream` from now on runs after the event; returns at once."""

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        """Enqueue what `work` asks of torch; host memory in it is pinned."""

    def synchronize(self, stream: Any) -> None:
        """Until everything that was enqueued on `stream` is done."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Page-locked host memory, uint8 [num_bytes]."""

    def scratch(self, stream: Any, num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8 [num_bytes], for work on `stream` only."""


@runtime_checkable
class PinsMemory(Protocol):
    """A device that can copy to and from memory that others have allocated, and can verify such
    copies itself. Any thread.
    """

    def pin(self, addr: int, num_bytes: int) -> None:
        """Until `unpin`; raises `BackendError` if it cannot be."""

    def unpin(self, addr: int) -> None:
        """What begins at `addr`; nothing copies it any more."""


class Fence:
    """A point in the engine's stream that copies of some blocks wait for. It may be moved on.

    Written by the engine's main thread, read by the threads that copy: one reference.
    """

    __slots__ = ("_device", "event")

    def __init__(self, device: Device) -> None:
        self._device = device
        self.event = device.record()

    def mark(self) -> None:
        """Move it behind all that has been launched so far. Main thread."""
        self.event = self._device.record()


class PinnedMemory:
    """Page-locked memory as staging: a device's link knows no other of the host."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        tensor = device.pinned(num_bytes + mmap.PAGESIZE)
        self.addr = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._tensor: torch.Tensor | None = tensor

    def close(self) -> None:
        self._tensor = None


class DeviceBlockCopier(BlockCopier):
    """A copier for `DevicePageLayout`. A call returns when its bytes are where they belong.

    Each thread has a stream of its own, as much memory of the device as its largest copy so far,
    and for memory that is not pinned as large a buffer that is. Also `HostPinning`.
    """

    def __init__(self, device: Device, host: BlockCopier, num_threads: int = 1) -> None:
        """`host` copies what is in host memory, and checksums it, by so many threads a copy."""
        self._device = device
        self._host = HostPass(host, num_threads)
        self._lanes = threading.local()
        self._lock = threading.Lock()
        self._fences: dict[int, Fence] = {}  # by block; under the lock
        self._last: Fence | None = None  # under the lock
        self._end: Any = None  # an event: written by the main thread, read by those that copy
        self._pinned: dict[int, torch.Tensor] = {}  # what is pinned, by address; under the lock

    def fence(self, block_ids: Iterable[int]) -> Fence:
        """Order copies of these blocks behind what the engine has launched. Main thread.

        Made at the begin of a step, before its loads start: a scatter must not overtake the kernels
        of earlier steps that still use those blocks. Marked again once the step's kernels are
        launched, before anybody may fetch what they compute. Blocks that were never named wait for
        the latest fence.
        """
        fence = Fence(self._device)
        with self._lock:
            self._last = fence
            self._fences.update(dict.fromkeys(block_ids, fence))
        return fence

    def end_step(self) -> None:
        """All kernels of a step are launched, also those behind its layers. Main thread.

        `gather_layers` waits for them, too: no message names the blocks that the pool stores once
        they are full. `gather` does not: a peer would wait for steps that compute nothing of what
        it fetches.
        """
        self._end = self._device.record()

    def gather(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        layout, ids, num_bytes = _check(layout, block_ids, staging, offset)
        if not num_bytes:
            return self._host.checksum(staging, offset, 0, seed)
        pinned = self._pinned_part(staging.base + offset, num_bytes)
        if pinned is not None:
            return self._copy_verified(layout, ids, pick, pinned, seed)
        fetched = self._fetch(layout, ids, num_bytes)
        num_pages, page_bytes = num_bytes // layout.page_bytes, layout.page_bytes
        return self._host.copy((fetched, 0), (staging, offset), num_pages, page_bytes, seed)

    def gather_layers(
        self, layout: PageLayout, start: int, stop: int, block_ids: Ids, values: Values
    ) -> NDArray[np.uint64]:
        layers, ids = _check_layout(layout.for_layers(start, stop), block_ids)
        num_bytes, page_bytes = layers.num_bytes(len(ids)), layout.page_bytes
        if not num_bytes:
            return np.zeros(len(ids), dtype=np.uint64)
        if (end := self._end) is not None:
            self._device.wait(self._lane(num_bytes).stream, end)
        fetched = self._fetch(layers, ids, num_bytes)
        # Layer-major in the pinned buffer, where the layers before ``start`` would lie before it.
        offsets = np.arange(-start, stop - start, dtype=np.int64) * (len(ids) * page_bytes)
        packed = PageLayout.packed(fetched, offsets, page_bytes)
        return self._host.copy_layers(packed, start, stop, len(ids), values)

    def scatter(
        self, layout: PageLayout, block_ids: Ids, staging: Region, offset: int = 0, seed: int = 0
    ) -> int:
        layout, ids, num_bytes = _check(layout, block_ids, staging, offset)
        if not num_bytes:
            return self._host.checksum(staging, offset, 0, seed)
        pinned = self._pinned_part(staging.base + offset, num_bytes)
        if pinned is not None:
            return self._copy_verified(layout, ids, put, pinned, seed)
        lane = self._lane(num_bytes)
        bounce = self._bounce(lane, num_bytes)
        num_pages, page_bytes = num_bytes // layout.page_bytes, layout.page_bytes
        checksum = self._host.copy((staging, offset), (lane.region, 0), num_pages, page_bytes, seed)
        self._run(lane, layout, ids, partial(put, memory=bounce))
        return checksum

    def checksum(self, region: Region, offset: int, num_bytes: int, seed: int = 0) -> int:
        """Of host memory: staging, or what a tier holds."""
        return self._host.checksum(region, offset, num_bytes, seed)

    def settle(self, block_ids: Ids) -> None:
        """Blocks for what the fences of these blocks stand for: up to a step of the engine."""
        lane = self._lane(1)
        self._order(lane, block_ids.tolist())
        self._device.synchronize(lane.stream)

    def bind_thread(self) -> None:
        """Make the device current for the calling thread, for a library that needs it there."""
        self._device.bind_thread()

    def close(self) -> None:
        """End its threads; nothing is copied any more."""
        self._host.close()

    def _fetch(self, layout: DevicePageLayout, ids: list[int], num_bytes: int) -> Region:
        """The pages, layer-major, in this thread's pinned buffer, once they are there."""
        lane = self._lane(num_bytes)
        self._run(lane, layout, ids, partial(pick, memory=self._bounce(lane, num_bytes)))
        return lane.region

    def _copy_verified(
        self,
        layout: DevicePageLayout,
        ids: list[int],
        move: Callable[..., None],
        memory: torch.Tensor,
        seed: int,
    ) -> int:
        """To or from pinned memory; the checksum is of what is in the device's scratch memory."""
        lane = self._lane(memory.numel())

        def copy_and_add_up(*args: Any) -> None:
            move(*args, memory)
            add_up(lane, memory.numel())

        self._run(lane, layout, ids, copy_and_add_up)
        return finish_checksum(int(lane.total), memory.numel(), seed)

    def pinned_memory(self, num_bytes: int) -> PinnedMemory:
        return PinnedMemory(self._device, num_bytes)

    def pin(self, addr: int, num_bytes: int) -> None:
        """From now on copies to and from this memory take no detour, if the device can pin it."""
        if not isinstance(self._device, PinsMemory):
            return
        try:
            self._device.pin(addr, num_bytes)
        except BackendError as error:
            logger.warning("%s; copies to and from it go through a buffer, and are slower", error)
            return
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(addr))
        with self._lock:
            self._pinned[addr] = torch.from_numpy(memory)

    def unpin(self, addr: int) -> None:
        with self._lock:
            was_pinned = self._pinned.pop(addr, None) is not None
        if was_pinned and isinstance(self._device, PinsMemory):
            self._device.unpin(addr)

    def _pinned_part(self, addr: int, num_bytes: int) -> torch.Tensor | None:
        """A view of this memory if it is pinned, uint8 [num_bytes]."""
        with self._lock:
            for start, memory in self._pinned.items():
                offset = addr - start
                if 0 <= offset <= memory.numel() - num_bytes:
                    return memory[offset : offset + num_bytes]
        return None

    def _run(
        self, lane: Lane, layout: DevicePageLayout, ids: list[int], move: Callable[..., None]
    ) -> None:
        self._order(lane, ids)
        index, rows = index_of(layout, np.array(ids, dtype=np.int64))
        if len(lane.index) < len(index):
            on_device = self._device.scratch(lane.stream, index.nbytes)
            lane.index = self._device.pinned(index.nbytes).view(torch.int64)
            lane.device_index = on_device.view(torch.int64)
        lane.index[: len(index)] = torch.from_numpy(index)
        try:
            self._device.run(lane.stream, partial(move, lane, layout, len(ids), rows))
        finally:  # what was enqueued before it failed must not reach pages or staging later
            self._device.synchronize(lane.stream)

    def _lane(self, num_bytes: int) -> Lane:
        lane: Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            self._device.bind_thread()
            stream, nothing = self._device.new_stream(), torch.empty(0, dtype=torch.int64)
            total = self._device.pinned(nothing.itemsize).view(torch.int64)[0]
            lane = Lane(stream, total, nothing, nothing, nothing, nothing)
            self._lanes.lane = lane
        if lane.scratch.nbytes < num_bytes:
            lane.scratch = self._device.scratch(lane.stream, padded(num_bytes))
        return lane

    def _bounce(self, lane: Lane, num_bytes: int) -> torch.Tensor:
        if lane.bounce.nbytes < num_bytes:
            lane.bounce = self._device.pinned(num_bytes)
        return lane.bounce[:num_bytes]

    def _order(self, lane: Lane, ids: list[int]) -> None:
        with self._lock:
            found = {self._fences.get(block, self._last) for block in ids}
        for fence in found:
            if fence is not None:
                self._device.wait(lane.stream, fence.event)


def _check(
    layout: PageLayout, block_ids: Ids, staging: Region, offset: int
) -> tuple[DevicePageLayout, list[int], int]:
    """Refuses what would leave the pages or staging, before anything is copied."""
    layout, ids = _check_layout(layout, block_ids)
    num_bytes = layout.num_bytes(len(ids))
    if offset < 0 or offset + num_bytes > staging.size:
        raise ValueError(
            f"staging range of {num_bytes} bytes at offset {offset} leaves the region of "
            f"{staging.size} bytes"
        )
    return layout, ids, num_bytes


def _check_layout(layout: PageLayout, block_ids: Ids) -> tuple[DevicePageLayout, list[int]]:
    if not isinstance(layout, DevicePageLayout):
        raise TypeError(f"pages in host memory ({type(layout).__name__}) have their own copier")
    if block_ids.dtype != np.int64 or block_ids.ndim != 1:
        raise TypeError("block_ids must be an int64 vector")
    outside = (block_ids < 0) | (block_ids >= layout.num_blocks)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(f"block_ids[{i}] = {block_ids[i]}: there are {layout.num_blocks} blocks")
    return layout, block_ids.tolist()

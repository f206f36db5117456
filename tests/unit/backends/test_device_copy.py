# SPDX-License-Identifier: Apache-2.0
"""The device copier on a device whose streams do nothing until somebody waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_ascend_pd.backends.block_copy import (
    BlockCopier,
    NativeBlockCopier,
    PageLayout,
    Region,
    Values,
    finish_checksum,
)
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier, DevicePageLayout, Segment
from vllm_ascend_pd.backends.fake_device import FakeDevice, FakeStream
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.torch_device import make_copier
from vllm_ascend_pd.errors import BackendError

NUM_LAYERS, NUM_BLOCKS = 3, 16
K_BYTES, V_BYTES = 96, 32
PAGE = K_BYTES + V_BYTES


class Memory:
    """KV caches of a fake device; ``shape`` says how the pages lie."""

    def __init__(self, shape: str, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape

        def fill(num_bytes: int) -> torch.Tensor:
            return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)

        layers = range(NUM_LAYERS)
        if shape == "one run":  # K page then V page
            self.memories = [fill(NUM_BLOCKS * PAGE) for _ in layers]
            segments = [(Segment(n, 0, PAGE, PAGE),) for n in layers]
        elif shape == "K and V apart":
            self.memories = [fill(NUM_BLOCKS * size) for _ in layers for size in (K_BYTES, V_BYTES)]
            segments = [
                (
                    Segment(2 * n, 0, K_BYTES, K_BYTES),
                    Segment(2 * n + 1, 0, V_BYTES, V_BYTES),
                )
                for n in layers
            ]
        else:  # all layers of a block together
            self.memories = [fill(NUM_BLOCKS * NUM_LAYERS * PAGE)]
            segments = [(Segment(0, n * PAGE, NUM_LAYERS * PAGE, PAGE),) for n in layers]
        self.layout = DevicePageLayout(
            region=Region(1, 1 << 60),
            layer_offsets=np.zeros(NUM_LAYERS, dtype=np.int64),
            block_strides=np.ones(NUM_LAYERS, dtype=np.int64),
            page_bytes=PAGE,
            segments=tuple(segments),
            memories=tuple(self.memories),
            num_blocks=NUM_BLOCKS,
        )

    def page(self, layer: int, block: int) -> bytes:
        return b"".join(
            self.memories[s.memory][s.offset + block * s.stride :][: s.num_bytes].numpy().tobytes()
            for s in self.layout.segments[layer]
        )

    def write(self, layer: int, block: int, value: int) -> None:
        for s in self.layout.segments[layer]:
            self.memories[s.memory][s.offset + block * s.stride :][: s.num_bytes] = value


SHAPES = ["one run", "K and V apart", "blocks outside layers"]


@pytest.fixture(params=[NativeBlockCopier, PythonBlockCopier])
def host(request: pytest.FixtureRequest) -> BlockCopier:
    return request.param()


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def copier(device: FakeDevice, host: BlockCopier) -> DeviceBlockCopier:
    return DeviceBlockCopier(device, host)


class Staging:
    def __init__(self, num_bytes: int = 1 << 16) -> None:
        self.bytes = np.zeros(num_bytes, dtype=np.uint8)
        self.region = Region(self.bytes.ctypes.data, num_bytes)


MakeStaging = Callable[[], Staging]


@pytest.fixture(params=["pinned", "not pinned"])
def make_staging(request: pytest.FixtureRequest, copier: DeviceBlockCopier) -> MakeStaging:
    """Memory that the device copies itself, or that is copied through a buffer."""

    def make() -> Staging:
        staging = Staging()
        if request.param == "pinned":
            copier.pin(staging.region.base, staging.region.size)
        return staging

    return make


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("blocks", [(4,), (5, 2), (3, 4, 5, 9, 10, 0), (15, 14)])
def test_gather_packs_pages_in_the_order_of_staging(
    copier: DeviceBlockCopier,
    host: BlockCopier,
    shape: str,
    blocks: tuple[int, ...],
    make_staging: MakeStaging,
) -> None:
    memory, staging = Memory(shape), make_staging()
    layers = memory.layout.for_layers(1, 3)
    checksum = copier.gather(layers, ids(*blocks), staging.region, 64, seed=9)
    packed = b"".join(memory.page(layer, block) for layer in (1, 2) for block in blocks)
    assert staging.bytes[64 : 64 + len(packed)].tobytes() == packed
    assert not staging.bytes[:64].any()
    assert not staging.bytes[64 + len(packed) :].any()
    assert checksum == host.checksum(staging.region, 64, len(packed), seed=9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("start", "stop"), [(0, NUM_LAYERS), (1, 3), (2, 2)])
@pytest.mark.parametrize("blocks", [(4,), (3, 4, 5, 9, 10, 0), ()])
def test_layers_of_blocks_are_packed_apart(
    copier: DeviceBlockCopier, shape: str, start: int, stop: int, blocks: tuple[int, ...]
) -> None:
    memory, staging = Memory(shape), Staging()
    stride = 64 + NUM_LAYERS * PAGE
    values = Values(staging.region, 64, stride)
    sums = copier.gather_layers(memory.layout, start, stop, ids(*blocks), values)
    expected = np.zeros_like(staging.bytes)
    for i, block in enumerate(blocks):
        for layer in range(start, stop):
            at = 64 + i * stride + layer * PAGE
            expected[at : at + PAGE] = np.frombuffer(memory.page(layer, block), np.uint8)
    np.testing.assert_array_equal(staging.bytes, expected)
    assert len(sums) == len(blocks)
    if (start, stop) == (0, NUM_LAYERS):
        for i, total in enumerate(sums.tolist()):
            checksum = copier.checksum(staging.region, 64 + i * stride, stop * PAGE, seed=3)
            assert finish_checksum(total, stop * PAGE, 3) == checksum


@pytest.mark.parametrize("source", SHAPES)
@pytest.mark.parametrize("target", SHAPES)
def test_pages_of_one_shape_go_into_another(
    copier: DeviceBlockCopier, source: str, target: str, make_staging: MakeStaging
) -> None:
    theirs, ours, staging = Memory(source), Memory(target, seed=2), make_staging()
    before = {
        (layer, block): ours.page(layer, block)
        for layer in range(NUM_LAYERS)
        for block in range(NUM_BLOCKS)
    }
    packed = copier.gather(theirs.layout, ids(1, 2, 7), staging.region, 0, seed=3)
    assert copier.scatter(ours.layout, ids(8, 5, 6), staging.region, 0, seed=3) == packed
    moved = {8: 1, 5: 2, 6: 7}
    for (layer, block), old in before.items():
        new = theirs.page(layer, moved[block]) if block in moved else old
        assert ours.page(layer, block) == new


def test_staging_is_that_of_the_hosts_copier(
    host: BlockCopier, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    """An engine on a CPU and one on a device understand each other."""
    memory, ours, theirs = Memory("blocks outside layers"), make_staging(), Staging()
    (flat,) = memory.memories
    on_host = PageLayout(
        region=Region(flat.data_ptr(), flat.numel()),
        layer_offsets=np.arange(NUM_LAYERS, dtype=np.int64) * PAGE,
        block_strides=np.full(NUM_LAYERS, NUM_LAYERS * PAGE, dtype=np.int64),
        page_bytes=PAGE,
    )
    blocks = ids(3, 4, 11)
    expected = host.gather(on_host, blocks, theirs.region, 8, seed=5)
    assert copier.gather(memory.layout, blocks, ours.region, 8, seed=5) == expected
    np.testing.assert_array_equal(ours.bytes, theirs.bytes)


def test_no_block_is_no_copy(
    copier: DeviceBlockCopier, host: BlockCopier, make_staging: MakeStaging
) -> None:
    memory, staging = Memory("one run"), make_staging()
    empty = host.checksum(staging.region, 0, 0, 7)
    assert copier.gather(memory.layout, ids(), staging.region, 0, 7) == empty
    assert copier.scatter(memory.layout, ids(), staging.region, 0, 7) == empty


class Kernels(TorchDispatchMode):
    """Counts what would be launched; views are not."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def kernels(copier: DeviceBlockCopier, shape: str, blocks: np.ndarray) -> tuple[int, int]:
    """Of a gather and of a scatter."""
    layout, staging = Memory(shape).layout, Staging()
    counts = []
    for call in (copier.gather, copier.scatter):
        call(layout, blocks, staging.region)  # makes the memory that later calls use
        with Kernels() as counted:
            call(layout, blocks, staging.region)
        counts.append(counted.count)
    return counts[0], counts[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_number_of_kernels_does_not_depend_on_the_number_of_blocks(
    copier: DeviceBlockCopier, shape: str
) -> None:
    few = kernels(copier, shape, ids(3, 9))
    assert kernels(copier, shape, ids(3, 5, 6, 9, 1, 2, 15, 14, 0, 12)) == few
    num_segments = sum(len(layer) for layer in Memory(shape).layout.segments)
    assert max(few) <= 2 * num_segments + 3


def test_pages_that_no_word_fits_are_copied_too(
    copier: DeviceBlockCopier, host: BlockCopier, make_staging: MakeStaging
) -> None:
    """A page of 5 bytes, 7 from the next one, after 3 others."""
    memory = torch.arange(64, dtype=torch.uint8)
    layout = replace(
        Memory("one run").layout.for_layers(0, 1),
        page_bytes=5,
        segments=((Segment(0, 3, 7, 5),),),
        memories=(memory,),
        num_blocks=8,
    )
    staging = make_staging()
    copier.gather(layout, ids(2, 3, 4, 5), staging.region)  # it leaves bytes behind the next one's
    packed = copier.gather(layout, ids(6, 1), staging.region)
    assert staging.bytes[:10].tolist() == [*range(45, 50), *range(10, 15)]
    assert packed == host.checksum(staging.region, 0, 10)
    assert copier.scatter(layout, ids(0, 7), staging.region) == packed
    assert memory[3:8].tolist() == [*range(45, 50)]
    assert memory[52:57].tolist() == [*range(10, 15)]
    assert memory[8:52].tolist() == [*range(8, 52)]


@pytest.mark.parametrize("wrong", [(16,), (-1,), (0, 99)])
def test_block_outside_is_refused_and_nothing_is_copied(
    copier: DeviceBlockCopier, wrong: tuple[int, ...], make_staging: MakeStaging
) -> None:
    memory, staging = Memory("one run"), make_staging()
    for copy in (copier.gather, copier.scatter):
        with pytest.raises(ValueError, match="there are 16 blocks"):
            copy(memory.layout, ids(*wrong), staging.region)
    assert not staging.bytes.any()


def test_staging_too_small_is_refused(copier: DeviceBlockCopier) -> None:
    with pytest.raises(ValueError, match="leaves the region"):
        copier.gather(Memory("one run").layout, ids(0, 1), Staging(2 * PAGE).region)


def test_pages_in_host_memory_are_refused(copier: DeviceBlockCopier) -> None:
    layout = PageLayout.packed(Region(1, 1), np.zeros(1, dtype=np.int64), 1)
    with pytest.raises(TypeError, match="have their own copier"):
        copier.gather(layout, ids(0), Staging().region)


def test_layout_that_leaves_its_memory_is_refused() -> None:
    layout = Memory("one run").layout
    with pytest.raises(ValueError, match="leaves its memory"):
        DevicePageLayout(
            layout.region,
            layout.layer_offsets,
            layout.block_strides,
            layout.page_bytes,
            layout.segments,
            layout.memories,
            NUM_BLOCKS + 1,
        )


# Memory that is pinned ---------------------------------------------------------------------------


class NoPasses(PythonBlockCopier):
    """Of the host: nothing is to be left for it."""

    def gather(self, *args: object, **options: object) -> int:
        raise AssertionError("a pass over the bytes by the host")


class CountsBuffers(FakeDevice):
    def __init__(self) -> None:
        super().__init__()
        self.num_pinned_bytes = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.num_pinned_bytes += num_bytes
        return super().pinned(num_bytes)


def test_host_does_not_touch_the_bytes_of_pinned_memory() -> None:
    device = CountsBuffers()
    copier = DeviceBlockCopier(device, NoPasses())
    theirs, ours, staging = Memory("K and V apart"), Memory("one run", seed=2), Staging()
    copier.pin(staging.region.base, staging.region.size)
    packed = copier.gather(theirs.layout, ids(1, 2, 7), staging.region, 8, seed=3)
    assert copier.scatter(ours.layout, ids(8, 5, 6), staging.region, 8, seed=3) == packed
    assert ours.page(2, 6) == theirs.page(2, 7)
    num_bytes = theirs.layout.num_bytes(3)
    assert packed == PythonBlockCopier().checksum(staging.region, 8, num_bytes, seed=3)
    assert device.num_pinned_bytes < num_bytes  # nor is there a buffer for them


@pytest.mark.parametrize("num_outside", [-8, 8])
def test_memory_that_is_pinned_in_part_is_copied_through_the_buffer(
    copier: DeviceBlockCopier, num_outside: int
) -> None:
    memory, staging = Memory("one run"), Staging()
    num_bytes = memory.layout.num_bytes(2)
    copier.pin(staging.region.base + 64, num_bytes)
    packed = copier.gather(memory.layout, ids(3, 1), staging.region, 64 + num_outside, seed=5)
    assert packed == copier.checksum(staging.region, 64 + num_outside, num_bytes, seed=5)


def test_memory_is_copied_through_the_buffer_once_it_is_not_pinned_any_more(
    device: FakeDevice,
) -> None:
    copier = DeviceBlockCopier(device, NoPasses())
    memory, staging = Memory("one run"), Staging()
    copier.pin(staging.region.base, staging.region.size)
    assert device.pins == {staging.region.base: staging.region.size}
    copier.gather(memory.layout, ids(3), staging.region)
    copier.unpin(staging.region.base)
    assert not device.pins
    with pytest.raises(AssertionError, match="a pass over the bytes"):
        copier.gather(memory.layout, ids(3), staging.region)


class PinsNothing(FakeDevice):
    def pin(self, addr: int, num_bytes: int) -> None:
        raise BackendError("CUDA cannot pin it: out of memory")

    def unpin(self, addr: int) -> None:
        raise AssertionError("it was never pinned")


def test_memory_that_cannot_be_pinned_is_copied_through_the_buffer_and_said_so(
    host: BlockCopier, caplog: pytest.LogCaptureFixture
) -> None:
    copier = DeviceBlockCopier(PinsNothing(), host)
    memory, staging = Memory("one run"), Staging()
    copier.pin(staging.region.base, staging.region.size)
    assert "out of memory; copies to and from it go through a buffer" in caplog.text
    packed = copier.gather(memory.layout, ids(3), staging.region)
    assert copier.scatter(memory.layout, ids(4), staging.region) == packed
    assert memory.page(1, 4) == memory.page(1, 3)
    copier.unpin(staging.region.base)


class LateWrite(TorchDispatchMode):
    """A write of a peer that comes before the n-th operation of a copy."""

    def __init__(self, staging: Staging, number: int) -> None:
        super().__init__()
        self._staging = staging
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self.left == 0:
            self._staging.bytes[:] = 0xEE
        self.left -= 1
        return func(*args, **(kwargs or {}))


def test_checksum_is_of_what_the_pages_hold_whenever_a_late_write_comes(
    copier: DeviceBlockCopier, host: BlockCopier, make_staging: MakeStaging
) -> None:
    theirs, number, results = Memory("K and V apart"), 0, set()
    while True:
        ours, staging, again = Memory("one run", seed=2), make_staging(), Staging()
        packed = copier.gather(theirs.layout, ids(1, 2), staging.region, seed=3)
        with LateWrite(staging, number) as late:
            placed = copier.scatter(ours.layout, ids(3, 4), staging.region, seed=3)
        copier.gather(ours.layout, ids(3, 4), again.region)
        assert placed == host.checksum(again.region, 0, ours.layout.num_bytes(2), seed=3)
        results.add(placed == packed)
        if late.left >= 0:
            break
        number += 1
    assert results == {True, False}


# Order against the engine's kernels --------------------------------------------------------------


def compute(device: FakeDevice, memory: Memory, layer: int, block: int, value: int) -> None:
    device.launch(lambda: memory.write(layer, block, value))


def test_gather_waits_for_the_step_that_computes_its_blocks(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    memory, staging = Memory("one run"), make_staging()
    fence = copier.fence([4])
    compute(device, memory, 0, 4, 77)
    fence.mark()
    copier.gather(memory.layout.for_layers(0, 1), ids(4), staging.region)
    assert (staging.bytes[:PAGE] == 77).all()


def test_gather_does_not_wait_for_later_steps(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    """Else each piece would take as long as a step."""
    memory, staging = Memory("one run"), make_staging()
    copier.fence([4]).mark()
    copier.fence([5])
    compute(device, memory, 1, 5, 88)
    copier.gather(memory.layout, ids(4), staging.region)
    assert device.compute.num_done == 0


def test_values_wait_for_all_that_was_launched_in_the_last_step(
    device: FakeDevice, copier: DeviceBlockCopier
) -> None:
    """Nothing named their blocks in that step, and something did in an earlier one."""
    memory, staging = Memory("one run"), Staging()
    copier.fence([4]).mark()
    compute(device, memory, 0, 4, 77)
    compute(device, memory, 1, 5, 88)
    copier.end_step()
    compute(device, memory, 2, 6, 99)  # of the step that is being launched
    copier.gather_layers(memory.layout, 0, 2, ids(4, 5), Values(staging.region, 0, 2 * PAGE))
    assert (staging.bytes[:PAGE] == 77).all()
    assert (staging.bytes[3 * PAGE : 4 * PAGE] == 88).all()
    assert device.compute.num_done == 2


def test_peers_do_not_wait_for_the_end_of_later_steps(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    memory, staging = Memory("one run"), make_staging()
    copier.fence([4]).mark()
    compute(device, memory, 1, 5, 88)
    copier.end_step()
    copier.gather(memory.layout, ids(4), staging.region)
    copier.settle(ids(4))
    assert device.compute.num_done == 0


def test_scatter_does_not_overtake_the_last_user_of_its_blocks(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    """The step before may still write a block that was freed and given to this load."""
    theirs, memory, staging = Memory("one run"), Memory("one run", seed=2), make_staging()
    layer = theirs.layout.for_layers(0, 1)
    copier.gather(layer, ids(0), staging.region)
    compute(device, memory, 0, 6, 99)
    copier.fence([6])
    copier.scatter(memory.layout.for_layers(0, 1), ids(6), staging.region)
    device.finish()
    assert memory.page(0, 6) == theirs.page(0, 0)


def test_block_that_no_fence_names_waits_for_the_latest(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    memory, staging = Memory("one run"), make_staging()
    fence = copier.fence([])
    compute(device, memory, 0, 4, 77)
    fence.mark()
    copier.gather(memory.layout.for_layers(0, 1), ids(4), staging.region)
    assert (staging.bytes[:PAGE] == 77).all()


def test_threads_do_not_share_a_stream_or_a_buffer(
    device: FakeDevice, copier: DeviceBlockCopier, make_staging: MakeStaging
) -> None:
    memory = Memory("one run")
    stagings = [make_staging() for _ in range(4)]

    def run(n: int) -> None:
        for _ in range(20):
            copier.gather(memory.layout, ids(n, n + 4), stagings[n].region)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, staging in enumerate(stagings):
        assert staging.bytes[:PAGE].tobytes() == memory.page(0, n)
        assert staging.bytes[PAGE : 2 * PAGE].tobytes() == memory.page(0, n + 4)


class LaunchesAPart(FakeDevice):
    def __init__(self) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []

    def new_stream(self) -> FakeStream:
        self.streams.append(super().new_stream())
        return self.streams[-1]

    def run(self, stream: FakeStream, work: Callable[[], object]) -> None:
        super().run(stream, work)
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("method", ["gather", "scatter"])
def test_nothing_is_written_after_a_copy_has_failed(host: BlockCopier, method: str) -> None:
    """Its blocks are free then."""
    device = LaunchesAPart()
    copier = DeviceBlockCopier(device, host)
    memory, staging = Memory("one run"), Staging()
    with pytest.raises(RuntimeError, match="out of memory"):
        getattr(copier, method)(memory.layout, ids(4), staging.region)
    (stream,) = device.streams
    assert stream.num_done == len(stream.work) > 0


# The fake device finds what is missing -----------------------------------------------------------


@pytest.mark.parametrize("kind", ["scratch", "pinned"])
@pytest.mark.parametrize("number", range(4))
def test_want_of_memory_fails_one_copy(
    host: BlockCopier, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """The first, second, … time that a thread needs some."""
    device, memory, staging = FakeDevice(), Memory("one run"), Staging()
    copier = DeviceBlockCopier(device, host)
    allocate, num_calls = getattr(device, kind), count()

    def refuse(*args: Any) -> torch.Tensor:
        if next(num_calls) == number:
            raise RuntimeError("out of memory")
        memory: torch.Tensor = allocate(*args)
        return memory

    monkeypatch.setattr(device, kind, refuse)
    ids = np.array([3, 1, 2], dtype=np.int64)
    with suppress(RuntimeError):
        copier.gather(memory.layout, ids, staging.region)
    copier.gather(memory.layout, ids, staging.region)
    expected = b"".join(memory.page(n, b) for n in range(NUM_LAYERS) for b in (3, 1, 2))
    assert staging.bytes[: len(expected)].tobytes() == expected


class NeverSynchronizes(FakeDevice):
    def synchronize(self, stream: FakeStream) -> None:
        """A copier that forgot it would look like this."""


class NeverWaits(FakeDevice):
    def wait(self, stream: FakeStream, event: object) -> None:
        """A copier that forgot its fences would look like this."""


def gather_after_a_kernel(device: FakeDevice) -> int:
    memory, staging = Memory("one run"), Staging()
    copier = DeviceBlockCopier(device, PythonBlockCopier())
    fence = copier.fence([4])
    compute(device, memory, 0, 4, 77)
    fence.mark()
    copier.gather(memory.layout.for_layers(0, 1), ids(4), staging.region)
    return int((staging.bytes[:PAGE] == 77).sum())


@pytest.mark.parametrize(
    ("make", "num_right"), [(FakeDevice, PAGE), (NeverSynchronizes, 0), (NeverWaits, 0)]
)
def test_missing_wait_gives_wrong_bytes(make: Callable[[], FakeDevice], num_right: int) -> None:
    assert gather_after_a_kernel(make()) <= max(num_right, PAGE // 8)
    assert (gather_after_a_kernel(make()) == PAGE) is (num_right == PAGE)


# Which copier ------------------------------------------------------------------------------------


def test_cpu_has_the_native_copier_without_a_detour() -> None:
    assert isinstance(make_copier(torch.device("cpu")), NativeBlockCopier)


def test_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(BackendError, match="'meta'"):
        make_copier(torch.device("meta"))


def test_npu_without_torch_npu_says_so() -> None:
    with pytest.raises(BackendError, match="torch_npu"):
        make_copier(SimpleNamespace(type="npu"))  # type: ignore[arg-type]

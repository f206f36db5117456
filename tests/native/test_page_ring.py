# SPDX-License-Identifier: Apache-2.0
"""Both ends of a ring, in one process."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vllm_ascend_pd.backends.block_copy import NativeBlockCopier, PageLayout, Region
from vllm_ascend_pd.backends.page_ring import RingPacker, RingPlacer
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.errors import BackendError

try:
    NATIVE = NativeBlockCopier()
except BackendError:
    pytest.skip("the native extension is not built", allow_module_level=True)

CHUNK = 256 << 10
NUM_CHUNKS = 8
HEADER = 4096
KEY = 12345
FOREVER_S = 10.0


class Pages:
    """uint8 [num_layers, num_blocks, page_bytes]."""

    def __init__(self, num_layers: int, num_blocks: int, page_bytes: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.bytes = random.integers(0, 256, (num_layers, num_blocks, page_bytes), dtype=np.uint8)
        self.layout = PageLayout.packed(
            region=Region(self.bytes.ctypes.data, self.bytes.nbytes),
            layer_offsets=np.arange(num_layers, dtype=np.int64) * num_blocks * page_bytes,
            page_bytes=page_bytes,
        )


class Ring:
    """Pages, a ring of ``num_bytes``, and pages for them."""

    def __init__(self, page_bytes: int, num_blocks: int, num_layers: int = 3, chunks: int = 8):
        self.theirs = Pages(num_layers, 2 * num_blocks, page_bytes, 1)
        self.ours = Pages(num_layers, 2 * num_blocks, page_bytes, 2)
        self.memory = np.zeros(HEADER + chunks * CHUNK + 64, dtype=np.uint8)
        self.start = -self.memory.ctypes.data % 64
        base = self.memory.ctypes.data + self.start
        self.region = Region(base, HEADER + chunks * CHUNK)
        self.sources = np.arange(2 * num_blocks - 1, num_blocks - 1, -1, dtype=np.int64)
        self.targets = np.arange(0, 2 * num_blocks, 2, dtype=np.int64)

    def packer(self, key: int = KEY) -> RingPacker:
        return NATIVE.pack_ring(self.theirs.layout, self.sources, self.region, key)

    def placer(self, key: int = KEY) -> RingPlacer:
        return NATIVE.place_ring(self.ours.layout, self.targets, self.region, key)

    def chunks(self) -> np.ndarray:
        return self.memory[self.start + HEADER :]

    def expected_checksum(self, key: int = KEY) -> int:
        num_bytes = self.theirs.layout.num_bytes(len(self.sources))
        packed = np.zeros(num_bytes + 64, dtype=np.uint8)
        region = Region(packed.ctypes.data, packed.nbytes)
        return NATIVE.gather(self.theirs.layout, self.sources, region, 0, key)

    def expect_placed(self, untouched: np.ndarray) -> None:
        np.testing.assert_array_equal(
            self.ours.bytes[:, self.targets], self.theirs.bytes[:, self.sources]
        )
        others = np.setdiff1d(np.arange(self.ours.bytes.shape[1]), self.targets)
        np.testing.assert_array_equal(self.ours.bytes[:, others], untouched[:, others])


@pytest.mark.parametrize("chunks", [2, 8, 9])
@pytest.mark.parametrize(
    ("page_bytes", "num_blocks"),
    [(1, 1), (13, 7), (4096, 5), (CHUNK, 4), (CHUNK + 8, 5), (3 * CHUNK + 5, 3), (100_003, 20)],
)
def test_pages_go_through_while_both_ends_run(
    page_bytes: int, num_blocks: int, chunks: int
) -> None:
    ring = Ring(page_bytes, num_blocks, chunks=chunks)
    before = ring.ours.bytes.copy()
    placer, packer = ring.placer(), ring.packer()
    statuses: list[TransferStatus] = []

    def pack() -> None:
        statuses.append(packer.run(FOREVER_S))

    thread = threading.Thread(target=pack)
    thread.start()
    assert placer.wait(FOREVER_S)
    assert placer.run(FOREVER_S)
    thread.join()
    assert statuses == [TransferStatus.DONE]
    assert packer.num_bytes_left == placer.num_bytes_left == 0
    assert packer.checksum == placer.checksum == ring.expected_checksum()
    assert not placer.is_confirmed(0.0)
    packer.confirm()
    assert placer.is_confirmed(0.0)
    ring.expect_placed(before)


def test_each_end_goes_on_where_it_stopped() -> None:
    ring = Ring(CHUNK, 8, num_layers=3)  # three times what fits
    before = ring.ours.bytes.copy()
    placer, packer = ring.placer(), ring.packer()
    turns = 0
    while packer.run(0.0) is TransferStatus.RUNNING:
        assert not placer.run(0.0)
        turns += 1
    assert placer.run(0.0)
    assert turns == 2
    assert packer.checksum == placer.checksum == ring.expected_checksum()
    ring.expect_placed(before)


def test_full_ring_is_not_overwritten() -> None:
    ring = Ring(CHUNK, NUM_CHUNKS + 1, num_layers=1)
    ring.placer()
    packer = ring.packer()
    assert packer.run(0.0) is TransferStatus.RUNNING
    assert packer.num_bytes_left == CHUNK
    full = ring.chunks().copy()
    assert packer.run(0.001) is TransferStatus.RUNNING
    np.testing.assert_array_equal(ring.chunks(), full)


def test_nothing_comes_from_an_empty_ring() -> None:
    ring = Ring(4096, 4)
    before = ring.ours.bytes.copy()
    placer = ring.placer()
    assert not placer.wait(0.001)
    assert not placer.run(0.0)
    assert not placer.is_confirmed(0.0)
    np.testing.assert_array_equal(ring.ours.bytes, before)


def test_packer_stops_when_the_ring_is_given_up() -> None:
    ring = Ring(CHUNK, 2 * NUM_CHUNKS, num_layers=1)
    placer, packer = ring.placer(), ring.packer()
    assert packer.run(0.0) is TransferStatus.RUNNING
    placer.end()
    after = ring.chunks().copy()
    assert packer.run(FOREVER_S) is TransferStatus.FAILED
    np.testing.assert_array_equal(ring.chunks(), after)


def test_waiting_packer_is_woken_when_the_ring_is_given_up() -> None:
    ring = Ring(CHUNK, 2 * NUM_CHUNKS, num_layers=1)
    placer, packer = ring.placer(), ring.packer()
    statuses: list[TransferStatus] = []
    thread = threading.Thread(target=lambda: statuses.append(packer.run(60.0)))
    thread.start()
    assert placer.wait(FOREVER_S)
    placer.end()
    thread.join(FOREVER_S)
    assert statuses == [TransferStatus.FAILED]


def test_packer_writes_nothing_into_the_ring_of_another_transfer() -> None:
    ring = Ring(CHUNK, NUM_CHUNKS, num_layers=2)
    before = ring.ours.bytes.copy()
    ring.placer(KEY)
    stopped = ring.packer(KEY)
    assert stopped.run(0.0) is TransferStatus.RUNNING
    placer = ring.placer(KEY + 1)
    after = ring.chunks().copy()
    assert stopped.run(0.0) is TransferStatus.FAILED
    np.testing.assert_array_equal(ring.chunks(), after)
    assert not placer.wait(0.0)
    packer = ring.packer(KEY + 1)
    assert packer.run(0.0) is TransferStatus.RUNNING
    assert not placer.run(0.0)
    assert packer.run(0.0) is TransferStatus.DONE
    assert placer.run(0.0)
    assert placer.checksum == packer.checksum == ring.expected_checksum(KEY + 1)
    ring.expect_placed(before)


def test_late_chunk_of_a_stopped_packer_spoils_the_checksum() -> None:
    ring = Ring(CHUNK, NUM_CHUNKS, num_layers=1)
    placer, packer = ring.placer(), ring.packer()
    assert packer.run(0.0) is TransferStatus.DONE
    ring.chunks()[5] ^= 1
    assert placer.run(0.0)
    packer.confirm()
    assert placer.checksum != packer.checksum
    assert not placer.is_confirmed(0.0)


@pytest.mark.parametrize("num_packed", [NUM_CHUNKS + 1, 1 << 31, (1 << 32) - 1])
def test_impossible_count_places_nothing(num_packed: int) -> None:
    ring = Ring(CHUNK, 2 * NUM_CHUNKS, num_layers=1)
    before = ring.ours.bytes.copy()
    placer = ring.placer()
    counts = ring.memory[ring.start + 64 : ring.start + 68].view(np.uint32)
    counts[0] = num_packed
    assert not placer.run(0.0)
    np.testing.assert_array_equal(ring.ours.bytes, before)


def test_ring_that_was_overwritten_places_nothing() -> None:
    ring = Ring(CHUNK, 2, num_layers=1)
    before = ring.ours.bytes.copy()
    placer = ring.placer()
    ring.memory[ring.start : ring.start + HEADER] = 1
    assert not placer.run(0.0)
    assert not placer.is_confirmed(0.0)
    np.testing.assert_array_equal(ring.ours.bytes, before)


def test_memory_that_is_no_ring_is_refused() -> None:
    ring = Ring(4096, 4)
    base, size = ring.region.base, ring.region.size
    assert NATIVE.fits_ring(ring.region)
    for region in (Region(base + 8, size - 8), Region(base, HEADER + 2 * CHUNK - 1)):
        assert not NATIVE.fits_ring(region)
        with pytest.raises(ValueError, match="not a ring"):
            NATIVE.pack_ring(ring.theirs.layout, ring.sources, region, KEY)
    with pytest.raises(ValueError, match="key"):
        ring.packer(0)
    with pytest.raises(ValueError, match="overlaps"):
        NATIVE.pack_ring(ring.theirs.layout, ring.sources, ring.theirs.layout.region, KEY)
    with pytest.raises(ValueError, match="block_ids"):
        NATIVE.place_ring(ring.ours.layout, ring.targets + 100, ring.region, KEY)

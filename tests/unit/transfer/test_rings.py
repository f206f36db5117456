# SPDX-License-Identifier: Apache-2.0
"""Loader and data server over shared memory: pieces go through rings. Real sockets and threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.pages import one_group
from tests.unit.transfer.raw_peers import connected, wait_until
from tests.unit.transfer.test_send_receive import ask
from vllm_ascend_pd.backends.block_copy import NativeBlockCopier, PageLayout, Region, WorkerPages
from vllm_ascend_pd.backends.page_ring import RingPacker, RingPlacer
from vllm_ascend_pd.backends.shared_memory import SharedMemoryTransferEngine
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.backends.transports import SHARED_MEMORY, Transports
from vllm_ascend_pd.errors import BackendError
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.grants import Grant, Grants
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer
from vllm_ascend_pd.types import Cause, LeaseRef, LoadId
from vllm_ascend_pd.wire import Fetch, Fetched, Packing, decode_data, encode

try:
    NativeBlockCopier()
except BackendError:
    pytest.skip("the native extension is not built", allow_module_level=True)

NUM_LAYERS = 4
NUM_BLOCKS = 16
PAGE = 256 << 10
SLOT_BYTES = 4 << 20
NUM_SLOTS = 4
LEASE = LeaseRef("t", 1)


class Copier(NativeBlockCopier):
    """Counts, and does something when a ring is opened, before it is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.before_packing: Callable[[], None] = lambda: None
        self.num_rings = 0

    def pack_ring(self, *args, **options) -> RingPacker:  # type: ignore[no-untyped-def]
        self.num_rings += 1
        packer = super().pack_ring(*args, **options)
        self.before_packing()
        return packer


class Host:
    """A producer and a consumer."""

    def __init__(self, write_timeout_s: float = 5.0, slot_bytes: int = SLOT_BYTES) -> None:
        random = np.random.default_rng(1)
        shape = (NUM_LAYERS, NUM_BLOCKS, PAGE)
        self.theirs = random.integers(0, 256, shape, dtype=np.uint8)
        self.ours = np.zeros(shape, dtype=np.uint8)
        self.time_passed = 0.0  # at each look at the clock of slots: lets quarantines end
        self._skipped = 0.0
        self.copier = Copier()
        self.transports = [Transports({SHARED_MEMORY: SharedMemoryTransferEngine()}) for _ in "PD"]
        self.pools = [
            StagingPool(transports, NUM_SLOTS, slot_bytes, self._clock)
            for transports in self.transports
        ]
        self.grants = Grants()
        blocks = tuple(range(NUM_BLOCKS))
        self.grants.begin_step([Grant(LEASE, "e", (blocks,), NUM_BLOCKS, NUM_BLOCKS)])
        self.server = DataServer(
            host="127.0.0.1",
            transports=self.transports[0],
            pages=WorkerPages(self.copier, one_group(layout_of(self.theirs))),
            pool=self.pools[0],
            grants=self.grants,
            allows_host=lambda host: False,
            write_timeout_s=write_timeout_s,
            trust=Trust(),
        )
        self.admitted = self.server.page_server.admit(LEASE, NUM_BLOCKS)
        self.loader = PeerLoader(
            self.transports[1].sessions,
            WorkerPages(NativeBlockCopier(), one_group(layout_of(self.ours))),
            self.pools[1],
            Trust(),
        )
        self.server.start()
        self.loader.start()
        self._load_ids = count(1)

    def _clock(self) -> float:
        self._skipped += self.time_passed
        return time.monotonic() + self._skipped

    def spec(self, *blocks: int, in_step: bool = True, has_tail: bool = False) -> LoadSpec:
        load_id = LoadId(next(self._load_ids))
        peers = (self.admitted,)
        parts = (LoadBlocks(0, blocks, blocks, has_tail),)
        return LoadSpec(load_id, peers, "t", "e", parts, in_step, 10.0)

    def run(self, spec: LoadSpec) -> LoadResult:
        self.loader.start_load(spec)
        results: list[LoadResult] = []
        wait_until(lambda: bool(results.extend(self.loader.take_results()) or results))
        return results[0]

    def expect_loaded(self, *blocks: int) -> None:
        np.testing.assert_array_equal(self.ours[:, blocks], self.theirs[:, blocks])
        others = [block for block in range(NUM_BLOCKS) if block not in blocks]
        assert not self.ours[:, others].any()

    def num_free(self) -> list[int]:
        return [pool.num_free for pool in self.pools]

    def expect_at_rest(self) -> None:
        wait_until(lambda: self.num_free() == [NUM_SLOTS, NUM_SLOTS])
        wait_until(lambda: not self.server.counts()["rings"])

    def stop(self) -> None:
        self.loader.stop()
        self.server.stop()
        for pool, transports in zip(self.pools, self.transports, strict=True):
            pool.close()
            transports.close()
        assert (self.server.num_errors, self.loader.num_errors) == (0, 0)


def layout_of(pages: np.ndarray) -> PageLayout:
    return PageLayout.packed(
        region=Region(pages.ctypes.data, pages.nbytes),
        layer_offsets=np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE,
        page_bytes=PAGE,
    )


@pytest.fixture
def make_host() -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make(**options: float) -> Host:
        hosts.append(Host(**options))  # type: ignore[arg-type]
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()


@pytest.mark.parametrize("in_step", [False, True])
@pytest.mark.parametrize("has_tail", [False, True])
def test_pages_come_through_rings(
    make_host: Callable[..., Host], in_step: bool, has_tail: bool
) -> None:
    host = make_host()
    blocks = tuple(range(1, 15))
    for _ in range(3):
        host.ours[:] = 0
        result = host.run(host.spec(*blocks, in_step=in_step, has_tail=has_tail))
        assert (result.cause, result.transport) == ("", SHARED_MEMORY)
        assert result.num_bytes == NUM_LAYERS * len(blocks) * PAGE
        host.expect_loaded(*blocks)
    assert host.copier.num_rings
    host.expect_at_rest()


def test_piece_that_comes_through_a_ring_may_be_larger(make_host: Callable[..., Host]) -> None:
    """All of a load is one, once the producer is known to use rings."""
    host = make_host()
    host.run(host.spec(0))
    num_rings = host.copier.num_rings
    assert host.run(host.spec(*range(NUM_BLOCKS))).cause == ""
    assert NUM_LAYERS * NUM_BLOCKS * PAGE > SLOT_BYTES
    assert host.copier.num_rings == num_rings + 1
    host.expect_loaded(*range(NUM_BLOCKS))


def test_slots_too_small_for_a_ring_are_filled_as_a_whole(make_host: Callable[..., Host]) -> None:
    host = make_host(slot_bytes=PAGE)
    assert host.run(host.spec(3, 4)).cause == ""
    host.expect_loaded(3, 4)
    assert host.copier.num_rings == 0


def test_grant_that_is_given_up_while_packing_counts_for_nothing(
    make_host: Callable[..., Host],
) -> None:
    host = make_host()
    host.copier.before_packing = lambda: host.grants.discard([LEASE])
    result = host.run(host.spec(*range(NUM_BLOCKS)))
    assert (result.cause, result.num_bytes) == (Cause.LEASE_EXPIRED.value, 0)
    host.expect_at_rest()


def test_cancelled_load_frees_the_producer_at_once(make_host: Callable[..., Host]) -> None:
    host = make_host(write_timeout_s=60.0)
    host.run(host.spec(0))
    host.ours[:] = 0
    spec = host.spec(*range(NUM_BLOCKS))
    host.copier.before_packing = lambda: host.loader.cancel(spec.load_id)
    assert host.run(spec).cause == Cause.CANCELLED.value
    host.expect_at_rest()
    assert not host.ours.any()
    host.copier.before_packing = lambda: None
    assert host.run(host.spec(1, 2)).cause == ""
    host.expect_loaded(1, 2)


def test_page_that_changes_in_the_ring_ends_the_load(make_host: Callable[..., Host]) -> None:
    """As by a producer that was stopped while it wrote for somebody else."""
    host = make_host()
    region = host.pools[1].region
    memory = np.ctypeslib.as_array(
        (np.ctypeslib.ctypes.c_uint8 * region.size).from_address(region.base)
    )

    class Packer(RingPacker):
        def run(self, patience_s: float):  # type: ignore[no-untyped-def]
            status = super().run(0.0)
            memory[4096 + 17 :: SLOT_BYTES] ^= 1
            return status

    pack_ring = host.copier.pack_ring
    host.copier.pack_ring = lambda *a, **o: Packer(  # type: ignore[method-assign]
        pack_ring(*a, **o)._native
    )
    assert host.run(host.spec(0)).cause == Cause.CHECKSUM.value
    host.expect_at_rest()


def test_consumer_that_places_nothing_is_given_up(make_host: Callable[..., Host]) -> None:
    host = make_host(write_timeout_s=0.2)
    fetch = make_fetch(host)
    ring = host.pools[1].acquire()
    assert ring is not None
    ids = np.arange(NUM_BLOCKS, dtype=np.int64)
    NativeBlockCopier().place_ring(layout_of(host.ours), ids, ring.region, fetch.seed)
    fetch = msgspec.structs.replace(fetch, address=ring.addr)
    with connected(host.server.page_server.endpoint) as peer:
        peer.send(encode(fetch))
        answers = [decode_data(peer.receive()) for _ in range(2)]
    assert answers[0] == Packing(fetch.fetch_id)
    assert isinstance(answers[1], Fetched)
    assert (answers[1].cause, answers[1].by_ring) == (Cause.DEADLINE.value, True)
    with ring:
        """It goes back."""
    host.expect_at_rest()


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"ring_bytes": SLOT_BYTES}, Cause.TRANSFER_FAILED),  # no key there
        ({"ring_bytes": 0}, Cause.BAD_PARAMS),
        ({"ring_bytes": -1}, Cause.BAD_PARAMS),
        ({"ring_bytes": 4096}, Cause.BAD_PARAMS),
        ({"ring_bytes": 1 << 40}, Cause.BAD_PARAMS),
        ({"ring_bytes": SLOT_BYTES, "address": 4096}, Cause.BAD_PARAMS),
        ({"ring_bytes": SLOT_BYTES, "seed": 0}, Cause.BAD_PARAMS),
    ],
    ids=str,
)
def test_fetch_for_what_is_no_ring_is_answered(
    make_host: Callable[..., Host], wrong: dict[str, int], cause: Cause
) -> None:
    host = make_host()
    fetch = msgspec.structs.replace(make_fetch(host), **wrong)
    assert ask(host, encode(fetch)).cause == cause.value  # type: ignore[arg-type]
    host.expect_at_rest()


def test_ring_that_is_not_aligned_is_no_ring(make_host: Callable[..., Host]) -> None:
    host = make_host()
    fetch = make_fetch(host)
    fetch = msgspec.structs.replace(fetch, address=fetch.address + 8, ring_bytes=SLOT_BYTES)
    assert ask(host, encode(fetch)).cause == Cause.BAD_PARAMS.value  # type: ignore[arg-type]
    host.expect_at_rest()


def make_fetch(host: Host) -> Fetch:
    """Of more than fits a slot."""
    return Fetch(
        fetch_id=1,
        transfer_id="t",
        epoch="e",
        ticket=host.admitted.ticket,
        group=0,
        first_layer=0,
        num_layers=NUM_LAYERS,
        block_indices=tuple(range(NUM_BLOCKS)),
        sessions=host.transports[1].sessions,
        address=host.pools[1].region.base,
        num_bytes=NUM_LAYERS * NUM_BLOCKS * PAGE,
        seed=5,
        ring_bytes=SLOT_BYTES,
    )


@pytest.mark.parametrize(
    ("side", "name"),
    [
        ("copier", "pack_ring"),
        ("packer", "run"),
        ("packer", "confirm"),
        ("placer", "wait"),
        ("placer", "run"),
    ],
)
def test_end_of_a_ring_that_raises_ends_the_load_and_serves_the_next(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, side: str, name: str
) -> None:
    host = make_host()
    host.run(host.spec(15))
    targets = {"copier": Copier, "packer": RingPacker, "placer": RingPlacer}
    raises = [True]
    call = getattr(targets[side], name)

    def maybe(*args: Any, **options: Any) -> Any:
        if raises[0]:
            raise RuntimeError("scripted")
        return call(*args, **options)

    monkeypatch.setattr(targets[side], name, maybe)
    assert host.run(host.spec(0, 1, 2)).cause == Cause.TRANSFER_FAILED.value
    raises[0] = False
    host.time_passed = 1000.0
    host.expect_at_rest()
    assert host.run(host.spec(0, 1, 2)).cause == ""
    host.expect_loaded(0, 1, 2, 15)
    host.server.num_errors = host.loader.num_errors = 0

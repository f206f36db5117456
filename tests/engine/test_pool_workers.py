# SPDX-License-Identifier: Apache-2.0
"""A pool with several workers: each has a share of every block, and the scheduler sees one pool."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_pool_scheduler import World, keys
from tests.pages import one_group
from tests.unit.engine.test_pool_io_machine import NoRegistry
from vllm_ascend_pd.backends.block_copy import (
    PageLayout,
    Region,
    WorkerPages,
    make_block_copier,
)
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.config import PDConfig, PoolConfig, Role, SsdConfig
from vllm_ascend_pd.engine.scheduler.sources import SourceState
from vllm_ascend_pd.engine.worker import pool_start
from vllm_ascend_pd.engine.worker.pool_start import as_stored
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.span import KVGroup
from vllm_ascend_pd.pool import link as pool_link
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.fold import fold_found, fold_saved
from vllm_ascend_pd.pool.io import PoolIO, PoolSlots
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.messages import (
    DROPPED,
    AheadSpec,
    DropSaves,
    Found,
    Lookup,
    Packed,
    PoolBlocks,
    PoolLoadSpec,
    Save,
    Saved,
    join_hashes,
)
from vllm_ascend_pd.pool.saver import Replica
from vllm_ascend_pd.pool.values import BlockValues
from vllm_ascend_pd.transfer.shares import Sharding, Share
from vllm_ascend_pd.types import LoadId, Place

NOWHERE, DRAM, REMOTE, SSD = Place.NOWHERE, Place.DRAM, Place.REMOTE, Place.SSD


def test_workers_with_the_same_kv_head_store_states_and_drafters_of_their_own() -> None:
    whole = KVGroup(0, 16, 16, ("a",))
    states = KVGroup(1, 16, 16, ("b",), state="gdn")
    drafter = KVGroup(0, 16, 16, ("a", "draft", "draft"), sizes=(16, 32))
    indexer = KVGroup(0, 16, 48, ("a",), sizes=(16, 32))
    for rank in range(4):
        own = Sharding(rank, tp_size=4, num_kv_heads=2)
        assert as_stored(own, [whole]) == as_stored(own, [indexer]) == own
        assert (own.share, own.num_replicas) == (Share(rank // 2, 2), 2)
        for groups in ([whole, states], [drafter]):
            each = as_stored(own, groups)
            assert (each.share, each.num_replicas) == (Share(rank, 4), 1)


@pytest.mark.parametrize(
    ("tier", "field", "option"),
    [
        ("dram", "dram_size", "tenant_share"),
        ("fs", "ssd.size", "tenant_share"),
        ("dram", "dram_size", "tenant_shares.a"),
    ],
)
def test_share_of_a_tenant_that_holds_no_block_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tier: str, field: str, option: str
) -> None:
    for name, value in {
        "fingerprint": "m",
        "sharding": Sharding(1, tp_size=2, num_kv_heads=2),
        "kv_groups": (),
        "data_parallel_rank": None,
        "from_first_worker": 64 << 20,
    }.items():
        monkeypatch.setattr(pool_start, name, lambda *of, value=value: value)
    ssd = SsdConfig(str(tmp_path), 128 << 20) if tier == "fs" else None
    share: dict[str, Any] = {"tenant_share": 1 / 64}
    if option != "tenant_share":
        share = {"tenant_shares": {"a": 1 / 64}}
    pool = PoolConfig(tiers=(tier,), dram_size=128 << 20, ssd=ssd, **share)
    config = PDConfig(role=Role.BOTH, engine_id="e", host="127.0.0.1", port=0, pool=pool)
    layout = PageLayout(
        Region(1 << 20, 1 << 30), np.array([0, 1 << 29]), np.full(2, 1 << 20), 1 << 20
    )
    num_bytes = BlockValues(make_block_copier(), one_group(layout)[0], KeySpace.of("m")).num_bytes
    message = (
        rf"{option} 0\.015625 of the {64 << 20} bytes .* pool\.{field} is less than the"
        rf" {num_bytes} bytes of a block, .*; raise pool\.{field} to {num_bytes * 128} bytes or"
    )
    config_of_vllm: Any = None
    pages = WorkerPages(make_block_copier(), one_group(layout))
    with pytest.raises(ConfigError, match=message):
        pool_start.start_pool(config, config_of_vllm, config_of_vllm, pages, [])
    assert not list(tmp_path.iterdir())


# Folding.


def found(*places: Place, healthy: bool = True) -> Found:
    return Found(7, bytes(places), healthy)


def test_a_block_is_where_its_slowest_share_is() -> None:
    answers = [found(DRAM, DRAM, SSD, NOWHERE), found(DRAM, REMOTE, DRAM, DRAM)]
    for order in itertools.permutations(answers):
        assert fold_found(order) == found(DRAM, REMOTE, SSD, NOWHERE)


@given(st.data(), st.integers(1, 5), st.integers(1, 20))
def test_places_fold_as_one_by_one(data: Any, num_workers: int, num_blocks: int) -> None:
    row = st.lists(
        st.sampled_from([Place.NOWHERE, *Place.all()]), min_size=num_blocks, max_size=num_blocks
    )
    rows = [data.draw(row) for _ in range(num_workers)]
    expected = [NOWHERE if NOWHERE in shares else max(shares) for shares in zip(*rows, strict=True)]
    assert fold_found([found(*row) for row in rows]).places == bytes(expected)


def test_a_lookup_that_failed_on_one_worker_has_failed() -> None:
    answers = [found(DRAM, DRAM), found(NOWHERE, healthy=False)]
    for order in itertools.permutations(answers):
        folded = fold_found(order)
        assert not folded.healthy
        assert not any(folded.places)


def test_the_worst_share_says_how_a_save_ended() -> None:
    answers = [
        Saved(3, ("ok", "ok", "full", DROPPED, "ok"), 100, 1.0),
        Saved(3, ("ok", "full", "failed", "ok", "ok"), 200, 4.0),
    ]
    for order in itertools.permutations(answers):
        assert fold_saved(order) == Saved(3, ("ok", "full", "failed", DROPPED, "ok"), 300, 4.0)


# The scheduler's side.


@pytest.fixture
def world() -> World:
    return World(num_workers=2)


def look_up(world: World) -> tuple[Any, int]:
    request = world.request()
    world.source.add(request)
    (lookup,) = world.take(Lookup)
    return world.source.find(request), lookup.lookup_id


def answer(lookup_id: int, *places: Place) -> Found:
    return Found(lookup_id, bytes(places), True)


def test_a_lookup_is_over_when_every_worker_has_answered(world: World) -> None:
    prompt, lookup_id = look_up(world)
    world.source.on_found(answer(lookup_id, DRAM, DRAM, DRAM, DRAM), world.now)
    assert prompt.state is SourceState.ASKED
    world.source.on_found(answer(lookup_id, DRAM, REMOTE, NOWHERE, DRAM), world.now)
    assert prompt.state is SourceState.READY
    assert [prompt.place_of(i) for i in range(4)] == [DRAM, REMOTE, NOWHERE, DRAM]


def test_a_worker_that_does_not_answer_ends_the_lookup_at_its_deadline(world: World) -> None:
    prompt, lookup_id = look_up(world)
    world.source.on_found(answer(lookup_id, DRAM, DRAM, DRAM, DRAM), world.now)
    world.now += 1.0
    world.source.tick()
    assert prompt.state is SourceState.FAILED
    assert world.stats.take()["pool_lookups/deadline"] == 1
    # The other one's answer comes late, and is not taken for half of another lookup's.
    world.source.on_found(answer(lookup_id, DRAM, DRAM, DRAM, DRAM), world.now)
    assert world.source._pending == {}
    other, other_id = look_up(world)
    world.source.on_found(answer(other_id, DRAM, DRAM, DRAM, DRAM), world.now)
    assert other.state is SourceState.ASKED
    world.source.on_found(answer(other_id, NOWHERE, NOWHERE, NOWHERE, NOWHERE), world.now)
    assert other.state is SourceState.FAILED


EVENTS = ["packed a", "saved a", "packed b", "saved b"]
ORDERS = [
    order
    for order in itertools.permutations(EVENTS)
    if all(order.index(f"packed {w}") < order.index(f"saved {w}") for w in "ab")
]


@pytest.mark.parametrize("events", ORDERS, ids=", ".join)
@pytest.mark.parametrize("status", ["ok", "full", "failed", DROPPED])
def test_blocks_are_pinned_until_all_have_copied_them(
    world: World, events: tuple[str, ...], status: str
) -> None:
    """Of two workers, the second one's save ends with ``status``."""
    before = world.pool.get_num_free_blocks()
    request = world.request()
    world.run_step(request, 32)
    world.free(request)
    (save,) = world.take(Save)
    for i, event in enumerate(events):
        kind, worker = event.split()
        if kind == "packed":
            world.saves.on_packed(Packed(save.save_id))
        else:
            own = status if worker == "b" else "ok"
            world.saves.on_saved(Saved(save.save_id, ("ok", own), 10, 1.0))
        all_packed = sum(e.startswith("packed") for e in events[: i + 1]) == 2
        assert world.saves.num_pinned == (0 if all_packed else 2)
        assert world.saves.num_under_way == (i < 3)
    assert world.pool.get_num_free_blocks() == before
    first, second = keys(request, 0, 1)
    assert first in world.known
    assert (second in world.known) == (status == "ok")
    stats = world.stats.take()
    assert stats["pool_put_bytes"] == 20
    assert stats.get(f"pool_put_blocks/{status}") == (2 if status == "ok" else 1)
    assert world.saves.num_under_way == 0


def test_a_put_that_fails_on_two_workers_is_one_failure(world: World) -> None:
    world.run_step(world.request(), 16)
    for _ in range(2):
        for save in [message for message in world.sent if isinstance(message, Save)]:
            world.saves.on_packed(Packed(save.save_id))
            world.saves.on_saved(Saved(save.save_id, ("failed",), 0, 1.0))
    assert world.saves.breaker.closed  # which opens at the second failure
    assert world.saves.num_under_way == 0


def test_a_worker_that_never_stores_is_a_failure_and_its_late_answers_end_the_saves(
    world: World,
) -> None:
    for i in range(2):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
    saves = world.take(Save)
    for save in saves:
        world.saves.on_packed(Packed(save.save_id))
        world.saves.on_saved(Saved(save.save_id, ("ok",), 10, 1.0))
    world.now += 2.5
    world.saves.tick()
    assert not world.saves.breaker.closed
    assert world.take(DropSaves)
    assert (world.saves.num_pinned, world.saves.num_under_way) == (2, 2)
    for save in saves:
        world.saves.on_packed(Packed(save.save_id))
        world.saves.on_saved(Saved(save.save_id, (DROPPED,), 0, 0.0))
    assert (world.saves.num_pinned, world.saves.num_under_way) == (0, 0)
    assert not len(world.known)


# The workers, and the link to them.

NUM_LAYERS, NUM_BLOCKS, PAGE = 2, 8, 256
LONG_S = 10.0


class Worker:
    """Its pages, and its side of the pool."""

    def __init__(self, tier: MemoryTier, space: KeySpace, replica: int, num_replicas: int) -> None:
        self.pages = np.zeros((NUM_LAYERS, NUM_BLOCKS, PAGE), dtype=np.uint8)
        offsets = np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE
        layout = PageLayout.packed(Region(self.pages.ctypes.data, self.pages.nbytes), offsets, PAGE)
        values = BlockValues(make_block_copier(), one_group(layout)[0], space)
        self.tier = FaultyTier(tier)
        self.slots = [StagingPool(NoRegistry(), 4, 8 * values.num_bytes) for _ in range(3)]
        read, write, ahead = self.slots
        slots = PoolSlots(read, write, ahead)
        self.value_bytes = values.num_bytes
        self.io = PoolIO(self.tier, [values], slots, 1, Replica(replica, num_replicas))
        self.io.start()

    def load(self, hashes: list[bytes]) -> np.ndarray[Any, Any]:
        """The pages of the blocks, as they come from the pool."""
        self.pages[:] = 0
        blocks = PoolBlocks(tuple(hashes), tuple(range(len(hashes))))
        self.io.loader.start_load(PoolLoadSpec(LoadId(1), (blocks,), True, LONG_S))
        self.io.loader.wait_all()
        (result,) = self.io.loader.take_results()
        assert result.cause == ""
        return self.pages[:, : len(hashes)].copy()

    def close(self) -> None:
        self.io.stop()
        for pool in self.slots:
            pool.close()
        self.io.close()


class Workers:
    """Two workers on one tier, and the scheduler's end of their links."""

    def __init__(self, replicas: bool, memories: Sequence[MemoryTier] = ()) -> None:
        self.are_replicas = replicas
        self.memory = MemoryTier(1 << 20)
        memories = memories or (self.memory, self.memory)
        if replicas:
            spaces = [KeySpace.of("m"), KeySpace.of("m")]
        else:
            spaces = [KeySpace.of("m", rank, 2) for rank in range(2)]
        self.each = [
            Worker(memories[rank], space, rank if replicas else 0, 2 if replicas else 1)
            for rank, space in enumerate(spaces)
        ]
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pool_link._listening.clear()  # as if they were other processes
        self.link = PoolLink("test", self.inbox.put)
        for worker in self.each:
            self.link.connect(worker.io.address)
        self.link.start()

    def save(
        self, save_id: int, hashes: list[bytes], first_block: int = 0, ahead_id: int = 0
    ) -> list[Saved]:
        block_ids = range(first_block, first_block + len(hashes))
        self.link.send(Save(save_id, tuple(block_ids), tuple(hashes), ahead_id))
        answers = [self.inbox.get(timeout=LONG_S) for _ in range(4)]
        assert sum(isinstance(x, Packed) for x in answers) == 2
        return [x for x in answers if isinstance(x, Saved)]

    def close(self) -> None:
        self.link.stop()
        for worker in self.each:
            worker.close()


@pytest.fixture(params=[False, True], ids=["shares", "replicas"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    workers = Workers(request.param)
    yield workers
    workers.close()


HASHES = [bytes([i]) * 32 for i in range(5)]


@pytest.mark.parametrize("ahead_id", [0, 7])
def test_every_worker_stores_and_loads_its_share(workers: Workers, ahead_id: int) -> None:
    rng = np.random.default_rng(1)
    first, second = workers.each
    first.pages[:] = rng.integers(0, 255, first.pages.shape)
    is_replica = workers.are_replicas
    second.pages[:] = first.pages if is_replica else rng.integers(0, 255, second.pages.shape)
    content = [worker.pages.copy() for worker in workers.each]
    for worker in workers.each if ahead_id else ():
        worker.io.ahead.begin_step([AheadSpec(ahead_id, tuple(range(len(HASHES))))])
        for layer in range(NUM_LAYERS):
            worker.io.ahead.layer_done(layer)
    saved = fold_saved(workers.save(4, HASHES, ahead_id=ahead_id))
    assert set(saved.statuses) == {"ok"}
    # Replicas share the work: what both hold is stored once.
    size = first.value_bytes
    assert saved.num_bytes == len(HASHES) * size * (1 if is_replica else 2)
    assert len(workers.memory.room) == len(HASHES) * (1 if is_replica else 2)
    joined, hash_bytes = join_hashes(HASHES)
    groups = bytes(len(HASHES))
    workers.link.send(Lookup(9, joined, hash_bytes, groups, time.monotonic() + LONG_S))
    answers = [workers.inbox.get(timeout=LONG_S) for _ in range(2)]
    assert NOWHERE not in fold_found(answers).places
    for worker, pages in zip(workers.each, content, strict=True):
        assert (worker.load(HASHES) == pages[:, : len(HASHES)]).all()


def test_single_blocks_are_shared_among_replicas() -> None:
    memories = [MemoryTier(1 << 20), MemoryTier(1 << 20)]
    workers = Workers(True, memories)
    for save_id in range(1, 5):
        answers = workers.save(save_id, [bytes([save_id]) * 32], first_block=save_id)
        assert fold_saved(answers).statuses == ("ok",)
    assert [len(memory.room) for memory in memories] == [2, 2]
    workers.close()


def test_what_one_worker_cannot_store_is_not_there(workers: Workers) -> None:
    workers.each[1].tier.script = TierScript("put:fail*")
    saved = fold_saved(workers.save(1, HASHES))
    assert "failed" in saved.statuses
    joined, hash_bytes = join_hashes(HASHES)
    groups = bytes(len(HASHES))
    workers.link.send(Lookup(9, joined, hash_bytes, groups, time.monotonic() + LONG_S))
    places = fold_found([workers.inbox.get(timeout=LONG_S) for _ in range(2)]).places
    there = [status == "ok" for status in saved.statuses]
    assert [bool(place) for place in places] == there


def test_saves_that_are_given_up_are_not_read_any_more(workers: Workers) -> None:
    """One worker has copied the first save and hangs; the other has not begun the second."""
    for worker in workers.each:
        worker.tier.script = TierScript("put:delay(300)*")
    for save_id in (1, 2, 3):
        workers.link.send(Save(save_id, (0,), (HASHES[save_id],)))
    workers.link.send(DropSaves(3))
    answers = [workers.inbox.get(timeout=LONG_S) for _ in range(12)]
    for save_id in (1, 2, 3):
        kinds = [type(x) for x in answers if x.save_id == save_id]
        assert kinds.count(Packed) == kinds.count(Saved) == 2


def test_saves_behind_those_that_are_given_up_are_stored(workers: Workers) -> None:
    for worker in workers.each:
        worker.tier.script = TierScript("put:delay(300)")
    for save_id in (1, 2, 3):
        workers.link.send(Save(save_id, (0,), (HASHES[save_id],)))
    workers.link.send(DropSaves(2))
    answers = [workers.inbox.get(timeout=LONG_S) for _ in range(12)]
    saved = [x.statuses for x in answers if isinstance(x, Saved) and x.save_id == 3]
    assert saved == [("ok",)] * 2


def test_lookups_that_wait_are_asked_at_once(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the tier is busy with one, others come; each gets its own answer."""
    calls, look_up = [], MemoryTier.lookup

    def counted(tier: MemoryTier, keys: Sequence[str]) -> list[Place]:
        calls.append(len(keys))
        return look_up(tier, keys)

    monkeypatch.setattr(MemoryTier, "lookup", counted)
    fold_saved(workers.save(1, HASHES[1:3]))
    for worker in workers.each:
        worker.tier.script = TierScript("lookup:delay(200)")
    deadline = time.monotonic() + LONG_S
    for lookup_id, block_hash in enumerate(HASHES):
        workers.link.send(Lookup(lookup_id, block_hash, 32, bytes(1), deadline))
    answers = [workers.inbox.get(timeout=LONG_S) for _ in range(2 * len(HASHES))]
    for lookup_id in range(len(HASHES)):
        places = fold_found([a for a in answers if a.lookup_id == lookup_id]).places
        assert [bool(place) for place in places] == [lookup_id in (1, 2)]
    # Of each worker: the first one, and all others together.
    assert len(calls) <= 2 * 2

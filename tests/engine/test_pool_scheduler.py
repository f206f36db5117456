# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pool, over a real block pool: what is saved, pinned, looked up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_pd.config import LoadMode, PDConfig, PoolConfig, PoolSave, Role
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.parking import Parking
from vllm_ascend_pd.engine.scheduler.parts import Common
from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolPrompt
from vllm_ascend_pd.engine.scheduler.pool_source import PoolSource
from vllm_ascend_pd.engine.scheduler.saves import SaveBounds, Saves
from vllm_ascend_pd.engine.scheduler.sources import SourceEvent, SourceState
from vllm_ascend_pd.engine.vllm_api.blocks import block_key
from vllm_ascend_pd.kv.cost import Question, plan
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import KVGroup, Wanted
from vllm_ascend_pd.metrics import Provenance, Stats
from vllm_ascend_pd.pool.known_keys import KnownKeys
from vllm_ascend_pd.pool.messages import (
    DROPPED,
    AheadSpec,
    DropAhead,
    DropSaves,
    Found,
    Lookup,
    Packed,
    Save,
    Saved,
    split_hashes,
)
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import LoadId, Place

BLOCK_SIZE = 16
GROUP = KVGroup(0, BLOCK_SIZE, page_bytes=1000, layers=("layer",))
init_none_hash(sha256)


class World:
    """One engine's scheduler objects, a clock, and everything that was sent to the worker."""

    def __init__(
        self,
        events: bool = False,
        num_workers: int = 1,
        stores_to: Place = Place.DRAM,
        groups: tuple[KVGroup, ...] = (GROUP,),
        **options: Any,
    ) -> None:
        self.groups = groups
        self.now = 1000.0
        self.sent: list[Any] = []
        self.ahead: tuple[AheadSpec, ...] = ()
        self.stats = Stats()
        self.pool = BlockPool(64, True, BLOCK_SIZE, enable_kv_cache_events=events)
        self.phantoms = PhantomBlocks(self.pool, groups)
        self.all_tables: list[dict[str, list[Any]]] = [{} for _ in groups]
        self.tables = self.all_tables[0]
        self.known = KnownKeys(1000, self.clock)
        pool_events = PoolEvents(self.pool, self.known, groups, stores_to)
        self.manager: Any = SimpleNamespace(
            block_pool=self.pool,
            coordinator=SimpleNamespace(
                single_type_managers=[SimpleNamespace(req_to_blocks=t) for t in self.all_tables]
            ),
        )
        self.loads = Loads(num_workers)
        self.scheduler: Any = SimpleNamespace(kv_cache_manager=self.manager, requests={})
        self.common = Common(
            scheduler=self.scheduler,
            config=PDConfig(
                role=Role.BOTH,
                engine_id="e",
                host="127.0.0.1",
                port=0,
                pool=PoolConfig(**{"breaker_failures": 2, **options}),
            ),
            stats=self.stats,
            groups=groups,
            sharding=Sharding(tp_size=num_workers),
            phantoms=self.phantoms,
            loads=self.loads,
            parking=Parking(self.manager, groups, self.phantoms, self.loads),
        )
        self.source = PoolSource(self.common, pool_events, self.sent.append, self.clock)
        self.saves = Saves(
            self.common,
            self.known,
            pool_events,
            self.sent.append,
            SaveBounds(blocks_per_save=4, blocks_per_step=6),
            not_found=self.source.closed,
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    def request(
        self, num_tokens: int = 70, name: str = "r", start: int = 0, salt: str | None = None
    ) -> Request:
        return Request(
            request_id=name,
            cache_salt=salt,
            prompt_token_ids=list(range(start, start + num_tokens)),
            sampling_params=SamplingParams(max_tokens=4),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )

    def run_step(self, request: Request, num_tokens: int, confirm: bool = True) -> None:
        """One step of ``num_tokens`` tokens; its blocks are allocated and hashed, and those before
        its windows given up.
        """
        total = request.num_computed_tokens + num_tokens
        first, last = request.num_computed_tokens // BLOCK_SIZE, total // BLOCK_SIZE
        for group, tables in zip(self.groups, self.all_tables, strict=True):
            table = tables.setdefault(request.request_id, [])
            for index in range(group.first_needed(request.num_computed_tokens)):
                if not table[index].is_null:
                    self.pool.free_blocks([table[index]])
                    table[index] = self.pool.null_block
            table += self.pool.get_new_blocks(-(-total // BLOCK_SIZE) - len(table))
            self.pool.cache_full_blocks(request, table, first, last, BLOCK_SIZE, group.id)
        output: Any = SimpleNamespace(
            total_num_scheduled_tokens=num_tokens,
            num_scheduled_tokens={request.request_id: num_tokens},
        )
        self.ahead = self.saves.note_step(output, {request.request_id: request})
        request.num_computed_tokens = total
        if confirm:
            self.saves.confirm()

    def free(self, request: Request) -> None:
        for tables in self.all_tables:
            self.pool.free_blocks(reversed(tables.pop(request.request_id)))

    def take(self, kind: type) -> list[Any]:
        found = [message for message in self.sent if isinstance(message, kind)]
        self.sent[:] = [message for message in self.sent if not isinstance(message, kind)]
        return found

    def answer(self, status: str = "ok") -> None:
        for save in self.take(Save):
            self.saves.on_packed(Packed(save.save_id))
            self.saves.on_saved(Saved(save.save_id, (status,) * len(save.hashes), 1, 1.0))

    def find(self, places: list[Place], healthy: bool = True) -> None:
        for lookup in self.take(Lookup):
            self.source.on_found(Found(lookup.lookup_id, bytes(places), healthy), self.now)


@pytest.fixture
def world() -> World:
    return World()


def hashes(request: Request, *indices: int) -> tuple[bytes, ...]:
    return tuple(bytes(request.block_hashes[i]) for i in indices)


def keys(request: Request, *indices: int) -> tuple[bytes, ...]:
    """As the scheduler knows them."""
    return tuple(block_key(request.block_hashes[i], 0) for i in indices)


def test_full_blocks_are_saved_after_their_step(world: World) -> None:
    request = world.request()
    world.run_step(request, 40, confirm=False)
    assert world.sent == []
    world.saves.confirm()
    (save,) = world.take(Save)
    assert save.hashes == hashes(request, 0, 1)
    assert save.block_ids == tuple(block.block_id for block in world.tables["r"][:2])


def test_saved_blocks_are_pinned_until_they_are_packed(world: World) -> None:
    request = world.request()
    before = world.pool.get_num_free_blocks()
    world.run_step(request, 40)
    world.free(request)
    assert world.pool.get_num_free_blocks() == before - 2
    (save,) = world.take(Save)
    world.saves.on_packed(Packed(save.save_id))
    assert world.pool.get_num_free_blocks() == before
    world.saves.on_saved(Saved(save.save_id, ("ok", "ok"), 1, 1.0))
    assert (world.saves.num_pinned, world.saves.num_under_way) == (0, 0)


def test_save_is_over_when_all_workers_say_so() -> None:
    world = World(num_workers=2)
    world.run_step(world.request(), 40)
    (save,) = world.take(Save)
    world.saves.on_packed(Packed(save.save_id))
    assert world.saves.num_pinned == 2
    world.saves.on_packed(Packed(save.save_id))
    assert world.saves.num_pinned == 0
    world.saves.on_saved(Saved(save.save_id, ("ok", "ok"), 1, 1.0))
    assert world.saves.num_under_way == 1
    world.saves.on_saved(Saved(save.save_id, ("ok", "failed"), 1, 1.0))
    assert (world.saves.num_under_way, len(world.known)) == (0, 1)


def test_step_whose_request_was_preempted_saves_nothing(world: World) -> None:
    """Which is what recovery from a failed load does, before the step is confirmed."""
    request = world.request()
    world.run_step(request, 40, confirm=False)
    request.num_preemptions += 1
    world.saves.confirm()
    assert world.take(Save) == []


def test_block_that_was_evicted_as_bad_is_not_saved(world: World) -> None:
    request = world.request()
    world.run_step(request, 64, confirm=False)
    world.pool.evict_blocks({world.tables["r"][1].block_id})
    world.saves.confirm()
    (save,) = world.take(Save)
    assert save.hashes == hashes(request, 0)


def test_what_is_known_or_on_its_way_is_not_saved_again(world: World) -> None:
    first, second = world.request(name="a"), world.request(name="b")
    world.run_step(first, 64)
    world.run_step(second, 64)
    assert len(world.take(Save)) == 1
    third = world.request(name="c")
    world.known.note(keys(third, 0)[0], Place.DRAM)
    world.run_step(third, 64)
    assert world.take(Save) == []


def test_pins_are_bounded_and_the_rest_is_saved_later(world: World) -> None:
    request = world.request(200)
    world.run_step(request, 192)
    saves = world.take(Save)
    assert sum(len(save.hashes) for save in saves) == 8  # an eighth of the blocks
    for save in saves:
        world.saves.on_saved(Saved(save.save_id, ("ok",) * len(save.hashes), 1, 1.0))
    world.run_step(request, 1)
    (save,) = world.take(Save)
    assert save.hashes == hashes(request, 8, 9, 10, 11)


def test_full_memory_backs_off_longer_and_longer(world: World) -> None:
    request = world.request(100)
    world.run_step(request, 16)
    world.answer("full")
    world.run_step(request, 16)
    assert world.take(Save) == []
    world.now += 0.06
    world.run_step(request, 16)
    world.answer("full")
    world.now += 0.06
    world.run_step(request, 16)
    assert world.take(Save) == []
    assert world.saves.breaker.closed


def test_failed_puts_open_the_breaker_and_a_good_one_closes_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator hears of it once, and when it is over; each probe in vain is dropped."""
    caplog.set_level(logging.INFO)
    for i in range(2):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
        world.answer("failed")
    for i in range(2, 4):
        assert not world.saves.breaker.closed
        assert world.take(DropSaves)
        world.now += 1.1
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
        world.answer("failed")
    assert world.take(DropSaves)
    assert world.stats.take()["pool_breaker_opened/put"] == 1
    world.run_step(world.request(name="bypassed", start=5000), 16)
    assert world.take(Save) == []
    world.now += 1.0
    world.run_step(world.request(name="probe", start=6000), 16)
    world.answer()
    assert world.saves.breaker.closed
    began, ended = (record.getMessage() for record in caplog.records)
    assert "(see the workers' logs)" in began
    assert ended == "the pool takes blocks again; writes go on after 3 s without"


def test_write_that_is_tried_and_given_up_does_not_say_that_the_pool_is_well(world: World) -> None:
    for i, status in enumerate(("failed", "failed", DROPPED, "ok")):
        assert world.saves.breaker.closed == (i < 2)
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
        world.answer(status)
        world.now += 1.1
    assert world.saves.breaker.closed


def test_save_that_hangs_counts_before_it_ends(world: World) -> None:
    for i in range(2):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
    world.now += 2.5
    world.saves.tick()
    assert not world.saves.breaker.closed


def test_saves_that_queue_behind_others_are_not_late(world: World) -> None:
    """Where more is computed than a tier takes, and many blocks may wait for it."""
    for i in range(8):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
    for save in world.take(Save):
        world.now += 1.5
        world.saves.tick()
        assert world.saves.breaker.closed
        world.saves.on_saved(Saved(save.save_id, ("ok",), 1, 1500.0))
    for i in range(8, 10):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
    world.now += 2.5
    world.saves.tick()
    assert not world.saves.breaker.closed


def test_blocks_of_the_prompt_are_announced_with_the_step_that_fills_them(world: World) -> None:
    request = world.request(100)
    world.run_step(request, 24, confirm=False)
    (first,) = world.ahead
    world.run_step(request, 60, confirm=False)  # before the first one is over
    (second,) = world.ahead
    table = [block.block_id for block in world.tables["r"]]
    assert (first.block_ids, second.block_ids) == (tuple(table[:1]), tuple(table[1:5]))
    world.saves.confirm()
    (save,) = world.take(Save)
    assert (save.ahead_id, save.block_ids) == (first.ahead_id, first.block_ids)
    assert save.hashes == hashes(request, 0)
    world.saves.confirm()
    (save,) = world.take(Save)
    assert (save.ahead_id, save.block_ids) == (second.ahead_id, second.block_ids)
    assert world.sent == []


def test_decoded_blocks_are_not_announced(world: World) -> None:
    request = world.request(20)
    world.run_step(request, 20)
    world.answer()
    request.append_output_token_ids(list(range(500, 513)))
    world.run_step(request, 12)
    assert world.ahead == ()
    (save,) = world.take(Save)
    assert (save.ahead_id, save.hashes) == (0, hashes(request, 1))


def test_what_need_not_or_cannot_be_stored_is_not_announced(world: World) -> None:
    first, second = world.request(name="a"), world.request(name="b")
    world.known.note(keys(first, 0)[0], Place.DRAM)
    world.run_step(first, 64, confirm=False)
    (spec,) = world.ahead
    assert spec.block_ids == tuple(block.block_id for block in world.tables["a"][1:4])
    world.saves.confirm()
    world.run_step(second, 64, confirm=False)  # the same, and on its way
    assert world.ahead == ()
    world.saves.confirm()
    world.answer("full")
    world.run_step(world.request(name="c", start=1000), 64)
    assert world.ahead == ()


@pytest.mark.parametrize("options", [{"save": PoolSave.EVICTION}, {"put": False}])
def test_without_write_through_nothing_is_announced(options: dict[str, Any]) -> None:
    world = World(**options)
    world.run_step(world.request(), 64)
    assert world.ahead == ()


def test_bypassed_pool_is_announced_nothing(world: World) -> None:
    for i in range(2):
        world.run_step(world.request(name=str(i), start=1000 * i), 16)
        world.answer("failed")
    world.run_step(world.request(name="bypassed", start=5000), 16)
    assert world.ahead == ()


def test_equal_blocks_of_a_step_are_saved_once(world: World) -> None:
    requests = [world.request(name=name) for name in "ab"]
    for request in requests:
        table = world.tables.setdefault(request.request_id, world.pool.get_new_blocks(4))
        world.pool.cache_full_blocks(request, table, 0, 4, BLOCK_SIZE, 0)
    output: Any = SimpleNamespace(
        total_num_scheduled_tokens=128, num_scheduled_tokens={"a": 64, "b": 64}
    )
    world.ahead = world.saves.note_step(
        output, {request.request_id: request for request in requests}
    )
    first, second = world.ahead
    assert first.block_ids == tuple(block.block_id for block in world.tables["a"])
    world.saves.confirm()
    (save,) = world.take(Save)
    assert (save.ahead_id, save.block_ids) == (first.ahead_id, first.block_ids)
    assert world.sent == [DropAhead(second.ahead_id)]


def preempt(world: World, request: Request) -> None:
    request.num_preemptions += 1


def abort(world: World, request: Request) -> None:
    request.status = RequestStatus.FINISHED_ABORTED


def bypass(world: World, request: Request) -> None:
    for _ in range(2):
        world.saves.breaker.record(False, 0.0)


def learn(world: World, request: Request) -> None:
    for key in keys(request, 0, 1, 2, 3):
        world.known.note(key, Place.DRAM)


def reset(world: World, request: Request) -> None:
    world.pool.evict_blocks({block.block_id for block in world.tables["r"]})


@pytest.mark.parametrize("happens", [preempt, abort, bypass, learn, reset])
def test_announced_blocks_that_are_not_stored_are_dropped_with_their_step(
    world: World, happens: Callable[[World, Request], None]
) -> None:
    request = world.request()
    world.run_step(request, 64, confirm=False)
    (spec,) = world.ahead
    happens(world, request)
    world.saves.confirm()
    assert world.take(Save) == []
    assert world.take(DropAhead) == [DropAhead(spec.ahead_id)]
    assert world.saves.num_pinned == 0


def test_only_good_ones_of_the_announced_blocks_are_saved(world: World) -> None:
    request = world.request()
    world.run_step(request, 64, confirm=False)
    (spec,) = world.ahead
    world.pool.evict_blocks({world.tables["r"][2].block_id})
    world.saves.confirm()
    (save,) = world.take(Save)
    assert (save.ahead_id, save.block_ids) == (spec.ahead_id, spec.block_ids[:2])
    assert world.take(DropAhead) == []


def test_block_that_is_another_one_by_now_is_packed_anew(world: World) -> None:
    request = world.request(20)
    world.run_step(request, 16, confirm=False)
    (spec,) = world.ahead
    world.tables["r"] = world.pool.get_new_blocks(1)
    world.pool.cache_full_blocks(request, world.tables["r"], 0, 1, BLOCK_SIZE, 0)
    world.saves.confirm()
    (save,) = world.take(Save)
    assert save.ahead_id == 0
    assert save.block_ids != spec.block_ids
    assert world.take(DropAhead) == [DropAhead(spec.ahead_id)]


def take_all(world: World) -> list[Any]:
    """Every free block goes to somebody else."""
    return world.pool.get_new_blocks(world.pool.get_num_free_blocks())


@pytest.fixture
def lazy() -> World:
    return World(save=PoolSave.EVICTION)


def fill(world: World, num_requests: int, num_tokens: int = 64) -> list[Request]:
    """Requests that ran and ended, one after another."""
    requests = []
    for i in range(num_requests):
        request = world.request(num_tokens, f"{i}", 10_000 * (i + 1))
        world.run_step(request, num_tokens)
        world.free(request)
        world.saves.forget(request)
        requests.append(request)
    return requests


def test_on_eviction_only_what_is_evicted_next_is_saved(lazy: World) -> None:
    requests = fill(lazy, 14)  # 56 of 63 blocks
    assert lazy.take(Save) == []
    lazy.run_step(lazy.request(80, "next", 5), 80)
    (save,) = lazy.take(Save)
    # Of the six blocks that a step may take, two were never used; then the oldest prompt's tail.
    assert save.hashes == hashes(requests[0], 3, 2, 1, 0)
    lazy.saves.on_packed(Packed(save.save_id))
    lazy.saves.on_saved(Saved(save.save_id, ("ok",) * 4, 1, 1.0))
    lazy.run_step(lazy.request(16, "after", 6), 16)
    (save,) = lazy.take(Save)
    assert save.hashes == hashes(requests[1], 3)


def test_saved_blocks_are_still_evicted_first(lazy: World) -> None:
    requests = fill(lazy, 14)
    lazy.run_step(lazy.request(80, "next", 5), 80)
    lazy.answer()
    assert lazy.saves.num_pinned == 0
    lazy.pool.get_new_blocks(4)
    cached = [lazy.pool.get_cached_block(h, [0]) is not None for h in requests[0].block_hashes]
    assert cached == [False] * 4
    assert lazy.pool.get_cached_block(requests[1].block_hashes[0], [0]) is not None


def test_block_that_is_used_again_while_it_is_saved_stays_in_use(lazy: World) -> None:
    requests = fill(lazy, 14)
    lazy.run_step(lazy.request(80, "next", 5), 80)
    block = (lazy.pool.get_cached_block(requests[0].block_hashes[0], [0]) or [None])[0]
    assert block is not None
    lazy.pool.touch([block])
    lazy.answer()
    assert block.ref_cnt == 1
    assert block not in take_all(lazy)


def test_block_that_was_never_confirmed_is_not_saved_on_eviction(lazy: World) -> None:
    """Its request was preempted or aborted in the step, or the block is a phantom."""
    request = lazy.request(64, "r", 20_000)
    lazy.run_step(request, 64, confirm=False)
    request.num_preemptions += 1
    lazy.saves.confirm()
    lazy.free(request)
    fill(lazy, 14)
    lazy.run_step(lazy.request(80, "next", 5), 80)
    saved = {block_hash for save in lazy.take(Save) for block_hash in save.hashes}
    assert not saved & set(hashes(request, 0, 1, 2, 3))


def test_what_is_evicted_before_it_is_saved_is_counted(lazy: World) -> None:
    fill(lazy, 2)
    blocks = take_all(lazy)
    used = {block.block_id for block in blocks[-8:]}
    lazy.pool.free_blocks(block for block in blocks if block.block_id in used)
    fill(lazy, 2)
    assert lazy.stats.take()["pool_put_blocks/evicted"] == 8


def test_short_memory_is_left_to_the_steps(lazy: World) -> None:
    fill(lazy, 14)
    lazy.pool.get_new_blocks(7)  # those that were never used
    lazy.pool.touch(lazy.pool.free_block_queue.get_all_free_blocks()[8:])
    lazy.run_step(lazy.request(16, "next", 5), 16)
    (save,) = lazy.take(Save)
    assert len(save.hashes) == 1  # of seven free blocks, of which a step may take six


def test_decoded_blocks_are_left_out_when_switched_off() -> None:
    world = World(put_decoded=False)
    request = world.request(20)
    request.append_output_token_ids(list(range(500, 520)))
    world.run_step(request, 36)
    (save,) = world.take(Save)
    assert save.hashes == hashes(request, 0)


def media(events: list[Any]) -> list[tuple[str, str]]:
    return [(type(event).__name__, event.medium) for event in events]


def test_events_tell_what_was_stored_and_where_it_went() -> None:
    world = World(events=True)
    request = world.request()
    world.run_step(request, 40)
    world.pool.take_events()
    world.answer()
    stored = world.pool.take_events()
    assert media(stored) == [("BlockStored", "CPU")] * 2
    assert stored[1].parent_block_hash == stored[0].block_hashes[0]
    assert stored[1].token_ids == list(range(16, 32))

    def look(*places: Place) -> list[Any]:
        world.pool.evict_blocks({block.block_id for block in world.tables["r"]})
        world.pool.take_events()
        world.source.add(world.request(name=str(places)))
        world.find([*places, Place.NOWHERE, Place.NOWHERE])
        return world.pool.take_events()

    assert look(Place.REMOTE, Place.DRAM) == []  # memory is memory
    moved = look(Place.SSD, Place.DRAM)
    assert media(moved) == [("BlockStored", "STORAGE"), ("BlockRemoved", "CPU")]
    assert [event.block_hashes for event in moved] == [stored[0].block_hashes] * 2
    gone = look(Place.NOWHERE, Place.DRAM)
    assert media(gone) == [("BlockRemoved", "STORAGE")]
    back = look(Place.DRAM, Place.DRAM)
    assert media(back) == [("BlockStored", "CPU")]


def test_events_of_what_was_stored_have_the_medium_of_the_first_tier() -> None:
    world = World(events=True, stores_to=Place.SSD)
    world.run_step(world.request(), 40)
    world.pool.take_events()
    world.answer()
    assert media(world.pool.take_events()) == [("BlockStored", "STORAGE")] * 2


def test_events_of_a_salted_prompt_say_so() -> None:
    world = World(events=True)
    request = world.request(name="salted", salt="tenant")
    world.run_step(request, 40)
    world.pool.take_events()
    world.answer()
    assert [event.extra_keys for event in world.pool.take_events()] == [[("tenant",)], [None]]


def test_events_take_everything_back_when_the_pool_is_down() -> None:
    world = World(events=True)
    world.run_step(world.request(), 40)
    world.answer()
    world.pool.take_events()
    world.source.add(world.request(name="other", start=1000))
    world.find([Place.NOWHERE], healthy=False)
    (removed,) = world.pool.take_events()
    assert (removed.medium, len(removed.block_hashes)) == ("CPU", 2)


def test_request_waits_for_its_lookup_and_offers_what_was_found(world: World) -> None:
    request = world.request()
    world.source.add(request)
    assert request.status == RequestStatus.WAITING_FOR_KV
    prompt = world.source.find(request)
    assert prompt is not None
    assert prompt.pending
    world.find([Place.DRAM, Place.NOWHERE, Place.SSD, Place.NOWHERE])
    assert prompt.offers
    assert [prompt.has_block(i) for i in range(5)] == [True, False, True, False, False]


def test_block_is_there_if_all_workers_have_it() -> None:
    world = World(num_workers=2)
    request = world.request()
    world.source.add(request)
    prompt = world.source.find(request)
    assert prompt is not None
    (lookup,) = world.take(Lookup)
    none = Place.NOWHERE
    for places in ([Place.DRAM, Place.DRAM, none, none], [Place.DRAM, none, Place.DRAM, none]):
        assert prompt.pending
        world.source.on_found(Found(lookup.lookup_id, bytes(places), True), world.now)
    assert [prompt.has_block(i) for i in range(4)] == [True, False, False, False]


@pytest.mark.parametrize("places", [[Place.NOWHERE] * 4, [Place.DRAM] * 9])
def test_nothing_found_or_a_wrong_answer_offers_nothing(world: World, places: list[Place]) -> None:
    request = world.request()
    world.source.add(request)
    world.find(places)
    prompt = world.source.find(request)
    assert prompt is not None
    assert prompt.state is SourceState.FAILED


def test_lookup_without_an_answer_ends_at_its_deadline(world: World) -> None:
    request = world.request()
    world.source.add(request)
    prompt = world.source.find(request)
    assert prompt is not None
    world.source.tick()
    assert prompt.pending
    world.now += 0.2
    world.source.tick()
    assert prompt.state is SourceState.FAILED
    world.find([Place.DRAM] * 4)  # too late
    assert not prompt.offers


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
@pytest.mark.parametrize("end", ["nothing found", "bypassed pool", "deadline"])
def test_request_that_gets_nothing_waits_for_the_engine_alone(
    world: World, status: RequestStatus, end: str
) -> None:
    request = world.request()
    request.status = status
    request.num_preemptions = int(status == RequestStatus.PREEMPTED)
    world.source.add(request)
    assert request.status == RequestStatus.WAITING_FOR_KV
    world.now += 0.2
    if end == "deadline":
        world.source.tick()
    else:
        world.find([Place.NOWHERE] * 4, healthy=end == "nothing found")
    assert request.status == status


def placed(world: World, request: Request, places: list[Place]) -> PoolPrompt:
    """What was found of a request that waits for memory since."""
    world.source.add(request)
    world.find(places)
    prompt = world.source.find(request)
    assert prompt is not None
    prompt.advance(SourceEvent.PLACE)
    request.status = RequestStatus.WAITING
    world.take(Lookup)
    return prompt


def look_again(world: World, request: Request, *places: Place) -> None:
    """Once it has waited for long; ``places`` are what the pool answers, if it does."""
    world.now += 1
    world.source.look_again(request)
    assert len(world.sent) == 1
    if places:
        world.find(list(places))
        world.source.look_again(request)


def test_request_that_waits_is_looked_up_again(world: World) -> None:
    """Others may have stored what it lacks."""
    request = world.request()
    world.source.add(request)
    world.find([Place.NOWHERE] * 4)
    world.now += 0.9
    world.source.look_again(request)
    assert world.take(Lookup) == []
    world.now += 0.1
    world.source.look_again(request)
    assert request.status == RequestStatus.WAITING  # and keeps its place in the queue
    assert world.source.num_looking == 0
    world.source.look_again(request)  # it has been asked
    assert len(world.sent) == 1
    world.find([Place.DRAM, Place.DRAM, Place.NOWHERE, Place.NOWHERE])
    assert world.source.take_queued() == []
    world.source.look_again(request)
    assert request.status == RequestStatus.WAITING_FOR_KV
    prompt = world.source.find(request)
    assert prompt is not None
    assert prompt.offers
    assert prompt.num_blocks == 2
    assert world.source.take_queued() == [prompt]
    assert world.source.closed == {}
    prompt.admit(0, 32, [0, 1])
    assert prompt.provenance.pool_tokens["dram"] == 32


def test_what_was_found_or_cached_when_a_request_came_may_be_gone(world: World) -> None:
    other = world.request(name="other")
    world.run_step(other, 32)
    world.take(Save)
    request = world.request()
    prompt = placed(world, request, [Place.DRAM] * 2)
    world.now += 1
    world.source.look_again(request)
    assert world.source.find(request) is prompt
    assert prompt.offers
    (lookup,) = world.take(Lookup)
    assert len(lookup.hashes) == 4 * 32
    world.source.on_found(Found(lookup.lookup_id, bytes(4), True), world.now)
    world.source.look_again(request)
    assert request.status == RequestStatus.WAITING
    assert prompt.state is SourceState.ABORTED
    assert list(world.source.closed) == ["r"]
    assert world.source.open == {}


def test_what_loads_have_brought_in_counts_after_a_second_look(world: World) -> None:
    request = world.request()
    prompt = placed(world, request, [Place.SSD, Place.DRAM, Place.NOWHERE, Place.NOWHERE])
    world.run_step(world.request(name="other"), 32)
    world.take(Save)
    prompt.loaded, prompt.num_parked_tokens = {0, 1}, 32
    look_again(world, request, Place.SSD, Place.DRAM, Place.DRAM, Place.NOWHERE)
    again = world.source.find(request)
    assert again is not None
    assert again is not prompt
    assert again.num_parked_tokens == 32
    again.admit(0, 48, [2])
    assert again.provenance.pool_tokens == {"dram": 32, "remote": 0, "ssd": 16}


@pytest.mark.parametrize("finds", [Place.DRAM, Place.NOWHERE])
def test_tail_is_held_for_a_prompt_until_a_second_look_finds_anything_else(
    world: World, finds: Place
) -> None:
    request = world.request()
    prompt = placed(world, request, [Place.DRAM] * 4)
    parking = world.source._common.parking
    parking.tails[prompt] = [(Wanted(3), world.pool.get_new_blocks(1)[0])]
    num_free = world.pool.get_num_free_blocks()
    look_again(world, request, *[finds] * 4)
    is_kept = finds is Place.DRAM
    assert (world.source.find(request) is prompt) == (prompt in parking.tails) == is_kept
    assert request.status == RequestStatus.WAITING
    assert world.pool.get_num_free_blocks() == num_free + (not is_kept)


@pytest.mark.parametrize("why", ["deadline", "unhealthy", "forgotten", "forsaken"])
def test_second_look_without_an_answer_changes_nothing_and_is_followed_by_another(
    world: World, why: str
) -> None:
    request = world.request()
    prompt = placed(world, request, [Place.DRAM] * 4)
    look_again(world, request)
    if why == "forgotten":
        world.source.forget()
    elif why == "forsaken":
        prompt.forsake()
    elif why == "unhealthy":
        world.find([], healthy=False)
    else:
        world.now += 0.2
        world.source.tick()
    world.take(Lookup)
    world.source.look_again(request)
    assert world.source.find(request) is prompt
    assert prompt.offers == (why in ("deadline", "unhealthy"))
    look_again(world, request)


@pytest.mark.parametrize("why", ["peer", "bypassed", "admitted", "loading", "unknown"])
def test_no_second_look(world: World, why: str) -> None:
    request = world.request()
    world.source.add(request, Provenance(70) if why == "peer" else None)
    world.find([Place.DRAM] * 4)
    prompt = world.source.find(request)
    assert prompt is not None
    prompt.advance(SourceEvent.PLACE)
    if why == "bypassed":
        open_get_breaker(world)
    elif why == "admitted":
        prompt.admit(0, 64, [0, 1, 2, 3])
    elif why == "loading":
        prompt.load_started()  # of another request that shares its blocks
    elif why == "unknown":
        world.source.finish(request)
    world.now += 2
    world.source.look_again(request)
    assert world.take(Lookup) == []


def test_request_that_has_a_peer_waits_on(world: World) -> None:
    request = world.request()
    world.source.add(request, Provenance(70))
    world.find([Place.NOWHERE] * 4)
    assert request.status == RequestStatus.WAITING_FOR_KV


def open_get_breaker(world: World) -> None:
    for i in range(2):
        world.source.add(world.request(name=f"late{i}", start=3000 + 100 * i))
        world.now += 0.2
        world.source.tick()
    world.take(Lookup)


def test_pool_that_does_not_answer_is_bypassed_and_probed(world: World) -> None:
    open_get_breaker(world)
    request = world.request()
    world.source.add(request)
    assert request.status == RequestStatus.WAITING
    assert world.take(Lookup) == []
    world.now += 1.0
    world.source.tick()
    world.find([Place.NOWHERE])
    assert world.source.breaker.closed
    world.source.add(world.request(name="next"))
    assert len(world.take(Lookup)) == 1


def test_probe_without_an_answer_is_followed_by_another(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator hears of it once, and when it is over."""
    caplog.set_level(logging.INFO)
    open_get_breaker(world)
    for _ in range(3):
        world.now += 1.1
        world.source.tick()
        assert len(world.take(Lookup)) == 1
        world.now += 0.2
        world.source.tick()
    assert not world.source.breaker.closed
    assert world.stats.take()["pool_breaker_opened/get"] == 1
    world.now += 1.1
    world.source.tick()
    world.find([Place.NOWHERE])
    assert world.source.breaker.closed
    began, ended = (record.getMessage() for record in caplog.records)
    assert "(lookups are not answered in 100 ms)" in began
    assert ended == "the pool answers again; reads go on after 5 s without"


def test_reset_during_a_probe_does_not_keep_the_pool_away(world: World) -> None:
    open_get_breaker(world)
    world.now += 1.1
    world.source.tick()
    assert len(world.take(Lookup)) == 1
    world.source.forget()
    for _ in range(2):
        world.now += 1.1
        world.source.tick()
    assert len(world.take(Lookup)) == 1


def test_blocks_that_are_here_are_looked_up_too_and_nobody_waits(world: World) -> None:
    """The pool hears that they are used; what it has evicted meanwhile is stored again."""
    first = world.request()
    world.run_step(first, 64)
    world.answer()
    world.free(first)
    world.now += 60
    again = world.request(name="again", num_tokens=64)
    world.source.add(again)
    waited, refresh = world.take(Lookup)
    assert waited.hashes == b"".join(hashes(again, 3))
    assert refresh.hashes == b"".join(hashes(again, 0, 1, 2))
    assert again.status == RequestStatus.WAITING_FOR_KV
    world.source.on_found(Found(waited.lookup_id, bytes([Place.NOWHERE]), True), world.now)
    places = [Place.DRAM, Place.NOWHERE, Place.SSD]
    world.source.on_found(Found(refresh.lookup_id, bytes(places), True), world.now)
    prompt = world.source.find(again)
    assert prompt is not None
    assert not prompt.offers
    assert [key in world.known for key in keys(again, 0, 1, 2)] == [True, False, True]
    world.source.add(world.request(name="soon", num_tokens=64))
    _, refresh = world.take(Lookup)
    assert refresh.hashes == b"".join(hashes(again, 1))


def test_blocks_that_are_here_are_refreshed_when_nothing_is_missing(world: World) -> None:
    first = world.request()
    world.run_step(first, 70)
    world.answer()
    world.now += 60
    again = world.request(name="again")
    world.source.add(again)
    assert again.status == RequestStatus.WAITING
    (refresh,) = world.take(Lookup)
    assert refresh.hashes == b"".join(hashes(again, 0, 1, 2, 3))


def test_refresh_without_an_answer_is_no_failure(world: World) -> None:
    first = world.request()
    world.run_step(first, 70)
    world.answer()
    for i in range(4):
        world.now += 60
        world.source.add(world.request(name=f"again{i}"))
        world.now += 0.2
        world.source.tick()
    assert world.source.breaker.closed
    (*_, last) = world.take(Lookup)
    world.source.on_found(Found(last.lookup_id, b"", False), world.now)
    assert all(key in world.known for key in keys(first, 0, 1, 2, 3))


def test_block_that_failed_is_not_tried_again_at_once(world: World) -> None:
    request = world.request()
    world.source.add(request)
    world.find([Place.DRAM] * 4)
    prompt = world.source.find(request)
    assert prompt is not None
    prompt.load_started()
    result = LoadResult(LoadId(1), "checksum", 10, 1.0, failed=(7,))
    prompt.load_ended(result, {6: Wanted(0), 7: Wanted(1)}, was_parked=False)
    again = world.request(name="again")
    world.source.add(again)
    world.find([Place.DRAM] * 4)
    second = world.source.find(again)
    assert second is not None
    assert [second.has_block(i) for i in range(3)] == [True, False, True]
    world.now += 31
    third = world.request(name="third")
    world.source.add(third)
    world.find([Place.DRAM] * 4)
    prompt = world.source.find(third)
    assert prompt is not None
    assert prompt.has_block(1)


def test_known_keys_are_forgotten_after_a_while_and_when_there_are_too_many() -> None:
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    known = KnownKeys(2, clock, ttl_s=10)
    for key in (b"a", b"b", b"c"):
        known.note(key, Place.DRAM)
    assert (b"a" in known, b"b" in known, b"c" in known) == (False, True, True)
    now[0] = 11
    assert b"c" not in known


def test_prompt_whose_peer_failed_is_counted_once(world: World) -> None:
    """The consumer counts what was local, came from the peer and was computed."""
    origin = Provenance(70, num_peer_tokens=16, num_computed_tokens=54, outcome="checksum")
    request = world.request()
    world.source.add(request, origin)
    world.find([Place.REMOTE] * 4)
    prompt = world.source.find(request)
    assert prompt is not None
    prompt.admit(16, 48, [1, 2, 3])
    assert world.source.finish(request) is origin
    assert (origin.num_local_tokens, origin.num_peer_tokens) == (0, 16)
    assert (origin.pool_tokens["remote"], origin.num_computed_tokens) == (48, 6)
    assert origin.outcome == "checksum"
    counted = {k: v for k, v in world.stats.take().items() if k.startswith("prompt_tokens")}
    assert counted == {"prompt_tokens/remote": 48}


@pytest.mark.parametrize(
    ("places", "num_left", "tokens"),
    [
        ((Place.SSD, Place.SSD, Place.REMOTE), 3, {"dram": 0, "remote": 16, "ssd": 32}),
        # Two have been evicted again before it was admitted.
        ((Place.REMOTE, Place.REMOTE, Place.REMOTE), 1, {"dram": 0, "remote": 16, "ssd": 0}),
    ],
)
def test_parked_load_is_attributed_to_the_tier_it_came_from(
    world: World, places: tuple[Place, ...], num_left: int, tokens: dict[str, int]
) -> None:
    request = world.request()
    world.source.add(request)
    world.find([*places, Place.NOWHERE])
    prompt = world.source.find(request)
    assert prompt is not None
    prompt.advance(SourceEvent.PARK)
    prompt.load_started()
    prompt.load_ended(
        LoadResult(LoadId(1), "", 10, 1.0),
        {5: Wanted(0), 6: Wanted(1), 7: Wanted(2)},
        was_parked=True,
    )
    prompt.admit(0, num_left * BLOCK_SIZE, [])
    assert prompt.provenance.pool_tokens == tokens
    world.source.finish(request)
    assert min(world.stats.take().values()) >= 0


def test_what_a_parked_load_brought_is_not_held_against_others(world: World) -> None:
    """Its request may wait as long as the queue is: its blocks can be evicted, and its tail goes
    back when memory is short.
    """
    request = world.request(num_tokens=64)
    world.source.add(request)
    world.find([Place.DRAM] * 4)
    prompt = world.source.find(request)
    assert prompt is not None
    parking, num_free = world.common.parking, world.pool.get_num_free_blocks()
    assert parking.park(prompt, world.phantoms.find_missing(request, prompt))
    (spec,) = world.loads.take_new()
    assert world.pool.get_num_free_blocks() == num_free - 4
    result = LoadResult(spec.load_id, "", 10, 1.0)
    record = world.loads.end(spec.load_id)
    prompt.load_ended(result, record.places(), was_parked=True)
    parking.end(record, result)
    assert world.pool.get_num_free_blocks() == num_free - 1  # the tail
    parking.relieve(is_stuck=False)
    assert prompt in parking.tails
    others = world.pool.get_new_blocks(world.pool.num_gpu_blocks * 9 // 10)
    parking.relieve(is_stuck=False)
    assert world.pool.get_num_free_blocks() == num_free - len(others)
    assert prompt.offers  # and is loaded again
    assert parking.num_tail_tokens(prompt) == 15


def decide(world: World, number: int, places: list[Place], load_ms: float = 1.0) -> int:
    """So many blocks are loaded of a prompt of which the pool has these."""
    request = world.request(16 * len(places) + 6, name=str(number), start=1000 * number)
    world.source.add(request)
    world.find([*places, Place.NOWHERE][: len(request.block_hashes)])
    prompt = world.source.find(request)
    assert prompt is not None
    wanted = prompt.load_ms([Wanted(i) for i in range(len(places))])
    decided = plan(Question(wanted, prompt.compute_ms, LoadMode.AUTO, 50.0, 5000.0, False))
    prompt.use(decided, len(places))
    if decided.num_blocks:
        loaded = {i: Wanted(i) for i in range(decided.num_blocks)}
        prompt.load_started()
        num_bytes = 1000 * decided.num_blocks
        prompt.load_ended(LoadResult(LoadId(1), "", num_bytes, load_ms), loaded, was_parked=False)
    world.source.finish(request)
    return decided.num_blocks


def test_tier_that_is_faster_than_it_was_believed_is_found_out(world: World) -> None:
    """An engine that computes quickly has computed its first prompts before the pool has any."""
    world.common.prefill.note(1600, 1e-2)  # a block of 1,000 bytes in 0.1 us; DRAM is believed 0.5
    nums_loaded = [decide(world, i, [Place.DRAM] * 4, load_ms=1e-5) for i in range(60)]
    assert nums_loaded[:20] == [0] * 20
    assert nums_loaded[-1] == 4
    assert world.source.speeds[Place.SSD].per_ms == Place.SSD.bytes_per_ms


def test_tier_that_comes_with_another_is_measured_too(world: World) -> None:
    world.common.prefill.note(16, 1000.0)
    for i in range(60):
        decide(world, i, [Place.DRAM, Place.SSD], load_ms=50.0)
    slow = world.source.load_ms(Place.DRAM, 0) + world.source.load_ms(Place.SSD, 0)
    assert slow == pytest.approx(50.0, rel=0.2)
    assert world.source.load_ms(Place.REMOTE, 0) < 1.0


# Several KV cache groups.


WINDOW = KVGroup(1, BLOCK_SIZE, page_bytes=1000, layers=("window",), window=2 * BLOCK_SIZE)


@pytest.fixture
def both() -> World:
    """Full attention, and windows."""
    return World(groups=(GROUP, WINDOW))


def saved_blocks(world: World) -> list[tuple[bytes, int]]:
    """Hash and group of what is to be stored, and stores it."""
    saves = [message for message in world.sent if isinstance(message, Save)]
    world.answer()
    return [(block_hash, save.group) for save in saves for block_hash in save.hashes]


def test_each_group_stores_what_it_has_filled(both: World) -> None:
    request = both.request(48)
    both.run_step(request, 48, confirm=False)
    assert [(spec.group, len(spec.block_ids)) for spec in both.ahead] == [(0, 3), (1, 3)]
    both.saves.confirm()
    blocks = {save.group: save.block_ids for save in both.sent}
    assert blocks == {
        group: tuple(block.block_id for block in both.all_tables[group]["r"]) for group in (0, 1)
    }
    assert {save.ahead_id for save in both.sent} == {spec.ahead_id for spec in both.ahead}
    assert saved_blocks(both) == [(h, g) for g in (0, 1) for h in hashes(request, 0, 1, 2)]


def test_what_one_group_has_in_the_pool_another_may_lack(both: World) -> None:
    request = both.request(48)
    both.known.note(keys(request, 1)[0], Place.DRAM)
    both.run_step(request, 48)
    stored = saved_blocks(both)
    first, second, third = hashes(request, 0, 1, 2)
    assert stored == [(first, 0), (third, 0), (first, 1), (second, 1), (third, 1)]


def test_blocks_that_were_given_up_before_they_could_be_pinned_are_stored_all_the_same(
    both: World,
) -> None:
    """Eight may be pinned at a time; windows are of two blocks."""
    request = both.request(130)
    both.run_step(request, 128)
    stored = saved_blocks(both)
    assert len(stored) == 8
    for _ in range(2):
        both.run_step(request, 1)
        stored += saved_blocks(both)
    window = both.all_tables[1]["r"]
    assert [block.is_null for block in window] == [True] * 6 + [False] * 3
    assert sorted(stored) == sorted((h, g) for h in hashes(request, *range(8)) for g in (0, 1))
    both.free(request)
    assert both.pool.get_num_free_blocks() == 63


def test_blocks_that_others_have_by_now_are_not_stored(both: World) -> None:
    request = both.request(130)
    both.run_step(request, 128)
    lost = {block.block_id for block in both.all_tables[1]["r"][:6]}
    saves = [message for message in both.sent if isinstance(message, Save)]
    both.run_step(request, 1)  # gives up six blocks, which nobody may pin yet
    assert [message for message in both.sent if isinstance(message, Save)] == saves
    taken = take_all(both)
    assert lost < {block.block_id for block in taken}
    both.pool.free_blocks(reversed(taken))
    stored = saved_blocks(both)
    both.run_step(request, 1)
    stored += saved_blocks(both)
    assert sorted(stored) == sorted(
        [*((h, 0) for h in hashes(request, *range(8))), *((h, 1) for h in hashes(request, 6, 7))]
    )
    assert both.stats.take()["pool_put_blocks/evicted"] == 6


def test_blocks_that_nobody_uses_are_left_to_the_steps_where_memory_is_short(both: World) -> None:
    request = both.request(130)
    both.run_step(request, 128)
    num_stored = len(saved_blocks(both))
    both.run_step(request, 1, confirm=False)
    held = both.pool.get_new_blocks(both.pool.get_num_free_blocks() - 6)
    assert not {block.block_id for block in held} & {
        block.block_id for block in both.pool.free_block_queue.get_all_free_blocks()
    }
    both.saves.confirm()
    assert both.pool.get_num_free_blocks() == 6
    assert len(saved_blocks(both)) + num_stored == 10
    both.pool.free_blocks(held)


def serve(world: World, *there: tuple[int, int]) -> list[list[tuple[int, int]]]:
    """Answers lookups until none follows: what was asked for, by index and group. All blocks of
    full attention are there, and these.
    """
    asked = []
    request = world.request(130)
    names = {block_hash: i for i, block_hash in enumerate(hashes(request, *range(8)))}
    while lookups := world.take(Lookup):
        for lookup in lookups:
            own = [names[h] for h in split_hashes(lookup.hashes, lookup.hash_bytes)]
            asked.append(list(zip(own, lookup.groups, strict=True)))
            places = [Place.DRAM if not g or (i, g) in there else 0 for i, g in asked[-1]]
            world.source.on_found(Found(lookup.lookup_id, bytes(places), True), world.now)
    return asked


FULL = [(i, 0) for i in range(8)]


def found(world: World, request: Request) -> PoolPrompt:
    prompt = world.source.find(request)
    assert prompt is not None
    assert prompt.state is SourceState.READY
    return prompt


def test_of_windows_only_those_before_the_end_are_asked_for(both: World) -> None:
    request = both.request(130)
    both.source.add(request)
    assert serve(both, (6, 1), (7, 1)) == [FULL, [(6, 1), (7, 1)]]
    prompt = found(both, request)
    missing = both.phantoms.find_missing(request, prompt)
    assert sorted(missing) == sorted([*FULL, (6, 1), (7, 1)])
    assert not prompt.has_block(5, 1)


def test_of_a_prompt_of_full_blocks_the_tail_is_asked_for_too(both: World) -> None:
    request = both.request(128)
    both.source.add(request)
    assert serve(both, (6, 1), (7, 1)) == [FULL, [(5, 1), (6, 1), (7, 1)]]
    prompt = found(both, request)
    assert prompt.num_tail_tokens == BLOCK_SIZE - 1
    assert [place for place in both.phantoms.find_missing(request, prompt) if place.group] == [
        (6, 1)
    ]


@pytest.mark.parametrize("num_tokens", [128, 130])
def test_where_these_are_missing_shorter_hits_are_looked_for(both: World, num_tokens: int) -> None:
    request = both.request(num_tokens)
    both.source.add(request)
    asked = serve(both, (7, 1), (2, 1), (3, 1), (5, 1))
    first = 5 if num_tokens == 128 else 6
    assert asked == [FULL, [(i, 1) for i in range(first, 8)], [(i, 1) for i in range(first)]]
    prompt = found(both, request)
    missing = both.phantoms.find_missing(request, prompt)
    assert sorted(missing) == sorted([*FULL[:4], (2, 1), (3, 1)])
    assert len(both.phantoms.publish(request, [[], []], prompt, 0)[0]) == 4


@pytest.mark.parametrize("preempted", [False, True])
def test_windows_that_are_here_may_be_gone_when_they_are_needed(
    both: World, preempted: bool
) -> None:
    first = both.request(130)
    both.run_step(first, 128)
    both.free(first)
    key = [block_key(first.block_hashes[i], g) for i, g in [(7, 0), (6, 1)]]
    held = [block.block_id for block in both.pool.blocks if block.block_hash in key]
    both.take(Save)
    if not preempted:
        both.pool.evict_blocks(set(held))
    request = both.request(130, name="again")
    both.source.add(request, admitted=preempted)
    asked = serve(both, (6, 1), (7, 1))
    assert asked[0] == FULL[0 if preempted else 6 :]
    assert asked[-1] == [(6, 1), (7, 1)]
    prompt = found(both, request)
    both.pool.evict_blocks(set(range(1, 64)))
    missing = both.phantoms.find_missing(request, prompt)
    assert len(missing) == (10 if preempted else 0)


def test_lookups_of_one_prompt_have_one_deadline(both: World) -> None:
    request = both.request(130)
    both.source.add(request)
    (first,) = both.take(Lookup)
    both.now += 0.08
    both.source.on_found(Found(first.lookup_id, bytes([Place.DRAM] * 8), True), both.now)
    (second,) = both.take(Lookup)
    assert second.before == first.before
    both.now += 0.03
    both.source.tick()
    prompt = both.source.find(request)
    assert prompt is not None
    assert prompt.state is SourceState.FAILED
    assert both.stats.take()["pool_lookups/deadline"] == 1


def test_only_the_block_of_the_group_that_failed_is_not_tried_again(both: World) -> None:
    request = both.request(130)
    both.source.add(request)
    serve(both, (6, 1), (7, 1))
    prompt = found(both, request)
    wanted = both.phantoms.find_missing(request, prompt)
    prompt.load_started()
    places = {10 + i: place for i, place in enumerate(wanted)}
    (failed,) = (block_id for block_id, place in places.items() if place == (7, 1))
    prompt.load_ended(LoadResult(LoadId(1), "checksum", 10, 1.0, (failed,)), places, False)
    again = both.request(130, name="again")
    both.source.add(again)
    serve(both, (5, 1), (6, 1), (7, 1))
    second = found(both, again)
    assert second.has_block(7, 0)
    assert not second.has_block(7, 1)
    assert both.phantoms.find_missing(again, second)[-1] == (6, 1)


def test_of_windows_only_what_is_used_is_refreshed(both: World) -> None:
    first = both.request(130)
    both.run_step(first, 80)
    while saved_blocks(both):
        both.run_step(first, 0)
    both.now += 60
    both.source.add(both.request(130, name="again"))
    waited, refresh, windows = serve(both, (6, 1), (7, 1))
    assert waited == [(5, 0), (6, 0), (7, 0)]
    assert refresh == [*((i, 0) for i in range(5)), (3, 1), (4, 1)]
    assert windows == [(6, 1), (7, 1)]


def test_what_a_lookup_has_found_is_not_stored_again(both: World) -> None:
    request = both.request(130)
    both.source.add(request)
    serve(both, (6, 1))
    both.run_step(request, 128)
    names = hashes(request, *range(8))
    assert sorted(saved_blocks(both)) == sorted((names[i], 1) for i in range(8) if i != 6)


def test_blocks_of_windows_that_vllm_does_not_cache_are_left_out(both: World) -> None:
    request = both.request(130)
    both.run_step(request, 128, confirm=False)
    both.pool.evict_blocks({block.block_id for block in both.all_tables[1]["r"][:6]})
    both.saves.confirm()
    stored = saved_blocks(both)
    both.run_step(request, 1)
    stored += saved_blocks(both)
    assert sorted(stored) == sorted(
        [*((h, 0) for h in hashes(request, *range(8))), *((h, 1) for h in hashes(request, 6, 7))]
    )


def test_events_name_the_group() -> None:
    world = World(events=True, groups=(GROUP, WINDOW))
    world.run_step(world.request(), 40)
    world.pool.take_events()
    world.answer()
    assert [event.group_idx for event in world.pool.take_events()] == [0, 0, 1, 1]
    world.source.add(world.request(name="other", start=1000))
    world.find([Place.NOWHERE] * 4, healthy=False)
    removed = world.pool.take_events()
    assert [(event.group_idx, len(event.block_hashes)) for event in removed] == [(0, 2), (1, 2)]

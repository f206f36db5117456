# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import itertools
import mmap
import threading

import pytest

from tests.clock import Clock
from vllm_ascend_pd.backends import staging
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.shared_memory import SharedMapping
from vllm_ascend_pd.backends.staging import Slot, StagingPool
from vllm_ascend_pd.errors import BackendError


@pytest.fixture
def engine():
    engine = FakeTransferEngine()
    yield engine
    engine.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(engine, clock):
    pool = StagingPool(engine, num_slots=3, slot_bytes=5000, clock=clock)
    yield pool
    pool.close()


def give_back(slot: Slot, quarantine_s: float = 0.0) -> None:
    with slot:
        slot.quarantine(quarantine_s)


def test_slots_are_page_aligned_disjoint_and_registered_as_one_region(engine, pool):
    slots = [pool.acquire() for _ in range(3)]
    starts = sorted(slot.addr for slot in slots)
    assert all(start % mmap.PAGESIZE == 0 for start in starts)
    assert all(b - a >= 5000 for a, b in itertools.pairwise(starts))
    assert starts[0] == pool.region.base
    assert starts[-1] + 5000 <= pool.region.base + pool.region.size
    assert {slot.num_bytes for slot in slots} == {5000}
    assert engine.num_regions() == 1


def test_a_slot_can_be_written_to_its_last_byte(pool):
    slot = pool.acquire()
    ctypes.memset(slot.addr, 0x5A, slot.num_bytes)
    assert ctypes.string_at(slot.addr, slot.num_bytes) == b"\x5a" * 5000
    give_back(slot)


def test_an_exhausted_pool_gives_none(pool):
    slots = [pool.acquire() for _ in range(3)]
    assert pool.acquire() is None
    assert pool.num_free == 0
    give_back(slots[1])
    assert pool.num_free == 1
    assert pool.acquire().addr == slots[1].addr


def test_a_quarantined_slot_rests_until_its_deadline(pool, clock):
    slots = [pool.acquire() for _ in range(3)]
    give_back(slots[0], 10.0)
    clock.now = 109.9
    assert pool.num_free == 0
    assert pool.acquire() is None
    clock.now = 110.0
    assert pool.num_free == 1
    assert pool.acquire().addr == slots[0].addr


def test_quarantines_end_one_by_one(pool, clock):
    slots = [pool.acquire() for _ in range(3)]
    for slot, seconds in zip(slots, (30.0, 10.0, 20.0), strict=True):
        give_back(slot, seconds)
    free = []
    for clock.now in (105.0, 115.0, 125.0, 135.0):
        free.append(pool.num_free)
    assert free == [0, 1, 2, 3]


@pytest.mark.parametrize("first", [0.0, 1.0])
@pytest.mark.parametrize("second", [0.0, 1.0])
def test_a_slot_cannot_be_given_back_twice(pool, clock, first, second):
    slot = pool.acquire()
    give_back(slot, first)
    with pytest.raises(ValueError, match="not held"):
        give_back(slot, second)
    clock.now += 1.0
    assert pool.num_free == 3


def test_a_slot_goes_back_when_its_holder_raises(pool):
    with pytest.raises(ZeroDivisionError), pool.acquire():
        raise ZeroDivisionError
    assert pool.num_free == 3


def test_a_stale_holder_cannot_give_back_the_next_ones_slot(pool):
    stale = pool.acquire()
    give_back(stale)
    fresh = pool.acquire()
    assert fresh.addr == stale.addr
    with pytest.raises(ValueError, match="not held"):
        give_back(stale)
    assert pool.num_free == 2
    give_back(fresh)


def test_close_unregisters_and_unmaps_and_can_be_repeated(engine, pool, caplog):
    abandoned = len(staging._abandoned)
    give_back(pool.acquire())
    pool.close()
    pool.close()
    assert engine.num_regions() == 0
    assert len(staging._abandoned) == abandoned
    assert not caplog.records
    with pytest.raises(BackendError):
        pool.acquire()


@pytest.mark.parametrize("how", ["held", "quarantined"])
def test_memory_that_may_still_be_written_stays_mapped_after_close(engine, pool, how, caplog):
    slot = pool.acquire()
    if how == "quarantined":
        give_back(slot, 900.0)
    pool.close()
    ctypes.memset(slot.addr, 1, slot.num_bytes)  # a crash if it were unmapped
    assert ctypes.string_at(slot.addr, 1) == b"\x01"
    assert engine.num_regions() == 0
    assert "stays mapped: 1 slots" in caplog.text


def test_a_slot_can_be_released_after_close(pool):
    slot = pool.acquire()
    pool.close()
    give_back(slot)
    assert pool.num_free == 3


def test_a_refused_registration_leaves_no_memory_behind(engine, monkeypatch):
    def refuse(addr: int, num_bytes: int) -> None:
        raise BackendError("no")

    mappings = dict(SharedMapping._live)
    monkeypatch.setattr(engine, "register", refuse)
    with pytest.raises(BackendError):
        StagingPool(engine, 1, 4096)
    assert SharedMapping._live == mappings


def test_what_is_registered_begins_and_ends_where_a_device_wants_it(engine, monkeypatch):
    alignment = 2 << 20
    registered = {}
    register = engine.register

    def note(addr: int, num_bytes: int) -> None:
        registered[addr] = num_bytes
        register(addr, num_bytes)

    monkeypatch.setattr(engine, "register", note)
    pool = StagingPool(engine, 3, 1 << 20, alignment=alignment)
    assert registered == {pool.region.base: 2 * alignment}
    assert pool.region.base % alignment == 0
    last = max((pool.acquire() for _ in range(3)), key=lambda slot: slot.addr)
    ctypes.memset(last.addr, 0x5A, last.num_bytes)
    pool.close()
    assert engine.num_regions() == 0


@pytest.mark.parametrize(("num_slots", "slot_bytes"), [(0, 4096), (1, 0), (-1, 4096)])
def test_an_empty_pool_is_refused(engine, num_slots, slot_bytes):
    with pytest.raises(ValueError, match="need num_slots"):
        StagingPool(engine, num_slots, slot_bytes)


def test_threads_never_share_a_slot(engine):
    pool = StagingPool(engine, num_slots=4, slot_bytes=4096)
    holders: dict[int, int] = {}
    clashes = []

    def work(me: int) -> None:
        for _ in range(500):
            slot = pool.acquire()
            if slot is None:
                continue
            if holders.setdefault(slot.index, me) != me:
                clashes.append((slot.index, me))
            del holders[slot.index]
            give_back(slot)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.num_free == 4
    pool.close()

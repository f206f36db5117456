# SPDX-License-Identifier: Apache-2.0
"""Blocks are packed while their step computes them: what is put is what the step left, slots come
back, and nobody waits for a slot.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.pages import one_group
from vllm_ascend_pd.backends.block_copy import PageLayout, Region
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.kv.load import QUARANTINE_S
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.io import PoolIO, PoolSlots
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.messages import AheadSpec, DropAhead, DropSaves, Packed, Save, Saved
from vllm_ascend_pd.pool.packed_slot import PackedSlot
from vllm_ascend_pd.pool.tier import Status, Value
from vllm_ascend_pd.pool.values import BlockValues

NUM_LAYERS, NUM_BLOCKS, PAGE, NUM_SLOTS = 3, 8, 128, 2
LONG_S = 10.0
HASHES = [bytes([i]) * 32 for i in range(NUM_BLOCKS)]


class NoRegistry:
    def register(self, addr: int, num_bytes: int) -> None:
        """Nobody else reads or writes this memory."""

    def unregister(self, addr: int) -> None:
        """Nor afterwards."""


class GatedCopier(PythonBlockCopier):
    """Copies while its gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_layers = 0
        """Of all calls."""
        self.num_failing = 0
        """Calls to come that raise."""

    def gather_layers(self, layout: PageLayout, start: int, stop: int, *args: Any) -> Any:
        assert self.gate.wait(LONG_S)
        if self.num_failing:
            self.num_failing -= 1
            raise OSError("the pages cannot be read")
        result = super().gather_layers(layout, start, stop, *args)
        self.num_layers += stop - start
        return result


class Worker:
    def __init__(self) -> None:
        self.pages = np.zeros((NUM_LAYERS, NUM_BLOCKS, PAGE), dtype=np.uint8)
        offsets = np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE
        region = Region(self.pages.ctypes.data, self.pages.nbytes)
        layout = PageLayout.packed(region, offsets, PAGE)
        self.copier = GatedCopier()
        self.space = KeySpace.of("packing")
        self.values = BlockValues(self.copier, one_group(layout)[0], self.space)
        self.memory = MemoryTier(1 << 20)
        self.tier = FaultyTier(self.memory)
        slot_bytes = 4 * self.values.num_bytes
        self.now = 0.0
        self.slots = [
            StagingPool(NoRegistry(), n, slot_bytes, clock=lambda: self.now)
            for n in (1, 1, NUM_SLOTS)
        ]
        read, self.write_slots, self.ahead_slots = self.slots
        slots = PoolSlots(read, self.write_slots, self.ahead_slots)
        self.io = PoolIO(self.tier, [self.values], slots, num_readers=1)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.hears: Callable[[Any], None] = self.inbox.put
        self.link = PoolLink("test", lambda message: self.hears(message))
        self.io.start()
        self.link.connect(self.io.address)
        self.link.start()

    def compute(self, *block_ids: int, layers: range = range(NUM_LAYERS)) -> None:
        """The forward writes what these blocks hold by their hashes."""
        for layer in layers:
            for block_id in block_ids:
                self.pages[layer, block_id] = 10 * block_id + layer
            self.io.ahead.layer_done(layer)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def save(self, block_ids: tuple[int, ...], ahead_id: int = 0, save_id: int = 1) -> None:
        hashes = tuple(HASHES[block_id] for block_id in block_ids)
        self.link.send(Save(save_id, block_ids, hashes, ahead_id))

    def until(self, kind: type) -> Any:
        while True:
            message = self.inbox.get(timeout=LONG_S)
            if isinstance(message, kind):
                return message

    def check_stored(self, *block_ids: int) -> None:
        size = self.values.num_bytes
        memory = np.zeros(size, dtype=np.uint8)
        for block_id in block_ids:
            value = Value(self.space.key(HASHES[block_id]), memory.ctypes.data, size)
            assert self.memory.get([value]) == [Status.OK]
            region = Region(memory.ctypes.data, size)
            assert self.values.unpack(7, HASHES[block_id], region, 0) is Status.OK
            assert self.pages[:, 7, 0].tolist() == [10 * block_id + n for n in range(NUM_LAYERS)]

    def check_all_free(self) -> None:
        assert [pool.num_free for pool in self.slots] == [1, 1, NUM_SLOTS]

    def stop(self) -> None:
        self.copier.gate.set()
        self.link.stop()
        self.io.stop()
        for pool in self.slots:
            pool.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.stop()


def test_layers_are_packed_while_the_step_computes_the_next_ones(worker: Worker) -> None:
    assert worker.io.ahead.begin_step([AheadSpec(1, (2, 3))])
    worker.compute(2, 3, layers=range(1))
    worker.wait(lambda: worker.copier.num_layers == 1)
    worker.compute(2, 3, layers=range(1, NUM_LAYERS))
    worker.wait(lambda: worker.copier.num_layers == NUM_LAYERS)
    worker.save((2, 3), ahead_id=1)
    assert worker.until(Saved).statuses == ("ok", "ok")
    assert worker.copier.num_layers == NUM_LAYERS  # not once more
    worker.check_stored(2, 3)
    assert worker.ahead_slots.num_free == NUM_SLOTS


def test_packed_blocks_are_given_back_though_the_tier_is_busy(worker: Worker) -> None:
    worker.tier.script = TierScript("put:delay(300)")
    worker.save((5,), save_id=1)
    worker.until(Packed)
    worker.io.ahead.begin_step([AheadSpec(1, (2,))])
    worker.compute(2)
    worker.wait(lambda: worker.copier.num_layers == 2 * NUM_LAYERS)
    worker.save((2,), ahead_id=1, save_id=2)
    assert worker.inbox.get(timeout=LONG_S) == Packed(2)
    worker.pages[:, 2] = 255
    assert worker.until(Saved).save_id == 1
    assert worker.inbox.get(timeout=LONG_S).save_id == 2
    worker.check_stored(2)


@pytest.mark.parametrize("num_layers", range(NUM_LAYERS))
def test_what_is_not_packed_when_the_step_ends_is_packed_then(
    worker: Worker, num_layers: int
) -> None:
    """A FULL graph runs no layer hook at all."""
    worker.io.ahead.begin_step([AheadSpec(1, (2, 3))])
    worker.compute(2, 3, layers=range(num_layers))
    for layer in range(num_layers, NUM_LAYERS):
        for block_id in (2, 3):
            worker.pages[layer, block_id] = 10 * block_id + layer
    worker.save((2, 3), ahead_id=1)
    assert worker.until(Packed) == Packed(1)
    assert worker.until(Saved).statuses == ("ok", "ok")
    worker.check_stored(2, 3)


def test_good_blocks_of_a_group_are_stored_without_the_others(worker: Worker) -> None:
    worker.io.ahead.begin_step([AheadSpec(1, (2, 3, 4))])
    worker.compute(2, 3, 4)
    worker.save((3,), ahead_id=1)
    assert worker.until(Saved).statuses == ("ok",)
    worker.check_stored(3)
    assert len(worker.memory.lookup([worker.space.key(h) for h in (HASHES[2], HASHES[4])])) == 2
    assert not any(worker.memory.lookup([worker.space.key(h) for h in (HASHES[2], HASHES[4])]))
    assert worker.ahead_slots.num_free == NUM_SLOTS


def test_what_no_save_asks_for_is_dropped_and_never_stored(worker: Worker) -> None:
    worker.io.ahead.begin_step([AheadSpec(1, (2,)), AheadSpec(2, (3,))])
    worker.compute(2, 3)
    assert worker.ahead_slots.num_free == 0
    worker.save((3,), ahead_id=2)
    worker.link.send(DropAhead(2))
    assert worker.until(Saved).statuses == ("ok",)
    worker.wait(lambda: worker.ahead_slots.num_free == NUM_SLOTS)
    assert not any(worker.memory.lookup([worker.space.key(HASHES[2])]))
    assert len(worker.io.ahead) == 0


def test_late_thread_packs_nothing_of_a_dropped_step(worker: Worker) -> None:
    """The blocks are another request's by then, and its slot another step's."""
    worker.copier.gate.clear()
    worker.io.ahead.begin_step([AheadSpec(1, (2,)), AheadSpec(2, (3,))])
    worker.compute(2, 3)
    worker.link.send(DropAhead(2))
    worker.wait(lambda: len(worker.io.ahead) == 0)
    worker.pages[:] = 255
    worker.copier.gate.set()
    worker.wait(lambda: worker.ahead_slots.num_free == NUM_SLOTS)
    worker.io.ahead.begin_step([AheadSpec(3, (4,))])
    worker.compute(4)
    worker.save((4,), ahead_id=3)
    assert worker.until(Saved).statuses == ("ok",)
    worker.check_stored(4)


def test_nothing_is_packed_into_a_slot_that_has_gone_back(worker: Worker) -> None:
    slot = worker.ahead_slots.acquire()
    assert slot is not None
    with PackedSlot(worker.values, slot, (2,)) as packing:
        packing.pack(1)
    packing.pack_all()
    assert worker.copier.num_layers == 1


def test_save_that_waits_for_a_slot_can_be_dropped(worker: Worker) -> None:
    slot = worker.write_slots.acquire()
    assert slot is not None
    with slot:
        worker.save((5,))
        worker.wait(worker.io._saver._saves.empty)
        worker.link.send(DropSaves(1))
        assert worker.until(Saved).statuses == ("dropped",)


def test_same_block_in_the_next_step_is_not_taken_from_the_last_one(worker: Worker) -> None:
    """A request is preempted, and comes back to the same block under the same hash."""
    worker.io.ahead.begin_step([AheadSpec(1, (2,))])
    worker.pages[:, 2] = 255  # not what belongs there
    for layer in range(NUM_LAYERS):
        worker.io.ahead.layer_done(layer)
    worker.wait(lambda: worker.copier.num_layers == NUM_LAYERS)
    worker.io.ahead.begin_step([AheadSpec(2, (2,))])
    worker.link.send(DropAhead(1))
    worker.compute(2)
    worker.save((2,), ahead_id=2)
    assert worker.until(Saved).statuses == ("ok",)
    worker.check_stored(2)


def test_without_a_free_slot_blocks_are_packed_after_the_step(worker: Worker) -> None:
    specs = [AheadSpec(n, (n,)) for n in (1, 2, 3, 4)]
    worker.io.ahead.begin_step(specs)
    assert len(worker.io.ahead) == NUM_SLOTS
    worker.compute(1, 2, 3, 4)
    for n in (1, 2, 3, 4):
        worker.save((n,), ahead_id=n, save_id=n)
        assert worker.until(Saved).statuses == ("ok",)
    worker.check_stored(1, 2, 3, 4)
    assert not worker.io.ahead.begin_step([])
    assert worker.ahead_slots.num_free == NUM_SLOTS


def test_dropped_saves_give_back_what_was_packed_ahead(worker: Worker) -> None:
    worker.tier.script = TierScript("put:delay(200)*")
    worker.io.ahead.begin_step([AheadSpec(1, (2,)), AheadSpec(2, (3,))])
    worker.compute(2, 3)
    worker.save((5,), save_id=1)  # holds the save thread
    worker.until(Packed)
    worker.save((2,), ahead_id=1, save_id=2)
    worker.save((3,), ahead_id=2, save_id=3)
    worker.link.send(DropSaves(3))
    statuses = {(saved := worker.until(Saved)).save_id: saved.statuses for _ in range(3)}
    assert statuses == {1: ("ok",), 2: ("dropped",), 3: ("dropped",)}
    assert worker.ahead_slots.num_free == NUM_SLOTS


def test_nothing_is_packed_once_it_was_stopped_while_the_tier_held_a_save(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages are about to be given up."""
    put, gate, reached = worker.tier.put, threading.Event(), threading.Event()

    def held(values: Sequence[Value]) -> list[Status]:
        reached.set()
        assert gate.wait(LONG_S)
        return put(values)

    monkeypatch.setattr(worker.tier, "put", held)
    assert worker.io.ahead.begin_step([AheadSpec(1, (2,))])
    worker.compute(2, layers=range(1))
    worker.wait(lambda: worker.copier.num_layers == 1)
    worker.save((3,), save_id=1)
    assert reached.wait(LONG_S)
    worker.save((2,), ahead_id=1, save_id=2)
    worker.io.stop()
    num_layers = worker.copier.num_layers
    gate.set()
    assert worker.until(Saved).statuses == ("ok",)
    assert worker.until(Saved).statuses == ("dropped",)
    assert worker.copier.num_layers == num_layers


def test_failed_put_leaves_its_slot_in_quarantine(worker: Worker) -> None:
    worker.tier.script = TierScript("put:fail")
    worker.io.ahead.begin_step([AheadSpec(1, (2,))])
    worker.compute(2)
    worker.save((2,), ahead_id=1)
    assert worker.until(Saved).statuses == ("failed",)
    assert worker.ahead_slots.num_free == NUM_SLOTS - 1
    assert len(worker.io.ahead) == 0
    worker.now += QUARANTINE_S
    worker.check_all_free()


AHEAD = pytest.mark.parametrize("ahead_id", [0, 1], ids=["after-the-step", "ahead"])


@AHEAD
def test_packing_that_raises_fails_the_save_and_gives_the_slot_back(
    worker: Worker, ahead_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker.io.ahead.begin_step([AheadSpec(1, (2,))] if ahead_id else [])
    worker.copier.num_failing = 100
    worker.compute(2)
    worker.save((2, 3), ahead_id)
    assert worker.until(Saved).statuses == ("failed", "failed")
    worker.check_all_free()  # at once: nobody was told to read from it
    assert "a write to the pool failed" in caplog.text
    assert not any(worker.memory.lookup([worker.space.key(HASHES[2])]))
    worker.copier.num_failing = 0
    worker.save((2,), save_id=2)
    assert worker.until(Saved).statuses == ("ok",)


@AHEAD
def test_put_that_raises_fails_the_save_and_leaves_its_slot_in_quarantine(
    worker: Worker, ahead_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    worker.tier.script = TierScript("put:raise")
    worker.io.ahead.begin_step([AheadSpec(1, (2,))] if ahead_id else [])
    worker.compute(2)
    worker.save((2,), ahead_id)
    assert worker.until(Saved).statuses == ("failed",)
    assert "a write to the pool failed" in caplog.text
    pool = worker.ahead_slots if ahead_id else worker.write_slots
    assert (pool.num_free, pool.num_held) == (pool.num_slots - 1, 0)
    worker.now += QUARANTINE_S
    worker.check_all_free()
    worker.save((2,), save_id=2)
    assert worker.until(Saved).statuses == ("ok",)


def test_save_of_a_group_that_is_not_there_fails_alone(worker: Worker) -> None:
    worker.link.send(Save(1, (2, 3), (HASHES[2], HASHES[3]), group=1))
    assert worker.until(Saved).statuses == ("failed", "failed")
    worker.check_all_free()
    worker.save((2,), save_id=2)
    assert worker.until(Saved).statuses == ("ok",)


def test_group_that_cannot_be_packed_ahead_leaves_the_others(worker: Worker) -> None:
    worker.io.ahead.begin_step([AheadSpec(1, (2,)), AheadSpec(2, (3,))])
    worker.copier.num_failing = 1
    for block_id in (2, 3):
        worker.pages[:, block_id] = [[10 * block_id + n] for n in range(NUM_LAYERS)]
    worker.io.ahead.layer_done(NUM_LAYERS - 1)
    worker.wait(lambda: worker.copier.num_layers == NUM_LAYERS)  # of the second
    for save_id in (1, 2):
        worker.save((save_id + 1,), ahead_id=save_id, save_id=save_id)
        assert worker.until(Saved).statuses == ("ok",)
    worker.check_stored(2, 3)
    worker.check_all_free()


@pytest.mark.parametrize(
    "spec", [AheadSpec(1, (2,), group=1), AheadSpec(1, (1 << 70,))], ids=["group", "block-id"]
)
def test_step_whose_announcement_raises_holds_no_slot(worker: Worker, spec: AheadSpec) -> None:
    with pytest.raises((IndexError, OverflowError)):
        worker.io.ahead.begin_step([spec])
    worker.check_all_free()


@AHEAD
def test_answer_that_nobody_takes_ends_neither_a_thread_nor_its_save(
    worker: Worker, ahead_id: int
) -> None:
    worker.io.ahead.begin_step([AheadSpec(1, (2,))] if ahead_id else [])
    worker.compute(2)
    unheard: list[Any] = []

    def hear(message: Any) -> None:
        unheard.append(message)
        raise OSError(f"nobody takes {message}")

    worker.hears = hear
    worker.save((2,), ahead_id)
    worker.wait(lambda: worker.link.num_errors == 2)
    assert [type(message) for message in unheard] == [Packed, Saved]
    assert worker.link.take_errors() == {"test": 2}
    worker.hears = worker.inbox.put
    worker.check_stored(2)
    worker.check_all_free()
    worker.save((3,), save_id=2)
    assert worker.until(Saved).statuses == ("ok",)

# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the pool against a model: whatever the tier does, a block that was loaded
holds what was saved under its hash, every load and save ends once, and no memory is left behind.
"""

from __future__ import annotations

import queue
import random
import time
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.pages import one_group
from vllm_ascend_pd.backends.block_copy import PageLayout, Region, make_block_copier
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.pool import link as pool_link
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.io import PoolIO, PoolSlots
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.messages import (
    DROPPED,
    AheadSpec,
    DropAhead,
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
from vllm_ascend_pd.pool.values import BlockValues
from vllm_ascend_pd.types import LoadId, Place

NUM_LAYERS, NUM_BLOCKS, PAGE = 2, 8, 256
HASHES = [bytes([i]) * 32 for i in range(6)]
LONG_S = 10.0

hashes = st.lists(st.sampled_from(HASHES), min_size=1, max_size=4, unique=True)
faults = st.sampled_from(["ok", "ok", "ok", "fail", "missing", "corrupt", "short"])


class NoRegistry:
    def register(self, addr: int, num_bytes: int) -> None:
        """Nobody else reads or writes this memory."""

    def unregister(self, addr: int) -> None:
        """Nor afterwards."""


class PoolMachine(RuleBasedStateMachine):
    @initialize(is_near=st.booleans())
    def open(self, is_near: bool) -> None:
        """``is_near``: as in one process with the scheduler."""
        self.pages = np.zeros((NUM_LAYERS, NUM_BLOCKS, PAGE), dtype=np.uint8)
        offsets = np.arange(NUM_LAYERS, dtype=np.int64) * NUM_BLOCKS * PAGE
        region = Region(self.pages.ctypes.data, self.pages.nbytes)
        space = KeySpace.of("machine")
        layout = PageLayout.packed(region, offsets, PAGE)
        values = BlockValues(make_block_copier(), one_group(layout)[0], space)
        self.space = space
        self.memory = MemoryTier(4 * values.num_bytes)  # less than there are hashes: it evicts
        self.tier = FaultyTier(self.memory)
        # Two blocks a batch, so that loads have several.
        self.slots = [StagingPool(NoRegistry(), n, 2 * values.num_bytes) for n in (64, 64, 2)]
        read, write, ahead = self.slots
        slots = PoolSlots(read, write, ahead)
        self.io = PoolIO(self.tier, [values], slots, num_readers=2)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.link = PoolLink("test", self.inbox.put)
        self.io.start()
        if not is_near:
            pool_link._listening.clear()
        self.link.connect(self.io.address)
        self.link.start()
        self.next_id = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def content(self, block_hash: bytes) -> np.ndarray[Any, Any]:
        """What the KV of a block with this hash is, always."""
        rng = np.random.default_rng(block_hash[0])
        return rng.integers(0, 255, (NUM_LAYERS, PAGE), dtype=np.uint8)

    def places(self, wanted: list[bytes]) -> list[Place]:
        self.tier.script = TierScript()
        joined, size = join_hashes(wanted)
        groups, before = bytes(len(wanted)), time.monotonic() + LONG_S
        self.link.send(Lookup(self.new_id(), joined, size, groups, before))
        found = self.inbox.get(timeout=LONG_S)
        assert isinstance(found, Found)
        assert found.lookup_id == self.next_id
        return [Place(place) for place in found.places]

    @rule(wanted=hashes, fault=st.sampled_from(["ok", "ok", "fail", "full"]))
    def save(self, wanted: list[bytes], fault: str) -> None:
        self.tier.script = TierScript(f"put:{fault}")
        for start in range(0, len(wanted), self.io.blocks_per_batch):
            part = wanted[start : start + self.io.blocks_per_batch]
            for block, block_hash in enumerate(part):
                self.pages[:, block] = self.content(block_hash)
            self.link.send(Save(self.new_id(), tuple(range(len(part))), tuple(part)))
            assert self.inbox.get(timeout=LONG_S) == Packed(self.next_id)
            # The blocks are somebody else's from here on.
            self.pages[:] = 255
            saved = self.inbox.get(timeout=LONG_S)
            assert isinstance(saved, Saved)
            assert len(saved.statuses) == len(part)
            # Those before the last one may have been evicted by it; what found memory full at first
            # was stored after it.
            if saved.statuses[-1] == "ok" and fault != "full":
                assert self.memory.lookup([self.space.key(part[-1])]) != [Place.NOWHERE]

    @rule(
        wanted=hashes,
        num_layers=st.integers(0, NUM_LAYERS),
        wants=st.sampled_from(["all", "last", "none", "none, late"]),
        fault=st.sampled_from(["ok", "ok", "fail"]),
    )
    def save_ahead(self, wanted: list[bytes], num_layers: int, wants: str, fault: str) -> None:
        """A step of up to two groups of blocks, of which layers are said to be done or not."""
        self.tier.script = TierScript(f"put:{fault}")
        size = self.io.blocks_per_batch
        starts = range(0, len(wanted), size)
        block_ids = tuple(range(len(wanted)))
        specs = [AheadSpec(self.new_id(), block_ids[at : at + size]) for at in starts]
        # A failed put leaves its slot in quarantine.
        assert self.io.ahead.begin_step(specs) or not self.slots[2].num_free
        self.pages[:] = 255
        for layer in range(NUM_LAYERS):
            for block_id, block_hash in enumerate(wanted):
                self.pages[layer, block_id] = self.content(block_hash)[layer]
            if layer < num_layers:
                self.io.ahead.layer_done(layer)
        if wants.startswith("none"):
            if wants == "none":
                self.pages[:] = 77  # another request's by now
            self.link.send(DropAhead(specs[-1].ahead_id))
            self.pages[:] = 77
        for spec in specs if not wants.startswith("none") else ():
            first = len(spec.block_ids) - 1 if wants == "last" else 0
            good = spec.block_ids[first:]
            named = tuple(wanted[block_id] for block_id in good)
            self.link.send(Save(self.new_id(), good, named, spec.ahead_id))
            assert self.inbox.get(timeout=LONG_S) == Packed(self.next_id)
            self.pages[:, list(good)] = 77
            saved = self.inbox.get(timeout=LONG_S)
            assert isinstance(saved, Saved)
            assert len(saved.statuses) == len(good)
            if saved.statuses[-1] == "ok":
                assert self.memory.lookup([self.space.key(named[-1])]) != [Place.NOWHERE]

    @rule(wanted=hashes)
    def look_up(self, wanted: list[bytes]) -> None:
        keys = [self.space.key(block_hash) for block_hash in wanted]
        assert self.places(wanted) == self.memory.lookup(keys)

    @rule(wanted=hashes)
    def evict(self, wanted: list[bytes]) -> None:
        self.memory.remove([self.space.key(block_hash) for block_hash in wanted])
        assert set(self.places(wanted)) == {Place.NOWHERE}

    @rule(wanted=hashes, fault=faults, position=st.integers(0, 3), in_step=st.booleans())
    def load(self, wanted: list[bytes], fault: str, position: int, in_step: bool) -> None:
        block_ids = tuple(random.Random(self.next_id).sample(range(NUM_BLOCKS), len(wanted)))
        self.pages[:] = 77
        present = self.places(wanted)
        self.tier.script = TierScript(f"get:ok*{position},{fault}" if position else f"get:{fault}")
        blocks = PoolBlocks(tuple(wanted), block_ids)
        spec = PoolLoadSpec(LoadId(self.new_id()), (blocks,), in_step, LONG_S)
        self.io.loader.start_load(spec)
        if in_step:
            self.io.loader.wait_layer(0)
        deadline = time.monotonic() + LONG_S
        while not (results := self.io.loader.take_results()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (result,) = results
        loaded = [i for i, block in enumerate(block_ids) if block not in result.failed]
        assert bool(result.cause) == bool(result.failed)
        for i in loaded:
            assert (self.pages[:, block_ids[i]] == self.content(wanted[i])).all()
        # One fault spoils one block; what was not there is not loaded; all else is.
        num_present = sum(place is not Place.NOWHERE for place in present)
        assert num_present - 1 <= len(loaded) <= num_present
        untouched = set(range(NUM_BLOCKS)) - set(block_ids)
        assert (self.pages[:, sorted(untouched)] == 77).all()

    @rule(wanted=hashes)
    def load_and_cancel(self, wanted: list[bytes]) -> None:
        self.pages[:] = 77
        self.tier.script = TierScript("get:delay(5)*")
        block_ids = tuple(range(len(wanted)))
        blocks = PoolBlocks(tuple(wanted), block_ids)
        self.io.loader.start_load(PoolLoadSpec(LoadId(self.new_id()), (blocks,), False, LONG_S))
        self.io.loader.cancel(LoadId(self.next_id))
        (result,) = self.io.loader.take_results()
        before = self.pages.copy()
        self.settle()
        if result.cause:
            assert (self.pages == before).all()  # not one byte more

    @rule(wanted=hashes)
    def save_and_drop(self, wanted: list[bytes]) -> None:
        self.tier.script = TierScript("put:delay(5)*")
        first = self.next_id + 1
        for block_hash in wanted:
            self.pages[:, 0] = self.content(block_hash)
            self.link.send(Save(self.new_id(), (0,), (block_hash,)))
            # The page is free for the next one once this one has been packed or given up; here
            # each save is waited for but the last.
            if block_hash != wanted[-1]:
                self.until_saved(self.next_id)
        self.link.send(DropSaves(self.next_id))
        status = self.until_saved(self.next_id)
        assert status in ("ok", DROPPED)
        assert self.next_id - first + 1 == len(wanted)

    def until_saved(self, save_id: int) -> str:
        while True:
            message = self.inbox.get(timeout=LONG_S)
            if isinstance(message, Saved) and message.save_id == save_id:
                return message.statuses[0]

    def settle(self) -> None:
        """Until no thread holds a slot (a failed one is held in quarantine for seconds)."""
        deadline = time.monotonic() + LONG_S
        while any(pool.num_held for pool in self.slots):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    @invariant()
    def nothing_is_left(self) -> None:
        if hasattr(self, "io"):
            assert not self.io.loader.num_loads()
            self.settle()
            assert not len(self.io.ahead)

    def teardown(self) -> None:
        if hasattr(self, "io"):
            self.link.stop()
            self.io.stop()
            for pool in self.slots:
                pool.close()
            self.io.close()


TestPoolIO = PoolMachine.TestCase
TestPoolIO.settings = settings(
    max_examples=15,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
)

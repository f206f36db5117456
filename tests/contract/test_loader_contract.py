# SPDX-License-Identifier: Apache-2.0
"""The contract of `Loader`: loads from a peer and from the pool, into pages in host memory and on a
device that runs nothing before somebody waits for it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import tests.unit.transfer.test_send_receive as transfer
from tests.pages import DevicePages, Pages, one_group
from tests.unit.transfer.test_send_receive import Pair
from vllm_ascend_pd.backends.block_copy import BlockCopier
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.fake_device import FakeDevice
from vllm_ascend_pd.backends.fake_engine import FakeTransferEngine
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.backends.python_copy import PythonBlockCopier
from vllm_ascend_pd.backends.shared_memory import SharedMapping
from vllm_ascend_pd.backends.staging import StagingPool
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.loader import PoolLoader
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.messages import PoolBlocks, PoolLoadSpec
from vllm_ascend_pd.pool.packed_slot import PackedSlot
from vllm_ascend_pd.pool.tier import Status, Value
from vllm_ascend_pd.pool.values import BlockValues
from vllm_ascend_pd.testing.loader_contract import (
    LONG_S,
    NUM_THEIRS,
    SHORT_S,
    Gate,
    LoaderContract,
    LoaderSubject,
)
from vllm_ascend_pd.types import Cause, LoadId


class GatedTier(FaultyTier):
    def __init__(self, gate: Gate) -> None:
        super().__init__(MemoryTier(1 << 24))
        self.gate = gate

    def get(self, values: Sequence[Value]) -> list[Status]:
        self.gate.enter()
        return super().get(values)


class FromPeer(LoaderSubject):
    def __init__(self, inner: BlockCopier, make_pages: Callable[[int], Any]) -> None:
        super().__init__(inner)
        copier: Any = self.copier
        self.pair = Pair(FaultScript(), SHORT_S, copier, make_pages=make_pages)
        self.pair.grant(*range(NUM_THEIRS))
        self.loader = self.pair.loader
        self.theirs, self.ours = self.pair.theirs, self.pair.ours
        self.slots = [self.pair.send_pool, self.pair.receive_pool]

    def make_spec(
        self,
        load_id: LoadId,
        indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        options: dict[str, Any],
    ) -> Any:
        return replace(self.pair.spec(indices, block_ids, **options), load_id=load_id)

    def spoil(self, kind: str) -> None:
        self.pair.engine.script = FaultScript.parse(f"{kind}*")

    def hold(self) -> None:
        self.copier.source.close()
        self.pair.loader.submit(self.copier.source.enter)

    def close(self) -> None:
        self.pair.stop()


class FromPool(LoaderSubject):
    def __init__(self, inner: BlockCopier, make_pages: Callable[[int], Any]) -> None:
        super().__init__(inner)
        self.theirs, self.ours = make_pages(1), make_pages(2)
        space = KeySpace.of("contract")
        self.tier = GatedTier(self.copier.source)
        copier: Any = self.copier
        values = BlockValues(copier, one_group(self.ours.layout)[0], space)
        self.engine = FakeTransferEngine()
        slots = StagingPool(self.engine, 4, NUM_THEIRS * values.num_bytes)
        self.slots = [slots]
        self.hashes = [bytes([index]) * 32 for index in range(NUM_THEIRS)]
        theirs = BlockValues(inner, one_group(self.theirs.layout)[0], space)
        slot = slots.acquire()
        assert slot is not None
        with PackedSlot(theirs, slot, range(NUM_THEIRS)) as packing:
            packing.pack_all()
            for index, block_hash in enumerate(self.hashes):
                addr = packing.seal(index, block_hash)
                value = Value(space.key(block_hash), addr, values.num_bytes)
                assert self.tier.put([value]) == [Status.OK]
        self.loader = PoolLoader(self.tier, [values], slots, num_readers=2)
        self.loader.start()

    def make_spec(
        self,
        load_id: LoadId,
        indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        options: dict[str, Any],
    ) -> Any:
        hashes = tuple(self.hashes[index] for index in indices)
        return PoolLoadSpec(load_id, (PoolBlocks(hashes, block_ids),), **options)

    def spoil(self, kind: str) -> None:
        self.tier.script = TierScript(f"get:{kind}*")

    def hold(self) -> None:
        self.copier.source.close()

    def close(self) -> None:
        self.loader.stop()
        for slots in self.slots:
            slots.close()
        self.engine.close()


class TestLoaders(LoaderContract):
    @pytest.fixture(params=["host memory", "device", "device that copies staging itself"])
    def pages(
        self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[BlockCopier, Callable[[int], Any]]:
        if request.param == "host memory":
            return PythonBlockCopier(), Pages
        copier = DeviceBlockCopier(FakeDevice(), PythonBlockCopier())
        if request.param != "device":
            pinned = partial(StagingPool, memory=partial(SharedMapping, pinning=copier))
            monkeypatch.setattr(transfer, "StagingPool", pinned)
            monkeypatch.setattr(sys.modules[__name__], "StagingPool", pinned)
        return copier, DevicePages

    @pytest.fixture(params=[FromPeer, FromPool], ids=["peer", "pool"])
    def make_subject(
        self, request: pytest.FixtureRequest, pages: tuple[BlockCopier, Callable[[int], Any]]
    ) -> Callable[[], LoaderSubject]:
        return lambda: request.param(*pages)


def test_readers_that_a_tier_holds_for_ever_do_not_keep_others_from_loading() -> None:
    subject = FromPool(PythonBlockCopier(), Pages)
    gate = subject.tier.gate
    gate.close()  # as a disk that hangs
    held = [subject.start((i,), (i,), in_step=False, timeout_s=SHORT_S) for i in (0, 1)]
    results = subject.results(2)
    assert {results[load_id].cause for load_id in held} == {Cause.DEADLINE.value}
    subject.tier.gate = Gate()  # it is not asked any more
    load_id = subject.start((2, 3), (2, 3), timeout_s=LONG_S / 4)  # a gate opens after LONG_S
    subject.loader.wait_all()
    assert subject.results()[load_id].cause == ""
    subject.expect_loaded((2, 3), (2, 3))
    gate.open()
    subject.wait_at_rest()
    subject.close()


def test_want_of_threads_to_read_with_ends_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads, so a load runs to its end; the next one has the threads."""
    subject = FromPool(PythonBlockCopier(), Pages)
    gate, entered = subject.tier.gate, threading.Barrier(3)
    gate.close()
    enter = gate.enter
    monkeypatch.setattr(gate, "enter", lambda: (entered.wait(LONG_S), enter()))
    held = [subject.start((index,), (index,), in_step=False) for index in (0, 1)]
    entered.wait(LONG_S)
    for load_id in held:
        subject.loader.cancel(load_id)
    subject.results(2)
    subject.tier.gate = Gate()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        load_id = subject.start((2,), (2,), timeout_s=SHORT_S)
    assert subject.results()[load_id].cause == Cause.DEADLINE.value
    load_id = subject.start((3,), (3,), timeout_s=LONG_S / 4)
    assert subject.results()[load_id].cause == ""
    gate.open()
    subject.wait_at_rest()
    subject.close()


def test_nothing_is_written_once_it_was_stopped_while_a_tier_held_a_reader() -> None:
    """The pages are about to be given up."""
    subject = FromPool(PythonBlockCopier(), Pages)
    subject.hold()
    subject.start((0, 1), (2, 3), in_step=False)
    assert subject.copier.source.reached.wait(LONG_S)
    subject.loader.stop()
    subject.check_nothing_more_is_written()
    subject.close()

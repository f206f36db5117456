# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the pool: reads values into blocks, writes blocks as values, looks keys up.

    link thread ──lookups──► lookup thread ──► tier
                ──saves────► save thread:   pages ──pack──► staging ──put──► tier
    main thread ──layers───► pack thread:   the same packing, while a step computes
    main thread ──loads────► read threads:  tier ──get──► staging ──verify, scatter──► pages
                                            tier's memory in this process ──the same──►

Nothing but our own copy ever writes to live pages, and only for a load that has not ended.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.socket_folder import SocketFolder
from vllm_ascend_pd.kv.load import QUARANTINE_S, LoadResult
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import (
    DROPPED,
    DropAhead,
    DropSaves,
    Found,
    Lookup,
    Message,
    Packed,
    Save,
    Saved,
    split_hashes,
)
from vllm_ascend_pd.pool.packing import PackAhead, Packing
from vllm_ascend_pd.pool.tier import Status, SupportsView, Tier, Value
from vllm_ascend_pd.types import Cause, LoadId

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.pool.keys import KeySpace
    from vllm_ascend_pd.pool.messages import PoolLoadSpec
    from vllm_ascend_pd.pool.values import BlockValues

logger = logging.getLogger(__name__)

_SLOT_POLL_S = 0.002
_LOOKUP_BATCH_BYTES = 512 * 32
"""Lookups of so many hashes together are asked for at once, if they wait."""
_RETRY_FULL_S = (0.02, 0.04, 0.08)
_MAX_SLOTS_PER_BATCH = 4
"""The tier is asked once for so many staging slots' worth of blocks, to read them in place."""
_CAUSES = {
    Status.MISSING: Cause.EVICTED,
    Status.DAMAGED: Cause.CHECKSUM,
    Status.FAILED: Cause.POOL_FAILED,
}


@dataclass(slots=True, eq=False)
class _Load:
    """One load under way.

    ``lock`` guards all fields below it and the copy into live pages: once ``ended`` is set, by any
    thread, not one byte more is written for this load.
    """

    spec: PoolLoadSpec
    started: float
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    missing: set[int] = field(default_factory=set)
    """Block ids that have not been loaded."""
    num_batches: int = 0
    cause: str = ""
    num_bytes: int = 0
    ended: LoadResult | None = None


@dataclass(slots=True)
class _Batch:
    """Some blocks of a load that one thread reads: ``spec.block_ids[start:stop]``."""

    load: _Load
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save, and what has been packed ahead of it; ``is_packed`` once that has been said."""

    save: Save
    packing: Packing | None
    is_packed: bool


class PoolIO:
    """Main thread: loads, and what is packed ahead. Everything else comes over the link and runs on
    threads of its own.
    """

    def __init__(
        self,
        tier: Tier,
        values: BlockValues,
        space: KeySpace,
        read_slots: StagingPool,
        write_slots: StagingPool,
        num_readers: int,
        on_close: Callable[[], None] = lambda: None,
        replica: int = 0,
        num_replicas: int = 1,
        ahead_slots: StagingPool | None = None,
    ) -> None:
        """``on_close`` gives the tier back, once no staging memory is registered any more.

        ``num_replicas`` workers hold the same share of the KV heads, and this is one of them: each
        stores its part of the blocks. Without ``ahead_slots``, blocks are packed only once their
        step has been confirmed.
        """
        self._replica = replica
        self._num_replicas = num_replicas
        self._tier = tier
        self._on_close = on_close
        self._values = values
        self._space = space
        self._read_slots = read_slots
        self._write_slots = write_slots
        self.blocks_per_batch = read_slots.slot_bytes // values.num_bytes
        self._ended = threading.Condition()
        self._loads: dict[LoadId, _Load] = {}  # main thread only
        self._order = count()
        self._batches: queue.PriorityQueue[tuple[int, int, _Batch | None]] = queue.PriorityQueue()
        self._lookups: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._dropped_saves = 0  # written by the link thread, read by the save thread
        self.ahead = PackAhead(values, ahead_slots, self._owns)
        self._folder = SocketFolder()
        self.address = str(self._folder.path / "pool")
        self._link = PoolLink("pd-pool-link", self.handle)
        self._link.listen(self.address)
        targets = [("pd-pool-lookup", self._run_lookups), ("pd-pool-save", self._run_saves)]
        if ahead_slots is not None:
            targets.append(("pd-pool-pack", self.ahead.run))
        targets += [(f"pd-pool-read-{i}", self._run_reads) for i in range(num_readers)]
        self._num_readers = num_readers
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in targets
        ]

    def start(self) -> None:
        self._link.start()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Threads that a call on the tier holds are left behind."""
        self._link.stop()
        self._lookups.put(None)
        self._saves.put(None)
        self.ahead.stop()
        for _ in range(self._num_readers):
            self._batches.put((-1, next(self._order), None))
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)
        self._folder.remove()

    def close(self) -> None:
        """After ``stop``, and after the staging memory has been closed."""
        self._on_close()

    # Loads, main thread. The interface is that of transfer.receive.Loader.

    def start_load(self, spec: PoolLoadSpec) -> None:
        """Begin a load; returns at once."""
        now = time.monotonic()
        load = _Load(spec, now, now + spec.timeout_s, missing=set(spec.block_ids))
        num_blocks = len(spec.block_ids)
        num_slots = math.ceil(num_blocks / (self.blocks_per_batch * self._num_readers))
        length = self.blocks_per_batch * min(num_slots, _MAX_SLOTS_PER_BATCH)
        starts = range(0, num_blocks, length)
        load.num_batches = len(starts)
        self._loads[spec.load_id] = load
        for start in starts:
            stop = min(start + length, num_blocks)
            # A step that waits goes before loads that nobody waits for yet.
            order = (0 if spec.in_step else 1, next(self._order))
            self._batches.put((*order, _Batch(load, start, stop)))

    def cancel(self, load_id: LoadId) -> None:
        if load := self._loads.get(load_id):
            self._end(load, Cause.CANCELLED)

    def wait_layer(self, layer: int) -> None:
        """A value holds every layer of its block, so the first layer waits for all."""
        self.wait_all()

    def wait_tails(self) -> None:
        """Until every in-step load with a tail block has ended."""
        if any(load.spec.has_tail and load.spec.in_step for load in self._loads.values()):
            self.wait_all()

    def wait_all(self) -> None:
        """Until every in-step load has ended."""
        for load in self._loads.values():
            if not load.spec.in_step or load.ended is not None:
                continue
            with self._ended:
                self._ended.wait_for(
                    lambda load=load: load.ended is not None,  # type: ignore[misc]
                    timeout=max(0.0, load.deadline - time.monotonic()),
                )
            self._end(load, Cause.DEADLINE)

    def in_step_under_way(self) -> bool:
        """Whether an in-step load has not ended yet."""
        return any(load.spec.in_step and load.ended is None for load in self._loads.values())

    def take_results(self) -> list[LoadResult]:
        """The loads that ended since the last call."""
        if not self._loads:
            return []
        now = time.monotonic()
        for load in self._loads.values():
            if load.ended is None and now >= load.deadline:
                self._end(load, Cause.DEADLINE)
        results = [load.ended for load in self._loads.values() if load.ended is not None]
        for result in results:
            del self._loads[result.load_id]
        return results

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and there is nothing to take."""
        return not self._loads

    def num_loads(self) -> int:
        return len(self._loads)

    def _end(self, load: _Load, cause: Cause | None) -> None:
        """Final, once; waits for a copy that is under way."""
        with load.lock:
            if load.ended is not None:
                return
            load.cause = load.cause or (cause.value if cause is not None else "")
            elapsed_ms = (time.monotonic() - load.started) * 1000
            load.ended = LoadResult(
                load.spec.load_id,
                load.cause,
                load.num_bytes,
                elapsed_ms,
                failed=tuple(sorted(load.missing)) if load.cause else (),
            )
        if load.cause:
            logger.warning(
                "load %d from the pool failed for %d of %d blocks: %s",
                load.spec.load_id,
                len(load.missing),
                len(load.spec.block_ids),
                load.cause,
            )
        with self._ended:
            self._ended.notify_all()

    # Read threads.

    def _run_reads(self) -> None:
        while True:
            _, _, batch = self._batches.get()
            if batch is None:
                return
            try:
                self._read(batch)
            except Exception:
                logger.exception("a read from the pool failed")
                batch.load.cause = batch.load.cause or Cause.POOL_FAILED.value
            with batch.load.lock:
                batch.load.num_batches -= 1
                is_last = not batch.load.num_batches
            if is_last:
                self._end(batch.load, None)

    def _read(self, batch: _Batch) -> None:
        load, left = batch.load, list(range(batch.start, batch.stop))
        if isinstance(self._tier, SupportsView):
            left = self._read_in_place(load, left, self._tier)
        while left and load.ended is None:
            self._read_staged(load, left[: self.blocks_per_batch])
            del left[: self.blocks_per_batch]

    def _read_in_place(self, load: _Load, indices: list[int], tier: SupportsView) -> list[int]:
        """Straight from the tier's memory, where that is in reach; what is left to be read."""
        spec, size = load.spec, self._values.num_bytes
        left = []
        with tier.view([self._space.key(spec.hashes[i]) for i in indices], size) as addrs:
            for i, addr in zip(indices, addrs, strict=True):
                if not addr or self._unpack(load, i, Region(addr, size), 0) is not Status.OK:
                    left.append(i)
        return left

    def _read_staged(self, load: _Load, indices: list[int]) -> None:
        """At most ``blocks_per_batch`` blocks."""
        slot = self._wait_slot(self._read_slots, lambda: load.ended is not None)
        if slot is None:
            return
        spec, size = load.spec, self._values.num_bytes
        values = [
            Value(self._space.key(spec.hashes[index]), slot.addr + i * size, size)
            for i, index in enumerate(indices)
        ]
        statuses = [Status.FAILED]
        damaged: list[str] = []
        try:
            statuses = self._tier.get(values)
            for i, index in enumerate(indices):
                status: Status | None = statuses[i]
                if status is Status.OK:
                    status = self._unpack(load, index, slot.region, i * size)
                if status is None:
                    return
                if status is not Status.OK:
                    load.cause = load.cause or _CAUSES[status].value
                if status is Status.DAMAGED:
                    damaged.append(values[i].key)
        finally:
            if Status.FAILED in statuses:
                # What a stalled owner sends may land when it goes on.
                self._read_slots.quarantine(slot, time.monotonic() + QUARANTINE_S)
            else:
                self._read_slots.release(slot)
        if damaged:
            # The first value of a key stays, so a bad one would be found for ever.
            logger.warning("the pool had %d values that do not verify; removed", len(damaged))
            self._tier.remove(damaged)

    def _unpack(self, load: _Load, index: int, memory: Region, offset: int) -> Status | None:
        """Put a value into the pages of block ``index`` of the load; ``None`` if that has ended."""
        block_id, block_hash = load.spec.block_ids[index], load.spec.hashes[index]
        with load.lock:
            if load.ended is not None:
                return None
            status = self._values.unpack(block_id, block_hash, memory, offset)
            if status is Status.OK:
                load.num_bytes += self._values.num_bytes
                load.missing.discard(block_id)
        return status

    def _wait_slot(self, pool: StagingPool, given_up: Callable[[], bool]) -> Slot | None:
        while not given_up():
            if slot := pool.acquire():
                return slot
            time.sleep(_SLOT_POLL_S)
        return None

    # What the scheduler wants, besides loads.

    def handle(self, message: Message) -> None:
        """On the link's thread, that of whoever sends it in this process, or the main thread, when
        a step brings it.
        """
        if isinstance(message, Lookup):
            self._lookups.put(message)
        elif isinstance(message, Save):
            self._queue_save(message)
        elif isinstance(message, DropAhead):
            self.ahead.drop(message.last_ahead_id)
        elif isinstance(message, DropSaves):
            self._drop_saves(message.last_save_id)

    def _queue_save(self, save: Save) -> None:
        packing = self.ahead.take(save.ahead_id)
        is_packed = packing is not None and packing.is_whole
        if is_packed:
            self._link.send(Packed(save.save_id))
        self._saves.put(_Queued(save, packing, is_packed))

    def _drop_saves(self, last_save_id: int) -> None:
        """Also while the save thread is held by a call that does not return."""
        self._dropped_saves = max(self._dropped_saves, last_save_id)
        kept: list[_Queued | None] = []
        while True:
            try:
                queued = self._saves.get_nowait()
            except queue.Empty:
                break
            if queued is not None and queued.save.save_id <= last_save_id:
                save = queued.save
                if queued.packing is not None:
                    queued.packing.close()
                if not queued.is_packed:
                    self._link.send(Packed(save.save_id))
                self._link.send(Saved(save.save_id, (DROPPED,) * len(save.block_ids), 0, 0.0))
            else:
                kept.append(queued)
        for queued in kept:
            self._saves.put(queued)

    def _run_lookups(self) -> None:
        while lookups := self._next_lookups():
            started = time.monotonic()
            lookups = [lookup for lookup in lookups if started < lookup.before]
            keys = [
                self._space.key(block_hash)
                for lookup in lookups
                for block_hash in split_hashes(lookup.hashes, lookup.hash_bytes)
            ]
            if not keys:
                continue
            try:
                places = bytes(self._tier.lookup(keys))
                healthy = self._tier.is_healthy()
            except Exception:
                logger.exception("a lookup in the pool failed")
                places, healthy = bytes(len(keys)), False
            elapsed_ms = (time.monotonic() - started) * 1000
            for lookup in lookups:
                num_keys = len(lookup.hashes) // lookup.hash_bytes
                self._link.send(Found(lookup.lookup_id, places[:num_keys], healthy, elapsed_ms))
                places = places[num_keys:]

    def _next_lookups(self) -> list[Lookup]:
        """The next one and, to ask the tier once for all of them, those that wait behind it;
        empty at the end.
        """
        lookup = self._lookups.get()
        lookups: list[Lookup] = []
        num_bytes = 0
        while lookup is not None:
            lookups.append(lookup)
            num_bytes += len(lookup.hashes)
            if num_bytes >= _LOOKUP_BATCH_BYTES or self._lookups.empty():
                return lookups
            lookup = self._lookups.get()
        self._lookups.put(None)
        return lookups

    def _run_saves(self) -> None:
        while (queued := self._saves.get()) is not None:
            save, started = queued.save, time.monotonic()
            statuses: list[str] = []
            try:
                statuses = self._save(queued)
            except Exception:
                logger.exception("a write to the pool failed")
            statuses += [Status.FAILED.value] * (len(save.block_ids) - len(statuses))
            num_stored = sum(
                self._owns(block_id) and status == Status.OK.value
                for block_id, status in zip(save.block_ids, statuses, strict=True)
            )
            num_bytes = num_stored * self._values.num_bytes
            if DROPPED in statuses and not queued.is_packed:
                self._link.send(Packed(save.save_id))
            elapsed_ms = (time.monotonic() - started) * 1000
            self._link.send(Saved(save.save_id, tuple(statuses), num_bytes, elapsed_ms))

    def _owns(self, block_id: int) -> bool:
        """Whether this worker stores it, and no other one that holds the same KV heads."""
        return block_id % self._num_replicas == self._replica

    def _save(self, queued: _Queued) -> list[str]:
        """At most ``blocks_per_batch`` blocks."""
        save = queued.save
        packing = queued.packing or self._begin_packing(save)
        if packing is None:
            return [DROPPED] * len(save.block_ids)
        if save.save_id <= self._dropped_saves:
            packing.close()
            return [DROPPED] * len(save.block_ids)
        own = [i for i, block_id in enumerate(save.block_ids) if self._owns(block_id)]
        statuses = [Status.FAILED]
        try:
            packing.pack_all()
            if not queued.is_packed:
                self._link.send(Packed(save.save_id))
            statuses = self._put(
                [
                    Value(
                        self._space.key(save.hashes[i]),
                        packing.seal(save.block_ids[i], save.hashes[i]),
                        self._values.num_bytes,
                    )
                    for i in own
                ]
            )
        finally:
            # A write that was given up may still read from it.
            failed = Status.FAILED in statuses
            packing.close(time.monotonic() + QUARANTINE_S if failed else None)
        # Of the others' blocks they say how it ended.
        every = [Status.OK.value] * len(save.block_ids)
        for i, status in zip(own, statuses, strict=True):
            every[i] = status.value
        return every

    def _begin_packing(self, save: Save) -> Packing | None:
        slot = self._wait_slot(
            self._write_slots, lambda: save.save_id <= self._dropped_saves or not self._is_running
        )
        if slot is None:
            return None
        return Packing(
            self._values, self._write_slots, slot, list(filter(self._owns, save.block_ids))
        )

    def _put(self, values: list[Value]) -> list[Status]:
        """What finds memory full is tried again for a moment, since room is made in the background;
        nobody waits for it but the next save.
        """
        statuses = self._tier.put(values)
        for delay_s in _RETRY_FULL_S:
            full = [i for i, status in enumerate(statuses) if status is Status.FULL]
            if not full:
                break
            time.sleep(delay_s)
            for i, status in zip(full, self._tier.put([values[i] for i in full]), strict=True):
                statuses[i] = status
        return statuses

    @property
    def _is_running(self) -> bool:
        return self._link.is_alive()

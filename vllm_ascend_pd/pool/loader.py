# SPDX-License-Identifier: Apache-2.0
"""Loads from the pool: values of a tier into blocks.

    main thread ──loads──► read threads:  tier ──get──► staging ──verify, scatter──► pages
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
from vllm_ascend_pd.kv.load import QUARANTINE_S, Load, LoadResult
from vllm_ascend_pd.kv.loader import Loader
from vllm_ascend_pd.pool.messages import PoolBlocks, PoolLoadSpec
from vllm_ascend_pd.pool.tier import Status, SupportsView, Tier, Value
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.pool.values import BlockValues

logger = logging.getLogger(__name__)

_SLOT_POLL_S = 0.002
_MAX_SLOTS_PER_BATCH = 4
"""The tier is asked once for so many staging slots' worth of blocks, to read them in place."""
_CAUSES = {
    Status.MISSING: Cause.EVICTED,
    Status.DAMAGED: Cause.CHECKSUM,
    Status.FAILED: Cause.POOL_FAILED,
}


@dataclass(slots=True, eq=False, kw_only=True)
class PoolLoad(Load):
    """One load; all fields under the lock."""

    spec: PoolLoadSpec
    missing: set[int] = field(default_factory=set)
    """Block ids that have not been loaded."""
    num_batches: int = 0
    """That have not been read to their end."""
    cause: str = ""
    """The first one, of a load that goes on with its other blocks."""

    def __str__(self) -> str:
        num_blocks = len(self.spec.block_ids)
        return f"load {self.load_id} from the pool, {len(self.missing)} of {num_blocks} blocks,"

    def has_tails(self) -> bool:
        return not self.spec.has_tail or self.ended is not None

    def result(self, cause: str, elapsed_ms: float) -> LoadResult:
        cause = self.cause or cause
        failed = tuple(sorted(self.missing)) if cause else ()
        return LoadResult(self.load_id, cause, self.num_bytes, elapsed_ms, failed)


@dataclass(slots=True)
class _Batch:
    """Some blocks of a load, of one KV cache group, that one thread reads."""

    load: PoolLoad
    values: BlockValues
    blocks: PoolBlocks

    @property
    def keys(self) -> list[str]:
        return [self.values.key(block_hash) for block_hash in self.blocks.hashes]


def wait_slot(slots: StagingPool, given_up: Callable[[], bool]) -> Slot | None:
    """``None`` if it was given up first."""
    while not given_up():
        if slot := slots.acquire():
            return slot
        time.sleep(_SLOT_POLL_S)
    return None


class PoolLoader(Loader[PoolLoadSpec, PoolLoad]):
    """Reads values on threads of its own, several blocks at a time."""

    def __init__(
        self,
        tier: Tier,
        values: Sequence[BlockValues],
        slots: StagingPool,
        num_readers: int,
    ) -> None:
        """``values`` are by KV cache group. ``slots`` hold what is read; each holds at least one
        value.
        """
        super().__init__()
        self._tier = tier
        self._values = values
        self._slots = slots
        self._order = count()
        self._batches: queue.PriorityQueue[tuple[int, int, _Batch | None]] = queue.PriorityQueue()
        self._num_readers = num_readers
        self._threads: list[threading.Thread] = []
        self._reading: dict[threading.Thread, _Batch] = {}
        """What each of them reads; its own thread writes, the main thread looks."""

    def start(self) -> None:
        for _ in range(self._num_readers):
            number = len(self._threads)
            thread = threading.Thread(target=self._run, name=f"pd-pool-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _replace_held(self) -> None:
        """Where every reader is held by a call beyond its load's end, as by a disk that hangs, as
        many more read from other tiers; once, for there are no slots for more.
        """
        num_held = sum(batch.load.ended is not None for batch in list(self._reading.values()))
        if num_held == self._num_readers == len(self._threads):
            try:
                self.start()
            except RuntimeError as e:
                logger.warning("the pool is read by no more threads: %s", e)

    def stop(self) -> None:
        for load_id in self._loads:  # a reader that a call holds shall write nothing afterwards
            self.cancel(load_id)
        for _ in self._threads:
            self._batches.put((-1, next(self._order), None))
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def start_load(self, spec: PoolLoadSpec) -> None:
        load = PoolLoad(
            load_id=spec.load_id,
            in_step=spec.in_step,
            timeout_s=spec.timeout_s,
            spec=spec,
            missing=set(spec.block_ids),
        )
        batches = [batch for part in spec.blocks for batch in self._divide(load, part)]
        load.num_batches = len(batches)
        self._add(spec.load_id, [load])
        self._replace_held()
        for batch in batches:
            # A step that waits goes before loads that nobody waits for yet.
            order = (0 if spec.in_step else 1, next(self._order))
            self._batches.put((*order, batch))

    def _divide(self, load: PoolLoad, part: PoolBlocks) -> list[_Batch]:
        values = self._values[part.group]
        num_blocks, blocks_per_slot = len(part.block_ids), self._blocks_per_slot(values)
        num_slots = math.ceil(num_blocks / (blocks_per_slot * self._num_readers))
        length = blocks_per_slot * min(num_slots, _MAX_SLOTS_PER_BATCH)
        runs = [slice(start, start + length) for start in range(0, num_blocks, length)]
        return [
            _Batch(load, values, PoolBlocks(part.hashes[run], part.block_ids[run], part.group))
            for run in runs
        ]

    def _blocks_per_slot(self, values: BlockValues) -> int:
        return self._slots.slot_bytes // values.num_bytes

    # Read threads.

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            self._reading.pop(me, None)
            _, _, batch = self._batches.get()
            if batch is None:
                return
            self._reading[me] = batch
            try:
                self._read(batch)
            except Exception:
                logger.exception("a read from the pool failed")
                batch.load.cause = batch.load.cause or Cause.POOL_FAILED.value
            with batch.load.lock:
                batch.load.num_batches -= 1
                is_last = not batch.load.num_batches
            if is_last:
                self._end(batch.load, "")

    def _read(self, batch: _Batch) -> None:
        left = list(range(len(batch.blocks.block_ids)))
        if isinstance(self._tier, SupportsView):
            left = self._read_in_place(batch, self._tier)
        while left and batch.load.ended is None:
            num_blocks = self._blocks_per_slot(batch.values)
            self._read_staged(batch, left[:num_blocks])
            del left[:num_blocks]

    def _read_in_place(self, batch: _Batch, tier: SupportsView) -> list[int]:
        """Straight from the tier's memory, where that is in reach; what is left to be read."""
        size, left = batch.values.num_bytes, []
        with tier.view(batch.keys, size) as addrs:
            for i, addr in enumerate(addrs):
                if not addr or self._unpack(batch, i, Region(addr, size), 0) is not Status.OK:
                    left.append(i)
        return left

    def _read_staged(self, batch: _Batch, indices: list[int]) -> None:
        """At most what one slot holds."""
        load, size, keys = batch.load, batch.values.num_bytes, batch.keys
        slot = wait_slot(self._slots, lambda: load.ended is not None)
        if slot is None:
            return
        with slot:
            targets = [
                Value(keys[index], slot.addr + i * size, size) for i, index in enumerate(indices)
            ]
            # What a stalled owner sends may land when it goes on, also after the call has raised.
            slot.quarantine(QUARANTINE_S)
            statuses = self._tier.get(targets)
            if Status.FAILED not in statuses:
                slot.quarantine(0)
            damaged = self._place(batch, indices, statuses, slot.region)
        if damaged:
            # The first value of a key stays, so a bad one would be found for ever.
            logger.warning("the pool had %d values that do not verify; removed", len(damaged))
            self._tier.remove([keys[index] for index in damaged])

    def _place(
        self, batch: _Batch, indices: list[int], statuses: list[Status], memory: Region
    ) -> list[int]:
        """What was read side by side, until the load has ended; which of it is not what was put."""
        load, damaged = batch.load, []
        for i, index in enumerate(indices):
            status: Status | None = statuses[i]
            if status is Status.OK:
                status = self._unpack(batch, index, memory, i * batch.values.num_bytes)
            if status is None:
                return []
            if status is not Status.OK:
                load.cause = load.cause or _CAUSES[status].value
            if status is Status.DAMAGED:
                damaged.append(index)
        return damaged

    def _unpack(self, batch: _Batch, index: int, memory: Region, offset: int) -> Status | None:
        """Put a value into the pages of block ``index`` of the batch; ``None`` if its load has
        ended. Under the load's lock, so that its end waits for the copy: not one byte comes after.
        """
        load, values = batch.load, batch.values
        block_id, block_hash = batch.blocks.block_ids[index], batch.blocks.hashes[index]
        with load.lock:
            if load.ended is not None:
                return None
            status = values.unpack(block_id, block_hash, memory, offset)
            if status is Status.OK:
                load.num_bytes += values.num_bytes
                load.missing.discard(block_id)
        return status

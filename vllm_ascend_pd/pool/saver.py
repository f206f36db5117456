# SPDX-License-Identifier: Apache-2.0
"""Saves: blocks into a tier, as values.

save thread:   pages ──pack──► staging ──put──► tier
pack thread:   the same packing, while a step computes (`pool.packed_slot`)
"""

from __future__ import annotations

import queue
import threading
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.kv.load import QUARANTINE_S
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.pool.loader import wait_slot
from vllm_ascend_pd.pool.messages import DROPPED, Message, Packed, Save, Saved
from vllm_ascend_pd.pool.packed_slot import PackAhead, PackedSlot
from vllm_ascend_pd.pool.tier import Status, Tier, Value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.backends.staging import StagingPool
    from vllm_ascend_pd.pool.values import BlockValues

logger = limited_logger(__name__)

_RETRY_FULL_S = (0.02, 0.04, 0.08)


@dataclass(frozen=True, slots=True)
class Replica:
    """Of ``count`` workers that hold the same share of the KV heads, this one: each stores its part
    of the blocks.
    """

    index: int = 0
    count: int = 1

    def owns(self, block_id: int) -> bool:
        return block_id % self.count == self.index


@dataclass(frozen=True, slots=True)
class _Queued:
    """A save, and what has been packed ahead of it; ``is_packed`` once that has been said."""

    save: Save
    packing: PackedSlot | None
    is_packed: bool


class _Increase:
    """By how much a count has grown since the last call. Save thread."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._last = 0

    def __call__(self) -> int:
        self._last, before = self._count(), self._last
        return self._last - before


class Saver:
    """Stores what it is asked to, in order; each save is answered with ``Packed`` and ``Saved``."""

    def __init__(
        self,
        tier: Tier,
        values: Sequence[BlockValues],
        slots: StagingPool,
        ahead_slots: StagingPool | None,
        replica: Replica,
        answer: Callable[[Message], None],
    ) -> None:
        """Without ``ahead_slots``, blocks are packed only once their step has been confirmed.
        ``answer``: from any thread.
        """
        self._tier = tier
        self._values = values
        self._slots = slots
        self._owns = replica.owns
        self._answer = answer
        self._saves: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._dropped_saves = 0  # written by the link thread, read by the save thread
        self._stopping = False
        self._new_over_share = _Increase(lambda: tier.num_over_share)
        self._new_file_errors = _Increase(lambda: tier.num_file_errors)
        self.ahead = PackAhead(values, ahead_slots, replica.owns)
        targets = [("pd-pool-save", self._run)]
        if ahead_slots is not None:
            targets.append(("pd-pool-pack", self.ahead.run))
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True) for name, target in targets
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """A thread that a call on the tier holds is left behind."""
        self._stopping = True
        self._saves.put(None)
        self.ahead.stop()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(2.0)

    def save(self, save: Save) -> None:
        """Any thread; returns at once."""
        with ExitStack() as held:
            packing = self.ahead.take(save.ahead_id)
            if packing is not None:
                held.enter_context(packing)
            is_packed = packing is not None and packing.is_whole
            if is_packed:
                self._answer(Packed(save.save_id))
            self._saves.put(_Queued(save, packing, is_packed))
            held.pop_all()

    def drop(self, last_save_id: int) -> None:
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
                with queued.packing or nullcontext():
                    if not queued.is_packed:
                        self._answer(Packed(save.save_id))
                self._answer(Saved(save.save_id, (DROPPED,) * len(save.block_ids), 0, 0.0))
            else:
                kept.append(queued)
        for queued in kept:
            self._saves.put(queued)

    def _run(self) -> None:
        while (queued := self._saves.get()) is not None:
            save, started = queued.save, time.monotonic()
            statuses, num_bytes = [Status.FAILED.value] * len(save.block_ids), 0
            try:
                statuses = self._save(queued)
                num_bytes = self._num_bytes(save, statuses)
            except Exception:
                logger.exception("a write to the pool failed")
            if DROPPED in statuses and not queued.is_packed:
                self._answer(Packed(save.save_id))
            elapsed_ms = (time.monotonic() - started) * 1000
            self._answer(
                Saved(
                    save.save_id,
                    tuple(statuses),
                    num_bytes,
                    elapsed_ms,
                    self._new_over_share(),
                    self._new_file_errors(),
                )
            )

    def _num_bytes(self, save: Save, statuses: Sequence[str]) -> int:
        """That were stored by this worker."""
        num_stored = sum(
            self._owns(block_id) and status == Status.OK.value
            for block_id, status in zip(save.block_ids, statuses, strict=True)
        )
        return num_stored * self._values[save.group].num_bytes

    def _save(self, queued: _Queued) -> list[str]:
        """At most what one slot holds."""
        save = queued.save
        packing = queued.packing or self._begin_packing(save)
        if packing is None:
            return [DROPPED] * len(save.block_ids)
        with packing:
            is_lost = self._stopping and not packing.is_whole  # its pages may be gone
            if is_lost or save.save_id <= self._dropped_saves:
                return [DROPPED] * len(save.block_ids)
            packing.pack_all()
            if not queued.is_packed:
                self._answer(Packed(save.save_id))
            return self._store(save, packing)

    def _store(self, save: Save, packing: PackedSlot) -> list[str]:
        values = self._values[save.group]
        own = [i for i, block_id in enumerate(save.block_ids) if self._owns(block_id)]
        sealed = [
            Value(
                values.key(save.hashes[i]),
                packing.seal(save.block_ids[i], save.hashes[i]),
                values.num_bytes,
                save.tenants[i] if save.tenants else "",
            )
            for i in own
        ]
        # A write that was given up may still read from it, also after the call has raised.
        packing.quarantine(QUARANTINE_S)
        statuses = self._put(sealed)
        if Status.FAILED not in statuses:
            packing.quarantine(0)
        # Of the others' blocks they say how it ended.
        every = [Status.OK.value] * len(save.block_ids)
        for i, status in zip(own, statuses, strict=True):
            every[i] = status.value
        return every

    def _begin_packing(self, save: Save) -> PackedSlot | None:
        values, own = self._values[save.group], list(filter(self._owns, save.block_ids))
        slot = wait_slot(self._slots, lambda: save.save_id <= self._dropped_saves or self._stopping)
        return None if slot is None else PackedSlot(values, slot, own)

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

# SPDX-License-Identifier: Apache-2.0
"""Blocks that become full are stored in the pool, once the step that filled them is known good.

    build_step N      which requests compute how far, and what of the new
                      full blocks may be packed while it computes           (note_step)
    output of step N  bad blocks are evicted, their requests preempted; what is left is right:
                      pin the new full blocks, send a Save                  (confirm)
    Packed            by all workers, perhaps during the step: unpin        (on_packed)
    Saved             by all: known to be in the pool, or why not           (on_saved)

On eviction: what is right is only noted, and those that the engine would evict next are sent.

A request is never held back for a save: its blocks are pinned by a reference of our own, for the
time of a copy.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vllm_ascend_pd.config import PoolSave
from vllm_ascend_pd.engine.scheduler.evictions import Evictable, Evictions
from vllm_ascend_pd.engine.vllm_api.groups import block_table, known_end
from vllm_ascend_pd.engine.vllm_api.types import Request
from vllm_ascend_pd.kv.breaker import Breaker, BreakerState
from vllm_ascend_pd.pool.fold import fold_saved
from vllm_ascend_pd.pool.messages import (
    DROPPED,
    AheadSpec,
    DropAhead,
    DropSaves,
    Packed,
    Save,
    Saved,
)
from vllm_ascend_pd.pool.tier import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
    from vllm_ascend_pd.engine.vllm_api.types import BlockStored, KVCacheBlock, SchedulerOutput
    from vllm_ascend_pd.pool.known_keys import KnownKeys
    from vllm_ascend_pd.pool.messages import Message


logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_PINNED_SHARE = 8
"""At most one block in so many is pinned for saves."""
_BLOCK_ID = attrgetter("block_id")
_EVICTED = "evicted"
"""Outcome of a block that was evicted before it could be stored."""


@dataclass(slots=True)
class _Save:
    """A save on its way. ``pinned`` is empty once its blocks have been copied."""

    pinned: list[KVCacheBlock]
    hashes: list[bytes]
    events: list[BlockStored | None]
    sent_at: float
    ahead_id: int = 0
    is_late: bool = False
    is_forgotten: bool = False
    """Whether it stores under names that nobody asks for any more."""
    num_packed: int = 0
    """Workers that have copied their share."""
    answers: list[Saved] = field(default_factory=list)


class _Step(msgspec.Struct):
    requests: list[tuple[Request, int, int]]
    """Those that may have full blocks to store after it: request, its number of preemptions, how
    many of its tokens are computed then.
    """
    ahead: tuple[AheadSpec, ...] = ()
    """Blocks of prompts that may be packed while it computes them."""

    def ahead_ids(self) -> dict[int, int]:
        """By block id."""
        return {block_id: spec.ahead_id for spec in self.ahead for block_id in spec.block_ids}


class SaveBounds(NamedTuple):
    blocks_per_save: int
    """What a worker packs at a time."""
    blocks_per_step: int
    """How many blocks one step may take."""


class Saves:
    """Scheduler thread. ``send`` hands a message to every worker and never blocks."""

    def __init__(
        self,
        common: Common,
        known: KnownKeys,
        events: PoolEvents,
        send: Callable[[Message], None],
        bounds: SaveBounds,
        not_found: Container[str],
        clock: Callable[[], float] = time.monotonic,
        name: Callable[[bytes], bytes] = bytes,
    ) -> None:
        """``name`` is what a block is called in the pool, by its hash; ``not_found`` are the ids of
        requests of which the pool had nothing when they came.
        """
        config = common.config.pool
        assert config is not None
        self._name = name
        self._not_found = not_found
        self._num_workers = common.sharding.num_workers
        self._send = send
        self._pool = common.manager.block_pool
        self._manager = common.manager
        self._group = common.group
        self._known = known
        self._events = events
        self._config = config
        self._stats = common.stats
        self._blocks_per_save = bounds.blocks_per_save
        self._clock = clock
        self._max_pinned = max(1, self._pool.num_gpu_blocks // _PINNED_SHARE)
        # With memory this short, blocks are evicted unsaved rather than kept from a step.
        self._min_free = min(bounds.blocks_per_step, self._max_pinned)
        self._evictions: Evictions | None = None
        if config.save is PoolSave.EVICTION:
            self._evictions = Evictions(self._pool, bounds.blocks_per_step)
        self.breaker = Breaker(
            config.breaker_failures,
            config.probe_interval_s,
            slow_s=config.breaker_slow_ms / 1000,
            clock=clock,
        )
        self._ids = count(1)
        self._last_id = 0
        self._ahead_ids = count(1)
        self._packs_ahead = config.put and self._evictions is None
        self._steps: deque[_Step] = deque()
        self._saved: dict[str, int] = {}
        self._under_way: dict[int, _Save] = {}
        self._pending_hashes: set[bytes] = set()
        self._num_pinned = 0
        self._backoff_s = _FIRST_BACKOFF_S
        self._resume_at = 0.0

    @property
    def num_pinned(self) -> int:
        return self._num_pinned

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def note_step(
        self, output: SchedulerOutput, requests: dict[str, Request]
    ) -> tuple[AheadSpec, ...]:
        """A step is about to go out; ``num_computed_tokens`` are still those before it. What it may
        pack while it computes.
        """
        resumes = self._clock() >= self._resume_at
        announces = self._packs_ahead and resumes and self.breaker.closed
        step = _Step([])
        self._steps.append(step)
        block_ids: list[int] = []
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = requests[request_id]
            num_before = request.num_computed_tokens
            num_after = num_before + num_scheduled
            if num_after // self._group.block_size > self._saved.get(request_id, 0):
                step.requests.append((request, request.num_preemptions, num_after))
            if announces and num_before < known_end(request):
                start = num_before // self._group.block_size
                stop = min(num_after, known_end(request)) // self._group.block_size
                if request_id not in self._not_found:
                    start = self._first_wanted(request, start, stop)
                table = block_table(self._manager, request, self._group)
                block_ids.extend(map(_BLOCK_ID, table[start:stop]))
        if block_ids:
            step.ahead = self._announce(block_ids)
        return step.ahead

    def _announce(self, block_ids: list[int]) -> tuple[AheadSpec, ...]:
        """Nothing is lost if the step turns out wrong, or some of them are not stored after all."""
        specs = []
        while block_ids:
            part = tuple(block_ids[: self._blocks_per_save])
            del block_ids[: self._blocks_per_save]
            specs.append(AheadSpec(next(self._ahead_ids), part, self._group.id))
        return tuple(specs)

    def _first_wanted(self, request: Request, start: int, stop: int) -> int:
        """The first of these blocks that is not somebody else's to store, or known to be stored."""
        hashes = request.block_hashes
        start = max(start, self._saved.get(request.request_id, 0))
        while start < stop and not self._is_wanted(hashes[start]):
            start += 1
        return start

    def confirm(self) -> None:
        """The oldest step is over and what it left is right: store what has become full."""
        if not self._steps:
            return
        step = self._steps.popleft()
        if not self._config.put:
            return
        may_store = self._clock() >= self._resume_at
        packed: dict[int, _Save] = {}
        ahead_ids = step.ahead_ids() if step.ahead else {}
        for request, num_preemptions, num_computed in step.requests:
            if request.num_preemptions == num_preemptions and not request.is_finished():
                if self._evictions is not None:
                    self._note_good(request, num_computed, self._evictions)
                elif may_store:
                    self._store(request, num_computed, ahead_ids, packed)
        for save in packed.values():
            self._send_save(save)
        if len(packed) < len(step.ahead):
            self._send(DropAhead(step.ahead[-1].ahead_id))
        if self._evictions is not None and may_store:
            self._store_next(self._evictions)

    def skip(self, request: Request, num_tokens: int) -> None:
        """These leading tokens are somebody else's to store. On eviction they are ours too: he may
        have stored nothing yet.
        """
        if self._evictions is None:
            self._saved[request.request_id] = num_tokens // self._group.block_size

    def _new_full_blocks(
        self, request: Request, num_computed: int
    ) -> tuple[int, int, Sequence[KVCacheBlock]]:
        """Those from ``start`` to ``end`` have not been seen; the request's block table."""
        start = self._saved.get(request.request_id, 0)
        end = min(num_computed, request.num_tokens) // self._group.block_size
        if not self._config.put_decoded:
            end = min(end, known_end(request) // self._group.block_size)
        end = min(end, len(request.block_hashes))
        if start >= end:
            return start, start, ()
        table = block_table(self._manager, request, self._group)
        return start, min(end, len(table)), table

    def _store(
        self,
        request: Request,
        num_computed: int,
        ahead_ids: dict[int, int],
        packed: dict[int, _Save],
    ) -> None:
        """Pin the request's new full blocks, as many as may be pinned now. Those that the step may
        have packed, under ``ahead_ids``, go into ``packed``, the others are sent.
        """
        start, end, table = self._new_full_blocks(request, num_computed)
        if start == end:
            return
        save = self._new_save()
        for index in range(start, end):
            block, block_hash = table[index], bytes(request.block_hashes[index])
            # A block that is not in the prefix cache has just been found bad.
            if block.is_null or block.block_hash is None:
                break
            if self._is_wanted(block_hash):
                if self._num_pinned >= self._max_pinned or not self._may_send():
                    break
                event = self._events.make_stored(request, index)
                if ahead_id := ahead_ids.get(block.block_id):
                    if ahead_id not in packed:
                        packed[ahead_id] = self._new_save(ahead_id)
                    self._add(packed[ahead_id], block, block_hash, event)
                else:
                    self._add(save, block, block_hash, event)
                    save = self._send_full(save)
            start = index + 1
        self._send_save(save)
        self._saved[request.request_id] = start

    def _note_good(self, request: Request, num_computed: int, evictions: Evictions) -> None:
        start, end, table = self._new_full_blocks(request, num_computed)
        for index in range(start, end):
            block = table[index]
            if block.is_null or block.block_hash is None:
                break
            if not evictions.is_good(block):
                event = self._events.make_stored(request, index)
                before = evictions.note_good(block, event)
                if before is not None and self._is_wanted(before.content_hash):
                    self._stats.add("pool_put_blocks", label=_EVICTED)
            self._saved[request.request_id] = index + 1

    def _store_next(self, evictions: Evictions) -> None:
        """Pin and send what would be evicted next, where that leaves enough for the next step."""
        room = min(
            self._max_pinned - self._num_pinned,
            self._pool.get_num_free_blocks() - self._min_free,
        )
        chosen: list[Evictable] = []
        for evictable in evictions.next_ones():
            if self._is_wanted(evictable.content_hash):
                if len(chosen) >= room or not self._may_send():
                    break
                chosen.append(evictable)
        save = self._new_save()
        for evictable in chosen:
            self._add(save, evictable.block, evictable.content_hash, evictable.event)
            save = self._send_full(save)
        self._send_save(save)

    def _is_wanted(self, block_hash: bytes) -> bool:
        return block_hash not in self._pending_hashes and block_hash not in self._known

    def _may_send(self) -> bool:
        """While it is bypassed, one save now and then is the probe."""
        return self.breaker.closed or (not self._under_way and self.breaker.take_probe())

    def _new_save(self, ahead_id: int = 0) -> _Save:
        return _Save([], [], [], self._clock(), ahead_id)

    def _add(
        self, save: _Save, block: KVCacheBlock, block_hash: bytes, event: BlockStored | None
    ) -> None:
        self._pool.touch([block])
        self._num_pinned += 1
        self._pending_hashes.add(block_hash)
        save.pinned.append(block)
        save.hashes.append(block_hash)
        save.events.append(event)

    def _send_full(self, save: _Save) -> _Save:
        """Send it if nothing more fits; the one to go on with."""
        if len(save.pinned) < self._blocks_per_save:
            return save
        self._send_save(save)
        return self._new_save()

    def _send_save(self, save: _Save) -> None:
        if not save.pinned:
            return
        self._last_id = next(self._ids)
        self._under_way[self._last_id] = save
        block_ids = tuple(block.block_id for block in save.pinned)
        names = tuple(map(self._name, save.hashes))
        self._send(Save(self._last_id, block_ids, names, save.ahead_id, self._group.id))

    def on_packed(self, message: Packed) -> None:
        save = self._under_way.get(message.save_id)
        if save is None:
            return
        save.num_packed += 1
        if save.num_packed == self._num_workers:
            self._unpin(save)

    def on_saved(self, message: Saved) -> None:
        save = self._under_way.get(message.save_id)
        if save is None:
            return
        save.answers.append(message)
        if len(save.answers) < self._num_workers:
            return
        del self._under_way[message.save_id]
        message = fold_saved(save.answers)
        self._unpin(save)
        self._pending_hashes.difference_update(save.hashes)
        for block_hash, event, status in zip(
            save.hashes, save.events, message.statuses, strict=True
        ):
            self._stats.add("pool_put_blocks", label=status)
            if status == Status.OK.value and not save.is_forgotten:
                self._events.stored(block_hash, event)
        self._stats.add("pool_put_bytes", message.num_bytes)
        self._stats.add("pool_put_ms", message.elapsed_ms)
        self._back_off(Status.FULL.value in message.statuses)
        if save.is_late:
            return
        if DROPPED not in message.statuses or self.breaker.state is BreakerState.HALF_OPEN:
            self._record(Status.FAILED.value not in message.statuses, message.elapsed_ms / 1000)

    def tick(self) -> None:
        """Once a step: a save that takes too long is a failure, before it has ended."""
        if not self._under_way:
            return
        late_before = self._clock() - self._config.breaker_slow_ms / 1000
        for save in self._under_way.values():
            if save.sent_at < late_before and not save.is_late:
                save.is_late = True
                self._record(False, 0.0)

    def _back_off(self, full: bool) -> None:
        if not full:
            self._backoff_s = _FIRST_BACKOFF_S
            return
        self._resume_at = self._clock() + self._backoff_s
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s)

    def _record(self, ok: bool, elapsed_s: float) -> None:
        if not self.breaker.record(ok, elapsed_s):
            return
        if self.breaker.closed:
            logger.info("the pool takes blocks again; writes go on")
            return
        self._events.all_gone()
        self._stats.add("pool_breaker_opened", label="put")
        logger.warning(
            "the pool does not take blocks, or slowly; nothing is written to it for %.1f s",
            self._config.probe_interval_s,
        )
        self._send(DropSaves(self._last_id))

    def _unpin(self, save: _Save) -> None:
        self._num_pinned -= len(save.pinned)
        if self._evictions is not None:
            self._evictions.give_back(save.pinned)
        else:
            self._pool.free_blocks(reversed(save.pinned))
        save.pinned = []

    def drop(self) -> None:
        """Give up what has not been copied yet; ``num_pinned`` says when that is done."""
        if self._num_pinned:
            self._send(DropSaves(self._last_id))

    def forget_all(self) -> None:
        """What is on its way counts for nothing: the pool is to be taken for empty."""
        for save in self._under_way.values():
            save.is_forgotten = True

    def forget(self, request: Request) -> None:
        """The request has ended, or has been preempted."""
        self._saved.pop(request.request_id, None)

# SPDX-License-Identifier: Apache-2.0
"""Blocks that become full are stored in the pool, once the step that filled them is known good.

    build_step N      which requests compute how far, and what of the new
                      full blocks may be packed while it computes           (note_step)
    output of step N  bad blocks are evicted, their requests preempted; what is left is right:
                      pin the new full blocks, send a Save                  (confirm)
    Packed            by all workers, perhaps during the step: unpin        (on_packed)
    Saved             by all: known to be in the pool, or why not           (on_saved)

What cannot be sent now is kept in mind, and sent while it is still in the prefix cache: a request
may end before, or give a block up because its layers look back a little only.

On eviction: what is right is only noted, and those that the engine would evict next are sent.

A request is never held back for a save: its blocks are pinned by a reference of our own, for the
time of a copy.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vllm_ascend_pd.config import PoolSave
from vllm_ascend_pd.engine.scheduler.evictions import Evictions, GoodBlock
from vllm_ascend_pd.engine.vllm_api.blocks import key_of, split_key
from vllm_ascend_pd.engine.vllm_api.groups import block_table, known_end, num_entered
from vllm_ascend_pd.engine.vllm_api.hashes import salt_of_client
from vllm_ascend_pd.engine.vllm_api.requests import num_landed_tokens
from vllm_ascend_pd.engine.vllm_api.status import is_completed
from vllm_ascend_pd.engine.vllm_api.types import Request
from vllm_ascend_pd.kv.breaker import Breaker, BreakerState
from vllm_ascend_pd.pool.fold import fold_saved
from vllm_ascend_pd.pool.keys import tenant_of
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
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, SchedulerOutput
    from vllm_ascend_pd.kv.span import KVGroup
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
    """A save on its way, of blocks of one KV cache group. ``pinned`` is empty once they have been
    copied.
    """

    group: int
    sent_at: float
    ahead_id: int = 0
    blocks: list[GoodBlock] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    """In the pool."""
    pinned: list[KVCacheBlock] = field(default_factory=list)
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
        self._blocks = common.manager.block_pool
        self._manager = common.manager
        self._groups = common.groups
        self._unit_size = common.block_size
        self._known = known
        self._events = events
        self._config = config
        self._tells_tenants = bool(config.shares)
        self._stats = common.stats
        self._blocks_per_save = bounds.blocks_per_save
        self._clock = clock
        self._max_pinned = max(1, self._blocks.num_gpu_blocks // _PINNED_SHARE)
        # With memory this short, blocks are evicted unsaved rather than kept from a step.
        self._min_free = min(bounds.blocks_per_step, self._max_pinned)
        self._evictions: Evictions | None = None
        if config.save is PoolSave.EVICTION:
            self._evictions = Evictions(self._blocks, bounds.blocks_per_step)
        self.breaker = Breaker(
            config.breaker_failures,
            config.probe_interval_s,
            slow_s=config.breaker_slow_ms / 1000,
            clock=clock,
        )
        self._ids = count(1)
        self._last_id = 0
        self._ahead_ids = count(1)
        self._packs_ahead = self._evictions is None
        self._steps: deque[_Step] = deque()
        self._saved: dict[str, int] = {}
        """By request id: so many of its leading units have been looked at."""
        self._waiting: OrderedDict[int, GoodBlock] = OrderedDict()
        """By block id: to be sent as soon as that may be."""
        self._under_way: dict[int, _Save] = {}
        self._pending: set[bytes] = set()
        self.num_pinned = 0
        self._ended_at = 0.0
        """When a save has ended last."""
        self._backoff_s = _FIRST_BACKOFF_S
        self._resume_at = 0.0

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    @property
    def num_waiting(self) -> int:
        """Blocks that are to be sent as soon as that may be."""
        return len(self._waiting)

    def note_step(
        self, output: SchedulerOutput, requests: dict[str, Request]
    ) -> tuple[AheadSpec, ...]:
        """A step is about to go out; ``num_computed_tokens`` are still those before it. What it may
        pack while it computes.
        """
        if not self._config.put:
            return ()
        resumes = self._clock() >= self._resume_at
        announces = self._packs_ahead and resumes and self.breaker.closed
        step = _Step([])
        self._steps.append(step)
        block_ids: list[list[int]] = [[] for _ in self._groups]
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = requests[request_id]
            num_before = request.num_computed_tokens
            num_after = num_before + num_scheduled
            if not self._config.put_decoded:
                num_after = min(num_after, known_end(request))
            if num_after // self._unit_size <= self._saved.get(request_id, 0):
                continue  # so most requests in most steps
            step.requests.append((request, request.num_preemptions, num_after))
            if announces and num_before < known_end(request):
                start = num_before // self._unit_size
                stop = min(num_after, known_end(request)) // self._unit_size
                for group, ids in zip(self._groups, block_ids, strict=True):
                    indices = group.blocks_of(start, stop)
                    if request_id not in self._not_found:
                        indices = self._wanted(request, group, indices)
                    table = block_table(self._manager, request, group)
                    table = table[indices.start : indices.stop]
                    if group.state:  # there is one where the step stops
                        table = [block for block in table if not block.is_null]
                    ids.extend(map(_BLOCK_ID, table))
        step.ahead = self._announce(block_ids)
        return step.ahead

    def _announce(self, block_ids: list[list[int]]) -> tuple[AheadSpec, ...]:
        """Nothing is lost if the step turns out wrong, or some of them are not stored after all."""
        size = self._blocks_per_save
        return tuple(
            AheadSpec(next(self._ahead_ids), tuple(ids[start : start + size]), group)
            for group, ids in enumerate(block_ids)
            for start in range(0, len(ids), size)
        )

    def _wanted(self, request: Request, group: KVGroup, indices: range) -> range:
        """From the first of these blocks that is not somebody else's to store, or known to be
        stored.
        """
        num_saved = self._saved.get(request.request_id, 0) * group.blocks_per_unit
        start, stop = max(indices.start, num_saved), indices.stop
        while start < stop and not self._is_wanted(key_of(request, start, group)):
            start += 1
        return range(start, stop)

    def confirm(self) -> None:
        """The oldest step is over and what it left is right: store what has become full."""
        if not self._steps:
            return
        step = self._steps.popleft()
        for request, num_preemptions, num_computed in step.requests:
            if request.num_preemptions == num_preemptions and not request.is_finished():
                self._note_good(request, num_computed)
        may_store = self._clock() >= self._resume_at
        num_packed = 0
        if self._evictions is None:
            if may_store and self._waiting:
                num_packed = self._store_waiting(step.ahead_ids())
        elif may_store:
            self._store_next(self._evictions)
        if num_packed < len(step.ahead):
            self._send(DropAhead(step.ahead[-1].ahead_id))

    def store_waiting(self) -> None:
        """Between steps, of which none may follow: what could not be pinned so far."""
        if self._waiting and self._clock() >= self._resume_at:
            self._store_waiting({})

    def skip(self, request: Request, num_tokens: int) -> None:
        """These leading tokens are somebody else's to store. On eviction they are ours too: he may
        have stored nothing yet.
        """
        if self._evictions is None:
            self._saved[request.request_id] = num_tokens // self._unit_size

    def _note_good(self, request: Request, num_computed: int) -> None:
        """The units that the request has filled since the last time. It still has all of them,
        unless it was admitted without: it gives up none before the step after this one. A scheduler
        that runs ahead enters what is full with the next step of the request, or with its end.
        """
        start = self._saved.get(request.request_id, 0)
        end = min(num_computed, request.num_tokens) // self._unit_size
        if not self._config.put_decoded:
            end = min(end, known_end(request) // self._unit_size)
        end = self._cached_end(request, start, min(end, self._num_hashed(request)))
        if start >= end:
            return
        for group in self._groups:
            indices = group.blocks_of(start, end)
            table = block_table(self._manager, request, group)[indices.start : indices.stop]
            for index, block in enumerate(table, indices.start):
                self._note_good_block(request, index, group, block)
        self._saved[request.request_id] = end

    def _cached_end(self, request: Request, start: int, end: int) -> int:
        """Up to where its blocks are in the prefix cache, which all groups enter at once."""
        if not any(group.keeps_all for group in self._groups):
            entered = (g.unit_of(num_entered(self._manager, request, g)) for g in self._groups)
            return min(end, *entered)
        for group in self._groups:
            if group.keeps_all:
                indices = group.blocks_of(start, end)
                table = block_table(self._manager, request, group)[indices.start : indices.stop]
                not_yet = (i for i, b in enumerate(table, indices.start) if b.block_hash is None)
                end = next(map(group.unit_of, not_yet), end)
        return end

    def _num_hashed(self, request: Request) -> int:
        """Units."""
        return len(request.block_hashes) // self._groups[0].hashes_per_unit

    def _note_good_block(
        self, request: Request, index: int, group: KVGroup, block: KVCacheBlock
    ) -> None:
        key, evictions = block.block_hash, self._evictions
        if key is None or block.is_null:
            return  # of windows vLLM may have been asked to cache only some blocks
        is_noted = evictions is not None and evictions.is_good(block)
        if is_noted or (evictions is None and not self._is_wanted(key)):
            return
        event = self._events.make_stored(request, index, group.id)
        tenant = tenant_of(salt_of_client(request)) if self._tells_tenants else ""
        good = GoodBlock(block, key, event, tenant)
        if evictions is not None:
            before = evictions.note_good(good)
        else:
            before = self._waiting.get(block.block_id)
            self._waiting[block.block_id] = good
        if before is not None:
            self._count_if_evicted(before)

    def _count_if_evicted(self, good: GoodBlock) -> None:
        if not good.is_current() and self._is_wanted(good.block_hash):
            self._stats.add("pool_put_blocks", label=_EVICTED)

    def _room(self) -> int:
        """So many blocks that nobody else uses may be pinned and leave enough for the next step."""
        return self._blocks.get_num_free_blocks() - self._min_free

    def _store_waiting(self, ahead_ids: dict[int, int]) -> int:
        """Pin and send what waits, as many blocks as may be pinned now. Those that the step may
        have packed, under ``ahead_ids``, are asked for by these; how many of the ids were used.
        """
        chosen: list[GoodBlock] = []
        seen: set[bytes] = set()
        room = self._room()
        is_closed = self.breaker.closed
        while self._waiting and self.num_pinned + len(chosen) < self._max_pinned:
            block_id, good = next(iter(self._waiting.items()))
            if good.is_current() and self._is_wanted(good.block_hash):
                is_used = good.block.ref_cnt > 0
                if good.block_hash in seen:
                    pass
                elif not is_used and room <= 0:
                    self._stats.add("pool_put_blocks", label=_EVICTED)  # which may be any moment
                elif is_closed or self._may_send():
                    seen.add(good.block_hash)
                    chosen.append(good)
                    room -= not is_used
                else:
                    break
            else:
                self._count_if_evicted(good)
            del self._waiting[block_id]
        return self._send_blocks(chosen, ahead_ids)

    def _store_next(self, evictions: Evictions) -> None:
        """Pin and send what would be evicted next, where that leaves enough for the next step."""
        room = min(self._max_pinned - self.num_pinned, self._room())
        chosen: list[GoodBlock] = []
        for good in evictions.next_ones():
            if self._is_wanted(good.block_hash):
                if len(chosen) >= room or not self._may_send():
                    break
                chosen.append(good)
        self._send_blocks(chosen, {})

    def _is_wanted(self, key: bytes) -> bool:
        return key not in self._pending and key not in self._known

    def _may_send(self) -> bool:
        """While it is bypassed, one save now and then is the probe."""
        return self.breaker.closed or (not self._under_way and self.breaker.take_probe())

    def _send_blocks(self, chosen: Sequence[GoodBlock], ahead_ids: dict[int, int]) -> int:
        """Those of one group, or of one of ``ahead_ids``, go together."""
        saves: dict[tuple[int, int], _Save] = {}
        self._blocks.touch([good.block for good in chosen])
        self.num_pinned += len(chosen)
        for good in chosen:
            block_hash, group = split_key(good.block_hash)
            place = ahead_ids.get(good.block.block_id, 0), group
            save = saves.get(place)
            if save is None or len(save.blocks) == self._blocks_per_save:
                if save is not None:
                    self._send_save(save)
                save = saves[place] = _Save(group, self._clock(), place[0])
            self._pending.add(good.block_hash)
            save.blocks.append(good)
            save.names.append(self._name(block_hash))
            save.pinned.append(good.block)
        for save in saves.values():
            self._send_save(save)
        return sum(ahead_id > 0 for ahead_id, _ in saves)

    def _send_save(self, save: _Save) -> None:
        self._last_id = next(self._ids)
        self._under_way[self._last_id] = save
        block_ids = tuple(good.block.block_id for good in save.blocks)
        tenants = tuple(good.tenant for good in save.blocks) if self._tells_tenants else ()
        self._send(
            Save(self._last_id, block_ids, tuple(save.names), save.ahead_id, save.group, tenants)
        )

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
        self._ended_at = self._clock()
        message = fold_saved(save.answers)
        self._unpin(save)
        stored = Status.OK.value
        for good, status in zip(save.blocks, message.statuses, strict=True):
            self._pending.discard(good.block_hash)
            if status == stored and not save.is_forgotten:
                self._events.stored(good.block_hash, good.event)
        for status, num_blocks in Counter(message.statuses).items():
            self._stats.add("pool_put_blocks", num_blocks, status)
        self._stats.add("pool_put_bytes", message.num_bytes)
        self._stats.add("pool_put_ms", message.elapsed_ms)
        if message.num_over_share:
            self._stats.add("pool_over_share_blocks", message.num_over_share)
        if message.num_file_errors:
            self._stats.add("pool_file_errors", message.num_file_errors)
        self._back_off(Status.FULL.value in message.statuses)
        if save.is_late:
            return
        if DROPPED not in message.statuses or self.breaker.state is BreakerState.HALF_OPEN:
            ok = {Status.FAILED.value, DROPPED}.isdisjoint(message.statuses)
            elapsed_s = message.elapsed_ms / 1000
            why = f"a write took {elapsed_s:.1f} s" if ok else "see the workers' logs"
            self._record(ok, elapsed_s, why)

    def tick(self) -> None:
        """Once a step: a save that takes too long is a failure, before it has ended. While others
        end, it is in line behind them.
        """
        slow_s = self._config.breaker_slow_ms / 1000
        late_before = self._clock() - slow_s
        if not self._under_way or self._ended_at >= late_before:
            return
        for save in self._under_way.values():
            if save.sent_at < late_before and not save.is_late:
                save.is_late = True
                self._record(False, 0.0, f"a write has not ended in {slow_s:g} s")

    def _back_off(self, full: bool) -> None:
        if not full:
            self._backoff_s = _FIRST_BACKOFF_S
            return
        self._resume_at = self._clock() + self._backoff_s
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s)

    def _record(self, ok: bool, elapsed_s: float, why: str) -> None:
        was_closed = self.breaker.closed
        if not self.breaker.record(ok, elapsed_s):
            return
        if self.breaker.closed:
            logger.info(
                "the pool takes blocks again; writes go on after %.0f s without",
                self.breaker.open_s,
            )
            return
        self._events.all_gone()
        if was_closed:  # and not after a probe in vain
            self._stats.add("pool_breaker_opened", label="put")
            logger.warning(
                "the pool does not take blocks, or slowly (%s); nothing is written to it, and it is"
                " tried again every %.1f s",
                why,
                self._config.probe_interval_s,
            )
        self._send(DropSaves(self._last_id))

    def _unpin(self, save: _Save) -> None:
        self.num_pinned -= len(save.pinned)
        if self._evictions is not None:
            self._evictions.give_back(save.pinned)
        else:
            self._blocks.free_blocks(reversed(save.pinned))
        save.pinned = []

    def drop(self) -> None:
        """Give up what has not been copied yet; ``num_pinned`` says when that is done."""
        self._waiting.clear()
        if self.num_pinned:
            self._send(DropSaves(self._last_id))

    def forget_all(self) -> None:
        """What is on its way counts for nothing: the pool is to be taken for empty."""
        for save in self._under_way.values():
            save.is_forgotten = True

    def finish(self, request: Request) -> None:
        """The request has ended, and where it ended well, all steps before are known good."""
        if self._config.put and is_completed(request):
            self._note_good(request, num_landed_tokens(request))
        self.forget(request)

    def forget(self, request: Request) -> None:
        """The request has ended, or has been preempted."""
        self._saved.pop(request.request_id, None)

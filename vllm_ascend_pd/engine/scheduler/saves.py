# SPDX-License-Identifier: Apache-2.0
"""Blocks that become full are stored in the pool, once the step that filled them is known good.

    build_step N      which requests compute how far                        (note_step)
    output of step N  bad blocks are evicted, their requests preempted; what is left is right:
                      pin the new full blocks, send a Save                  (confirm)
    Packed            they have been copied: unpin                          (on_packed)
    Saved             known to be in the pool, or why not                   (on_saved)

A request is never held back for a save: its blocks are pinned by a reference of our own, for the
time of a copy.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.pool_link import DROPPED, DropSaves, Packed, Save, Saved
from vllm_ascend_pd.pool.breaker import Breaker, BreakerState
from vllm_ascend_pd.pool.tier import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_ascend_pd.config import PoolConfig
    from vllm_ascend_pd.engine.pool_link import Message
    from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
    from vllm_ascend_pd.metrics import Stats
    from vllm_ascend_pd.pool.policy import Speeds

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_PINNED_SHARE = 8
"""At most one block in so many is pinned for saves."""


class KnownKeys:
    """Hashes of blocks that the pool is believed to have, so that they are not stored again.

    The pool evicts without telling us, so what is believed is forgotten after a while.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        max_keys: int = 200_000,
        ttl_s: float = 600.0,
    ) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, block_hash: bytes) -> bool:
        until = self._until.get(block_hash)
        return until is not None and until > self._clock()

    def add(self, block_hash: bytes) -> None:
        self._until[block_hash] = self._clock() + self._ttl_s
        self._until.move_to_end(block_hash)
        if len(self._until) > self._max_keys:
            self._until.popitem(last=False)

    def discard(self, block_hash: bytes) -> bool:
        """Whether the pool was believed to have it."""
        return self._until.pop(block_hash, None) is not None

    def clear(self) -> None:
        self._until.clear()


@dataclass(slots=True)
class _Save:
    """A save on its way. ``pinned`` is empty once its blocks have been copied."""

    pinned: list[KVCacheBlock]
    hashes: tuple[bytes, ...]
    events: list[BlockStored | None]
    sent_at: float
    is_late: bool = False


@dataclass(slots=True)
class _Step:
    started: float
    num_tokens: int
    requests: list[tuple[Request, int, int]]
    """Request, its number of preemptions, and how many of its tokens are computed after it."""


class Saves:
    """Scheduler thread. ``send`` hands a message to the worker and never blocks."""

    def __init__(
        self,
        send: Callable[[Message], None],
        manager: KVCacheManager,
        known: KnownKeys,
        events: PoolEvents,
        speeds: Speeds,
        config: PoolConfig,
        stats: Stats,
        block_size: int,
        blocks_per_save: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._manager = manager
        self._pool = manager.block_pool
        self._known = known
        self._events = events
        self._speeds = speeds
        self._config = config
        self._stats = stats
        self._block_size = block_size
        self._blocks_per_save = blocks_per_save
        self._clock = clock
        self._max_pinned = max(1, self._pool.num_gpu_blocks // _PINNED_SHARE)
        self.breaker = Breaker(
            config.breaker_failures, config.breaker_slow_ms / 1000, config.probe_interval_s, clock
        )
        self._ids = count(1)
        self._last_id = 0
        self._steps: deque[_Step] = deque()
        self._last_output_at = 0.0
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

    def note_step(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """A step is about to go out; ``num_computed_tokens`` are still those before it."""
        step = _Step(self._clock(), output.total_num_scheduled_tokens, [])
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = requests[request_id]
            num_computed = request.num_computed_tokens + num_scheduled
            step.requests.append((request, request.num_preemptions, num_computed))
        self._steps.append(step)

    def confirm(self) -> None:
        """The oldest step is over and what it left is right: store what has become full."""
        if not self._steps:
            return
        step = self._steps.popleft()
        now = self._clock()
        started = max(step.started, self._last_output_at)
        self._speeds.note_step(step.num_tokens, (now - started) * 1000)
        self._last_output_at = now
        if not self._config.put or now < self._resume_at:
            return
        for request, num_preemptions, num_computed in step.requests:
            if request.num_preemptions == num_preemptions and not request.is_finished():
                self._store(request, num_computed)

    def skip(self, request: Request, num_tokens: int) -> None:
        """These leading tokens are somebody else's to store."""
        self._saved[request.request_id] = num_tokens // self._block_size

    def _store(self, request: Request, num_computed: int) -> None:
        """Pin and send the request's new full blocks, as many as may be pinned now."""
        start = self._saved.get(request.request_id, 0)
        end = min(num_computed, request.num_tokens) // self._block_size
        if not self._config.put_decoded:
            end = min(end, request.num_prompt_tokens // self._block_size)
        end = min(end, len(request.block_hashes))
        if start >= end:
            return
        table = self._manager.get_blocks(request.request_id).blocks[0]
        indices: list[int] = []
        for index in range(start, min(end, len(table))):
            block, block_hash = table[index], bytes(request.block_hashes[index])
            # A block that is not in the prefix cache has just been found bad.
            if block.is_null or block.block_hash is None:
                break
            if block_hash not in self._known and block_hash not in self._pending_hashes:
                if self._num_pinned + len(indices) >= self._max_pinned or not self._may_send():
                    break
                indices.append(index)
                if len(indices) == self._blocks_per_save:
                    self._send_save(request, table, indices)
                    indices = []
            start = index + 1
        if indices:
            self._send_save(request, table, indices)
        self._saved[request.request_id] = start

    def _may_send(self) -> bool:
        """While it is bypassed, one save now and then is the probe."""
        return self.breaker.closed or (not self._under_way and self.breaker.take_probe())

    def _send_save(
        self, request: Request, table: Sequence[KVCacheBlock], indices: list[int]
    ) -> None:
        blocks = [table[index] for index in indices]
        hashes = tuple(bytes(request.block_hashes[index]) for index in indices)
        events = [self._events.make_stored(request, index) for index in indices]
        self._pool.touch(blocks)
        self._num_pinned += len(blocks)
        self._last_id = next(self._ids)
        self._under_way[self._last_id] = _Save(blocks, hashes, events, self._clock())
        self._pending_hashes.update(hashes)
        block_ids = tuple(block.block_id for block in blocks)
        self._send(Save(self._last_id, block_ids, hashes))

    def on_packed(self, message: Packed) -> None:
        if save := self._under_way.get(message.save_id):
            self._unpin(save)

    def on_saved(self, message: Saved) -> None:
        save = self._under_way.pop(message.save_id, None)
        if save is None:
            return
        self._unpin(save)
        self._pending_hashes.difference_update(save.hashes)
        for block_hash, event, status in zip(
            save.hashes, save.events, message.statuses, strict=True
        ):
            self._stats.add("pool_put_blocks", label=status)
            if status == Status.OK.value:
                self._known.add(block_hash)
                if event is not None:
                    self._events.publish(event)
        self._stats.add("pool_put_bytes", message.num_bytes)
        self._stats.add("pool_put_ms", message.elapsed_ms)
        self._back_off(Status.FULL.value in message.statuses)
        if save.is_late:
            return
        if DROPPED not in message.statuses or self.breaker.state is BreakerState.PROBING:
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
        self._known.clear()
        self._stats.add("pool_breaker_opened", label="put")
        logger.warning(
            "the pool does not take blocks, or slowly; nothing is written to it for %.1f s",
            self._config.probe_interval_s,
        )
        self._send(DropSaves(self._last_id))

    def _unpin(self, save: _Save) -> None:
        self._num_pinned -= len(save.pinned)
        self._pool.free_blocks(reversed(save.pinned))
        save.pinned = []

    def drop(self) -> None:
        """Give up what has not been copied yet; ``num_pinned`` says when that is done."""
        if self._num_pinned:
            self._send(DropSaves(self._last_id))

    def forget(self, request: Request) -> None:
        """The request has ended, or has been preempted."""
        self._saved.pop(request.request_id, None)

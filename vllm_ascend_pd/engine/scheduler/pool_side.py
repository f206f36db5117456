# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pool: a link to its workers, lookups, saves."""

from __future__ import annotations

import math
import queue
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
from vllm_ascend_pd.engine.scheduler.pool_source import PoolSource
from vllm_ascend_pd.engine.scheduler.saves import Saves
from vllm_ascend_pd.engine.sharding import bytes_per_block
from vllm_ascend_pd.engine.vllm_api.queues import num_waiting
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.known_keys import KnownKeys
from vllm_ascend_pd.pool.link import PoolLink, pool_address
from vllm_ascend_pd.pool.messages import DropSaves, Found, Message, Packed, Saved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ascend_pd.config import PDConfig
    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolPrompt
    from vllm_ascend_pd.metrics import Provenance, Stats

_DROP_TIMEOUT_S = 1.0
_TICK_S = 0.001
_LOOKUPS_AT_A_TIME = 8


class PoolSide:
    """Scheduler thread; ``on_message`` alone is the link's."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine_core: Any,
        config: PDConfig,
        phantoms: PhantomBlocks,
        stats: Stats,
        others_wait: Callable[[], bool],
        wake: Callable[[], None],
    ) -> None:
        assert config.pool is not None
        self._scheduler = scheduler
        self._wake = wake
        # Filled by the link's thread. Answers to lookups with the time of their arrival.
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[Found, float]] = queue.SimpleQueue()
        workers = engine_core.model_executor.collective_rpc(pool_address)
        for rank, (address, _) in enumerate(workers):
            if not Path(address).exists():
                raise ConfigError(
                    "kv_connector InEngine does not support: a pool with workers on several hosts"
                    f" (worker {rank} is on another one than the scheduler; leave pool out)"
                )
        self._link = PoolLink("pd-pool-client", self.on_message)
        for address, _ in workers:
            self._link.connect(address)
        known = KnownKeys()
        events = PoolEvents(scheduler.kv_cache_manager.block_pool, known, scheduler.block_size)
        options = scheduler.scheduler_config
        blocks_per_step = options.max_num_seqs + math.ceil(
            options.max_num_batched_tokens / scheduler.block_size
        )
        self._stats = stats
        self.source = PoolSource(
            send=self._link.send,
            phantoms=phantoms,
            events=events,
            config=config.pool,
            transfer=config.transfer,
            stats=stats,
            block_size=scheduler.block_size,
            bytes_per_block=bytes_per_block(scheduler.kv_cache_config) * len(workers),
            others_wait=others_wait,
            num_workers=len(workers),
        )
        self.saves = Saves(
            send=self._hold,
            manager=scheduler.kv_cache_manager,
            known=known,
            events=events,
            speeds=self.source.speeds,
            config=config.pool,
            stats=stats,
            block_size=scheduler.block_size,
            blocks_per_save=min(num_blocks for _, num_blocks in workers),
            blocks_per_step=blocks_per_step,
            not_found=self.source.closed,
            num_workers=len(workers),
            name=self.source.names.name,
        )
        self.has_saved = False
        """Whether a save has ended since the last step went out."""
        self.held: list[Message] = []
        """The next step takes them along, see ``take_held``."""
        # With another step under way already, the next one would begin too late.
        self._holds = scheduler.vllm_config.max_concurrent_batches == 1
        self._next_tick_at = 0.0
        self._gauges: dict[tuple[str, str], float] = {}
        self._gauges_of: tuple[object, ...] = ()
        self._link.start()

    def on_message(self, message: Message) -> None:
        """Link thread."""
        if isinstance(message, Found):
            self._found.put((message, time.monotonic()))
        else:
            # A request that waits for a lookup keeps the engine stepping; a save may be the last
            # thing that goes on.
            self._inbox.put(message)
            self._wake()

    def _hold(self, message: Message) -> None:
        """Until the next step takes it along. A pass of the scheduler follows right after the step
        whose blocks are to be stored, and the threads that store them would take turns with it.
        """
        self.held.append(message)
        if not self._holds or isinstance(message, DropSaves):
            self._send_held()

    def take_held(self) -> tuple[Message, ...]:
        """What the step that goes out now tells the workers."""
        held, self.held = tuple(self.held), []
        return held

    def _send_held(self) -> None:
        for message in self.take_held():
            self._link.send(message)

    def send_held_if_idle(self) -> None:
        """When no step will take it along."""
        scheduler = self._scheduler
        if not (
            num_waiting(scheduler)
            or any(not request.is_finished() for request in scheduler.running)
        ):
            self._send_held()

    def collect(self) -> None:
        """Fold in what the workers have said: of lookups a few, so that no pass pays for many."""
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, Packed):
                self.saves.on_packed(message)
            elif isinstance(message, Saved):
                self.saves.on_saved(message)
                self.has_saved = True
        self._fold_some()
        # Called for every waiting request of a pass.
        now = time.monotonic()
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
            if self._found.empty():  # else it might be too late for what is here already
                self.source.tick()
            self.saves.tick()

    def wait_if_nothing_else(self) -> None:
        """Where every request waits for its lookup, a pass could only take turns with the thread
        that looks up, so for a moment the answers are waited for, and folded in as they come.
        """
        scheduler, source = self._scheduler, self.source
        num_requests = num_waiting(scheduler)
        if scheduler.running or not num_requests or source.num_looking < num_requests:
            return
        until = time.monotonic() + _TICK_S
        with suppress(queue.Empty):
            while source.is_looking and (left_s := until - time.monotonic()) > 0:
                source.on_found(*self._found.get(timeout=left_s))

    def _fold_some(self) -> None:
        for _ in range(_LOOKUPS_AT_A_TIME):
            if self._found.empty():
                return
            self.source.on_found(*self._found.get_nowait())

    def has_answer(self, prompt: PoolPrompt) -> bool:
        """Whether the lookup of a prompt that could be scheduled now is over; its answer may have
        come after those of others.
        """
        while not self._found.empty():
            self._fold_some()
            if not prompt.pending:
                return True
        return False

    @property
    def has_news(self) -> bool:
        """Whether a step should carry counters out, though there is nothing to compute."""
        return self.has_saved and not self.saves.num_under_way

    def look_up_again(
        self, preempted: Iterable[str], origin_of: Callable[[Request], Provenance | None]
    ) -> None:
        """Requests that have been preempted; ``origin_of`` is what the consumer says of one that
        had a peer.
        """
        for request_id in preempted:
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.status == RequestStatus.PREEMPTED:
                self.saves.forget(request)
                self.source.add(request, origin_of(request), admitted=True)

    def set_gauges(self) -> None:
        """Those that have changed."""
        speeds = self.source.speeds
        made_of = (
            self.source.breaker.closed,
            self.saves.breaker.closed,
            self.saves.num_pinned,
            self.saves.num_under_way,
            speeds.tokens_per_ms,
            *speeds.bytes_per_ms.values(),
        )
        if made_of == self._gauges_of:
            return
        self._gauges_of = made_of
        now: dict[tuple[str, str], float] = {
            ("pool_bypassed", "get"): int(not self.source.breaker.closed),
            ("pool_bypassed", "put"): int(not self.saves.breaker.closed),
            ("pool_pinned_blocks", ""): self.saves.num_pinned,
            ("pool_saves_queued", ""): self.saves.num_under_way,
            ("pool_prefill_tokens_per_s", ""): round((speeds.tokens_per_ms or 0) * 1000),
        }
        for place, bytes_per_ms in speeds.bytes_per_ms.items():
            now["pool_load_bytes_per_s", place.label] = round(bytes_per_ms) * 1000
        for (name, label), value in now.items():
            if self._gauges.get((name, label)) != value:
                self._stats.set(name, value, *([label] if label else []))
        self._gauges = now

    def reset(self) -> None:
        """Let go of every block; waits for a copy that is under way, at most a second."""
        self.saves.drop()
        deadline = time.monotonic() + _DROP_TIMEOUT_S
        while self.saves.num_pinned and time.monotonic() < deadline:
            time.sleep(0.001)
            self.collect()

    def forget(self) -> None:
        """Take the pool for empty from now on."""
        self.saves.forget_all()
        self.source.forget()

    def stop(self) -> None:
        self._link.stop()

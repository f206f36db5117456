# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of the pool: a link to its workers, lookups, saves."""

from __future__ import annotations

import math
import queue
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
from vllm_ascend_pd.engine.scheduler.pool_source import PoolSource
from vllm_ascend_pd.engine.scheduler.saves import SaveBounds, Saves
from vllm_ascend_pd.engine.vllm_api.queues import next_waiting, num_waiting
from vllm_ascend_pd.engine.vllm_api.status import is_preempted, is_queued, queue_as, waits_for_kv
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.known_keys import KnownKeys
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import DropSaves, Found, Message, Packed, Saved
from vllm_ascend_pd.pool.registry import tier_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolPrompt
    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import Request, SchedulerOutput
    from vllm_ascend_pd.metrics import Provenance


_DROP_TIMEOUT_S = 1.0
_KNOWN_BLOCKS = 200_000
"""Of a KV cache group; as many are remembered as stored."""
_NEXT = 16
"""So many of the requests that wait are looked up again if they have waited long."""
_LOOK_AGAIN_S = 0.1
"""Between two passes that see to that, unless an answer is awaited."""
_LOOKS_AT_A_TIME = 2
_TICK_S = 0.001


class PoolSide(Part):
    """Scheduler thread; ``on_message`` alone is the link's."""

    has_blocks = True

    def __init__(
        self,
        common: Common,
        blocks_per_save: int,
        origin_of: Callable[[Request], Provenance | None],
        wake: Callable[[], None],
    ) -> None:
        """``blocks_per_save``: how many a worker packs at a time. ``origin_of``: what the consumer
        says of a request that had a peer.
        """
        self._scheduler = scheduler = common.scheduler
        self._origin_of = origin_of
        self._wake = wake
        self._stats = common.stats
        self._prefill = common.prefill
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # filled by the link's thread
        self._link = PoolLink("pd-pool-client", self.on_message)
        self.known = KnownKeys(max_keys=_KNOWN_BLOCKS * len(common.groups))
        assert common.config.pool is not None
        stores_to = tier_class(common.config.pool.tiers[0]).stores_to
        events = PoolEvents(common.manager.block_pool, self.known, common.groups, stores_to)
        options = scheduler.scheduler_config
        self.source = PoolSource(common, events, self._link.send)
        self.open = self.source.open
        self.saves = Saves(
            common,
            self.known,
            events,
            send=self._hold,
            bounds=SaveBounds(
                blocks_per_save=blocks_per_save,
                blocks_per_step=sum(
                    options.max_num_seqs
                    + math.ceil(options.max_num_batched_tokens / group.block_size)
                    for group in common.groups
                ),
            ),
            not_found=self.source.closed,
            name=self.source.names.name,
        )
        self.has_saved = False
        """Whether a save has ended since the last step went out."""
        self.held: list[Message] = []
        """The next step takes them along, see ``take_held``."""
        # With another step under way already, the next one would begin too late.
        self._holds = scheduler.vllm_config.max_concurrent_batches == 1
        self._next_tick_at = 0.0
        self._look_again_at = 0.0
        self._gauges: dict[tuple[str, str], float] = {}

    def connect(self, addresses: Sequence[str]) -> None:
        """To all workers; before the first request.

        Raises:
            ConfigError: one is on another host.
        """
        for rank, address in enumerate(addresses):
            if not Path(address).exists():
                raise ConfigError(
                    "kv_connector InEngine does not support: a pool with workers on several hosts"
                    f" (worker {rank} is on another one than the scheduler; leave pool out)"
                )
            self._link.connect(address)
        self._link.start()

    def on_message(self, message: Message) -> None:
        """Link thread."""
        if isinstance(message, Found):
            self.source.answers.put((message, time.monotonic()))
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
        self.source.fold_some()
        # Called for every waiting request of a pass.
        now = time.monotonic()
        if now >= self._next_tick_at:
            self._next_tick_at = now + _TICK_S
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
        source.wait_for_answers(time.monotonic() + _TICK_S)

    # The part.

    def find(self, request: Request) -> PoolPrompt | None:
        return self.source.find(request)

    def arrived(self, request: Request, source: BlockSource | None) -> None:
        if source is not None:
            # Its producer stores the prompt.
            self.saves.skip(request, source.end)
        else:
            self.source.add(request)

    def take_over(self, request: Request, failed: BlockSource) -> None:
        """What nobody else may have stored is to be stored from here."""
        if self.source.find(request) is not None:
            return
        if waits_for_kv(request):
            queue_as(request, failed.queued_status)
        self.saves.forget(request)
        self.source.add(request, failed.provenance)

    def settle(self) -> bool:
        """A step also carries counters out."""
        self.wait_if_nothing_else()
        self.collect()
        self.saves.store_waiting()
        if self.held:
            self.send_held_if_idle()
        return self.has_saved and not self.saves.num_under_way

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        self.has_saved = False
        meta.ahead = self.saves.note_step(output, self._scheduler.requests)
        for request_id in output.preempted_req_ids or ():
            request = self._scheduler.requests.get(request_id)
            if request is not None and is_preempted(request):
                self.saves.forget(request)
                self.source.add(request, self._origin_of(request), admitted=True)
        now = time.monotonic()
        if now >= self._look_again_at:
            self._look_again_at = now if self._look_again() else now + _LOOK_AGAIN_S
        if self.held:
            meta.saves = self.take_held()

    def _look_again(self) -> bool:
        """Whether there is more to see to in the next pass; none pays for many."""
        num_awaited = 0
        for request in next_waiting(self._scheduler, _NEXT):
            if is_queued(request):
                num_awaited += self.source.look_again(request)
                if num_awaited == _LOOKS_AT_A_TIME:
                    break
        return num_awaited > 0

    def end_step(self) -> None:
        self.saves.confirm()
        self.set_gauges()

    def take_prefetchable(self) -> Sequence[PoolPrompt]:
        return self.source.take_queued() if self.source.queued else []

    def finish(self, request: Request, ending: Ending) -> None:
        self.saves.finish(request)
        self.send_held_if_idle()
        origin = self.source.finish(request)
        ending.provenance = ending.provenance or origin

    def forsake(self, request: Request) -> None:
        self.source.forsake(request)
        if request.num_computed_tokens:
            # Nobody else has a use for what it computes from now on.
            self.saves.skip(request, self._scheduler.max_model_len)

    @property
    def is_storing(self) -> bool:
        return self.saves.num_pinned > 0

    def counts(self) -> dict[str, int]:
        return {
            "pool_prompts": len(self.source.open) + len(self.source.closed),
            "pool_saves": self.saves.num_under_way,
            "pool_pins": self.saves.num_pinned,
            "pool_waiting": self.saves.num_waiting,
        }

    def set_gauges(self) -> None:
        """Those that have changed."""
        now: dict[tuple[str, str], float] = {
            ("pool_bypassed", "get"): int(not self.source.breaker.closed),
            ("pool_bypassed", "load"): int(not self.source.load_breaker.closed),
            ("pool_bypassed", "put"): int(not self.saves.breaker.closed),
            ("pool_pinned_blocks", ""): self.saves.num_pinned,
            ("pool_saves_queued", ""): self.saves.num_under_way,
            ("pool_prefill_tokens_per_s", ""): round(self._prefill.per_ms * 1000),
        }
        for place, speed in self.source.speeds.items():
            now["pool_load_bytes_per_s", place.label] = round(speed.per_ms) * 1000
        for (name, label), value in now.items():
            if self._gauges.get((name, label)) != value:
                self._stats.set(name, value, *([label] if label else []))
        self._gauges = now

    def reset(self, reset_connector: bool) -> None:
        """Let go of every block; waits for a copy that is under way, at most a second."""
        self.saves.drop()
        deadline = time.monotonic() + _DROP_TIMEOUT_S
        while self.saves.num_pinned and time.monotonic() < deadline:
            time.sleep(0.001)
            self.collect()
        if reset_connector:
            # From now on the pool is taken for empty.
            self.saves.forget_all()
            self.source.forget()

    def stop(self) -> None:
        self._link.stop()

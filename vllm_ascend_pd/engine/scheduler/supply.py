# SPDX-License-Identifier: Apache-2.0
"""How requests that wait come to their blocks: which source is next, how its blocks are loaded, and
what of it counts when the request is scheduled.

    waits in WAITING_FOR_KV          try_promote: place or park what is missing, or go on without
    lookup                           what the source has counts as cached, see ``phantom``
    allocated
        |<--------------------- hits --------------------->|<- tail ->|
        [cached here][phantom: loaded now][parked before]   [ source ] [computed ...
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.scheduler.sources import SourceEvent, SourceState
from vllm_ascend_pd.engine.vllm_api.groups import block_table
from vllm_ascend_pd.engine.vllm_api.prefill_stats import count_external
from vllm_ascend_pd.engine.vllm_api.queues import waiting_queues
from vllm_ascend_pd.engine.vllm_api.status import is_queued, queue, queue_as, waits_for_kv
from vllm_ascend_pd.kv.cost import Question, plan
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.scheduler.parts import Common, Part
    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, Request, SchedulerOutput
    from vllm_ascend_pd.kv.span import KVGroup, Wanted


_COLLECT_S = 0.0002
"""What peers and the pool have said is looked at so often within a pass."""


class Supply:
    """Scheduler thread."""

    def __init__(self, common: Common) -> None:
        self._scheduler = common.scheduler
        self.parts: list[Part] = []
        """Those that have blocks, in the order in which they are asked."""
        self._manager = common.manager
        self._phantoms = common.phantoms
        self._loads = common.loads
        self._parking = common.parking
        self._transfer = common.config.transfer
        self._groups = common.groups
        self._has_windows = any(not group.keeps_all for group in common.groups)
        self._has_states = common.has_states
        """Whether a tail is worth a load by itself: blocks with states are of many tokens."""
        self._block_size = common.block_size
        self._collect_at = 0.0
        self._step_ms = 0.0
        """What the loads that are in the next step so far are expected to hold it up for."""

    # Which source.

    def source_of(self, request: Request) -> BlockSource | None:
        """The first one that may still give something, else the last that was asked."""
        last = None
        for part in self.parts:
            if (source := part.open.get(request.request_id)) is not None:
                if not source.state.final:
                    return source
                last = source
        return last

    def hand_on(self, request: Request) -> None:
        """Where a source has failed, the next one is asked before the rest is computed."""
        failed = None
        for part in self.parts:
            if failed is not None:
                part.take_over(request, failed)
            if (source := part.find(request)) is not None:
                failed = source if source.hands_on else None

    def leave(self, request: Request) -> None:
        """It has ended, or wants nothing any more of what its sources have."""
        for part in self.parts:
            if (source := part.find(request)) is not None:
                self._phantoms.withdraw(source)
                self._parking.leave(source)

    @property
    def is_idle(self) -> bool:
        """Whether no request has a source that could give something."""
        return not any(part.open for part in self.parts)

    # Waiting.

    def try_promote(self, request: Request) -> bool:
        # Called for every waiting request of a pass.
        now = time.monotonic()
        if now >= self._collect_at:
            self._collect_at = now + _COLLECT_S
            for part in self.parts:
                part.collect()
        source = self.source_of(request)
        if source is None or source.state.final:
            self.hand_on(request)
            source = self.source_of(request)
        if source is None:
            if waits_for_kv(request):
                queue(request)
            return is_queued(request)
        if source.holds_back():
            return False
        if source.state is SourceState.READY and not self._place(source):
            # Without it, the next one may be asked.
            return source.state.final and self.try_promote(request)
        if source.delays():
            return False
        queue_as(request, source.queued_status)
        return is_queued(request)

    def _place(self, source: BlockSource) -> bool:
        """Decide how its blocks come; whether the request may be scheduled now."""
        if source.always_parks and self._parking.is_short_for(source):
            if time.monotonic() >= source.place_until:
                source.give_up(Cause.DEADLINE)
            return False
        if self._loads.still_awaits(source):
            return False
        missing = self._phantoms.find_missing(source.request, source)
        if self._loads.awaits_parked(source, missing):
            # Another request's load brings these blocks in; then they are ordinary hits.
            return False
        if missing:
            missing, parks = self._plan(source, missing)
            if not missing:
                source.give_up(Cause.NOT_NEEDED)
                return False
            if parks and self._parking.park(source, missing):
                return False
        elif self._parks_tail(source) and self._parking.park(source, []):
            return False
        if source.is_complete and not (missing and source.parked_only):
            source.advance(SourceEvent.PLACE)
            return True
        # Only a tail is missing, which is computed sooner than it would come, or no memory for the
        # rest has been found so far.
        if not missing:
            source.give_up(Cause.NOT_NEEDED)
        elif time.monotonic() >= source.place_until:
            source.give_up(Cause.DEADLINE)
        return False

    def _parks_tail(self, source: BlockSource) -> bool:
        index = self._groups[0].tail_unit(source.request.num_tokens)
        return self._has_states and source.has_tail(index)

    def _plan(self, source: BlockSource, missing: list[Wanted]) -> tuple[list[Wanted], bool]:
        """What of the missing blocks is loaded, and whether beside the steps."""
        unit_of = self._phantoms.unit_of
        num_offered = unit_of(missing[-1]) + 1
        load_ms: list[float | None] = [None] * num_offered
        first = None
        if self._has_windows and source.compute_ms:
            # A source is known to have those of its own end: it is all or nothing.
            first = self._phantoms.num_leading_hits(source.request, unit_of(missing[0]))
        for place, block_ms in zip(missing, source.load_ms(missing), strict=True):
            at = unit_of(place) if first is None else first
            load_ms[at] = (load_ms[at] or 0.0) + block_ms
        decided = plan(
            Question(
                load_ms=load_ms,
                compute_ms=source.compute_ms,
                mode=self._transfer.load_mode,
                max_step_ms=self._transfer.max_step_load_ms - self._step_ms,
                step_timeout_ms=self._transfer.step_load_timeout_s * 1000,
                others_wait=self._others_wait(),
            )
        )
        source.use(decided, num_offered)
        parks = decided.parks or source.always_parks
        return [place for place in missing if unit_of(place) < decided.num_blocks], parks

    def _others_wait(self) -> bool:
        """Whether an in-step load would hold up other requests."""
        return bool(self._scheduler.running) or len(self._scheduler.requests) > 1

    def begin_step(self, output: SchedulerOutput) -> None:
        """What waits gives memory back that others need."""
        if self._parking.tails:
            self._parking.relieve(self._is_stuck(output))

    def _is_stuck(self, output: SchedulerOutput) -> bool:
        """Nothing runs, and a request that waits for nothing has found no memory."""
        scheduler = self._scheduler
        return not (output.num_scheduled_tokens or scheduler.running) and any(
            is_queued(request) for requests in waiting_queues(scheduler) for request in requests
        )

    def add_loads(self, meta: StepMeta) -> None:
        loads = self._loads
        if loads.new or loads.running:
            meta.cancels = loads.take_cancels()
            self._note_computed()
        self._prefetch()
        meta.loads = loads.take_new()
        self._step_ms = 0.0

    def _prefetch(self) -> None:
        """What requests wait for to which no pass has come: load it while they queue."""
        for part in self.parts:
            for source in part.take_prefetchable():
                if self._parking.is_short_for(source):
                    break  # to look at all whenever memory is short would hold up the steps
                if source.lacks_nothing or self._loads.still_awaits(source):
                    continue  # nor are all of their blocks looked at in each step
                missing = self._phantoms.find_missing(source.request, source)
                source.lacks_nothing = not missing
                if missing and not self._loads.awaits_parked(source, missing):
                    missing, _ = self._plan(source, missing)
                    if not missing:
                        source.give_up(Cause.NOT_NEEDED)
                    elif not self._parking.park(source, missing):
                        break

    # Lookup and allocation.

    def look_up(self, request: Request, hit: tuple[Any, int, int]) -> tuple[Any, int, int]:
        source = self.source_of(request)
        if source is None or not source.offers:
            return hit
        num_tail = self._parking.num_tail_tokens(source)
        tables = self._phantoms.publish(request, hit[0], source, num_tail)
        num_blocks = self._phantoms.num_units(tables)
        if num_blocks < self._groups[0].tail_unit(request.num_tokens):
            num_tail = 0
        end = num_blocks * self._block_size + num_tail
        if self._has_windows:
            tables = tuple(
                self._with_windows(group, table, end)
                for group, table in zip(self._groups, tables, strict=True)
            )
        shared = hit[1] + hit[2]
        if self._has_states:
            # Where states of a shared prefix are missing, vLLM stops to keep some.
            num_shared = self._phantoms.num_shared(request, source)
            shared = max(shared, num_shared * self._block_size)
        return tables, end, max(0, shared - end)

    def _with_windows(
        self, group: KVGroup, table: Sequence[KVCacheBlock], end: int
    ) -> Sequence[KVCacheBlock]:
        """What the tail leaves behind the window is not the request's any more."""
        num_behind = min(group.first_needed(end), len(table))
        return [self._manager.block_pool.null_block] * num_behind + list(table[num_behind:])

    def split_tail(self, request: Request, num_local: int, num_external: int) -> tuple[int, int]:
        num_tail = num_local % self._block_size
        if not num_tail or self.source_of(request) is None:
            return num_local, num_external
        return num_local - num_tail, num_external + num_tail

    def allocated(self, request: Request, hits: Sequence[Sequence[KVCacheBlock]]) -> bool:
        """The request has committed to ``hits``, by group; whether they may be of a source."""
        num_blocks = self._phantoms.num_units(hits)
        self._loads.note_begin(request, num_blocks)
        if not hits[0] and self.is_idle:
            return False
        phantoms = [phantom for table in hits for phantom in self._phantoms.claim(table)]
        for used in dict.fromkeys(phantom.source for phantom in phantoms):
            self._loads.claim(request, used, [p for p in phantoms if p.source is used])
            self._step_ms += used.plan.load_ms if used.plan is not None else 0.0
        source = self.source_of(request) or self._find(request)
        num_tail = self._parking.take_tail(source, num_blocks) if source is not None else 0
        if self._loads.in_steps():
            if self._has_windows:
                # Others of this pass may compute what is shared; without windows the blocks before
                # are shared as well, and those tell.
                self._note_computed()
            for table in hits:
                self._loads.note_user(request, table)
        indices = sorted({self._phantoms.unit_of(phantom.place) for phantom in phantoms})
        num_hit = num_blocks * self._block_size
        num_external = len(indices) * self._block_size
        if num_tail:
            indices.append(num_blocks)
        if indices:
            num_external += self._phantoms.num_with(request, indices[0]) * self._block_size
        if source is not None:
            num_external = min(num_hit, num_external + source.num_parked_tokens)
            source.admit(num_hit - num_external, num_external + num_tail, indices)
            num_external += num_tail
            num_hit += num_tail
        if num_external:
            count_external(self._manager, request, num_hit, num_external)
        return True

    def _note_computed(self) -> None:
        self._loads.note_computed(
            lambda request: [block_table(self._manager, request, g) for g in self._groups]
        )

    def _find(self, request: Request) -> BlockSource | None:
        return next(filter(None, (part.find(request) for part in self.parts)), None)

# SPDX-License-Identifier: Apache-2.0
"""Blocks that the pool has: looked up at arrival, loaded as those of a peer are."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import LoadFromPool, LoadMode
from vllm_ascend_pd.engine.scheduler.pool_prompt import Asked, PoolPrompt, num_asked
from vllm_ascend_pd.engine.scheduler.sources import SourceEvent, SourceState
from vllm_ascend_pd.engine.vllm_api.blocks import block_keys, hashes_of, key_of
from vllm_ascend_pd.engine.vllm_api.status import queue_as, wait_for_kv
from vllm_ascend_pd.kv.breaker import Breaker
from vllm_ascend_pd.kv.cost import Speed
from vllm_ascend_pd.kv.span import Wanted
from vllm_ascend_pd.pool.fold import fold_found
from vllm_ascend_pd.pool.keys import PoolNames
from vllm_ascend_pd.pool.messages import Found, Lookup, join_hashes
from vllm_ascend_pd.types import Cause, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.kv.cost import LoadPlan
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.metrics import Provenance
    from vllm_ascend_pd.pool.messages import Message


logger = logging.getLogger(__name__)

_BLACKLIST_S = 30.0
_ANSWERS_AT_A_TIME = 8
_PROBE_HASH = bytes(32)
_AGAIN_S = 1.0
"""Before a request is scheduled that has waited, it is looked up again after that: others may have
stored what it lacks, and what was in the prefix cache may have been evicted."""
_AGAIN_BLOCKS = 500
"""So many blocks are looked up again in that time; a longer prompt waits longer for its turn, since
each block costs the scheduler's thread some microseconds, and many prompts may wait."""
_REFRESH_S = 2.0
"""Blocks that are used without the pool are looked up this often at most."""
_LOOKED_UP = (SourceState.PLACED, SourceState.FAILED)
_POOL_FAULTS = (Cause.POOL_FAILED.value, Cause.DEADLINE.value)


@dataclass(slots=True)
class _Pending:
    """A lookup on its way: of a prompt, of blocks that a request has already, or a probe, which is
    no request's.
    """

    request: Request | None
    asked: Sequence[Asked]
    prompt: PoolPrompt | None
    sent_at: float
    deadline: float
    answers: list[Found] = field(default_factory=list)
    """Of the workers that have answered so far."""


class PoolSource:
    """Scheduler thread. ``send`` hands a message to every worker and never blocks."""

    def __init__(
        self,
        common: Common,
        events: PoolEvents,
        send: Callable[[Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = common.config.pool
        assert config is not None
        self.names = PoolNames(is_shared="mooncake" in config.tiers)
        self.transfer = common.config.transfer
        self.groups = common.groups
        self.size = common.groups[0]
        """Units of all groups are of one size."""
        self._config = config
        self._common = common
        self._has_states = common.has_states
        self._phantoms = common.phantoms
        self._stats = common.stats
        self._events = events
        self._send = send
        self._clock = clock
        self.speeds = {place: Speed(place.bytes_per_ms) for place in Place.all()}
        """Of loads, by where the values lie."""
        self.breaker, self.load_breaker = (
            Breaker(
                config.breaker_failures,
                config.probe_interval_s,
                slow_s=config.breaker_slow_ms / 1000,
                clock=clock,
            )
            for _ in range(2)
        )
        """Of lookups, and of loads: a disk that hangs may still say what it has."""
        self._probe_load: PoolPrompt | None = None
        """The last one that was to be loaded while loads were bypassed."""
        self.answers: queue.Queue[tuple[Found, float]] = queue.Queue()
        """Of lookups, with the time of their arrival; the link's thread fills it."""
        self._ids = count(1)
        self._pending: dict[int, _Pending] = {}
        self.open: dict[str, PoolPrompt] = {}
        """By request id: prompts that the pool may have something of, and those that had a peer."""
        self.closed: dict[str, PoolPrompt] = {}
        """The others. A pass of the scheduler has nothing to do for them."""
        self._blacklist: dict[bytes, float] = {}
        self.queued: list[PoolPrompt] = []
        """Found, and perhaps to be loaded before a pass comes to them, see ``take_queued``."""

    def find(self, request: Request) -> PoolPrompt | None:
        """Open or closed."""
        return self.open.get(request.request_id) or self.closed.get(request.request_id)

    # Lookups.

    def add(
        self, request: Request, from_peer: Provenance | None = None, admitted: bool = False
    ) -> None:
        """Look for what the prefix cache has not; the request waits for the answer.

        Called at arrival, when a request has been preempted (``admitted``), and when its peer,
        whose session has ``from_peer``, has failed.
        """
        if not self._config.get or request.skip_reading_prefix_cache:
            return
        previous = self.find(request)
        if previous is not None:
            prompt = self._follow(previous, admitted)
        else:
            # The blocks of a preempted request are still cached, and about to be taken by others.
            end = self.size.tail_unit(request.num_tokens)
            start = 0 if admitted else self._phantoms.num_leading_hits(request, end)
            prompt = PoolPrompt(request, start, self, from_peer, from_peer is not None)
            prompt.follow(admitted and prompt.had_peer)
        prompt.asked_at = self._clock()
        self.closed.pop(request.request_id, None)
        self.open[request.request_id] = prompt
        asked = self._asked_first(prompt)
        if not self.breaker.closed:
            if asked:
                self._count_lookup("bypassed")
            self._give_up(prompt)
            self._probe()
            return
        if asked:
            self._look_up(request, asked, prompt)
            wait_for_kv(request)
        else:
            self._give_up(prompt)
        self._refresh(request, prompt.start)

    def _follow(self, previous: PoolPrompt, admitted: bool) -> PoolPrompt:
        """Another one of the same request. What was found in the prefix cache may be evicted before
        it is scheduled, so all of it is asked for.
        """
        prompt = PoolPrompt(previous.request, 0, self, previous.provenance, previous.had_peer)
        prompt.follow(previous.count_computed(admitted))
        return prompt

    def _asked_first(self, prompt: PoolPrompt) -> list[Asked]:
        """What its first lookup asks for."""
        request = prompt.request
        # The last token is computed in any case, which a state behind it is of no use for.
        stop = self.size.tail_unit(request.num_tokens) + (not self._has_states)
        stop = min(stop, len(request.block_hashes) // self.size.hashes_per_unit)
        # States are at some boundaries only, and where is not to be guessed.
        groups = [group for group in self.groups if group.keeps_all or group.state]
        groups = groups or list(self.groups)
        asked = [Asked(group.id, group.blocks_of(prompt.start, stop)) for group in groups]
        return asked if prompt.start < stop else []

    def look_again(self, request: Request) -> bool:
        """It waits for memory only, and may be scheduled soon. It keeps its place in the queue, and
        what it has, until there is an answer; that is taken up here. Whether one is awaited.
        """
        prompt = self.find(request)
        if prompt is None or prompt.had_peer or prompt.state not in _LOOKED_UP or prompt.num_loads:
            return False
        if (again := prompt.again) is not None:
            if not again.pending:
                prompt.again = None
                self._take_up(prompt, again)
        elif self.breaker.closed and self._clock() - prompt.asked_at >= self._again_s(request):
            again = self._follow(prompt, admitted=False)
            prompt.asked_at = again.asked_at = self._clock()
            if asked := self._asked_first(again):
                prompt.again = again
                self._look_up(request, asked, again)
        return prompt.again is not None

    def _again_s(self, request: Request) -> float:
        return _AGAIN_S * max(1.0, len(request.block_hashes) / _AGAIN_BLOCKS)

    def _take_up(self, prompt: PoolPrompt, again: PoolPrompt) -> None:
        """What was found counts instead of ``prompt``, if that makes a difference."""
        is_known = again.offers or again.found_nothing
        if not is_known or self._loadable(again) == self._loadable(prompt):
            return
        request = prompt.request
        again.take_over(prompt)
        prompt.advance(SourceEvent.ABORT)
        self._phantoms.withdraw(prompt)
        self._common.parking.leave(prompt)
        self.closed.pop(request.request_id, None)
        self.open[request.request_id] = again
        if again.offers:
            self._queue(again)
            wait_for_kv(request)
        else:
            self._close(again)

    def _loadable(self, prompt: PoolPrompt) -> tuple[list[Wanted], int]:
        """Blocks that the request may take, and tokens of its tail."""
        if not prompt.offers:
            return [], 0
        return self._phantoms.find_missing(prompt.request, prompt), prompt.num_tail_tokens

    def _refresh(self, request: Request, num_units: int) -> None:
        """These leading units are taken from the prefix cache. The pool evicts what nobody has
        looked up for longest, and without telling: it learns that they are used, and we, what must
        be stored again. Nobody waits for the answer.
        """
        is_recent = self._events.is_recent
        asked = []
        for group in self.groups:
            first = group.first_needed(num_units * group.unit_size)
            stop = num_units * group.blocks_per_unit
            keys = block_keys(hashes_of(request, range(first, stop), group), group.id)
            indices = [i for i, key in enumerate(keys, first) if not is_recent(key, _REFRESH_S)]
            if indices:
                asked.append(Asked(group.id, indices))
        if asked:
            self._look_up(request, asked)

    def _probe(self) -> None:
        if self.breaker.take_probe():
            self._look_up(None, [Asked(0, [0])])

    def _look_up(
        self,
        request: Request | None,
        asked: Sequence[Asked],
        prompt: PoolPrompt | None = None,
        deadline: float = math.inf,
    ) -> None:
        now = self._clock()
        timeout_s = self._config.lookup_timeout_ms / 1000
        lookup_id = next(self._ids)
        deadline = min(deadline, now + timeout_s)
        self._pending[lookup_id] = _Pending(request, asked, prompt, now, deadline)
        hashes = [_PROBE_HASH]
        if request is not None:
            each = (hashes_of(request, own, self.groups[group]) for group, own in asked)
            hashes = list(chain.from_iterable(each))
        joined, hash_bytes = join_hashes(list(map(self.names.name, hashes)))
        ids = b"".join(bytes([group]) * len(each) for group, each in asked)
        self._send(Lookup(lookup_id, joined, hash_bytes, ids, deadline))

    def fold_some(self) -> None:
        """Of answers that have come; a few, so that no pass pays for many."""
        for _ in range(_ANSWERS_AT_A_TIME):
            if self.answers.empty():
                return
            self.on_found(*self.answers.get_nowait())

    def has_answer(self, prompt: PoolPrompt) -> bool:
        """Whether the lookup of a prompt that could be scheduled now is over; its answer may have
        come after those of others.
        """
        while prompt.pending and not self.answers.empty():
            self.fold_some()
        return not prompt.pending

    def wait_for_answers(self, until: float) -> None:
        """Fold them in as they come."""
        with suppress(queue.Empty):
            while self.num_looking and (left_s := until - time.monotonic()) > 0:
                self.on_found(*self.answers.get(timeout=left_s))

    @property
    def num_looking(self) -> int:
        """Prompts that wait for the answer to their lookup."""
        return sum(self._is_open(pending.prompt) for pending in self._pending.values())

    def _is_open(self, prompt: PoolPrompt | None) -> bool:
        """Whether it is its request's, and not one that may take another one's place."""
        return prompt is not None and self.open.get(prompt.request.request_id) is prompt

    def on_found(self, found: Found, arrived_at: float) -> None:
        """A worker has answered a lookup; with the last one's answer it is over."""
        pending = self._pending.get(found.lookup_id)
        if pending is None:
            return
        pending.answers.append(found)
        if len(pending.answers) < self._common.sharding.num_workers:
            return
        del self._pending[found.lookup_id]
        found = fold_found(pending.answers)
        is_whole = found.healthy and len(found.places) == num_asked(pending.asked)
        request, prompt = pending.request, pending.prompt
        if request is not None and prompt is None:
            if is_whole:
                self._learn(request, pending.asked, found.places)
            return
        elapsed_s = arrived_at - pending.sent_at
        why = f"a lookup took {elapsed_s:.1f} s" if found.healthy else "see the workers' logs"
        self._record(found.healthy, elapsed_s, why)
        if not found.healthy:
            self._events.all_gone()
        if prompt is None or not prompt.pending:
            return
        if not is_whole:
            self._count_lookup("failed")
            self._give_up(prompt)
            return
        self._stats.add("pool_lookup_ms", elapsed_s * 1000)
        self._learn(prompt.request, pending.asked, found.places)
        prompt.learn(pending.asked, self._usable(prompt.request, pending.asked, found.places))
        if not prompt.num_blocks:
            self._count_lookup("miss")
            self._give_up(prompt)
            return
        if unknown := prompt.unknown(self._phantoms):
            self._look_up(prompt.request, unknown, prompt, pending.deadline)
            return
        if not self._may_load(prompt):
            self._count_lookup("bypassed")
            self._give_up(prompt)
            return
        self._count_lookup("hit")
        prompt.advance(SourceEvent.FOUND)
        if self._config.load is LoadFromPool.NONE:
            prompt.give_up(Cause.NOT_NEEDED)
            self._stats.add("pool_decisions", label="none")
        if self._is_open(prompt):
            self._queue(prompt)

    def _may_load(self, prompt: PoolPrompt) -> bool:
        """While loads are bypassed, one at a time is tried, which no step waits for."""
        if self.load_breaker.closed:
            return True
        self.load_breaker.take_probe()
        is_probing = self._probe_load is not None and self._probe_load.may_load
        if not self._is_open(prompt) or not self.load_breaker.allows(is_probing):
            return False
        prompt.load_beside_steps()
        self._probe_load = prompt
        return True

    def _give_up(self, prompt: PoolPrompt) -> bool:
        """The pool has nothing for it; whether it was waiting for that. Without a peer, nothing
        holds the request any more, and the engine need not ask us about it.
        """
        if not prompt.pending:
            return False
        prompt.advance(SourceEvent.NOTHING)
        if not prompt.had_peer and self._is_open(prompt):
            queue_as(prompt.request, prompt.queued_status)
            self._close(prompt)
        return True

    def _close(self, prompt: PoolPrompt) -> None:
        self.closed[prompt.request.request_id] = self.open.pop(prompt.request.request_id)

    def forget(self) -> None:
        """Nothing that the pool has now is taken any more."""
        for prompt in (*self.open.values(), *self.closed.values()):
            prompt.again = None
        for prompt in self.open.values():
            prompt.give_up(Cause.CANCELLED)
        # A probe goes on: without its end the breaker would stay half open.
        self._pending = {i: p for i, p in self._pending.items() if p.request is None}
        self._events.all_gone()
        self.names.forget()

    def forsake(self, request: Request) -> None:
        """It is about to be hashed anew: what is found of it by the hashes before says nothing."""
        self._pending = {i: p for i, p in self._pending.items() if p.request is not request}
        if (prompt := self.find(request)) is not None:
            prompt.forsake()

    def _queue(self, prompt: PoolPrompt) -> None:
        if self.transfer.load_mode is not LoadMode.STEP:
            self.queued.append(prompt)

    def take_queued(self) -> list[PoolPrompt]:
        """Prompts with something to load that no pass of the scheduler has come to yet."""
        self.queued = [p for p in self.queued if p.state is SourceState.READY]
        return list(self.queued)

    def _learn(self, request: Request, asked: Sequence[Asked], places: bytes) -> None:
        """What is there need not be stored again."""
        at = 0
        for group, indices in asked:
            self._events.found(request, indices, group, Place.of(places[at : at + len(indices)]))
            at += len(indices)

    def _usable(self, request: Request, asked: Sequence[Asked], places: bytes) -> bytes:
        """What failed a moment ago is not tried again."""
        if not self._blacklist:
            return places
        now, usable = self._clock(), bytearray(places)
        keys = (key_of(request, i, self.groups[group]) for group, each in asked for i in each)
        for at, key in enumerate(keys):
            if (until := self._blacklist.get(key, 0.0)) > now:
                usable[at] = Place.NOWHERE
            elif until:
                del self._blacklist[key]
        return bytes(usable)

    def expire(self) -> None:
        """Requests whose lookup is not answered in time go on without the pool."""
        if not self._pending:
            return
        now = self._clock()
        for lookup_id, pending in list(self._pending.items()):
            if now < pending.deadline:
                continue
            del self._pending[lookup_id]
            if pending.request is not None and pending.prompt is None:
                continue
            timeout_ms = self._config.lookup_timeout_ms
            self._record(False, 0.0, f"lookups are not answered in {timeout_ms:g} ms")
            if pending.prompt is not None and self._give_up(pending.prompt):
                self._count_lookup("deadline")

    def _count_lookup(self, outcome: str) -> None:
        self._stats.add("pool_lookups", label=outcome)

    def _record(self, ok: bool, elapsed_s: float, why: str) -> None:
        was_closed = self.breaker.closed
        if not self.breaker.record(ok, elapsed_s):
            return
        if self.breaker.closed:
            logger.info(
                "the pool answers again; reads go on after %.0f s without", self.breaker.open_s
            )
            return
        self._events.all_gone()
        if was_closed:  # and not after a probe in vain
            self._stats.add("pool_breaker_opened", label="get")
            logger.warning(
                "the pool is down or slow (%s); it is not read, prompts are computed, and it is"
                " tried again every %.1f s",
                why,
                self._config.probe_interval_s,
            )

    # Load or recompute.

    def load_ms(self, place: Place, group: int) -> float:
        """How long loading a block from there is expected to take."""
        return self.speeds[place].ms(self._common.bytes_per_block(group))

    @property
    def compute_ms(self) -> float:
        if self._config.load is not LoadFromPool.AUTO:
            return 0.0
        return self._common.prefill.ms(self.size.unit_size)

    def decided(self, prompt: PoolPrompt, plan: LoadPlan, num_offered: int) -> None:
        """So many of the units that it offers are used."""
        use = plan.num_blocks
        label = "all" if use == num_offered else "part" if use else "none"
        self._stats.add("pool_decisions", label=label)
        logger.debug(
            "request %s: %d of %d units are used that the pool has; load %.1f ms, %s bytes/ms,"
            " prefill %s tokens/ms",
            *(prompt.request.request_id, use, num_offered, plan.load_ms),
            {place.label: round(speed.per_ms) for place, speed in self.speeds.items()},
            self._common.prefill.per_ms,
        )
        for place in {prompt.place_of(*block) for block in self.blocks_of(use, num_offered)}:
            if place and self._is_slow(place):
                self.speeds[place].relax()

    def blocks_of(self, start: int, stop: int) -> list[Wanted]:
        """Of these units, in all groups."""
        return [Wanted(i, group.id) for group in self.groups for i in group.blocks_of(start, stop)]

    def _is_slow(self, place: Place) -> bool:
        """Whether a unit is believed to be computed sooner than it comes from there."""
        blocks = self.blocks_of(0, 1)
        return sum(self.load_ms(place, block.group) for block in blocks) > self.compute_ms

    # Loads, end.

    def load_ended(self, result: LoadResult, places: Sequence[Place], was_parked: bool) -> None:
        """A load of any prompt has; ``places`` are those of its blocks."""
        self._stats.add("pool_loads", label=result.cause or "ok")
        self._stats.add("pool_load_ms", result.elapsed_ms)
        num_bytes = {p: result.num_bytes * n / len(places) for p, n in Counter(places).items()}
        expected_ms = {p: self.speeds[p].ms(n) or 1.0 for p, n in num_bytes.items() if p}
        for place, share in num_bytes.items():
            self._stats.add("pool_load_bytes", share, place.label)
            if place:  # of several each was as much slower, or faster, than expected as the load
                part = expected_ms[place] / sum(expected_ms.values())
                self.speeds[place].note(share, result.elapsed_ms * part)
        if result.cause != Cause.CANCELLED.value:
            # A long prompt may take its time where no step waits for it.
            elapsed_s = 0.0 if was_parked else result.elapsed_ms / 1000
            self._record_load(result.cause, elapsed_s)

    def _record_load(self, cause: str, elapsed_s: float) -> None:
        was_closed = self.load_breaker.closed
        if cause == Cause.DEADLINE.value and elapsed_s > self._config.breaker_slow_ms / 1000:
            # Every request of the step has waited in vain, and would for the next one.
            changed = self.load_breaker.failed(unreachable=True)
        else:
            changed = self.load_breaker.record(cause not in _POOL_FAULTS, elapsed_s)
        if not changed:
            return
        if self.load_breaker.closed:
            logger.info(
                "a load from the pool has come; loads go on after %.0f s without",
                self.load_breaker.open_s,
            )
            return
        if was_closed:
            self._stats.add("pool_breaker_opened", label="load")
            logger.warning(
                "loads from the pool fail or are slow (the last one: %s, %.1f s); prompts are"
                " computed, and one load is tried every %.1f s",
                *(cause or "ok", elapsed_s, self._config.probe_interval_s),
            )
        for prompt in (*self.open.values(), *self.closed.values()):
            prompt.again = None
        for prompt in self.open.values():
            self._phantoms.withdraw(prompt)
            if prompt.offers:
                prompt.give_up(Cause.POOL_FAILED)

    def failed_to_load(self, request: Request, wanted: Wanted) -> None:
        """It is not tried again for a while."""
        key = key_of(request, wanted.block_index, self.groups[wanted.group])
        now = self._clock()
        self._blacklist.pop(key, None)
        self._blacklist[key] = now + _BLACKLIST_S
        while self._blacklist[oldest := next(iter(self._blacklist))] <= now:
            del self._blacklist[oldest]
        self._events.gone(key)

    def finish(self, request: Request) -> Provenance | None:
        """The request ended, by whatever cause."""
        prompt = self.find(request)
        if prompt is None:
            return None
        if self.closed.pop(request.request_id, None) is None:
            del self.open[request.request_id]
            prompt.advance(SourceEvent.ABORT)
            self._phantoms.withdraw(prompt)
        prompt.count_computed(request.num_computed_tokens > 0)
        origin = prompt.provenance
        origin.outcome = origin.outcome or ("local" if origin.num_local_tokens else "computed")
        sources = dict(origin.pool_tokens)
        if not prompt.had_peer:
            sources |= {"local": origin.num_local_tokens, "computed": origin.num_computed_tokens}
        for source, num_tokens in sources.items():
            if num_tokens:
                self._stats.add("prompt_tokens", num_tokens, source)
        logger.debug("request %s: %s", request.request_id, origin)
        return origin

    def tick(self) -> None:
        """Once a step: give up what is late, try a pool that is bypassed."""
        if self.answers.empty():  # else it might be too late for what is here already
            self.expire()
        if not self.breaker.closed:
            self._probe()

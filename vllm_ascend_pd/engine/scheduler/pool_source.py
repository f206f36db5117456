# SPDX-License-Identifier: Apache-2.0
"""Blocks that the pool has: looked up at arrival, loaded as those of a peer are."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from vllm_ascend_pd.breaker import Breaker
from vllm_ascend_pd.config import LoadMode, PoolConfig, PoolLoad, TransferConfig
from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolEvent, PoolPrompt, PoolState
from vllm_ascend_pd.pool.answers import fold_found
from vllm_ascend_pd.pool.keys import PoolNames
from vllm_ascend_pd.pool.messages import Found, Lookup, join_hashes
from vllm_ascend_pd.pool.policy import Speeds, num_blocks_to_use
from vllm_ascend_pd.pool.tier import Place
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.v1.request import Request

    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.engine.scheduler.pool_events import PoolEvents
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.metrics import Provenance, Stats
    from vllm_ascend_pd.pool.messages import Message

logger = logging.getLogger(__name__)

_BLACKLIST_S = 30.0
_PROBE_HASH = bytes(32)
_REFRESH_S = 2.0
"""Blocks that are used without the pool are looked up this often at most."""
_POOL_FAULTS = (Cause.POOL_FAILED.value, Cause.DEADLINE.value)
_EXPECTED_OUTCOMES = ("", Cause.CANCELLED.value)


@dataclass(slots=True)
class _Pending:
    """A lookup on its way: of a prompt that waits for it, of blocks that a request has already, or
    a probe.
    """

    prompt: PoolPrompt | None
    sent_at: float
    deadline: float
    refreshed: tuple[Request, Sequence[int]] | None = None
    answers: list[Found] = field(default_factory=list)
    """Of the workers that have answered so far."""


class PoolSource:
    """Scheduler thread. ``send`` hands a message to every worker and never blocks."""

    def __init__(
        self,
        send: Callable[[Message], None],
        phantoms: PhantomBlocks,
        events: PoolEvents,
        config: PoolConfig,
        transfer: TransferConfig,
        stats: Stats,
        block_size: int,
        bytes_per_block: int,
        others_wait: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        num_workers: int = 1,
    ) -> None:
        """``bytes_per_block`` are those of all workers together."""
        self.names = PoolNames()
        self._num_workers = num_workers
        self._send = send
        self._phantoms = phantoms
        self._events = events
        self._config = config
        self._transfer = transfer
        self._stats = stats
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._others_wait = others_wait
        self._clock = clock
        self.speeds = Speeds()
        self.breaker = Breaker(
            config.breaker_failures,
            config.probe_interval_s,
            slow_s=config.breaker_slow_ms / 1000,
            clock=clock,
        )
        self._ids = count(1)
        self._pending: dict[int, _Pending] = {}
        self.open: dict[str, PoolPrompt] = {}
        """By request id: prompts that the pool may have something of, and those that had a peer."""
        self.closed: dict[str, PoolPrompt] = {}
        """The others. A pass of the scheduler has nothing to do for them."""
        self._blacklist: dict[bytes, float] = {}
        self.queued: list[PoolPrompt] = []
        """Found, and perhaps to be loaded before a pass comes to them, see ``take_queued``."""

    def __len__(self) -> int:
        return len(self.open) + len(self.closed)

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
        end = (request.num_tokens - 1) // self._block_size
        stop = min(end + 1, len(request.block_hashes))
        previous = self.find(request)
        # The blocks of a preempted request are still cached, and about to be taken by others.
        was_preempted = previous is not None or admitted
        start = 0 if was_preempted else self._phantoms.num_leading_hits(request, end)
        prompt = PoolPrompt(request, start, self._transfer, self.names)
        if previous is not None:
            prompt.provenance = previous.provenance
            prompt.had_peer = previous.had_peer
            prompt.admitted = previous.count_computed(admitted)
        elif from_peer is not None:
            prompt.provenance, prompt.had_peer = from_peer, True
            prompt.admitted = admitted
        self.closed.pop(request.request_id, None)
        self.open[request.request_id] = prompt
        if not self.breaker.closed:
            if start < stop:
                self._count_lookup("bypassed")
            self._give_up(prompt)
            self._probe()
            return
        if start < stop:
            self._look_up([bytes(h) for h in request.block_hashes[start:stop]], prompt)
            request.status = RequestStatus.WAITING_FOR_KV
        else:
            self._give_up(prompt)
        self._refresh(request, start)

    def _refresh(self, request: Request, num_blocks: int) -> None:
        """These leading blocks are taken from the prefix cache. The pool evicts what nobody has
        looked up for longest, and without telling: it learns that they are used, and we, what must
        be stored again. Nobody waits for the answer.
        """
        hashes = [bytes(h) for h in request.block_hashes[:num_blocks]]
        indices = [i for i, h in enumerate(hashes) if not self._events.is_recent(h, _REFRESH_S)]
        if indices:
            self._look_up([hashes[i] for i in indices], refreshed=(request, indices))

    def _probe(self) -> None:
        if self.breaker.take_probe():
            self._look_up([_PROBE_HASH])

    def _look_up(
        self,
        hashes: Sequence[bytes],
        prompt: PoolPrompt | None = None,
        refreshed: tuple[Request, Sequence[int]] | None = None,
    ) -> None:
        now = self._clock()
        timeout_s = self._config.lookup_timeout_ms / 1000
        lookup_id = next(self._ids)
        self._pending[lookup_id] = _Pending(prompt, now, now + timeout_s, refreshed)
        joined, hash_bytes = join_hashes([self.names.name(h) for h in hashes])
        self._send(Lookup(lookup_id, joined, hash_bytes, now + timeout_s))

    @property
    def num_looking(self) -> int:
        """Prompts whose lookup is not answered."""
        return sum(pending.prompt is not None for pending in self._pending.values())

    @property
    def is_looking(self) -> bool:
        """Whether there is any of them."""
        return any(pending.prompt is not None for pending in self._pending.values())

    def on_found(self, found: Found, arrived_at: float) -> None:
        """A worker has answered a lookup; with the last one's answer it is over."""
        pending = self._pending.get(found.lookup_id)
        if pending is None:
            return
        pending.answers.append(found)
        if len(pending.answers) < self._num_workers:
            return
        del self._pending[found.lookup_id]
        found = fold_found(pending.answers)
        if pending.refreshed is not None:
            self._note_refreshed(*pending.refreshed, found)
            return
        elapsed_s = arrived_at - pending.sent_at
        self._record(found.healthy, elapsed_s)
        if not found.healthy:
            self._events.all_gone()
        prompt = pending.prompt
        if prompt is None or prompt.state is not PoolState.LOOKING:
            return
        places = bytearray(found.places)
        if not found.healthy or len(places) + prompt.start > len(prompt.request.block_hashes):
            self._count_lookup("failed")
            self._give_up(prompt)
            return
        self._stats.add("pool_lookup_ms", elapsed_s * 1000)
        self._learn(prompt, places)
        if not any(places):
            self._count_lookup("miss")
            self._give_up(prompt)
            return
        self._count_lookup("hit")
        prompt.found(bytes(places))
        if prompt.has_block((prompt.request.num_tokens - 1) // self._block_size):
            prompt.num_tail_tokens = self._block_size - 1
        prompt.advance(PoolEvent.FOUND)
        self._decide(prompt)
        self.queued.append(prompt)

    def _give_up(self, prompt: PoolPrompt) -> bool:
        """The pool has nothing for it; whether it was waiting for that. Without a peer, nothing
        holds the request any more, and the engine need not ask us about it.
        """
        if not prompt.advance(PoolEvent.NOTHING):
            return False
        if not prompt.had_peer:
            prompt.request.status = prompt.queued_status
            self.closed[prompt.request.request_id] = self.open.pop(prompt.request.request_id)
        return True

    def _note_refreshed(self, request: Request, indices: Sequence[int], found: Found) -> None:
        if found.healthy and len(found.places) == len(indices):
            for index, place in zip(indices, found.places, strict=True):
                self._events.found(request, index, Place(place))

    def forget(self) -> None:
        """Nothing that the pool has now is taken any more."""
        for prompt in self.open.values():
            prompt.advance(PoolEvent.ENDED)
        self._pending.clear()
        self._events.all_gone()
        self.names.forget()

    def take_queued(self) -> list[PoolPrompt]:
        """Prompts with something to load that no pass of the scheduler has come to yet."""
        self.queued = [p for p in self.queued if p.offers and not p.placed]
        return list(self.queued)

    def _learn(self, prompt: PoolPrompt, places: bytearray) -> None:
        """What is there need not be stored again; what failed a moment ago is not tried again."""
        now = self._clock()
        for i, place in enumerate(places):
            block_hash = bytes(prompt.request.block_hashes[prompt.start + i])
            self._events.found(prompt.request, prompt.start + i, Place(place))
            if self._blacklist and (until := self._blacklist.get(block_hash)):
                if until > now:
                    places[i] = Place.NOWHERE
                else:
                    del self._blacklist[block_hash]

    def expire(self) -> None:
        """Requests whose lookup is not answered in time go on without the pool."""
        if not self._pending:
            return
        now = self._clock()
        for lookup_id, pending in list(self._pending.items()):
            if now < pending.deadline:
                continue
            del self._pending[lookup_id]
            if pending.refreshed is not None:
                continue
            self._record(False)
            if pending.prompt is not None and self._give_up(pending.prompt):
                self._count_lookup("deadline")

    def _count_lookup(self, outcome: str) -> None:
        self._stats.add("pool_lookups", label=outcome)

    def _record(self, ok: bool, elapsed_s: float = 0.0) -> None:
        if not self.breaker.record(ok, elapsed_s):
            return
        if self.breaker.closed:
            logger.info("the pool answers again; reads go on")
        else:
            self._events.all_gone()
            self._stats.add("pool_breaker_opened", label="get")
            logger.warning(
                "the pool is down or slow; it is not read for %.1f s, prompts are computed",
                self._config.probe_interval_s,
            )

    # Load or recompute.

    def _decide(self, prompt: PoolPrompt) -> None:
        """Cut what is slower to load than to compute."""
        if self._config.load is PoolLoad.NONE:
            prompt.advance(PoolEvent.ENDED)
            self._stats.add("pool_decisions", label="none")
            return
        missing = set(self._phantoms.find_missing(prompt.request, prompt))
        if not missing:
            return
        last = max(missing) + 1
        places = [prompt.place_of(i) if i in missing else None for i in range(last)]
        use = last
        if self._config.load is PoolLoad.AUTO:
            use = num_blocks_to_use(places, self.speeds, self._bytes_per_block, self._block_size)
        label = "all" if use == last else "part" if use else "none"
        self._stats.add("pool_decisions", label=label)
        logger.debug(
            "request %s: the pool has %d of the missing blocks, %s of %d are used; load %.1f ms,"
            " bandwidth %s bytes/ms, prefill %s tokens/ms",
            prompt.request.request_id,
            len(missing),
            use,
            last,
            self.speeds.load_ms([place for place in places[:use] if place], self._bytes_per_block),
            {place.label: round(speed) for place, speed in self.speeds.bytes_per_ms.items()},
            self.speeds.tokens_per_ms,
        )
        if use < last:
            self.speeds.relax()
            prompt.num_blocks = use
            prompt.num_tail_tokens = 0
            if not use:
                prompt.advance(PoolEvent.ENDED)

    def wants_parking(self, prompt: PoolPrompt, missing: Sequence[int]) -> bool:
        """Whether this load is so long that the rest of the batch should not wait for it."""
        mode = self._transfer.load_mode
        if mode is not LoadMode.AUTO:
            return mode is LoadMode.PARK
        places = [prompt.place_of(index) for index in missing]
        expected_ms = self.speeds.load_ms(places, self._bytes_per_block)
        if expected_ms <= self._transfer.max_step_load_ms:
            return False
        return self._others_wait() or expected_ms > self._transfer.step_load_timeout_s * 500

    # Admission, loads, end.

    def admitted(
        self, prompt: PoolPrompt, num_local: int, num_pool: int, claimed: Sequence[int]
    ) -> None:
        """The request is scheduled on ``num_pool`` tokens of the pool."""
        prompt.advance(PoolEvent.ADMITTED)
        if prompt.admitted:
            return
        prompt.admitted = True
        origin = prompt.provenance
        num_prompt = origin.num_prompt_tokens
        # What a failed peer brought in before lies in the prefix cache, and stays the peer's.
        num_peer = min(origin.num_peer_tokens, num_local)
        origin.num_peer_tokens = num_peer
        num_local = min(num_local, num_prompt)
        num_pool = min(num_pool, num_prompt - num_local)
        origin.num_local_tokens = num_local - num_peer
        origin.num_computed_tokens = num_prompt - num_local - num_pool
        self._attribute(prompt, num_pool, prompt.loaded.union(claimed))

    def _attribute(self, prompt: PoolPrompt, num_pool: int, indices: set[int]) -> None:
        """Split the pool's tokens by tier, as the lookup saw it. ``indices`` are the blocks that it
        has brought in, or is about to.
        """
        if not num_pool and not indices:
            return
        origin = prompt.provenance
        by_place = {Place.DRAM: 0, Place.REMOTE: 0, Place.SSD: 0}
        tail = (origin.num_prompt_tokens - 1) // self._block_size
        for index in indices:
            num_tokens = self._block_size - (index == tail)
            by_place[prompt.place_of(index) or Place.DRAM] += num_tokens
        # Some may have been evicted since; what is not known to be elsewhere was in DRAM.
        excess = sum(by_place.values()) - num_pool
        for place, num_tokens in by_place.items():
            back = min(excess, num_tokens)
            by_place[place] -= back
            excess -= back
        origin.num_dram_tokens = by_place[Place.DRAM]
        origin.num_remote_tokens = by_place[Place.REMOTE]
        origin.num_ssd_tokens = by_place[Place.SSD]
        if num_pool:
            origin.outcome = origin.outcome or "loaded"

    def load_ended(self, prompt: PoolPrompt, result: LoadResult, blocks: dict[int, int]) -> None:
        """A load has ended; ``blocks`` are its block ids with their indices in the prompt."""
        self._stats.add("pool_loads", label=result.cause or "ok")
        self._stats.add("pool_load_ms", result.elapsed_ms)
        prompt.provenance.num_pool_bytes += result.num_bytes
        prompt.provenance.transfer_ms += result.elapsed_ms
        if result.failed or not result.cause:
            prompt.loaded.update(i for b, i in blocks.items() if b not in result.failed)
        places = {index: prompt.place_of(index) for index in blocks.values()}
        for place in set(places.values()):
            share = sum(p is place for p in places.values()) / len(places)
            self._stats.add("pool_load_bytes", result.num_bytes * share, place.label)
        if len(set(places.values())) == 1:
            self.speeds.note_load(next(iter(places.values())), result.num_bytes, result.elapsed_ms)
        if result.cause != Cause.CANCELLED.value:
            self._record(result.cause not in _POOL_FAULTS)
        if result.cause in _EXPECTED_OUTCOMES:
            return
        prompt.provenance.outcome = result.cause
        until = self._clock() + _BLACKLIST_S
        for block_id in result.failed:
            if (index := blocks.get(block_id)) is not None:
                block_hash = bytes(prompt.request.block_hashes[index])
                self._blacklist[block_hash] = until
                self._events.gone(block_hash)
        lost = {i for b, i in blocks.items() if not result.failed or b in result.failed}
        self._take_back(prompt, min(lost, default=0))

    def _take_back(self, prompt: PoolPrompt, first_lost: int) -> None:
        """Tokens from this block on are computed after all."""
        origin = prompt.provenance
        kept = first_lost * self._block_size
        names = (
            *("num_dram_tokens", "num_remote_tokens", "num_ssd_tokens"),
            *("num_local_tokens", "num_peer_tokens"),
        )
        excess = sum(getattr(origin, name) for name in names) - kept
        for name in names:
            back = max(0, min(excess, getattr(origin, name)))
            setattr(origin, name, getattr(origin, name) - back)
            origin.num_computed_tokens += back
            excess -= back

    def finish(self, request: Request) -> Provenance | None:
        """The request ended, by whatever cause."""
        prompt = self.find(request)
        if prompt is None:
            return None
        if self.closed.pop(request.request_id, None) is None:
            del self.open[request.request_id]
            prompt.advance(PoolEvent.ENDED)
            self._phantoms.withdraw(prompt)
        prompt.count_computed(request.num_computed_tokens > 0)
        origin = prompt.provenance
        origin.outcome = origin.outcome or ("local" if origin.num_local_tokens else "computed")
        sources = ("dram", "remote", "ssd")
        for source in sources if prompt.had_peer else (*sources, "local", "computed"):
            if num_tokens := getattr(origin, f"num_{source}_tokens"):
                self._stats.add("prompt_tokens", num_tokens, source)
        logger.debug("request %s: %s", request.request_id, origin)
        return origin

    def tick(self) -> None:
        """Once a step: give up what is late, try a pool that is bypassed."""
        self.expire()
        if not self.breaker.closed:
            self._probe()

# SPDX-License-Identifier: Apache-2.0
"""P and D engines as queues, event by event. Pure: the same trace gives the same outcome.

    arrival ─► P: first come, first served, ─► hand-over ─► D: continuous batching ─► last token
               each step with as many tokens
               as fit, of however many prompts

The router gives each request to the P and the D with the fewest tokens in progress. Between two
changes of its batch all steps of a D are one event: their length grows evenly with the context.

Where engines share a host, a step of P is the slower the more tokens D gives, and those of D are
slower while P computes: as it is when they begin.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vllm_ascend_pd.planner.speeds import Speeds
    from vllm_ascend_pd.planner.trace_file import RequestTrace

MIN_STEP_S = 1e-6
"""No step is shorter, whatever a profile says: else time would stand still."""


class Split(NamedTuple):
    """How many instances of each role."""

    num_prefill: int
    num_decode: int

    def __str__(self) -> str:
        return f"{self.num_prefill}P {self.num_decode}D"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of each request, and of the engines."""

    split: Split
    ttft_s: npt.NDArray[np.float64]
    """By request: from its arrival to its first token."""
    itl_s: npt.NDArray[np.float64]
    """By request: mean seconds between its tokens; 0 if it has one only."""
    duration_s: float
    """From the first arrival to the last token."""
    step_s: npt.NDArray[np.float64]
    """Seconds between two tokens, of which ``step_tokens`` were that far apart."""
    step_tokens: npt.NDArray[np.float64]
    prefill_use: float
    """Share of the P engines' time in which they computed, until the last token or P's last step;
    ``decode_use`` likewise."""
    decode_use: float
    hit_rate: float
    """Share of all prompt tokens that P engines had in their prefix cache."""
    decode_batch: int
    """Requests of a D's step; of a hundred tokens one came of a larger one."""

    def itl_percentile(self, percent: float) -> float:
        """Of all tokens but each request's first."""
        if not len(self.step_s):
            return 0.0
        order = np.argsort(self.step_s)
        below = np.cumsum(self.step_tokens[order])
        at = int(np.searchsorted(below, below[-1] * percent / 100))
        return float(self.step_s[order][min(at, len(order) - 1)])


_Cache = OrderedDict[int, None]
"""Ids of the prefixes in an engine's prefix cache, the least recently used first."""


@dataclass(slots=True)
class _Prefill:
    queue: deque[int] = field(default_factory=deque)
    batch: list[int] = field(default_factory=list)
    """What the step under way completes."""
    is_busy: bool = False
    computed: int = 0
    """Tokens that there are of the first one in the queue, from the cache and from steps before."""
    busy_s: float = 0.0
    cached: _Cache = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Decode:
    waiting: deque[int] = field(default_factory=deque)
    running: list[tuple[int, int]] = field(default_factory=list)
    """A heap: the step with which a request ends, and the request."""
    num_steps: int = 0
    num_firsts: int = 0
    """Requests whose first token the next step gives: it is nobody's second."""
    context_tokens: int = 0
    """Of all that run."""
    kv_tokens: int = 0
    """Reserved: prompts and whole answers of all that run."""
    busy_s: float = 0.0
    cached: _Cache = field(default_factory=OrderedDict)
    tokens_per_s: float = 0.0
    # The steps under way: what was computed before them, when they began, how many, the first one's
    # seconds, and how much longer each is than the one before it. ``turn`` tells their end from
    # those of steps that were cut.
    delay_s: float = 0.0
    began_s: float = 0.0
    steps: int = 0
    step_s: float = 0.0
    growth_s: float = 0.0
    turn: int = 0

    def seconds(self, steps: int) -> float:
        return steps * self.step_s + self.growth_s * steps * (steps - 1) / 2

    def steps_within(self, seconds: float) -> int:
        """The step that is under way after so long ends with this number, from 1."""
        if self.growth_s * seconds < 1e-9 * self.step_s**2:
            steps = seconds / self.step_s
        else:
            half = self.step_s - self.growth_s / 2
            root = math.sqrt(half * half + 2 * self.growth_s * seconds)
            steps = (root - half) / self.growth_s
        return max(1, math.ceil(steps - 1e-6))


class _Least:
    """Tokens in progress by instance; of equals, each in turn."""

    def __init__(self, num_instances: int) -> None:
        self.tokens = np.zeros(num_instances, np.int64)
        self._turn = 0

    def choose(self) -> int:
        tokens, start = self.tokens, self._turn % len(self.tokens)
        self._turn += 1
        found = start + int(tokens[start:].argmin())
        if start:
            other = int(tokens[:start].argmin())
            if tokens[other] < tokens[found]:
                return other
        return found


class _Event(NamedTuple):
    at_s: float
    number: int
    """Of events at the same time the older one comes first."""
    kind: int
    who: int
    """A request or an instance."""
    turn: int


_PREFILL, _PREFILLED, _HANDED_OVER, _DECODE, _STEPPED = range(5)


class _Simulation:
    def __init__(self, trace: RequestTrace, speeds: Speeds, split: Split) -> None:
        self._trace, self._speeds, self._split = trace, speeds, split
        self._prompts: list[int] = trace.num_prompt_tokens.tolist()
        self._outputs: list[int] = trace.num_output_tokens.tolist()
        self._costs = _costs(speeds, max(self._prompts))
        tokens = np.arange(max(self._prompts) + 1)
        handovers = speeds.handover_s(tokens)
        sending = np.minimum(handovers, speeds.sending_s_per_token * tokens)
        self._sending: list[float] = sending.tolist()
        """By the tokens that D lacks."""
        # D has P's first token before all of the KV, so by those of the prompt.
        self._handovers: list[float] = (handovers - sending).tolist()
        self._computed_by_d = [0] * len(trace)
        """Tokens of a prompt of which D lacks less than a block: it does not wait for P."""
        self._prefills = [_Prefill() for _ in range(split.num_prefill)]
        self._decodes = [_Decode() for _ in range(split.num_decode)]
        self._prefill_load, self._decode_load = map(_Least, split)
        self._decode_of = [0] * len(trace)
        self._first_s = [math.nan] * len(trace)
        self._end_s = [math.nan] * len(trace)
        self._step_s, self._step_tokens = array("d"), array("d")
        self._batch_tokens = [0] * (speeds.max_num_seqs + 1)
        """That came in steps of so many requests."""
        self._num_hit_tokens = 0
        self._prefilled_s = 0.0
        """When P's last step ended."""
        self._num_computing = 0
        """P engines; ``_tokens_per_s`` is of all D engines."""
        self._tokens_per_s = 0.0
        self._events: list[_Event] = []
        self._num_events = 0

    def run(self) -> Outcome:
        handlers = (
            self._prefill,
            self._prefilled,
            self._handed_over,
            self._decode,
            self._stepped,
        )
        events = self._events
        for request, arrival in enumerate(self._trace.arrival_s.tolist()):
            while events and events[0][0] < arrival:
                at, _, kind, who, turn = heappop(events)
                handlers[kind](at, who, turn)
            self._arrived(arrival, request)
        while events:
            at, _, kind, who, turn = heappop(events)
            handlers[kind](at, who, turn)
        return self._outcome()

    def _slowdown(self, tokens_per_s: float) -> float:
        line = self._speeds.prefill_slowdown
        return float(line(tokens_per_s)) if len(line.x) > 1 else float(line.y[0])

    def _at(self, at_s: float, kind: int, who: int, turn: int = 0) -> None:
        self._num_events += 1
        heappush(self._events, _Event(at_s, self._num_events, kind, who, turn))

    def _arrived(self, now: float, request: int) -> None:
        number = self._prefill_load.choose()
        self._prefill_load.tokens[number] += self._prompts[request]
        self._decode_of[request] = decode = self._decode_load.choose()
        self._decode_load.tokens[decode] += self._prompts[request] + self._outputs[request]
        lacking = self._prompts[request] - self._hits(self._decodes[decode].cached, request)
        if lacking < self._speeds.block_size and self._outputs[request] > 1:
            self._computed_by_d[request] = lacking
            self._at(now, _HANDED_OVER, request)
        prefill = self._prefills[number]
        prefill.queue.append(request)
        if not prefill.is_busy:
            prefill.is_busy = True
            self._num_computing += 1
            self._at(now, _PREFILL, number)  # with all that come at this time

    # ---------------------------------------------------------------------------------------- P

    def _prefill(self, now: float, number: int, _: int = 0) -> None:
        """Prompts in the order in which they came, as many tokens as fit: of the last one perhaps
        only a part, which the next step goes on with."""
        prefill, costs = self._prefills[number], self._costs
        room = self._speeds.max_num_batched_tokens
        seconds = self._speeds.prefill_base_s
        while prefill.queue and room:
            request = prefill.queue[0]
            begin = prefill.computed
            if not begin:
                begin = self._hits(prefill.cached, request)
                self._num_hit_tokens += begin
                if begin:  # or it is among the costs from 0 on
                    seconds += self._speeds.prefill_first_s
            end = min(self._prompts[request], begin + room)
            room -= end - begin
            seconds += costs[end] - costs[begin]
            prefill.computed = end
            if end == self._prompts[request]:
                self._remember(prefill.cached, request, self._speeds.prefill_kv_tokens)
                if not self._computed_by_d[request]:
                    decode = self._decodes[self._decode_of[request]]
                    hits = self._hits(decode.cached, request)
                    seconds += self._sending[self._prompts[request] - hits]
                prefill.computed = 0
                prefill.batch.append(prefill.queue.popleft())
        seconds *= self._slowdown(self._tokens_per_s / self._split.num_prefill)
        prefill.busy_s += seconds
        self._at(now + seconds, _PREFILLED, number)

    def _hits(self, cached: _Cache, request: int) -> int:
        """Tokens of its prefix in the cache; the last token is computed in any case."""
        tokens_per_id = self._trace.tokens_per_id
        most = (self._prompts[request] - 1) // tokens_per_id
        num_hits = 0
        for hash_id in self._trace.prefixes[request][:most]:
            if hash_id not in cached:
                break
            num_hits += tokens_per_id
        return num_hits

    def _remember(self, cached: _Cache, request: int, most_tokens: int) -> None:
        tokens_per_id = self._trace.tokens_per_id
        num_full = self._prompts[request] // tokens_per_id
        for hash_id in self._trace.prefixes[request][:num_full]:
            cached[hash_id] = None
            cached.move_to_end(hash_id)
        while len(cached) > most_tokens // tokens_per_id:
            cached.popitem(last=False)

    def _prefilled(self, now: float, number: int, _: int) -> None:
        prefill = self._prefills[number]
        self._prefilled_s = now
        for request in prefill.batch:
            self._prefill_load.tokens[number] -= self._prompts[request]
            if not self._computed_by_d[request]:
                handover_s = self._handovers[self._prompts[request]]
                self._at(now + handover_s, _HANDED_OVER, request)
        prefill.batch = []
        prefill.is_busy = bool(prefill.queue)
        self._num_computing -= not prefill.queue
        if prefill.queue:
            self._prefill(now, number)

    # ---------------------------------------------------------------------------------------- D

    def _handed_over(self, now: float, request: int, _: int) -> None:
        if self._outputs[request] == 1:  # P sampled its only token
            self._first_s[request] = now
            self._ended(now, request)
            return
        decode = self._decodes[self._decode_of[request]]
        self._remember(decode.cached, request, self._speeds.decode_kv_tokens)
        decode.waiting.append(request)
        if len(decode.waiting) > 1:
            return
        if not decode.running:
            self._at(now, _DECODE, self._decode_of[request])  # with all that come at this time
        elif self._has_room(decode, request):
            steps = decode.steps_within(now - decode.began_s)
            if steps < decode.steps:
                self._step(decode, self._decode_of[request], steps)

    def _has_room(self, decode: _Decode, request: int) -> bool:
        kv_tokens = decode.kv_tokens + self._prompts[request] + self._outputs[request]
        return not decode.running or (
            len(decode.running) < self._speeds.max_num_seqs
            and kv_tokens <= self._speeds.decode_kv_tokens
        )

    def _step(self, decode: _Decode, number: int, steps: int) -> None:
        """Let it make so many steps, from when it began."""
        decode.steps = steps
        decode.turn += 1
        self._at(decode.began_s + decode.seconds(steps), _STEPPED, number, decode.turn)

    def _stepped(self, now: float, number: int, turn: int) -> None:
        decode = self._decodes[number]
        if turn != decode.turn:
            return
        batch = len(decode.running)
        num_tokens = decode.steps * batch
        self._batch_tokens[batch] += num_tokens
        seconds = now - decode.began_s
        self._step_s.append(decode.delay_s + decode.step_s)
        self._step_tokens.append(batch - decode.num_firsts)
        if decode.steps > 1:
            self._step_s.append((seconds - decode.step_s) / (decode.steps - 1))
            self._step_tokens.append(num_tokens - batch)
        decode.num_firsts = 0
        decode.busy_s += seconds
        decode.num_steps += decode.steps
        decode.context_tokens += num_tokens
        while decode.running and decode.running[0][0] == decode.num_steps:
            request = heappop(decode.running)[1]
            num_kv_tokens = self._prompts[request] + self._outputs[request]
            decode.kv_tokens -= num_kv_tokens
            decode.context_tokens -= num_kv_tokens - 1
            self._ended(now, request)
        self._decode(now, number)

    def _decode(self, now: float, number: int, _: int = 0) -> None:
        """Between two steps: who waits and has room joins, and the next steps begin."""
        decode = self._decodes[number]
        delay_s, joined = 0.0, []
        while decode.waiting and self._has_room(decode, decode.waiting[0]):
            request = decode.waiting.popleft()
            self._first_s[request] = now
            decode.kv_tokens += self._prompts[request] + self._outputs[request]
            decode.context_tokens += self._prompts[request]
            last = decode.num_steps + self._outputs[request] - 1
            if computed := self._computed_by_d[request]:
                num_tokens = self._prompts[request]
                delay_s += self._costs[num_tokens] - self._costs[num_tokens - computed]
                joined.append(request)
                decode.context_tokens -= 1  # the token is not there yet
                last += 1
            heappush(decode.running, (last, request))
        decode.num_firsts = len(joined)
        batch = len(decode.running)
        self._tokens_per_s -= decode.tokens_per_s
        decode.tokens_per_s = 0.0
        if batch:
            slope = self._speeds.step_slope_s[batch]
            base = self._speeds.step_base_s[batch]
            # Alone, and for each P that computes for it as much more.
            alone = self._speeds.decode_alone
            share = alone + (1 - alone) * self._num_computing / self._split.num_decode
            decode.delay_s = delay_s
            decode.busy_s += delay_s
            decode.began_s = now + delay_s
            decode.step_s = max(MIN_STEP_S, share * (base + slope * decode.context_tokens / batch))
            decode.growth_s = share * slope
            decode.tokens_per_s = batch / decode.step_s
            self._tokens_per_s += decode.tokens_per_s
            for request in joined:  # their first tokens are of this step
                self._first_s[request] = decode.began_s + decode.step_s
            self._step(decode, number, decode.running[0][0] - decode.num_steps)

    def _ended(self, now: float, request: int) -> None:
        number = self._decode_of[request]
        self._decode_load.tokens[number] -= self._prompts[request] + self._outputs[request]
        self._end_s[request] = now

    def _outcome(self) -> Outcome:
        trace, first, end = self._trace, np.array(self._first_s), np.array(self._end_s)
        duration = float(end.max())
        gaps = np.maximum(1, trace.num_output_tokens - 1)
        whole_s = max(duration, self._prefilled_s)
        tokens = np.cumsum(self._batch_tokens)

        def use(engines: Sequence[_Prefill | _Decode]) -> float:
            return sum(e.busy_s for e in engines) / (len(engines) * whole_s) if whole_s else 0.0

        return Outcome(
            split=self._split,
            ttft_s=first - trace.arrival_s,
            itl_s=(end - first) / gaps,
            duration_s=duration,
            step_s=np.array(self._step_s),
            step_tokens=np.array(self._step_tokens),
            prefill_use=use(self._prefills),
            decode_use=use(self._decodes),
            hit_rate=self._num_hit_tokens / int(trace.num_prompt_tokens.sum()),
            decode_batch=int(np.searchsorted(tokens, tokens[-1] * 0.99)),
        )


def _costs(speeds: Speeds, num_tokens: int) -> list[float]:
    """Seconds that so many tokens of one prompt add to their steps, by their number."""
    tokens = np.arange(num_tokens + 1)
    steps = -(-tokens // speeds.max_num_batched_tokens)
    seconds = speeds.prefill_s(tokens) - steps * speeds.prefill_base_s
    seconds[0] = 0.0
    costs: list[float] = np.maximum.accumulate(seconds.clip(min=0.0)).tolist()
    return costs


def simulate(trace: RequestTrace, speeds: Speeds, split: Split) -> Outcome:
    """What so many engines make of the trace."""
    return _Simulation(trace, speeds, split).run()

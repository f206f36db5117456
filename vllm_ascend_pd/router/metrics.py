# SPDX-License-Identifier: Apache-2.0
"""What the router counts. Event loop thread.

Numbers are kept here and given to ``prometheus_client`` when somebody asks: its own counters and
histograms take locks and scan buckets, which a request would pay for several times.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from vllm_ascend_pd.host_memory import resident_memory_bytes
from vllm_ascend_pd.router.snapshot import (
    COUNTERS,
    HISTOGRAMS,
    Counts,
    Histogram,
    InstanceSnapshot,
    Snapshot,
)
from vllm_ascend_pd.router.trace import NUM_TIMELINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.trace import Timeline, Trace

OUTCOMES = (
    "ok",
    "client_error",
    "unauthorized",
    "unavailable",
    "refused",
    "failed",
    "timeout",
    "broken_stream",
    "disconnected",
)
"""How a request ends, each exactly once."""
MOVE_GAPS_S = 60.0
"""Of so many seconds they are summed up."""


class Recent:
    """How many values came within the last seconds, and their sum; kept by second."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._seconds: deque[tuple[int, int, float]] = deque()

    def add(self, value: float) -> None:
        second, count, total = int(self._clock()), 0, 0.0
        if self._seconds and self._seconds[-1][0] == second:
            _, count, total = self._seconds.pop()
        else:
            self._forget()
        self._seconds.append((second, count + 1, total + value))

    def sums(self) -> tuple[int, float]:
        self._forget()
        return sum(one[1] for one in self._seconds), sum(one[2] for one in self._seconds)

    def _forget(self) -> None:
        while self._seconds and self._seconds[0][0] < self._clock() - self._window_s:
            self._seconds.popleft()


class Metrics:
    """Counters and histograms of one process."""

    def __init__(
        self,
        instances: Callable[[], Iterable[Instance]],
        break_evens: Callable[[], dict[str, int]],
        degraded: Callable[[], dict[str, str]],
        window_s: float,
    ) -> None:
        self._instances = instances
        self._break_evens = break_evens
        self._degraded = degraded
        self._counts: dict[str, Counts] = {name: {} for name in COUNTERS}
        self._counts["requests"] = {(outcome,): 0 for outcome in OUTCOMES}
        self._legs: dict[str, Counts] = {}
        """By instance."""
        self.ttft = Histogram()
        self._recent_ttft = Recent(window_s)
        self.itl = Histogram()
        self.prefill_leg = Histogram()
        self.decode_leg = Histogram()
        self.handover = Histogram()
        self.queue = Histogram()
        self.resume = Histogram()
        self.move = Histogram()
        self.move_gap = Histogram()
        self.recent_move_gaps = Recent(MOVE_GAPS_S)
        self.loop_lag = Histogram()
        self.num_requests = 0
        """In progress now."""
        self.num_waiting = 0
        """Of them, those whose answer has not begun."""
        self.num_queued: Callable[[], int] = lambda: 0
        """What engines have no room for: requests, chats of batches, and running requests that are
        to go on elsewhere."""
        self._timelines: deque[Timeline] = deque(maxlen=NUM_TIMELINES)

    def came(self, trace: Trace) -> None:
        """A request."""
        self.num_requests += 1
        self.num_waiting += 1
        trace.is_waiting = True

    def begun(self, trace: Trace) -> None:
        """The answer to a request; of a part of one nothing is said."""
        self.num_waiting -= trace.is_waiting
        trace.is_waiting = False

    def ended(self, trace: Trace) -> None:
        """A request, in whatever way."""
        self.num_requests -= 1
        self.begun(trace)
        self.add("requests", trace.outcome)
        if trace.tenant is not None:
            self.add("tenant_requests", trace.tenant.name, trace.outcome)
        if trace.stages:
            self._timelines.append(trace.timeline())

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """To a counter of ``COUNTERS``."""
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0) + by

    def leg_ended(self, instance_id: str, leg: str, outcome: str) -> None:
        counts = self._legs.setdefault(instance_id, {})
        labels = (instance_id, leg, outcome)
        counts[labels] = counts.get(labels, 0) + 1

    def first_byte(self, seconds: float) -> None:
        """An answer has begun."""
        self.ttft.observe(seconds)
        self._recent_ttft.add(seconds)

    def moved(self, seconds: float) -> None:
        """The client of a stream that moved waited so long for its next token."""
        self.move_gap.observe(seconds)
        self.recent_move_gaps.add(seconds)

    def prefix(self, role: str, num_expected: int, told: tuple[int, int] | None) -> None:
        """A leg's prompt: what the policy expected its engine to have, and what the engine said:
        tokens of the prompt, and of them those that it had."""
        if num_expected:
            self.add("prefix_expected_tokens", role, str(told is not None).lower(), by=num_expected)
        if told is not None:
            num_prompt, num_cached = told
            self.add("prefix_prompt_tokens", role, by=num_prompt)
            self.add("prefix_cached_tokens", role, by=num_cached)

    def forget(self, instance_id: str) -> None:
        """An instance is gone: its series would stay for ever."""
        self._legs.pop(instance_id, None)

    def snapshot(self) -> Snapshot:
        """All of it now; the histograms are those that go on counting."""
        counters = {name: list(counts.items()) for name, counts in self._counts.items()}
        counters["legs"] = [one for counts in self._legs.values() for one in counts.items()]
        return Snapshot(
            counters,
            {name: getattr(self, name) for name in HISTOGRAMS},
            self.num_requests,
            self.num_waiting,
            self.num_queued(),
            [InstanceSnapshot.of(instance) for instance in self._instances()],
            self._break_evens(),
            self._degraded(),
            *self._recent_ttft.sums(),
            list(self._timelines),
            resident_memory_bytes(),
        )

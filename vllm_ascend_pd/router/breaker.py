# SPDX-License-Identifier: Apache-2.0
"""When to stop sending to an instance that fails, and when to try it again.

CLOSED     all requests
OPEN       none; the prober asks /health, less and less often
HALF_OPEN  it answers probes, but had failed requests: one at a time, until one succeeds
"""

from __future__ import annotations

from enum import Enum


class BreakerState(str, Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Event(Enum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The last of several failures in a row, or one that leaves no doubt."""
    CAME_BACK = "came back"
    """It could not be reached, and now answers a probe."""
    PROBE_ANSWERED = "probe answered"
    """It answers a probe, as it perhaps did while it failed requests."""


TRANSITIONS: dict[BreakerState, dict[Event, BreakerState]] = {
    BreakerState.CLOSED: {Event.FAILED: BreakerState.OPEN},
    BreakerState.OPEN: {
        Event.CAME_BACK: BreakerState.CLOSED,
        Event.PROBE_ANSWERED: BreakerState.HALF_OPEN,
    },
    BreakerState.HALF_OPEN: {
        Event.SUCCEEDED: BreakerState.CLOSED,
        Event.FAILED: BreakerState.OPEN,
    },
}

MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0


class Breaker:
    """Of one instance. Event loop thread."""

    def __init__(self, failure_threshold: int) -> None:
        self._threshold = failure_threshold
        self._num_failures = 0
        self._unreachable = False
        self._backoff_s = MIN_BACKOFF_S
        self.state = BreakerState.CLOSED

    def allows(self, num_active: int) -> bool:
        """May one more leg be sent, with ``num_active`` in progress?"""
        if self.state is BreakerState.HALF_OPEN:
            return num_active == 0
        return self.state is BreakerState.CLOSED

    @property
    def backoff_s(self) -> float:
        """Until the next probe of an open breaker."""
        return self._backoff_s

    def succeeded(self) -> None:
        self._num_failures = 0
        if self._apply(Event.SUCCEEDED):
            self._backoff_s = MIN_BACKOFF_S

    def failed(self, *, unreachable: bool = False) -> bool:
        """Whether the breaker opened by this failure. One that is ``unreachable`` needs no more."""
        self._num_failures += 1
        half_open = self.state is BreakerState.HALF_OPEN
        if not (unreachable or half_open or self._num_failures >= self._threshold):
            return False
        # One that failed requests and then could not be reached was restarted.
        self._unreachable = unreachable or (self._unreachable and self.state is BreakerState.OPEN)
        if half_open:
            self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)
        return self._apply(Event.FAILED)

    def probe_failed(self, *, unreachable: bool) -> None:
        """Of an open breaker."""
        self._unreachable |= unreachable
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)

    def probe_answered(self) -> None:
        if self.state is BreakerState.CLOSED:
            return
        self._num_failures = 0
        if self._unreachable:
            self._apply(Event.CAME_BACK)
            self._backoff_s = MIN_BACKOFF_S
        else:
            self._apply(Event.PROBE_ANSWERED)

    def _apply(self, event: Event) -> bool:
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

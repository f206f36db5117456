# SPDX-License-Identifier: Apache-2.0
"""Bypasses a pool that is down or slow, and tries it again."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class BreakerState(Enum):
    CLOSED = "closed"
    """The pool is used."""
    OPEN = "open"
    """It is bypassed until the next probe."""
    PROBING = "probing"
    """One call is under way that decides."""


class Event(Enum):
    OK = "ok"
    FAILURE = "failure"
    """A failure that exhausts the error budget."""
    PROBE = "probe"


TRANSITIONS = {
    BreakerState.CLOSED: {Event.FAILURE: BreakerState.OPEN},
    BreakerState.OPEN: {Event.PROBE: BreakerState.PROBING},
    BreakerState.PROBING: {
        Event.OK: BreakerState.CLOSED,
        Event.FAILURE: BreakerState.OPEN,
    },
}


class Breaker:
    """One direction (get or put) of one pool. One thread; ``clock`` returns seconds.

    Calls that failed, or were slower than ``slow_s``, count as failures; ``max_failures`` of them
    in a row open it. Every ``probe_interval_s`` one probe may go out, whose end decides.
    """

    def __init__(
        self,
        max_failures: int,
        slow_s: float,
        probe_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._max_failures = max_failures
        self._slow_s = slow_s
        self._probe_interval_s = probe_interval_s
        self._clock = clock
        self.state = BreakerState.CLOSED
        self.closed = True
        """That it is in that state: what every pass of the scheduler asks."""
        self.num_opened = 0
        self._num_failures = 0
        self._next_probe_at = 0.0

    def record(self, ok: bool, elapsed_s: float = 0.0) -> bool:
        """One call has ended; whether that changed the state."""
        if ok and elapsed_s <= self._slow_s:
            self._num_failures = 0
            return self._advance(Event.OK)
        self._num_failures += 1
        # One failed probe is enough: it was sent to find out.
        if self.closed and self._num_failures < self._max_failures:
            return False
        return self._advance(Event.FAILURE)

    def take_probe(self) -> bool:
        """Whether a probe is to be sent now; its end must be given to ``record``."""
        if self.state is not BreakerState.OPEN or self._clock() < self._next_probe_at:
            return False
        return self._advance(Event.PROBE)

    def _advance(self, event: Event) -> bool:
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        self.state = state
        self.closed = state is BreakerState.CLOSED
        if state is BreakerState.OPEN:
            self.num_opened += 1
            self._next_probe_at = self._clock() + self._probe_interval_s
        return True

# SPDX-License-Identifier: Apache-2.0
"""Stops asking what fails or is slow, the pool or an engine, and tries it again."""

from __future__ import annotations

import math
import time
from enum import Enum
from typing import TYPE_CHECKING

from vllm_ascend_pd.states import Transitions

if TYPE_CHECKING:
    from collections.abc import Callable


class BreakerState(str, Enum):
    CLOSED = "closed"
    """It is asked."""
    OPEN = "open"
    """It is left alone, until a probe may be sent or is answered."""
    HALF_OPEN = "half_open"
    """One call at a time, whose end decides."""


class Event(Enum):
    OK = "ok"
    FAILURE = "failure"
    """The last of several in a row, or one that leaves no doubt."""
    PROBE = "probe"
    """Its time has come, or it answers probes, as it perhaps did while it failed."""
    CAME_BACK = "came back"
    """It could not be reached, and now answers a probe."""


_S, _E = BreakerState, Event
# Calls end after others have opened or closed it, and whoever may probe asks in every state.
TRANSITIONS: Transitions[BreakerState, Event] = Transitions(
    {
        _S.CLOSED: {_E.FAILURE: _S.OPEN, _E.OK: _S.CLOSED, _E.PROBE: _S.CLOSED},
        _S.OPEN: {
            _E.PROBE: _S.HALF_OPEN,
            _E.CAME_BACK: _S.CLOSED,
            _E.OK: _S.OPEN,
            _E.FAILURE: _S.OPEN,
        },
        _S.HALF_OPEN: {
            _E.OK: _S.CLOSED,
            _E.FAILURE: _S.OPEN,
            _E.PROBE: _S.HALF_OPEN,
            _E.CAME_BACK: _S.HALF_OPEN,
        },
    }
)


class Breaker:
    """Lookups, loads or writes of one pool, or one engine behind a router. One thread.

    Either its owner asks ``take_probe`` and sends the next call as a probe, or somebody else probes
    and tells ``probe_answered`` and ``probe_failed``.
    """

    def __init__(
        self,
        max_failures: int,
        min_backoff_s: float,
        max_backoff_s: float | None = None,
        slow_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``max_failures`` in a row open it; calls slower than ``slow_s`` are some. Probes of one
        that fails again and again become rarer, up to ``max_backoff_s``.
        """
        self._max_failures = max_failures
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s or min_backoff_s
        self._slow_s = slow_s
        self._clock = clock
        self._num_failures = 0
        self._unreachable = False
        self._next_probe_at = 0.0
        self.state = BreakerState.CLOSED
        self.closed = True
        """That it is in that state: what every pass of the scheduler asks."""
        self.backoff_s = min_backoff_s
        """Until the next probe of an open breaker."""
        self.opened_at = 0.0
        """When it was closed last."""
        self.on_change: Callable[[], None] = _nothing
        """Of its state."""

    @property
    def open_s(self) -> float:
        """Since it was closed last."""
        return self._clock() - self.opened_at

    def allows(self, num_active: int) -> bool:
        """May one more call be made, with ``num_active`` in progress?"""
        return self.closed or (self.state is BreakerState.HALF_OPEN and not num_active)

    def record(self, ok: bool, elapsed_s: float = 0.0) -> bool:
        """One call has ended; whether that changed the state."""
        return self.succeeded() if ok and elapsed_s <= self._slow_s else self.failed()

    def succeeded(self) -> bool:
        self._num_failures = 0
        return not self.closed and self._advance(Event.OK)

    def failed(self, *, unreachable: bool = False) -> bool:
        """Whether it opened by this failure. One that is ``unreachable`` needs no more."""
        self._num_failures += 1
        if self.closed and not unreachable and self._num_failures < self._max_failures:
            return False
        # One that failed calls and then could not be reached was restarted.
        is_open = self.state is BreakerState.OPEN
        self._unreachable = unreachable or (self._unreachable and is_open)
        if self.state is BreakerState.HALF_OPEN:
            self._back_off()
        return self._advance(Event.FAILURE)

    def take_probe(self) -> bool:
        """Whether a probe is to be sent now; its end must be given to ``record``."""
        return self._clock() >= self._next_probe_at and self._advance(Event.PROBE)

    def probe_failed(self, *, unreachable: bool) -> None:
        """Of an open breaker."""
        self._unreachable |= unreachable
        self._back_off()

    def probe_answered(self) -> None:
        if not self.closed:
            self._num_failures = 0
            self._advance(Event.CAME_BACK if self._unreachable else Event.PROBE)

    def _back_off(self) -> None:
        self.backoff_s = min(self.backoff_s * 2, self._max_backoff_s)

    def _advance(self, event: Event) -> bool:
        state = TRANSITIONS.after(self.state, event)
        if state is self.state:
            return False
        if self.closed:
            self.opened_at = self._clock()
        self.state = state
        self.closed = state is BreakerState.CLOSED
        if self.closed:
            self.backoff_s = self._min_backoff_s
        if state is BreakerState.OPEN:
            self._next_probe_at = self._clock() + self.backoff_s
        self.on_change()
        return True


def _nothing() -> None: ...

# SPDX-License-Identifier: Apache-2.0
"""Deadlines over awaits.

``timeout``: ``asyncio.wait_for`` loses cancellations before 3.12. ``Deadline``: for what an engine
does, which is not late because this process was.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import TYPE_CHECKING

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout  # aiohttp needs it there, too

if TYPE_CHECKING:
    from collections.abc import Callable
TIMED_OUT = (asyncio.TimeoutError, TimeoutError)

TICK_S = 0.1
JITTER_S = 0.01
"""Which a tick always has."""
TOLERANCE_S = 0.05
"""Lag over a whole deadline that changes nothing."""


class LoopLag:
    """How long the event loop kept what was due waiting, from ``start`` to ``stop``."""

    def __init__(self, seen: Callable[[float], None] = lambda lag_s: None) -> None:
        """``seen`` is told the lag of each tick. One that was not started has none."""
        self._seen = seen
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._total_s = 0.0

    def total_s(self, now: float) -> float:
        """What has been waited for until ``now``, even if the loop is at it."""
        overdue_s = now - self._due - JITTER_S
        return self._total_s + overdue_s if overdue_s > 0 else self._total_s

    def start(self) -> None:
        self._due = time.monotonic() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        self._due = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        before_s, self._total_s = self._total_s, self.total_s(time.monotonic())
        self._seen(self._total_s - before_s)
        self.start()


class Deadline:
    """Calls ``expire`` once, after so many seconds in which the loop was there to see an answer:
    what it was late by is added, until it is not late any more. Event loop thread.

    A stream begins it anew with each token, so its timer stays where it is, and goes on for what is
    left when it is due.
    """

    __slots__ = (
        "_due",
        "_expire",
        "_lag",
        "_lag_before_s",
        "_loop",
        "_rings_at",
        "_seconds",
        "_timer",
    )

    def __init__(self, seconds: float, lag: LoopLag, expire: Callable[[], object]) -> None:
        self._lag = lag
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = math.inf
        self.begin(seconds)

    def begin(self, seconds: float) -> None:
        """From now on, whatever was before."""
        now = time.monotonic()
        self._seconds = seconds
        self._lag_before_s = self._lag.total_s(now)
        self._due = now + seconds
        if self._due < self._rings_at:
            self._ring(seconds)

    def pause(self) -> None:
        """Until it begins anew."""
        self._due = math.inf

    def cancel(self) -> None:
        """For good."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._rings_at = self._due
        self._timer = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        self._timer, self._rings_at = None, math.inf
        if self._due == math.inf:
            return
        now = time.monotonic()
        left_s = self._due - now
        if left_s > 0:  # a timer's clock may be a millisecond ahead
            self._ring(max(left_s, 0.001))
            return
        late_s = self._lag.total_s(now) - self._lag_before_s
        if late_s > TOLERANCE_S:
            self._lag_before_s += late_s
            more_s = min(late_s, self._seconds)
            self._due = now + more_s
            self._ring(more_s)
        else:
            self._expire()


__all__ = ["TIMED_OUT", "Deadline", "LoopLag", "timeout"]

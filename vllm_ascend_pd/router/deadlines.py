# SPDX-License-Identifier: Apache-2.0
"""Deadlines over awaits.

``timeout``: ``asyncio.wait_for`` loses cancellations before 3.12. ``Deadline``: for what an engine
does, which is not late because this process was.
"""

from __future__ import annotations

import asyncio
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
        self._due = 0.0
        self._total_s = 0.0

    @property
    def total_s(self) -> float:
        """What has been waited for until now, even if the loop is at it."""
        return self._total_s + self._overdue_s()

    def start(self) -> None:
        self._due = time.monotonic() + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue_s(self) -> float:
        if self._timer is None:
            return 0.0
        return max(0.0, time.monotonic() - self._due - JITTER_S)

    def _tick(self) -> None:
        lag_s = self._overdue_s()
        self._total_s += lag_s
        self._seen(lag_s)
        self.start()


class Deadline:
    """Calls ``expire`` once, after so many seconds in which the loop was there to see an answer:
    what it was late by is added, until it is not late any more. Event loop thread."""

    __slots__ = ("_expire", "_lag", "_lag_before_s", "_seconds", "_timer")

    def __init__(self, seconds: float, lag: LoopLag, expire: Callable[[], object]) -> None:
        self._seconds = seconds
        self._lag = lag
        self._expire = expire
        self._arm(seconds)

    def cancel(self) -> None:
        self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        self._lag_before_s = self._lag.total_s
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        late_s = self._lag.total_s - self._lag_before_s
        if late_s > TOLERANCE_S:
            self._arm(min(late_s, self._seconds))
        else:
            self._expire()


__all__ = ["TIMED_OUT", "Deadline", "LoopLag", "timeout"]

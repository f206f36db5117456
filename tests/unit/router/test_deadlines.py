# SPDX-License-Identifier: Apache-2.0
"""A deadline that begins anew, on a clock that the test turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from vllm_ascend_pd.router import deadlines
from vllm_ascend_pd.router.deadlines import TICK_S, Deadline, LoopLag

if TYPE_CHECKING:
    from collections.abc import Callable


class _Timer:
    def __init__(self, loop: Clock, at: float, ring: Callable[[], None]) -> None:
        self.loop, self.at, self.ring = loop, at, ring

    def cancel(self) -> None:
        self.loop.timers.remove(self)


class Clock:
    """An event loop's timers, and the time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[_Timer] = []

    def monotonic(self) -> float:
        return self.now

    def call_later(self, after_s: float, ring: Callable[[], None]) -> _Timer:
        timer = _Timer(self, self.now + after_s, ring)
        self.timers.append(timer)
        return timer

    def until(self, at: float) -> None:
        """All timers ring when they are due, or at once."""
        while due := sorted((t for t in self.timers if t.at <= at), key=lambda timer: timer.at):
            self.now = max(self.now, due[0].at)
            self.timers.remove(due[0])
            due[0].ring()
        self.now = at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", clock)
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


class Expired:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at: list[float] = []

    def __call__(self) -> None:
        self.at.append(self.clock.now)


def test_deadline_that_begins_anew_is_over_so_long_after_that(clock: Clock) -> None:
    expired = Expired(clock)
    deadline = Deadline(10, LoopLag(), expired)
    for _ in range(5):
        clock.until(clock.now + 9)
        deadline.begin(10)
    assert len(clock.timers) == 1
    began = clock.now
    clock.until(began + 100)
    assert expired.at == [began + 10]
    assert not clock.timers


def test_deadline_that_begins_anew_may_be_sooner(clock: Clock) -> None:
    expired = Expired(clock)
    deadline = Deadline(600, LoopLag(), expired)
    deadline.begin(10)
    clock.until(2000)
    assert expired.at == [1010]


def test_paused_deadline_is_not_over_until_it_begins_anew(clock: Clock) -> None:
    expired = Expired(clock)
    deadline = Deadline(10, LoopLag(), expired)
    deadline.pause()
    clock.until(1100)
    assert not expired.at
    assert not clock.timers
    deadline.begin(10)
    clock.until(1200)
    assert expired.at == [1110]


def test_cancelled_deadline_leaves_no_timer(clock: Clock) -> None:
    deadline = Deadline(10, LoopLag(), Expired(clock))
    deadline.begin(20)
    deadline.cancel()
    assert not clock.timers


def test_deadline_adds_only_the_lag_since_it_began_anew(clock: Clock) -> None:
    lag, expired = LoopLag(), Expired(clock)
    lag.start()
    deadline = Deadline(10, lag, expired)
    clock.now += 3 + TICK_S  # the loop was busy
    deadline.begin(10)
    began = clock.now
    clock.until(began + 9)
    clock.now += 2  # and again
    clock.until(began + 100)
    (at,) = expired.at
    assert began + 11 + 2 - 2 * TICK_S < at <= began + 11 + 2
    lag.stop()
    assert not clock.timers

# SPDX-License-Identifier: Apache-2.0
"""The breaker opens on failures in a row, and one probe decides when it closes."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.pool.breaker import TRANSITIONS, Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(max_failures=3, slow_s=1.0, probe_interval_s=5.0, clock=clock)


def open_it(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.record(False)
    assert breaker.state is BreakerState.OPEN


def test_it_opens_on_failures_in_a_row(breaker: Breaker) -> None:
    assert [breaker.record(False) for _ in range(3)] == [False, False, True]
    assert not breaker.closed


def test_a_success_starts_the_count_again(breaker: Breaker) -> None:
    for ok in (False, False, True, False, False):
        breaker.record(ok)
    assert breaker.closed


def test_a_slow_success_is_a_failure(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.record(True, 1.5)
    assert not breaker.closed


def test_a_probe_goes_out_after_the_interval_and_only_one(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    assert not breaker.take_probe()
    clock.now += 5
    assert breaker.take_probe()
    clock.now += 50
    assert not breaker.take_probe()


def test_a_good_probe_closes_it(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 5
    breaker.take_probe()
    assert breaker.record(True)
    assert breaker.closed


def test_a_bad_probe_opens_it_for_another_interval(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    clock.now += 5
    breaker.take_probe()
    assert breaker.record(False)
    assert breaker.state is BreakerState.OPEN
    clock.now += 4.9
    assert not breaker.take_probe()
    clock.now += 0.2
    assert breaker.take_probe()


def test_a_late_answer_does_not_close_it(breaker: Breaker) -> None:
    open_it(breaker)
    assert not breaker.record(True)
    assert not breaker.closed


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(BreakerState)

# SPDX-License-Identifier: Apache-2.0
"""When the pool or an engine is left alone, and when it is tried again."""

from __future__ import annotations

import pytest

from tests.clock import Clock
from vllm_ascend_pd.kv.breaker import TRANSITIONS, Breaker, BreakerState
from vllm_ascend_pd.router.instances import MAX_BACKOFF_S, MIN_BACKOFF_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(max_failures=3, min_backoff_s=5.0, slow_s=1.0, clock=clock)


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
    assert set(TRANSITIONS.table) == set(BreakerState)


# One that somebody else probes, as a router does.


def make(max_failures: int = 3) -> Breaker:
    return Breaker(max_failures, MIN_BACKOFF_S, MAX_BACKOFF_S)


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = make()
    for _ in range(5):
        assert not breaker.failed()
        assert not breaker.failed()
        breaker.succeeded()
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0)


def test_half_open_lets_one_through_and_a_success_closes() -> None:
    breaker = make(1)
    breaker.failed()
    breaker.probe_answered()
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.allows(0)
    assert not breaker.allows(1)
    assert breaker.failed()
    assert breaker.state is BreakerState.OPEN
    breaker.probe_answered()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED


def test_one_that_was_away_is_trusted_when_it_is_back() -> None:
    breaker = make()
    assert breaker.failed(unreachable=True)
    breaker.probe_answered()
    assert breaker.state is BreakerState.CLOSED


def test_one_that_died_after_its_requests_failed_is_trusted_when_it_is_back() -> None:
    breaker = make(1)
    breaker.failed()
    breaker.probe_failed(unreachable=True)
    breaker.probe_answered()
    assert breaker.state is BreakerState.CLOSED


def test_probes_of_an_open_breaker_become_rare() -> None:
    breaker = make(1)
    breaker.failed(unreachable=True)
    waits = []
    for _ in range(8):
        waits.append(breaker.backoff_s)
        breaker.probe_failed(unreachable=True)
    assert waits == sorted(waits)
    assert waits[-1] == MAX_BACKOFF_S
    breaker.probe_answered()
    assert (breaker.closed, breaker.backoff_s) == (True, waits[0])


def test_answered_probe_alone_does_not_hide_failing_requests() -> None:
    breaker = make()
    for expected in (False, False, True):
        breaker.probe_answered()
        assert breaker.failed() is expected

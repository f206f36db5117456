# SPDX-License-Identifier: Apache-2.0
"""When an instance is left out, and when it is tried again."""

from __future__ import annotations

from vllm_ascend_pd.router.breaker import MAX_BACKOFF_S, Breaker, BreakerState
from vllm_ascend_pd.router.retries import RetryBudget


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = Breaker(3)
    for _ in range(5):
        assert not breaker.failed()
        assert not breaker.failed()
        breaker.succeeded()
    assert [breaker.failed() for _ in range(3)] == [False, False, True]
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allows(0)


def test_half_open_lets_one_through_and_a_success_closes() -> None:
    breaker = Breaker(1)
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
    breaker = Breaker(3)
    assert breaker.failed(unreachable=True)
    breaker.probe_answered()
    assert breaker.state is BreakerState.CLOSED


def test_one_that_died_after_its_requests_failed_is_trusted_when_it_is_back() -> None:
    breaker = Breaker(1)
    breaker.failed()
    breaker.probe_failed(unreachable=True)
    breaker.probe_answered()
    assert breaker.state is BreakerState.CLOSED


def test_probes_of_an_open_breaker_become_rare() -> None:
    breaker = Breaker(1)
    breaker.failed(unreachable=True)
    waits = []
    for _ in range(8):
        waits.append(breaker.backoff_s)
        breaker.probe_failed(unreachable=True)
    assert waits == sorted(waits)
    assert waits[-1] == MAX_BACKOFF_S


def test_answered_probe_alone_does_not_hide_failing_requests() -> None:
    breaker = Breaker(3)
    for expected in (False, False, True):
        breaker.probe_answered()
        assert breaker.failed() is expected


def test_retry_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.5, 2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]

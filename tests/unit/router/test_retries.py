# SPDX-License-Identifier: Apache-2.0
"""How many requests are tried again."""

from __future__ import annotations

from vllm_ascend_pd.router.retries import RetryBudget


def test_retry_budget_is_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.5, 2)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]

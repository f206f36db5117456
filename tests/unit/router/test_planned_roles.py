# SPDX-License-Identifier: Apache-2.0
"""What the planner's model says of requests that came lately; no engine, no clock."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.planner.profile import check
from vllm_ascend_pd.planner.search import Objective
from vllm_ascend_pd.planner.speeds import Speeds
from vllm_ascend_pd.router.instances import Kind
from vllm_ascend_pd.router.planned_roles import MIN_REQUESTS, WINDOW_S, PlannedRoles

BOTH: dict[Kind, bool] = {"prefill": True, "decode": True}
PROFILE = {
    "format": 1,
    "model": "m",
    # A second for 1000 tokens.
    "prefill": [{"num_tokens": n, "batch": 1, "seconds": n / 1000} for n in (10, 1000)],
    # 20 ms, and 10 ms more for each request.
    "decode": [
        {"batch": n, "context_tokens": 100, "seconds": 0.02 + 0.01 * n} for n in (1, 10, 100)
    ],
    "handover": [{"num_tokens": 1000, "seconds": 0.001}],
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 100,
    "prefill_kv_tokens": 100_000,
    "decode_kv_tokens": 1_000_000,
}


def planned(num_prompt_tokens: int, num_answer_tokens: int, num: int = 40) -> PlannedRoles:
    """One such request each second up to 40 s."""
    plan = PlannedRoles("m", Speeds.of(check(PROFILE)), Objective(4.0, 0.1))
    for number in range(num):
        plan.saw(40.0 - number, num_prompt_tokens, num_answer_tokens)
    return plan


def wanted(
    plan: PlannedRoles, prefill: int, decode: int, movable: dict[Kind, bool] = BOTH
) -> Kind | None:
    asked = plan.requests(40.0)
    assert asked is not None
    return plan.wanted(asked, {"prefill": prefill, "decode": decode}, movable)


def test_kind_that_is_short_of_engines_gets_one() -> None:
    assert wanted(planned(2000, 2), 1, 3) == "prefill"
    assert wanted(planned(10, 200), 3, 1) == "decode"


def test_nothing_is_wanted_where_all_is_in_time() -> None:
    assert wanted(planned(10, 2), 1, 3) is None
    assert wanted(planned(10, 2), 3, 1) is None


@pytest.mark.parametrize("prompt", [10, 500, 2000])
@pytest.mark.parametrize("answer", [2, 50, 200])
def test_same_requests_come_to_rest(prompt: int, answer: int) -> None:
    plan = planned(prompt, answer)
    for start in range(1, 5):
        prefill, seen = start, {start}
        while kind := wanted(plan, prefill, 5 - prefill):
            prefill += 1 if kind == "prefill" else -1
            assert prefill not in seen
            assert 0 < prefill < 5
            seen.add(prefill)


def test_engine_that_cannot_change_is_not_asked_for() -> None:
    assert wanted(planned(2000, 2), 1, 3, {"prefill": True, "decode": False}) is None


def test_last_engine_of_a_kind_stays() -> None:
    assert wanted(planned(2000, 2), 3, 1) is None


def test_few_requests_and_old_ones_tell_nothing() -> None:
    assert planned(2000, 2, MIN_REQUESTS - 1).requests(40.0) is None
    assert planned(2000, 2).requests(40.0 + WINDOW_S) is None


def test_answer_without_tokens_is_not_counted() -> None:
    assert planned(2000, 0).requests(40.0) is None

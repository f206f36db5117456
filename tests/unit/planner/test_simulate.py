# SPDX-License-Identifier: Apache-2.0
"""Engines as queues: cases that can be worked out by hand, and what must hold of any trace."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.planner.known_speeds import MAX_SEQS, SPEEDS, poisson, trace
from vllm_ascend_pd.planner.simulate import Split, simulate
from vllm_ascend_pd.planner.speeds import Line

ONE_EACH = Split(1, 1)


def test_one_request_takes_its_prefill_its_hand_over_and_its_steps() -> None:
    outcome = simulate(trace((0, 100, 11)), SPEEDS, ONE_EACH)
    assert outcome.ttft_s == pytest.approx([0.11])
    assert outcome.itl_s == pytest.approx([0.02])
    assert outcome.duration_s == pytest.approx(0.11 + 10 * 0.02)
    assert outcome.prefill_use == pytest.approx(0.1 / 0.31)
    assert outcome.decode_use == pytest.approx(0.2 / 0.31)
    assert outcome.itl_percentile(99) == pytest.approx(0.02)


def test_an_answer_of_one_token_is_p_s_and_needs_no_step() -> None:
    outcome = simulate(trace((0, 100, 1)), SPEEDS, ONE_EACH)
    assert (outcome.ttft_s[0], outcome.itl_s[0]) == (pytest.approx(0.11), 0)
    assert outcome.decode_use == outcome.itl_percentile(50) == 0


def test_prompts_are_computed_one_after_another_and_short_ones_in_one_step() -> None:
    outcome = simulate(trace((0, 100, 1), (0, 60, 1), (0, 40, 1), (0, 1, 1)), SPEEDS, ONE_EACH)
    # 60 and 40 fill a step: both are there when it ends.
    assert outcome.ttft_s == pytest.approx([0.11, 0.21, 0.21, 0.211])


def test_what_prompts_of_one_step_share_is_spent_once() -> None:
    speeds = replace(SPEEDS, prefill_base_s=0.03)
    outcome = simulate(trace((0, 100, 1), (0, 50, 1), (0, 50, 1)), speeds, ONE_EACH)
    # 100 ms; then 30 ms for both, and 20 ms for each.
    assert outcome.ttft_s == pytest.approx([0.11, 0.18, 0.18])


def test_a_prompt_that_does_not_fit_is_begun_in_the_step_and_ended_in_the_next() -> None:
    outcome = simulate(trace((0, 60, 1), (0, 60, 1), (0, 60, 1)), SPEEDS, ONE_EACH)
    # The first step computes 40 of the second one, the next one the rest and the third one.
    assert outcome.ttft_s == pytest.approx([0.11, 0.19, 0.19])


def test_a_long_prompt_has_several_steps_and_leaves_its_rest_of_the_last_one_to_others() -> None:
    speeds = replace(SPEEDS, prefill_base_s=0.03)
    alone = simulate(trace((0, 250, 1)), speeds, ONE_EACH)
    assert alone.ttft_s == pytest.approx([0.26])  # as it was measured
    outcome = simulate(trace((0, 250, 1), (0, 50, 1), (0, 30, 1)), speeds, ONE_EACH)
    # The prompt's last 50 and the second one's 50: 30 ms for both, 20 ms for it.
    assert outcome.ttft_s == pytest.approx([0.28, 0.28, 0.31])


def test_a_prompt_that_was_begun_goes_on_from_there_after_what_the_cache_had() -> None:
    requests = ((0.0, 60, 1), (1.0, 70, 1), (1.0, 100, 1), (1.0, 10, 1))
    prefixes = ((1, 2, 3), (), (1, 2, 3), ())
    outcome = simulate(trace(*requests, prefixes=prefixes), SPEEDS, ONE_EACH)
    # Of the third one 30 tokens are cached, 30 fit in the step, and 40 are left for the next.
    assert outcome.ttft_s == pytest.approx([0.07, 0.11, 0.16, 0.16])
    assert outcome.hit_rate == 30 / 240


def test_what_p_spends_on_sending_delays_the_next_prompt_and_no_request_twice() -> None:
    speeds = replace(SPEEDS, sending_s_per_token=5e-5)
    outcome = simulate(trace((0, 100, 1), (0, 100, 1)), speeds, ONE_EACH)
    # 5 of the 10 ms of each hand-over.
    assert outcome.ttft_s == pytest.approx([0.11, 0.215])
    all_of_it = simulate(
        trace((0, 100, 1), (0, 100, 1)), replace(speeds, sending_s_per_token=1.0), ONE_EACH
    )
    assert all_of_it.ttft_s == pytest.approx([0.11, 0.22])


def test_a_request_joins_the_batch_when_the_step_under_way_ends() -> None:
    # The first one's steps begin at 0.06; the second one is there at 0.165, within the sixth.
    outcome = simulate(trace((0, 50, 21), (0.105, 50, 3)), SPEEDS, ONE_EACH)
    assert outcome.ttft_s == pytest.approx([0.06, 0.18 - 0.105])
    assert outcome.itl_s == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize(
    ("requests", "batch"),
    [
        ([(0, 50, 1)], 0),
        ([(0, 50, 21)], 1),
        ([(0, 50, 21), (0.105, 50, 3)], 2),
        ([(0, 50, 1000), (0.105, 50, 3)], 1),
    ],
)
def test_the_batch_of_a_d_is_that_of_nearly_all_tokens(
    requests: list[tuple[float, int, int]], batch: int
) -> None:
    assert simulate(trace(*requests), SPEEDS, ONE_EACH).decode_batch == batch


def test_a_request_that_comes_with_the_end_of_a_step_joins_the_next_one() -> None:
    outcome = simulate(trace((0, 50, 21), (0.1, 50, 3)), SPEEDS, ONE_EACH)
    assert outcome.ttft_s == pytest.approx([0.06, 0.06])


def test_larger_batches_and_longer_contexts_have_longer_steps() -> None:
    speeds = replace(
        SPEEDS, step_base_s=[0.0, 0.02, 0.03, 0.04, 0.05], step_slope_s=[0.0] + [1e-4] * MAX_SEQS
    )
    outcome = simulate(trace((0, 100, 4)), speeds, ONE_EACH)
    # Contexts of 100, 101 and 102 tokens.
    assert outcome.itl_s[0] == pytest.approx(0.02 + 101e-4)
    both = simulate(trace((0, 50, 3), (0, 50, 3)), speeds, ONE_EACH)
    assert both.itl_s == pytest.approx([0.03 + 50.5e-4] * 2)
    assert both.step_tokens.sum() == 4


def test_a_request_joins_at_a_step_s_end_while_steps_grow() -> None:
    speeds = replace(SPEEDS, step_slope_s=[0.0] + [1e-3] * MAX_SEQS)
    alone = simulate(trace((0, 50, 30)), speeds, ONE_EACH)
    ends = 0.06 + np.cumsum(0.02 + 1e-3 * (50 + np.arange(29)))
    assert alone.duration_s == pytest.approx(ends[-1])
    outcome = simulate(trace((0, 50, 30), (0.7, 50, 2)), speeds, ONE_EACH)
    assert outcome.ttft_s[1] + 0.7 == pytest.approx(min(e for e in ends if e >= 0.76))


@pytest.mark.parametrize(
    "limit", [{"max_num_seqs": 1}, {"decode_kv_tokens": 70}, {"decode_kv_tokens": 1}]
)
def test_a_full_d_lets_others_wait(limit: dict[str, int]) -> None:
    outcome = simulate(trace((0, 50, 11), (0, 50, 11)), replace(SPEEDS, **limit), ONE_EACH)
    # Both are handed over at 0.11, and the second one begins when the first one ends.
    assert outcome.ttft_s == pytest.approx([0.11, 0.31])
    assert outcome.itl_s == pytest.approx([0.02, 0.02])


def test_each_request_goes_to_the_least_loaded() -> None:
    outcome = simulate(
        trace((0, 90, 2), (0.001, 20, 2), (0.002, 20, 2), (0.003, 20, 2)), SPEEDS, Split(2, 2)
    )
    # The second P takes all three: they are fewer tokens than the first one's.
    assert outcome.ttft_s == pytest.approx([0.1, 0.03, 0.069, 0.068])


def test_a_prefix_that_p_has_computed_is_not_computed_again() -> None:
    requests = ((0.0, 55, 1), (1.0, 55, 1), (2.0, 60, 1), (3.0, 50, 1))
    prefixes = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 5, 7), (1, 2, 8, 9, 10, 11), (1, 2, 3, 4, 5))
    found = simulate(trace(*requests, prefixes=prefixes), SPEEDS, ONE_EACH)
    # Five, two and four whole ids: of the last prompt at least one token is computed.
    assert found.ttft_s == pytest.approx([0.065, 0.015, 0.05, 0.02])
    assert found.hit_rate == pytest.approx((50 + 20 + 40) / 220)


def test_what_each_prompt_costs_is_spent_on_one_with_a_cached_prefix_too() -> None:
    speeds = replace(SPEEDS, prefill_s=Line.through([(0, 0.03), (1000, 1.03)]))
    speeds = replace(speeds, prefill_first_s=0.03, max_num_batched_tokens=40)
    requests = ((0.0, 60, 1), (1.0, 60, 1), (2.0, 80, 1))
    prefixes = ((1, 2, 3), (1, 2, 3), (1, 2, 3))
    found = simulate(trace(*requests, prefixes=prefixes), speeds, ONE_EACH)
    # Of the second one 30 tokens are computed, of the third one 40 and 10: 30 ms for each, once.
    assert found.ttft_s == pytest.approx([0.1, 0.07, 0.09])


def test_p_sends_no_prefix_that_d_has() -> None:
    requests = ((0.0, 55, 2), (1.0, 55, 2), (2.0, 55, 2))
    prefixes = ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), (6, 7, 8, 9, 10))
    # A hand-over takes 2 ms for each token that D lacks, and P spends a quarter of that.
    speeds = replace(
        SPEEDS, handover_s=Line.through([(0, 0), (100, 0.2)]), sending_s_per_token=0.0005
    )
    found = simulate(trace(*requests, prefixes=prefixes), speeds, ONE_EACH)
    # Of the second one it sends 5 tokens; the first token takes as long as before.
    assert found.ttft_s == pytest.approx([0.165, 0.005 + 0.0025 + 0.0825, 0.165])
    small = replace(speeds, decode_kv_tokens=40)  # it keeps the last four ids
    found = simulate(trace(*requests, prefixes=prefixes), small, ONE_EACH)
    assert found.ttft_s[1] == pytest.approx(0.005 + 0.0275 + 0.0825)


def test_d_computes_less_than_a_block_itself_and_waits_for_no_p() -> None:
    # P is busy until 1.4 when the third request comes, of which D lacks 15 tokens of its 55.
    requests = ((0.0, 40, 21), (0.4, 100, 1), (0.41, 100, 1), (0.415, 55, 11))
    prefixes = ((1, 2, 3, 4), (), (), (1, 2, 3, 4, 5))
    speeds = replace(SPEEDS, block_size=16)
    found = simulate(trace(*requests, prefixes=prefixes), speeds, ONE_EACH)
    # D's step of 20 ms that ends at 0.43, then 15 ms and a step; P comes to it as well, in vain.
    assert found.ttft_s == pytest.approx([0.05, 0.11, 0.2, 0.43 + 0.015 + 0.02 - 0.415])
    assert found.itl_s == pytest.approx([(20 * 0.02 + 0.015) / 20, 0, 0, 0.02])
    assert found.itl_percentile(90) == pytest.approx(0.02)
    assert found.itl_percentile(99) == pytest.approx(0.035)  # of the first one, once
    whole = simulate(trace(*requests, prefixes=prefixes), SPEEDS, ONE_EACH)
    assert whole.ttft_s[3] > 0.2
    assert whole.hit_rate == found.hit_rate


def test_what_d_computes_itself_leaves_nothing_behind() -> None:
    asked = trace(*((float(i), 41, 11) for i in range(500)), prefixes=((1, 2, 3, 4),) * 500)
    speeds = replace(SPEEDS, block_size=16, step_slope_s=[1e-4] * (MAX_SEQS + 1))
    itl_s = simulate(asked, speeds, ONE_EACH).itl_s
    assert itl_s[1:] == pytest.approx(itl_s[0])  # the first one is P's
    assert itl_s[0] == pytest.approx(0.02 + 45.5e-4)


def test_p_that_ends_after_the_last_token_was_not_busier_than_all_the_time() -> None:
    # Each D computes its prompt and gives both tokens by 0.09; the P computes both until 0.1.
    speeds = replace(SPEEDS, block_size=64)
    found = simulate(trace((0, 50, 2), (0, 50, 2)), speeds, Split(1, 2))
    assert found.duration_s == pytest.approx(0.09)
    assert found.prefill_use == pytest.approx(1.0)
    assert found.decode_use == pytest.approx(0.9)
    assert found.step_tokens.sum() == 2  # each one's second


def test_p_is_slower_the_more_tokens_d_gives() -> None:
    # D gives 50 tokens a second to the first request from 0.11 on.
    speeds = replace(SPEEDS, prefill_slowdown=Line.through([(0, 1.0), (100, 3.0)]))
    requests = ((0, 100, 41), (0.5, 100, 1), (2.0, 100, 1))
    assert simulate(trace(*requests), speeds, ONE_EACH).ttft_s == pytest.approx([0.11, 0.21, 0.11])
    # There are 25 of them for each of two P.
    found = simulate(trace(*requests), speeds, Split(2, 1))
    assert found.ttft_s == pytest.approx([0.11, 0.16, 0.11])


def test_d_is_slower_while_p_computes() -> None:
    speeds = replace(SPEEDS, decode_alone=0.5)
    requests = ((0, 50, 12), (0.1, 50, 2), (1.0, 50, 12))
    # Steps of 10 ms from 0.06 on. The second request joins at 0.16 while P is idle.
    found = simulate(trace(*requests), speeds, ONE_EACH)
    assert found.itl_s == pytest.approx([0.01, 0.01, 0.01])
    # Now the third one's prompt is computed, for 0.1 s, when the second one joins.
    requests = ((0, 50, 41), (0.1, 50, 2), (0.105, 100, 1))
    found = simulate(trace(*requests), speeds, ONE_EACH)
    assert found.ttft_s[1] == pytest.approx(0.06)
    assert found.itl_s[1] == pytest.approx(0.02)
    assert found.itl_s[0] == pytest.approx((10 * 0.01 + 1 * 0.02 + 29 * 0.02) / 40)
    two = simulate(trace(*requests), speeds, Split(1, 2))
    assert two.itl_s[1] == pytest.approx(0.015)  # half of P is for the other D


def test_p_forgets_what_was_used_least_recently() -> None:
    requests = ((0.0, 20, 1), (1.0, 20, 1), (2.0, 25, 1), (3.0, 25, 1))
    prefixes = ((1, 2), (3, 4), (1, 2, 5), (3, 4, 6))
    small = replace(SPEEDS, prefill_kv_tokens=20)
    assert simulate(trace(*requests, prefixes=prefixes), SPEEDS, ONE_EACH).hit_rate == 40 / 90
    assert simulate(trace(*requests, prefixes=prefixes), small, ONE_EACH).hit_rate == 0


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_p_s_queue_is_as_long_as_that_of_one_server_with_constant_service(load: float) -> None:
    # M/D/1: the mean wait is load / (2 (1 - load)) of the service time.
    outcome = simulate(poisson(40_000, load / 0.1, 100, 1, 7), SPEEDS, ONE_EACH)
    wait = float(outcome.ttft_s.mean()) - 0.11
    assert wait == pytest.approx(0.1 * load / (2 * (1 - load)), rel=0.06)
    assert outcome.prefill_use == pytest.approx(load, rel=0.03)


def test_requests_in_d_are_as_many_as_little_s_law_says() -> None:
    speeds = replace(SPEEDS, max_num_seqs=64, step_base_s=[0.02] * 65, step_slope_s=[0.0] * 65)
    outcome = simulate(poisson(5_000, 5.0, 10, 51, 3), speeds, ONE_EACH)
    # 5 a second, each 50 steps of 20 ms: 5 run at once in the mean.
    num_running = outcome.step_tokens.sum() / (outcome.duration_s / 0.02)
    assert num_running == pytest.approx(5.0, rel=0.05)
    assert outcome.step_tokens.sum() == 5_000 * 50


ROWS = st.lists(
    st.tuples(st.floats(0, 20, allow_nan=False), st.integers(1, 400), st.integers(1, 60)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100)
@given(
    ROWS,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 500),
    st.floats(0, 1e-3),
    st.sampled_from((1, 16, 64)),
)
def test_every_request_ends_once_and_no_sooner_than_it_could_alone(
    rows: list[tuple[float, int, int]],
    p: int,
    d: int,
    kv_tokens: int,
    slope: float,
    block_size: int,
) -> None:
    speeds = replace(
        SPEEDS,
        decode_kv_tokens=kv_tokens,
        step_slope_s=[slope] * (MAX_SEQS + 1),
        block_size=block_size,
    )
    asked = trace(*sorted(rows))
    outcome = simulate(asked, speeds, Split(p, d))
    assert len(outcome.ttft_s) == len(rows)
    prompts, outputs = asked.num_prompt_tokens, asked.num_output_tokens
    assert (outcome.ttft_s >= prompts * 0.001 + 0.01 - 1e-9).all()
    assert (outcome.itl_s >= np.where(outputs > 1, 0.02 - 1e-9, 0)).all()
    assert outcome.step_tokens.sum() == (outputs - 1).sum()
    ends = asked.arrival_s + outcome.ttft_s + outcome.itl_s * np.maximum(1, outputs - 1)
    assert outcome.duration_s == pytest.approx(ends.max())
    assert 0 < outcome.prefill_use <= 1 + 1e-9
    assert 0 <= outcome.decode_use <= 1 + 1e-9
    assert not math.isnan(outcome.duration_s)
    # Whatever there was before, who comes when all is done finds the engines as they were at first.
    last = (1e4, 100, 10)
    after = simulate(trace(*sorted(rows), last), speeds, Split(p, d))
    assert after.itl_s[-1] == pytest.approx(simulate(trace(last), speeds, Split(p, d)).itl_s[0])


def test_the_same_trace_has_the_same_outcome() -> None:
    asked = poisson(500, 30.0, 60, 9, 5)
    one, other = (simulate(asked, SPEEDS, Split(2, 3)) for _ in range(2))
    assert (one.ttft_s == other.ttft_s).all()
    assert (one.itl_s == other.itl_s).all()


@pytest.mark.parametrize("seed", range(4))
def test_more_instances_never_lower_goodput(seed: int) -> None:
    asked = poisson(400, 25.0, 90, 30, seed)

    def num_in_time(split: Split) -> int:
        outcome = simulate(asked, SPEEDS, split)
        return int(((outcome.ttft_s <= 0.4) & (outcome.itl_s <= 0.021)).sum())

    by_p = [num_in_time(Split(p, 4)) for p in range(1, 7)]
    by_d = [num_in_time(Split(4, d)) for d in range(1, 7)]
    assert by_p == sorted(by_p)
    assert by_d == sorted(by_d)
    assert by_p[0] < by_p[-1]
    assert by_d[0] < by_d[-1]

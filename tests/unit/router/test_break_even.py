# SPDX-License-Identifier: Apache-2.0
"""The measured break-even, on engines whose speed is a formula."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.router.break_even import LONGEST, NUM_NEEDED, BreakEven

Speed = Callable[[int], float]
"""Seconds to the first token, by prompt tokens."""


def serve(
    known: BreakEven,
    lengths: list[int],
    with_prefill: Speed,
    alone: Speed,
    *,
    num_running: int = 0,
    noise: float = 0.0,
    seed: int = 1,
) -> Counter[tuple[int, str | None]]:
    """Requests of these lengths; how often each length went which way."""
    chance, ways = random.Random(seed), Counter[tuple[int, str | None]]()
    for num_tokens in lengths:
        way = known.choose(num_tokens, num_running)
        ways[num_tokens, way] += 1
        seconds = (with_prefill if way is None else alone)(num_tokens)
        seconds *= 1 + chance.expovariate(1 / noise) if noise else 1
        known.learn(num_tokens, with_prefill=way is None, seconds=seconds)
    return ways


def mixed(num: int, *lengths: int, seed: int = 2) -> list[int]:
    chance = random.Random(seed)
    return [chance.choice(lengths) for _ in range(num)]


ALL = (8, 30, 60, 120, 250, 500, 1000, 2000)


@pytest.mark.parametrize("true_tokens", [50, 100, 200, 400, 800])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_finds_the_length_at_which_both_take_as_long(true_tokens: int, noise: float) -> None:
    known = BreakEven()
    lengths = [int(2 ** random.Random(i).uniform(3, 11)) for i in range(3000)]
    # 1 ms for 50 tokens of D, 5 times as fast on P, and a hand-over that makes up for it.
    handover = true_tokens * (20e-6 - 4e-6)
    serve(known, lengths, lambda n: n * 4e-6 + handover, lambda n: n * 20e-6, noise=noise)
    # Within a class of the true one; a class is half an octave.
    assert true_tokens / 1.5 <= known.num_tokens <= true_tokens * 1.5 * (1 + noise)


def test_what_is_measured_costs_few_requests() -> None:
    known = BreakEven()
    handed_over, alone = (lambda n: 0.001 + n * 1e-6), (lambda n: n * 20e-6)
    serve(known, mixed(500, *ALL), handed_over, alone)
    ways = serve(known, mixed(8000, *ALL), handed_over, alone)
    assert known.num_tokens < 60
    for num_tokens in (120, 250, 500, 1000, 2000):
        assert ways[num_tokens, "measuring"] == 0
    assert 0 < ways[60, "measuring"] <= 1000 / 12
    assert ways[30, "short_prompt"] > 0.9 * (ways[30, "short_prompt"] + ways[30, None])


def test_follows_engines_that_become_slower() -> None:
    known = BreakEven()
    serve(known, mixed(1000, *ALL), lambda n: 0.001 + n * 1e-6, lambda n: n * 20e-6)
    assert known.num_tokens < 60
    serve(known, mixed(20000, *ALL), lambda n: 0.010 + n * 1e-6, lambda n: n * 20e-6)
    assert 300 < known.num_tokens < 800
    serve(known, mixed(20000, *ALL), lambda n: 0.001 + n * 1e-6, lambda n: n * 20e-6)
    assert known.num_tokens < 60


def test_a_busy_decode_engine_gets_fewer_prompts() -> None:
    known = BreakEven()
    serve(known, mixed(2000, *ALL), lambda n: 0.002 + n * 1e-6, lambda n: 0.0001 + n * 10e-6)
    assert known.choose(120, 0) == "short_prompt"
    assert [known.choose(120, 8) for _ in range(8)].count("short_prompt") == 0


def test_long_prompts_are_never_tried_on_the_decode_engine() -> None:
    known = BreakEven()
    ways = serve(known, [LONGEST + 1, 30_000] * 500, lambda n: 10.0, lambda n: 0.001)
    assert set(ways) == {(LONGEST + 1, None), (30_000, None)}
    assert known.num_tokens == 0


def test_nothing_is_left_to_chance_before_the_way_with_prefill_is_known() -> None:
    known = BreakEven()
    assert [known.choose(100, 0) for _ in range(100)] == [None] * 100
    for _ in range(NUM_NEEDED):
        known.learn(100, with_prefill=True, seconds=1.0)
    assert "measuring" in [known.choose(100, 0) for _ in range(10)]


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-5, 5000), st.integers(0, 40), st.floats(0, 100)), max_size=300)
)
def test_any_traffic_gives_an_answer(requests: list[tuple[int, int, float]]) -> None:
    known = BreakEven()
    for num_tokens, num_running, seconds in requests:
        way = known.choose(num_tokens, num_running)
        assert way in (None, "short_prompt", "measuring")
        known.learn(num_tokens, with_prefill=way is None, seconds=seconds)
        assert 0 <= known.num_tokens < 2 * LONGEST

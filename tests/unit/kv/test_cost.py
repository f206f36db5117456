# SPDX-License-Identifier: Apache-2.0
"""Load in the step, park, load a part, or compute."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.config import LoadMode
from vllm_ascend_pd.kv.cost import LoadPlan, Question, Speed, plan

FAST, SLOW = 0.1, 2.0
COMPUTE = 1.0
"""Milliseconds for a block."""


def decide(*load_ms: float | None, compute_ms: float = COMPUTE, **options: Any) -> LoadPlan:
    defaults: dict[str, Any] = {
        "mode": LoadMode.AUTO,
        "max_step_ms": 50.0,
        "step_timeout_ms": 5000.0,
        "others_wait": False,
    }
    return plan(Question(load_ms=load_ms, compute_ms=compute_ms, **{**defaults, **options}))


def test_all_is_loaded_where_nothing_is_known_of_computing() -> None:
    assert decide(FAST, SLOW, compute_ms=0.0).num_blocks == 2


@pytest.mark.parametrize(
    ("load_ms", "num_blocks"),
    [
        ([FAST] * 5, 5),
        ([SLOW] * 5, 0),
        ([FAST, FAST, SLOW, SLOW], 2),
        # A slow block is loaded for what it makes usable.
        ([SLOW, None, None, FAST], 4),
        ([], 0),
    ],
)
def test_what_is_ready_soonest_is_loaded(load_ms: list[float | None], num_blocks: int) -> None:
    decided = decide(*load_ms)
    assert decided.num_blocks == num_blocks
    assert decided.load_ms == sum(ms or 0 for ms in load_ms[:num_blocks])


@given(
    st.lists(st.none() | st.floats(0.01, 10), max_size=12),
    st.floats(0.1, 10),
)
def test_no_other_cut_is_faster(load_ms: list[float | None], compute_ms: float) -> None:
    def total_ms(cut: int) -> float:
        return sum(ms or 0 for ms in load_ms[:cut]) + (len(load_ms) - cut) * compute_ms

    chosen = decide(*load_ms, compute_ms=compute_ms).num_blocks
    assert total_ms(chosen) <= min(total_ms(cut) for cut in range(len(load_ms) + 1)) + 1e-6


@pytest.mark.parametrize(
    ("ms", "options", "parks"),
    [
        (50.0, {"others_wait": True}, False),
        (51.0, {"others_wait": True}, True),
        (51.0, {}, False),
        (2500.0, {}, False),
        (2501.0, {}, True),
        (5000.0, {"mode": LoadMode.STEP, "others_wait": True}, False),
        (1.0, {"mode": LoadMode.PARK}, True),
    ],
)
def test_long_loads_are_parked(ms: float, options: dict[str, Any], parks: bool) -> None:
    assert decide(ms, compute_ms=0.0, **options).parks is parks


def test_only_what_is_loaded_counts_for_parking() -> None:
    assert not decide(FAST, 1000.0, others_wait=True).parks


def test_measured_speed_moves_the_mean() -> None:
    speed = Speed(1000.0)
    for _ in range(50):
        speed.note(500_000, 1.0)
    assert abs(speed.per_ms - 500_000) < 1000
    assert speed.ms(1_000_000) == pytest.approx(2.0, rel=0.01)


def test_what_has_not_been_measured_takes_no_time_to_guess() -> None:
    speed = Speed()
    assert speed.ms(100) == 0.0
    speed.note(0, 1.0)
    speed.note(100, 0.0)
    assert speed.per_ms == 0.0
    speed.note(256, 100.0)
    assert speed.per_ms == 2.56


def test_bad_moment_is_forgotten_bit_by_bit() -> None:
    speed = Speed(1000.0)
    for _ in range(20):
        speed.note(1, 1.0)
    assert speed.per_ms < 10
    for _ in range(150):
        speed.relax()
    assert speed.per_ms > 900


def test_load_of_which_nothing_has_come_is_forgotten_soon() -> None:
    speed = Speed(1000.0)
    speed.drop_to(0, 5000.0)
    for _ in range(10):
        speed.relax()
    assert speed.per_ms > 500


def test_first_belief_that_is_far_too_low_is_tried_some_day() -> None:
    """Nothing is loaded, so nothing is measured."""
    speed = Speed(300_000.0)
    for _ in range(100):
        speed.relax()
    assert speed.per_ms > 10_000_000
    speed.note(40_000_000, 1.0)
    assert speed.per_ms > 10_000_000


def test_slow_load_is_tried_again_seldom() -> None:
    """Ten times as long as computing: every second of it was a request's."""
    compute_ms, load_ms = 100.0, 1000.0
    speed, num_loads = Speed(1000.0), 0
    for _ in range(100):
        if speed.ms(1000.0) <= compute_ms:
            speed.note(1000.0, load_ms)
            num_loads += 1
        else:
            speed.relax()
    assert 1 < num_loads < 25

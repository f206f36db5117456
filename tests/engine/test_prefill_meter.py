# SPDX-License-Identifier: Apache-2.0
"""How fast prompts are computed here, as the steps show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.engine.metadata import StepMeta
from vllm_ascend_pd.engine.scheduler.prefill_meter import PrefillMeter
from vllm_ascend_pd.kv.cost import Speed


class World:
    def __init__(self) -> None:
        self.now = 1.0
        self.speed = Speed()
        self.meter = PrefillMeter(self.speed, lambda: self.now)

    def begin(self, *nums_tokens: int) -> None:
        """By request."""
        scheduled = {str(i): num_tokens for i, num_tokens in enumerate(nums_tokens)}
        output: Any = SimpleNamespace(num_scheduled_tokens=scheduled)
        self.meter.begin_step(output, StepMeta())

    def end_after(self, elapsed_s: float) -> None:
        self.now += elapsed_s
        self.meter.end_step()


@pytest.fixture
def world() -> World:
    return World()


def test_tokens_of_a_step_by_its_time(world: World) -> None:
    world.begin(256)
    world.end_after(0.1)
    assert world.speed.per_ms == pytest.approx(2.56)


def test_small_steps_say_nothing_about_prefill(world: World) -> None:
    world.begin(1)
    world.end_after(0.01)
    assert world.speed.per_ms == 0.0


def test_many_answers_say_nothing_about_prefill(world: World) -> None:
    world.begin(256)
    world.end_after(0.1)
    world.begin(*[1] * 200)
    world.end_after(0.1)
    assert world.speed.per_ms == pytest.approx(2.56)
    world.begin(256, *[1] * 200)
    world.end_after(0.1)
    assert world.speed.per_ms == pytest.approx(2.56)
    world.begin(40, *[1] * 200)  # the end of a prompt beside them
    world.end_after(0.1)
    assert world.speed.per_ms == pytest.approx(2.56)


def test_step_that_was_sent_ahead_begins_when_the_one_before_it_ends(world: World) -> None:
    world.begin(1)
    world.begin(256)
    world.end_after(1.0)
    world.end_after(0.1)
    assert world.speed.per_ms == pytest.approx(2.56)


def test_output_of_no_step_says_nothing(world: World) -> None:
    world.end_after(1.0)
    assert world.speed.per_ms == 0.0

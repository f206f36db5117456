# SPDX-License-Identifier: Apache-2.0
"""The best split and the least, of outcomes that are known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.unit.planner.known_speeds import SPEEDS, poisson, trace
from vllm_ascend_pd.planner import report
from vllm_ascend_pd.planner.limits import router_needs
from vllm_ascend_pd.planner.search import MAX_ROWS, Objective, Row, Search
from vllm_ascend_pd.planner.simulate import Outcome, Split, simulate
from vllm_ascend_pd.planner.speeds import Line, Speeds


class World:
    """Requests are in time as far as P and D suffice: needs 3.5 P and 1.5 D, say."""

    def __init__(self, need_p: float, need_d: float, num_requests: int = 1000) -> None:
        self._need, self._num_requests = (need_p, need_d), num_requests
        self.asked: list[Split] = []

    def __call__(self, split: Split) -> Outcome:
        self.asked.append(split)
        good = min(1.0, *(have / need for have, need in zip(split, self._need, strict=True)))
        in_time = np.arange(self._num_requests) < good * self._num_requests
        nothing = np.zeros(0)
        times = np.where(in_time, 0.5, 3.0)
        return Outcome(split, times, times / 100, 10.0, nothing, nothing, 0.5, 0.5, 0.0, 1)


OBJECTIVE = Objective(ttft_s=2.0, itl_s=0.1)


def test_every_split_is_tried_and_the_best_is_the_one_with_most_requests_in_time() -> None:
    world = World(3.5, 1.5)
    found = Search(world, OBJECTIVE).find(8)
    assert [row.split for row in found.rows] == [Split(p, 8 - p) for p in range(1, 8)]
    assert found.best.split == Split(4, 4)
    assert found.best.attained == 1.0
    assert found.best.goodput == pytest.approx(100.0)
    assert found.rows[0].goodput == pytest.approx(28.6)
    assert len(world.asked) == len(set(world.asked))


def test_the_least_that_meets_the_objective() -> None:
    found = Search(World(3.5, 1.5), OBJECTIVE).find(8)
    assert found.least is not None
    assert found.least.split == Split(4, 2)
    assert Search(World(3.5, 1.5), Objective(2, 0.1, attained=0.8)).find(8).least.split == (3, 2)
    assert Search(World(7.5, 0.5), OBJECTIVE).find(8).least is None
    assert Search(World(4.5, 3.5), OBJECTIVE).find(8).least is None


def test_the_least_is_looked_for_upwards_where_p_and_d_fail_different_requests() -> None:
    def fails(split: Split) -> Outcome:
        """Each role loses some requests, others than the other."""
        times = np.full(1000, 0.5)
        times[: max(0, 8 - 2 * split.num_prefill)] = 3
        times[len(times) - max(0, 8 - 2 * split.num_decode) :] = 3
        nothing = np.zeros(0)
        return Outcome(split, times, times / 100, 10.0, nothing, nothing, 0.5, 0.5, 0.0, 1)

    # 1 P alone loses 6 of the 10 that may be lost, and so does 1 D: 12 together.
    found = Search(fails, OBJECTIVE).find(8)
    assert found.least is not None
    assert sum(found.least.split) == 3


SHARED_HOST = replace(
    SPEEDS, prefill_slowdown=Line.through([(0, 1.0), (1000, 3.0)]), decode_alone=0.5
)


@pytest.mark.parametrize("speeds", [SPEEDS, SHARED_HOST], ids=["apart", "shared_host"])
@pytest.mark.parametrize("seed", range(12))
def test_the_best_and_the_least_are_those_of_a_look_at_all(speeds: Speeds, seed: int) -> None:
    random, most = Random(seed), 6
    rate = random.choice((5.0, 15.0, 40.0))
    asked = poisson(80, rate, random.choice((30, 90, 200)), random.choice((2, 10, 30)), seed)
    objective = Objective(random.choice((0.3, 0.6, 1.5)), 0.03, random.choice((0.9, 0.99)))
    search = Search(lambda split: simulate(asked, speeds, split), objective)
    found = search.find(most)
    meets: dict[int, list[float]] = {}
    for total in range(2, most + 1):
        rows = [search.row(Split(p, total - p)) for p in range(1, total)]
        meets[total] = [row.attained for row in rows if objective.met(row)]
    best = [row for row in found.rows if not row.is_overloaded] or found.rows
    assert found.best.attained == max(row.attained for row in best)
    least = next((total for total, met in meets.items() if met), None)
    assert (found.least and sum(found.least.split)) == least
    if found.least is not None:
        assert found.least.attained == max(meets[sum(found.least.split)])


def test_of_many_splits_those_around_the_best_are_tried() -> None:
    world = World(700.0, 200.0, num_requests=100_000)
    found = Search(world, OBJECTIVE).find(1000)
    assert found.best.split.num_prefill in range(700, 801)
    assert len(found.rows) < 4 * MAX_ROWS
    assert found.least is not None
    assert found.least.split == Split(693, 198)  # 99 % of them


def test_an_objective_of_time_between_tokens_counts_too() -> None:
    assert Search(World(1, 1), Objective(2, 0.004)).find(2).best.attained == 0


@pytest.mark.parametrize(
    ("per_second", "seconds", "is_overloaded"),
    [
        pytest.param(4.0, 100, False, id="room"),
        pytest.param(9.5, 100, False, id="nearly_full"),
        pytest.param(15.0, 20, True, id="too_many"),
        pytest.param(15.0, 200, True, id="too_many_for_long"),
    ],
)
def test_a_queue_that_grows_as_long_as_requests_come_is_overload(
    per_second: float, seconds: int, is_overloaded: bool
) -> None:
    # P computes a prompt of 100 tokens in 0.1 s.
    asked = poisson(round(per_second * seconds), per_second, 100, 2, 1)
    row = Row.of(simulate(asked, SPEEDS, Split(1, 9)), Objective(2.0, 0.1))
    assert row.is_overloaded == is_overloaded


def test_a_burst_that_is_over_is_no_overload() -> None:
    times = [*np.arange(0, 20, 0.2), *np.linspace(20, 21, 100), *np.arange(31, 51, 0.2)]
    asked = trace(*((float(at), 100, 2) for at in times))
    row = Row.of(simulate(asked, SPEEDS, Split(1, 9)), Objective(2.0, 0.1))
    assert row.ttft_p99_s > 2.0
    assert not row.is_overloaded


def test_what_is_in_time_by_a_little_is_not_if_all_is_slower() -> None:
    def just(split: Split) -> Outcome:
        """By 10 % of the objective, but for a quarter of the requests."""
        times = np.where(np.arange(100) < 25, 0.5, 1.8)
        nothing = np.zeros(0)
        return Outcome(split, times, times / 100, 10.0, nothing, nothing, 0.5, 0.5, 0.0, 1)

    found = Search(just, OBJECTIVE).find(2)
    assert (found.best.attained, found.best.attained_if_slower) == (1.0, 0.25)
    shown = report.table(found, OBJECTIVE, 1).splitlines()[1]
    assert shown.split()[3:7] == ["100.0", "%", "25.0", "%"]


def test_what_is_overloaded_has_no_figures_and_is_not_the_best(tmp_path: Path) -> None:
    # 15 prompts a second are too many for one P, and 300 tokens for one D.
    asked = poisson(600, 15.0, 100, 20, 1)
    objective = Objective(2.0, 0.019)
    found = Search(lambda split: simulate(asked, SPEEDS, split), objective).find(12)
    assert [row.split.num_prefill for row in found.rows if row.is_overloaded] == [1, 11]
    assert not found.best.is_overloaded
    shown = report.table(found, objective, 1)
    first, second = shown.splitlines()[1:3]
    assert first.split()[:4] == ["1P", "11D", "overloaded", "-"]
    assert second.split()[2] == "0.00/s"
    assert "overloaded: its queue grows as long as requests come" in shown
    assert json.loads(report.to_json(found))["rows"][0]["is_overloaded"]
    report.draw(found, objective, tmp_path / "plan.svg")
    assert "<!-- overloaded -->" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("measured_batch", "prompt", "said"),
    [
        (4, 1000, ""),
        (2, 1000, "4 requests at once in a D (up to 2); take a profile with --batches …,4 be"),
        (4, 1200, "prompts of 1,200 tokens (measured up to 1,000); take a profile with --tok"),
        (3, 1200, "take a profile with --tokens …,1200 --batches …,4 before you rely on it"),
    ],
)
def test_what_the_profile_has_not_measured_is_said(
    measured_batch: int, prompt: int, said: str
) -> None:
    speeds = replace(SPEEDS, measured_batch=measured_batch)
    asked = trace(*[(0.0, prompt, 200)] * 50)
    row = Search(lambda split: simulate(asked, speeds, split), OBJECTIVE).row(Split(1, 1))
    shown = report.beyond(asked, speeds, row)
    assert said in shown
    assert bool(shown) == bool(said)


def test_table_picture_and_json_show_what_was_found(tmp_path: Path) -> None:
    asked = poisson(200, 8.0, 90, 20, 1)
    objective = Objective(0.4, 0.1)
    found = Search(lambda split: simulate(asked, SPEEDS, split), objective).find(5)
    shown = report.table(found, objective, 2)
    assert [line.split()[:2] for line in shown.splitlines()[1:5]] == [
        ["1P", "4D"],
        ["2P", "3D"],
        ["3P", "2D"],
        ["4P", "1D"],
    ]
    assert f"best:  {found.best.split}: {found.best.goodput:.2f} requests/s in time" in shown
    assert found.least is not None
    assert f"least: {found.least.split} ({2 * sum(found.least.split)} devices)" in shown
    assert json.loads(report.to_json(found))["best"]["split"] == list(found.best.split)
    report.draw(found, objective, tmp_path / "plan.svg")
    assert "<svg" in (tmp_path / "plan.svg").read_text()
    needs = router_needs(asked, found.best)
    assert "the first to be too much: tokens of streams" in report.needs(needs)
    by_name = {need.what: need for need in needs}
    assert by_name["heartbeats"].per_second == 1.0
    assert by_name["tokens of streams"].per_second == pytest.approx(
        20 * by_name["requests"].per_second
    )

# SPDX-License-Identifier: Apache-2.0
"""Profiles: written, read, checked; and the speeds that are worked out from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.planner.known_speeds import plain
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner import profile
from vllm_ascend_pd.planner.speeds import Line, Speeds


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    taken = profile.check(plain())
    profile.save(taken, path)
    assert profile.load(path) == taken
    assert path.read_text().count("\n") > 20


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 99}, "format must be 1, not 99"),
        ({"prefill": [{"num_tokens": 0, "batch": 1, "seconds": 1}]}, r"prefill\[0\].num_tokens"),
        ({"prefill": [{"num_tokens": 9, "batch": 1}]}, r"prefill\[0\]: \['seconds'\] is missing"),
        ({"prefill": [{"num_tokens": 9, "batch": 2, "seconds": 1}]}, "no point has a batch of 1"),
        ({"decode": []}, "decode: at least one point"),
        ({"handover": [{"num_tokens": 1, "seconds": -1}]}, r"handover\[0\].seconds"),
        ({"decode_alone": 0}, "decode_alone"),
        ({"decode_alone": 1.5}, "decode_alone"),
        (
            {"prefill_beside": [{"tokens_per_second": 1, "slowdown": 0}]},
            r"prefill_beside\[0\].slowdown",
        ),
        ({"max_num_seqs": "many"}, "max_num_seqs must be int"),
        ({"speed": 1}, r"unknown keys \['speed'\]"),
    ],
)
def test_a_wrong_profile_is_an_error_that_names_the_field(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(plain(**changed)))
    with pytest.raises(ConfigError, match=f"profile.json: .*{message}"):
        profile.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "the profile must be a mapping"), ("\xff", "not JSON")],
)
def test_what_is_no_profile_is_an_error_that_names_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"profile.json: {message}"):
        profile.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        profile.load(tmp_path / "none.json")


def test_prompts_of_a_batch_share_what_was_measured_to_be_shared() -> None:
    speeds = Speeds.of(profile.check(plain()))
    assert speeds.prefill_base_s == pytest.approx(0.005)
    assert speeds.prefill_s(150) == pytest.approx(0.155)
    assert speeds.prefill_s([10, 1200]) == pytest.approx([0.105, 1.205])


def test_what_each_prompt_costs_is_where_the_line_would_begin() -> None:
    points = plain()["prefill"]
    assert Speeds.of(profile.check(plain())).prefill_first_s == pytest.approx(0)  # all is the base
    assert Speeds.of(profile.check(plain(prefill=points[:2]))).prefill_first_s == pytest.approx(
        0.005
    )
    assert Speeds.of(profile.check(plain(prefill=points[:1]))).prefill_first_s == 0


def test_prompts_that_slow_each_other_down_share_nothing() -> None:
    points = plain()["prefill"]
    points[2]["seconds"] = 0.6
    assert Speeds.of(profile.check(plain(prefill=points))).prefill_base_s == 0
    assert Speeds.of(profile.check(plain(prefill=points[:2]))).prefill_base_s == 0


def test_steps_are_straight_lines_over_contexts_and_batches() -> None:
    speeds = Speeds.of(profile.check(plain()))
    assert len(speeds.step_base_s) == len(speeds.step_slope_s) == 9

    def step(batch: int, context: int) -> float:
        return speeds.step_base_s[batch] + speeds.step_slope_s[batch] * context

    assert step(1, 100) == pytest.approx(0.011)
    assert step(3, 600) == pytest.approx(0.032)
    assert step(2, 1100) == pytest.approx((0.021 + 0.042) / 2)
    assert step(5, 0) == pytest.approx(0.03)


def test_a_line_has_one_value_where_several_were_measured_and_never_falls_below_zero() -> None:
    line = Line.through([(2, 5.0), (1, 3.0), (1, 1.0), (1, 2.0)])
    assert line([0, 1, 1.5, 2, 3]).tolist() == [2, 2, 3.5, 5, 8]
    falling = Line.through([(1, 3.0), (2, 1.0)])
    assert falling([2, 9]).tolist() == [1, 1]
    assert falling.at_zero() == 3

# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd plan`` and ``vllm-pd profile`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.planner.known_speeds import plain
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.planner import profile


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of a command that works."""
    profile.save(profile.check(plain()), tmp_path / "profile.json")
    lines = [{"timestamp": 50 * i, "input_length": 100, "output_length": 5} for i in range(200)]
    (tmp_path / "trace.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [
        *("plan", "--trace", str(tmp_path / "trace.jsonl")),
        *("--profile", str(tmp_path / "profile.json"), "--slo-ttft", "0.5", "--gpus", "8"),
    ]


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main.app, list(words), env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_trace_and_a_profile_give_a_table(words: list[str]) -> None:
    code, output = run(*words, "--gpus-per-instance", "2")
    assert code == 0, output
    assert [line.split()[:2] for line in output.splitlines()[1:4]] == [
        ["1P", "3D"],
        ["2P", "2D"],
        ["3P", "1D"],
    ]
    assert "best:  3P 1D" in output
    assert "least: 3P 1D (8 devices) get 99 % of the requests in time" in output
    assert "the first to be too much: tokens of streams" in output


def test_requests_of_one_moment_have_no_rate_that_keeps_a_router_busy(words: list[str]) -> None:
    code, output = run(*words, "--max-requests", "1")
    assert code == 0, output
    assert "best:  " in output
    assert output.splitlines()[-1].startswith("one router process: all requests come at the same")


def test_requests_that_come_slower_need_fewer(words: list[str]) -> None:
    code, output = run(*words, "--speed", "0.25", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert found["least"]["split"] == [1, 1]
    assert len(found["rows"]) == 7
    assert found["rows"][0]["attained"] == 1.0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--gpus-per-instance", "8"), "8 devices are 1 instances of 8"),
        (("--slo-ttft", "0"), "--slo-ttft"),
        (("--speed", "-1"), "--speed"),
        (("--attained", "99"), "--attained"),
        (("--profile", "/none.json"), "/none.json: cannot be read"),
        (("--trace", "/none.jsonl"), "/none.jsonl: cannot be read"),
        (("--picture", "/none/plan.svg"), "--picture /none/plan.svg"),
        (("--picture", "plan.doc"), "--picture plan.doc"),
    ],
)
def test_wrong_options_are_named(words: list[str], more: tuple[str, ...], message: str) -> None:
    code, output = run(*words, *more)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("127.0.0.1:8000",), "is not http://HOST:PORT"),
        (("http://127.0.0.1:9",), "http://127.0.0.1:9/instances does not answer"),
        (("http://127.0.0.1:9", "--tokens", "1,x"), "--tokens"),
        (("http://127.0.0.1:9", "--token-ids", "9"), "--token-ids"),
        (("http://127.0.0.1:9", "--out", "/none/profile.json"), "/none takes no files"),
        (("http://127.0.0.1:9", "--tokens", "\u00b2"), "--tokens"),
    ],
)
def test_a_profile_that_cannot_be_taken_says_why(more: tuple[str, ...], message: str) -> None:
    code, output = run("profile", *more)
    assert code == 2
    assert message in output

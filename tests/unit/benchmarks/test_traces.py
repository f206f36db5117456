# SPDX-License-Identifier: Apache-2.0
"""Traces in Mooncake's format."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from benchmarks import traces
from benchmarks.traces import ideal_hits, make_trace, prompt_of, scale
from vllm_ascend_pd.planner.trace_file import TOKENS_PER_ID, TraceRequest, read_trace


def test_trace_that_was_made_up_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setattr("sys.argv", ["traces", "--out", str(path), "--conversations", "5"])
    traces.main()
    requests = read_trace(path)
    assert f"{len(requests)} requests" in capsys.readouterr().out
    assert [r.timestamp_ms for r in requests] == sorted(r.timestamp_ms for r in requests)
    assert requests[0].timestamp_ms == 0
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    assert read_trace(path, 2) == requests[:2]


def test_turns_begin_with_the_turns_before_them() -> None:
    requests = make_trace(1, 6, num_systems=1, seed=3)
    assert len(requests) > 1
    for before, after in itertools.pairwise(requests):
        num_full = before.input_length // TOKENS_PER_ID
        assert after.hash_ids[:num_full] == before.hash_ids[:num_full]
        assert after.input_length >= before.input_length + before.output_length


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        '{"timestamp": 0, "input_length": 600, "output_length": 1}',
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
        '{"timestamp": 0, "input_length": "many", "output_length": 1, "hash_ids": [1]}',
    ],
)
def test_line_of_another_format_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"timestamp": 0, "input_length": 6, "output_length": 1, "hash_ids": [1]}'
    path.write_text(f"{good}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl:3 is not a line"):
        read_trace(path, needs_prefixes=True)


def test_scaled_requests_share_the_same_full_blocks() -> None:
    requests = make_trace(4, 4)
    scaled = scale(requests, 32, 10_000)
    assert scaled[-1].timestamp_ms == 10_000
    for request, small in zip(requests, scaled, strict=True):
        assert small.input_length // 32 == request.input_length // TOKENS_PER_ID
        assert len(small.hash_ids) == math.ceil(small.input_length / 32)
        assert len(prompt_of(small, 32, 300, 2000)) == small.input_length


def test_prompts_are_equal_as_far_as_their_ids_are() -> None:
    first, second = (TraceRequest(0, 80, 1, (1, 2, last)) for last in (3, 4))
    one, other = (prompt_of(request, 32, 300, 2000) for request in (first, second))
    assert one[:64] == other[:64]
    assert one[64:] != other[64:]
    assert all(300 <= token <= 2000 for token in one)


def test_ideal_cache_forgets_what_was_used_least_recently() -> None:
    requests = [
        TraceRequest(0, 20, 1, (1, 2)),
        TraceRequest(0, 20, 1, (1, 3)),  # 2 is the oldest now
        TraceRequest(0, 25, 1, (1, 2, 4)),
        TraceRequest(0, 25, 1, (1, 2, 5)),
        TraceRequest(0, 20, 1, (1, 2)),  # its last token is computed in any case
    ]
    assert list(ideal_hits(requests, 10, math.inf)) == [0, 10, 20, 20, 10]
    assert list(ideal_hits(requests, 10, 2)) == [0, 10, 10, 20, 10]
    assert list(ideal_hits(requests, 10, 0)) == [0] * 5

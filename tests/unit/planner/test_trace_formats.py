# SPDX-License-Identifier: Apache-2.0
"""Traces as others publish them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner.trace_file import RequestTrace, TraceRequest, read_trace

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_mooncake_s_format_with_and_without_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n\n'
        '{"timestamp": 27000.5, "input_length": 7, "output_length": 2, "session_id": "a"}\n'
    )
    late, early = TraceRequest(27482, 600, 52, (46, 47)), TraceRequest(27000.5, 7, 2)
    assert read_trace(path) == [early, late]
    asked = RequestTrace(read_trace(path), speed=2)
    assert asked.arrival_s == pytest.approx([0, 0.24075])
    assert asked.prefixes == [(), (46, 47)]


def test_azure_s_format(tmp_path: Path) -> None:
    path = tmp_path / "AzureLLMInferenceTrace_conv.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert first == TraceRequest(0, 374, 44)
    assert second.timestamp_ms == pytest.approx(4314.579)
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    )
    assert read_trace(path) == [TraceRequest(0, 2162, 5)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "a,b\n1,2\n", r"columns \['ContextTokens', 'GeneratedTokens', 'TIMESTAMP'\]"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "t.csv:2 is not a line"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1\n", "t.csv:2 is not a"),
        ("t.csv", f"{HEAD}2023-11-16,1,1\n,1,1\n", "t.csv:3 is not .*: TIMESTAMP '' is no time"),
        ("t.csv", f"{HEAD}NaT,1,1\n", "t.csv:2 is not .*: TIMESTAMP 'NaT' is no time"),
        ("t.csv", f"{HEAD}2023-11-16 18:15:46\xff,1,1\n", r"t.csv:2 .*46\ufffd' is no time"),
        ("t.csv", f"{HEAD}2023-11-16,1\xff,1\n", r"t.csv:2 .*: ContextTokens '1\ufffd' is no num"),
        ("t.csv", f"{HEAD}2023-11-16,1,\n", "t.csv:2 is not .*: GeneratedTokens '' is no number"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}', "t.jsonl:1 is not"),
        ("t.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1, 2]}',
         "2 hash_ids for 1 tokens"),
        ("t.jsonl", "\n", "no request is in it"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_an_error_that_names_the_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")

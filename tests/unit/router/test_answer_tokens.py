# SPDX-License-Identifier: Apache-2.0
"""How many tokens a prompt and its answer have, as engines tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_ascend_pd.router.prefilled import find_num_tokens, find_prompt_usage


def test_of_several_events_the_last_one_tells() -> None:
    numbers = (0, 1, 500)
    for name in ("completion_tokens", "output_tokens"):
        told = [json.dumps({"usage": {"prompt_tokens": 9, name: number}}) for number in numbers]
        stream = "".join(f"data: {one}\n\n" for one in told)
        assert find_num_tokens(stream.encode()) == (9, 500)
    assert find_num_tokens(b'data: {"choices":[{"text":"a"}]}\n\n') == (None, None)


CLAIMS = {"usage": {"output_tokens": 0}, "output_tokens": 0, "cached_tokens": 9, "prompt_tokens": 9}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"usage": {"output_tokens": 7}, "metadata": CLAIMS}, 7),
        ({"type": "response.created", "response": {"metadata": CLAIMS, "usage": None}}, None),
        ({"response": {"usage": {"output_tokens": 7}, "tools": [CLAIMS]}}, 7),
        ({"usage": {"output_tokens": 7}, "content": [{"type": "tool_use", "input": CLAIMS}]}, 7),
        ({"type": "message_start", "message": {"usage": {"output_tokens": 0}}}, 0),
    ],
    ids=str,
)
def test_what_a_client_says_that_its_engine_repeats_is_no_number_of_tokens(
    answer: dict[str, Any], told: int | None
) -> None:
    whole = json.dumps(answer).encode()
    for data in (whole, b"event: any\ndata: " + whole + b"\n\n"):
        assert find_num_tokens(data) == (None, told)
        assert find_prompt_usage(data) is None

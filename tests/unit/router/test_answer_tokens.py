# SPDX-License-Identifier: Apache-2.0
"""How many tokens an answer has, as engines tell it."""

from __future__ import annotations

import json

from vllm_ascend_pd.router.prefilled import find_answer_tokens


def test_of_several_events_the_last_one_tells() -> None:
    numbers = (0, 1, 500)
    for name in ("completion_tokens", "output_tokens"):
        told = [json.dumps({"usage": {"prompt_tokens": 9, name: number}}) for number in numbers]
        stream = "".join(f"data: {one}\n\n" for one in told)
        assert find_answer_tokens(stream.encode()) == 500
    assert find_answer_tokens(b'data: {"choices":[{"text":"a"}]}\n\n') is None

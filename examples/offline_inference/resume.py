#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Interrupt an answer on one engine, and have another engine go on with it.

The first engine answers each prompt for a few tokens only, as if it had been lost then. The second
one is told these tokens and gives the rest. Each whole answer is compared, token by token, with
what the first engine says when nobody interrupts it.

    python -m vllm_ascend_pd.testing.tiny_model --out .cache/models/tiny
    python examples/offline_inference/resume.py --model .cache/models/tiny
"""

from __future__ import annotations

import sys
from typing import Any

from two_engines import SAMPLING, STOP_S, make_engines, parse_options

PROMPTS = ["Hello, my name is", "Tell me a very long story", "One, two, three, four, five,"]
NUM_THERE = [2, 7, 12]
"""Tokens of each answer before it is interrupted."""


def answer(llm: Any, prompt: str, sampling: dict[str, Any], num_tokens: int) -> tuple[Any, Any]:
    """Token ids of the prompt and of what comes after it, until there are so many."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    engine.add_request("request", prompt, SamplingParams(ignore_eos=True, **sampling))
    while True:
        for output in engine.step():
            token_ids = list(output.outputs[0].token_ids)
            if output.finished or len(token_ids) >= num_tokens:
                engine.abort_request(["request"])
                return list(output.prompt_token_ids), token_ids


def go_on(llm: Any, prompt: str, sampling: dict[str, Any], begun: tuple[Any, Any]) -> list[int]:
    """All tokens of the answer that has begun elsewhere."""
    from vllm_ascend_pd.resume import ResumeKey

    resume = ResumeKey(None).sign("request", *begun)
    extra_args = {"kv_transfer_params": {"resume": resume.to_params()}}
    return answer(llm, prompt, {**sampling, "extra_args": extra_args}, sampling["max_tokens"])[1]


def main() -> None:
    options = parse_options(__doc__, max_tokens=24, least=1 + NUM_THERE[-1])
    first, second = make_engines(options)
    num_different = 0
    for name, sampling in SAMPLING.items():
        sampling = {**sampling, "max_tokens": options.max_tokens}
        for num_there, prompt in zip(NUM_THERE, PROMPTS, strict=True):
            begun = answer(first, prompt, sampling, num_there)
            tokens = go_on(second, prompt, sampling, begun)
            _, expected = answer(first, prompt, sampling, options.max_tokens)
            is_equal = tokens == expected
            num_different += not is_equal
            print(
                f"{name:>14} | {prompt!r}: {len(begun[1])} tokens there,"
                f" {len(tokens) - len(begun[1])} here: {'equal' if is_equal else 'DIFFERENT'}"
            )
    for llm in (first, second):
        llm.llm_engine.engine_core.shutdown(timeout=STOP_S)
    if num_different:
        sys.exit(f"error: {num_different} answers differ from those of one engine")
    print(f"verified: {len(SAMPLING) * len(PROMPTS)} answers are those of one engine")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Move requests from one engine to another one while they run.

The first engine decodes; the second one copies what it has, the first one stops for the last
blocks, and the second one decodes on. Each whole answer is compared, token by token, with what one
engine says when nothing moves.

    python -m vllm_ascend_pd.testing.tiny_model --out .cache/models/tiny
    python examples/offline_inference/move.py --model .cache/models/tiny
"""

from __future__ import annotations

import sys
from typing import Any

from two_engines import SAMPLING, STOP_S, make_engines, parse_options

MAX_TOKENS = 1000
"""Of an answer that was over before it could move, and is asked for again."""
PROMPTS = ["Hello, my name is", "Tell me a very long story " * 20, "One, two, three, four, five,"]


def add(llm: Any, prompt: Any, sampling: dict[str, Any], kv: dict[str, Any] | None = None) -> None:
    from vllm import SamplingParams

    extra_args = {"kv_transfer_params": kv} if kv is not None else None
    params = SamplingParams(ignore_eos=True, extra_args=extra_args, **sampling)
    llm.llm_engine.add_request("request", prompt, params)


def finish(*llms: Any) -> list[Any]:
    """The ends of the requests of these engines."""
    ends: dict[int, Any] = {}
    while len(ends) < len(llms):
        for number, llm in enumerate(llms):
            if number not in ends:
                for output in llm.llm_engine.step():
                    if output.finished:
                        ends[number] = output
    return [ends[number] for number in range(len(llms))]


def source_of(llm: Any) -> Any:
    """Where requests of this engine are taken over: a router knows it from the registration."""
    from vllm_ascend_pd.resume import RunningAt

    add(llm, "where?", {"max_tokens": 1}, {"do_remote_decode": True})
    at = finish(llm)[0].kv_transfer_params
    add(llm, "there", {"max_tokens": 1}, {"release_transfer_id": at["transfer_id"]})
    finish(llm)
    return RunningAt(at["remote_host"], at["remote_port"], at["remote_key"], at["remote_epoch"])


def move(source: Any, target: Any, at: Any, prompt: str, sampling: dict[str, Any]) -> list[Any]:
    """The ends of an answer at both engines."""
    from vllm_ascend_pd.resume import ResumeKey

    add(source, prompt, sampling)
    while not (outputs := source.llm_engine.step()):
        pass
    resume = ResumeKey(None).sign("request", outputs[0].prompt_token_ids, [], source=at)
    add(target, prompt, sampling, {"resume": resume.to_params()})
    return finish(source, target)


def was_over(end: Any) -> bool:
    """As a short answer is where the machine is busy: the other engine had nothing to take over."""
    return (end.kv_transfer_params or {}).get("resume") == {"refused": "not_needed"}


def main() -> None:
    options = parse_options(__doc__, max_tokens=120, least=2)
    first, second = make_engines(options)
    at, failed = source_of(first), 0
    for name, sampling in SAMPLING.items():
        for prompt in PROMPTS:
            sampling = {**sampling, "max_tokens": options.max_tokens}
            left, right = move(first, second, at, prompt, sampling)
            while was_over(right) and sampling["max_tokens"] * 2 <= MAX_TOKENS:
                sampling["max_tokens"] *= 2
                left, right = move(first, second, at, prompt, sampling)
            add(first, prompt, sampling)
            expected = list(finish(first)[0].outputs[0].token_ids)
            num_there = len(left.outputs[0].token_ids)
            tokens = list(right.outputs[0].token_ids)
            has_moved = (left.kv_transfer_params or {}).get("moved", False)
            verdict = "equal" if tokens == expected else "DIFFERENT"
            verdict = verdict if has_moved else f"NOT MOVED: {right.kv_transfer_params}"
            failed += verdict != "equal"
            print(
                f"{name:>14} | {prompt[:24]!r}: {num_there} tokens there,"
                f" {len(tokens) - num_there} here: {verdict}"
            )
    for llm in (first, second):
        llm.llm_engine.engine_core.shutdown(timeout=STOP_S)
    if failed:
        sys.exit(f"error: {failed} answers did not move, or differ from those of one engine")
    print(f"verified: {len(SAMPLING) * len(PROMPTS)} answers are those of one engine")


if __name__ == "__main__":
    main()

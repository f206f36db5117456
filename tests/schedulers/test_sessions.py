# SPDX-License-Identifier: Apache-2.0
"""Streaming sessions, whose next chunk takes the place of the token that was sampled last."""

from __future__ import annotations

from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from tests.schedulers.harness import BLOCK_SIZE, Engine, hasher, prompt_of, right_token


def chunk(token_ids: list[int]) -> Request:
    return Request(
        request_id="session",
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=3, ignore_eos=True),
        pooling_params=None,
        block_hasher=hasher,
        resumable=True,
    )


def test_a_block_that_a_discarded_token_had_completed_is_not_found_by_its_text(
    producer: Engine, consumer: Engine
) -> None:
    """Neither here nor by another engine that gets KV from here."""
    session = producer.requests["session"] = chunk(prompt_of(BLOCK_SIZE - 3))
    producer.tokens["session"] = []
    producer.scheduler.add_request(session)
    producer.run(lambda: session.status is RequestStatus.WAITING_FOR_STREAMING_REQ)
    text = list(session.all_token_ids)[:BLOCK_SIZE]
    assert len(text) == BLOCK_SIZE
    producer.scheduler.add_request(chunk([555] * 20))
    producer.run(lambda: session.num_computed_tokens > 2 * BLOCK_SIZE)
    prompt = [*text, 1, 2, 3, 4]
    params = producer.prefill("other", prompt)
    consumer.add("other", prompt, params, max_tokens=4)
    consumer.run(lambda: len(consumer.tokens["other"]) == 4)
    assert consumer.tokens["other"] == [right_token(len(prompt) + i) for i in range(4)]
    producer.abort("session")

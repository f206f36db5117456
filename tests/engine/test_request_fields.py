# SPDX-License-Identifier: Apache-2.0
"""What the router knows of the fields of vLLM's requests: all of them are named here, so a version
that has others is noticed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.sampling_params import SamplingParams

from vllm_ascend_pd.engine.scheduler.resume import STAYING
from vllm_ascend_pd.router.apis import APIS, CHAT, COMPLETIONS
from vllm_ascend_pd.router.bodies import ENGINE_PARAMS, parse
from vllm_ascend_pd.router.prefix.tokenizer import question
from vllm_ascend_pd.router.resumable import HARMLESS

CONVERSATION = [{"role": "user", "content": "x"}]
PROMPT = {
    *(name for api in (APIS[CHAT], APIS[COMPLETIONS]) for name in api.prompt),
    *("add_generation_prompt", "add_special_tokens", "cache_salt", "chat_template"),
    *("chat_template_kwargs", "continue_final_message", "media_io_kwargs", "mm_processor_kwargs"),
    *("reasoning_effort", "suffix", "truncation_side"),
}
"""Any engine makes the same of them."""
SAMPLING = {
    *("allowed_token_ids", "bad_words", "frequency_penalty", "ignore_eos", "logit_bias"),
    *("max_completion_tokens", "max_tokens", "min_p", "min_tokens", "presence_penalty"),
    *("repetition_detection", "repetition_penalty", "response_format", "stop", "stop_token_ids"),
    *("structured_outputs", "top_k", "top_p", "vllm_xargs", "watermarking"),
}
"""Output tokens that are known count for any engine."""
TOLD = {
    *("include_stop_str_in_output", "parallel_tool_calls", "return_prompt_text"),
    *("return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens"),
    *("spaces_between_special_tokens", "stream_interval", "stream_options"),
}
"""How the same tokens are told; the stream is cut by what a client has."""
ELSEWHERE = {
    *("length_penalty", "model", "priority", "request_id", "session_id", "user"),
    *("mm_payload", "return_assistant_tokens_mask", "return_mm_kwargs", "return_token_offsets"),
    "routed_experts_prompt_start",
}
"""Of beams, of who asks and how it waits, of other paths or of engines that are refused."""
READ = {
    *("prompt_embeds", "seed", "stream", "temperature", "tool_choice"),
    "truncate_prompt_tokens",
}
"""The router looks at them itself."""


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatCompletionRequest])
def test_router_knows_which_fields_leave_an_answer_that_can_go_on(
    request_type: type[BaseModel],
) -> None:
    fields = set(request_type.model_fields)
    known = {*HARMLESS, *ENGINE_PARAMS, *PROMPT, *SAMPLING, *TOLD, *ELSEWHERE, *READ}
    assert fields <= known, sorted(fields - known)


def test_engine_knows_with_which_fields_a_request_goes_on() -> None:
    goes_on = {
        *(SAMPLING - {"max_completion_tokens", "response_format", "vllm_xargs"}),
        *(TOLD & set(SamplingParams.__struct_fields__)),
        *("detokenize", "extra_args", "flat_logprobs", "n", "output_kind", "seed", "temperature"),
        *("output_text_buffer_length", "skip_clone", "skip_reading_prefix_cache"),
        *("_all_stop_token_ids", "_bad_words_token_ids", "_eos_token_id"),
        *("routed_experts_prompt_start", "prompt_logprob_start", "_watermarking_skipped"),
    }
    fields = set(SamplingParams.__struct_fields__)
    assert fields <= goes_on | set(STAYING), sorted(fields - goes_on - set(STAYING))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"documents": [{"title": "a", "text": "b"}]},
        {"documents": None, "reasoning_effort": None, "chat_template_kwargs": None},
        {"reasoning_effort": "high", "chat_template_kwargs": {"a": [1], "reasoning_effort": "low"}},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
    ids=str,
)
def test_prompt_of_a_chat_is_asked_for_with_all_that_makes_it(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": CONVERSATION, **fields}
    asked = question(parse(CHAT, json.dumps(body).encode()))
    assert asked is not None
    made, told = (
        request.build_chat_params(None, "auto")
        for request in (
            ChatCompletionRequest(**body),
            TokenizeChatRequest(**json.loads(asked)),
        )
    )
    assert told.chat_template_kwargs == made.chat_template_kwargs


@pytest.mark.parametrize("kwargs", [b"[1]", b'{"\xff": 1}'])
def test_prompt_that_no_engine_can_make_is_not_asked_for(kwargs: bytes) -> None:
    body = json.dumps({"messages": CONVERSATION, "documents": [{}]}).encode()
    body = body.replace(b"}]}", b'}], "chat_template_kwargs": %b}' % kwargs)
    assert question(parse(CHAT, body)) is None

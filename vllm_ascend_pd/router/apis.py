# SPDX-License-Identifier: Apache-2.0
"""Requests that are routed over a prefill and a decode engine, as the engines name things."""

from __future__ import annotations

import re
from dataclasses import dataclass

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BATCH = "/v1/chat/completions/batch"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
GENERATE = "/inference/v1/generate"
INVOCATIONS = "/invocations"
"""A chat or a completion, for SageMaker."""


@dataclass(frozen=True, slots=True)
class API:
    """One path. All of them take ``kv_transfer_params``, and give them back in a whole answer."""

    prompt: tuple[str, ...]
    """Fields that make the prompt; without the first there is none."""
    max_tokens: tuple[str, ...]
    """Fields that bound the answer, the one that counts first."""
    sampling: str = ""
    """The field with all that says how to sample, if it is one."""


APIS = {
    COMPLETIONS: API(("prompt",), ("max_tokens",)),
    CHAT: API(("messages", "tools", "documents"), ("max_completion_tokens", "max_tokens")),
    RESPONSES: API(
        ("input", "instructions", "tools", "previous_input_messages"), ("max_output_tokens",)
    ),
    MESSAGES: API(("messages", "system", "tools"), ("max_tokens",)),
    GENERATE: API(("token_ids",), ("max_tokens",), "sampling_params"),
}

NOT_FOR_PREFILL = frozenset(
    {
        "background",
        "best_of",
        "echo",
        "include",
        "kv_transfer_params",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "request_id",
        "return_token_ids",
        "store",
        "stream_options",
        "top_logprobs",
        "use_beam_search",
    }
)
"""They change what is generated, kept or returned, not the KV of the prompt."""

_OPENING = re.compile(
    rb"(?::[^\n]*\n\n|event: response\.(?:created|queued|in_progress)\n[^\n]*\n\n)*"
)
"""Events that an engine sends before it has computed anything, and comments."""

_DATA = re.compile(rb"(?:event: [^\n]*\n)?data: ")


def payload(event: bytes) -> bytes:
    """Its JSON; a whole answer is that itself."""
    begun = _DATA.match(event)
    return event[begun.end() :] if begun else event


def has_token(events: bytes) -> bool:
    """Whether the beginning of a stream holds a whole event of the answer itself."""
    opening = _OPENING.match(events)
    assert opening is not None
    return b"\n\n" in events[opening.end() :]

# SPDX-License-Identifier: Apache-2.0
"""What a prefill leg answers, and what any answer tells of its prompt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.registration import KVEndpoint
from vllm_ascend_pd.router.apis import payload
from vllm_ascend_pd.router.failures import Failure, FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterator

_NONE = msgspec.Raw(b"null")


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None


class _PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _PromptTokens | None = None
    input_tokens: int = 0
    input_tokens_details: _PromptTokens | None = None
    cache_read_input_tokens: int | None = None
    """Of Anthropic's API, beside ``input_tokens``."""
    completion_tokens: int | None = None
    output_tokens: int | None = None

    def num_tokens(self) -> tuple[int, int | None]:
        """Of the prompt, and of them those that the engine had, if it says."""
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details else self.cache_read_input_tokens
        if self.prompt_tokens is not None:
            return self.prompt_tokens, cached
        return self.input_tokens + (self.cache_read_input_tokens or 0), cached

    @property
    def num_answer_tokens(self) -> int | None:
        return self.completion_tokens if self.output_tokens is None else self.output_tokens


class _HasUsage(msgspec.Struct):
    usage: _Usage | None = None


class _Told(_HasUsage):
    """An answer, or an event that may hold one."""

    response: _HasUsage | None = None
    message: _HasUsage | None = None


class _PrefillAnswer(msgspec.Struct):
    """Of any of ``APIS``."""

    kv_transfer_params: msgspec.Raw = _NONE
    usage: _Usage | None = None
    choices: list[_PrefillChoice] = []
    status: str | None = None
    stop_reason: str | None = None

    @property
    def has_stopped(self) -> bool:
        """At its first token, and not because that was the last one asked for."""
        if self.choices:
            return self.choices[0].finish_reason == "stop"
        return self.status == "completed" or self.stop_reason in ("end_turn", "stop_sequence")


class _Learned(msgspec.Struct):
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_key: str = ""
    supports_concurrent: bool = False
    transfer_id: str | None = None
    remote_data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill leg's answer. ``params`` is ``None`` if the engine ended the request at its first
    token and kept nothing, as vLLM's own connectors do."""

    params: msgspec.Raw | None
    kv: KVEndpoint | None
    """Where this producer can be reached in concurrent order, if it can."""
    num_prompt_tokens: int
    """0 if the engine did not say."""
    num_cached_tokens: int | None = None
    """Of them, those that the engine had already; ``None`` if it did not say."""
    transfer_id: str | None = None
    """Under which an engine of ours keeps the KV."""


_prefill_decoder: msgspec.json.Decoder[_PrefillAnswer] = msgspec.json.Decoder(_PrefillAnswer)
_told_decoder: msgspec.json.Decoder[_Told] = msgspec.json.Decoder(_Told)
_learned_decoder: msgspec.json.Decoder[_Learned] = msgspec.json.Decoder(_Learned)


def parse_prefill_answer(raw: bytes, rank: int | None = None) -> Prefilled | Failure:
    """What a producer answered to ``for_prefill``, sent to its data parallel ``rank``. Where its
    front end has chosen one, nothing else can be sent there.
    """
    try:
        answer = _prefill_decoder.decode(raw)
    except UNREADABLE as e:
        return Failure(FailureKind.PROTOCOL, f"the prefill answer is not understood: {e}")
    params = answer.kv_transfer_params
    num_tokens, num_cached = (answer.usage or _Usage()).num_tokens()
    if bytes(params) in (b"null", b"{}"):
        if answer.has_stopped:
            return Prefilled(None, None, num_tokens, num_cached)
        return Failure(
            FailureKind.NO_PARAMS,
            "the prefill engine returned no kv_transfer_params: is its --kv-transfer-config set,"
            " with kv_role kv_producer or kv_both?",
        )
    try:
        learned = _learned_decoder.decode(params)
    except msgspec.MsgspecError as e:
        return Failure(FailureKind.PROTOCOL, f"kv_transfer_params is not understood: {e}")
    is_reachable = learned.supports_concurrent and learned.remote_data_parallel_rank == rank
    if not is_reachable:
        return Prefilled(params, None, num_tokens, num_cached)
    return Prefilled(params, _kv_endpoint(learned), num_tokens, num_cached, learned.transfer_id)


def _kv_endpoint(learned: _Learned) -> KVEndpoint | None:
    if not (learned.remote_engine_id and learned.remote_host):
        return None
    if learned.remote_port is None:
        return None
    return KVEndpoint(
        engine_id=learned.remote_engine_id,
        host=learned.remote_host,
        port=learned.remote_port,
        key=learned.remote_key,
        supports_concurrent=True,
    )


_CACHED = re.compile(rb'"cached_tokens"\s*:\s*\d')
_ANSWER = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*\d')
"""Without them nothing is told. With them it is decoded: engines repeat some of what clients
say."""


class NumTokens(NamedTuple):
    """As an engine said; ``None``: it did not."""

    prompt: int | None = None
    answer: int | None = None


def find_num_tokens(data: bytes) -> NumTokens:
    """Of the prompt, and of the answer so far, if an answer or events say; the last one counts."""
    prompt = answer = None
    for usage in _usages(data) if _ANSWER.search(data) else ():
        prompt = usage.num_tokens()[0] or prompt
        answer = answer if usage.num_answer_tokens is None else usage.num_answer_tokens
    return NumTokens(prompt, answer)


def find_prompt_usage(data: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt, and of them those that the engine had already, in a whole answer of
    completions or chats, or in events; ``None`` if it does not say."""
    for usage in _usages(data) if _CACHED.search(data) else ():
        _, cached = usage.num_tokens()
        if usage.prompt_tokens is not None and cached is not None:
            return usage.prompt_tokens, cached
    return None


def _usages(data: bytes) -> Iterator[_Usage]:
    """In their order."""
    for event in data.split(b"\n\n"):
        try:
            told = _told_decoder.decode(payload(event))
        except UNREADABLE:
            continue
        for one in (told, told.response, told.message):
            if one is not None and one.usage is not None:
                yield one.usage

# SPDX-License-Identifier: Apache-2.0
"""Request bodies: what the router reads of them, and what it sends to each leg.

Values are kept as the bytes that the client sent (``msgspec.Raw``): a prompt is neither decoded nor
changed. Of what an engine does with a body, only the prefill leg's length and form are altered.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_ascend_pd.registration import KVEndpoint
from vllm_ascend_pd.router.failures import Failure, FailureKind

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

KV_PARAMS = "kv_transfer_params"
XARGS = "vllm_xargs"  # vLLM reads kv_transfer_params there too

NOT_FOR_PREFILL = frozenset(
    {
        "best_of",
        "echo",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "return_token_ids",
        "stream_options",
        "top_logprobs",
        "use_beam_search",
        KV_PARAMS,
    }
)
"""They change what is generated or returned, not the KV of the prompt."""

Fields = dict[str, msgspec.Raw]

_fields_decoder: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()
_FALSE = msgspec.Raw(b"false")
_TRUE = msgspec.Raw(b"true")
_ONE = msgspec.Raw(b"1")
_NONE = msgspec.Raw(b"null")
_DO_REMOTE_DECODE = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')


class BadRequest(Exception):
    """The client's body cannot be routed; answered with 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(slots=True)
class Body:
    """A parsed completion or chat request. ``fields`` holds no ``kv_transfer_params``."""

    path: str
    raw: bytes
    """To send when no leg's parameters are added."""
    fields: Fields
    model: str | None
    prompt: bytes
    """The JSON of ``prompt`` or ``messages``."""
    decode_only: str | None
    """Why a prefill leg would be of no use: ``batch`` (one set of parameters cannot name the KV of
    several prompts) or ``prompt_embeds``."""
    num_max_tokens: int
    is_stream: bool
    """As far as the router can tell: engines also read ``1`` and ``"true"``."""

    def for_prefill(self, transfer_id: str | None = None) -> bytes:
        """Compute the prompt, one token of one sample, not streamed."""
        fields = {key: value for key, value in self.fields.items() if key not in NOT_FOR_PREFILL}
        fields["stream"] = _FALSE
        fields["max_tokens"] = _ONE
        if self.path == CHAT:
            fields["max_completion_tokens"] = _ONE
        if "n" in fields:
            fields["n"] = _ONE
        if transfer_id is None:
            fields[KV_PARAMS] = _DO_REMOTE_DECODE
        else:
            params = {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            }
            fields[KV_PARAMS] = msgspec.Raw(_encoder.encode(params))
        return _encoder.encode(fields)

    def for_decode(self, params: msgspec.Raw | None) -> bytes:
        """The client's request, and where the KV of its prompt is."""
        if params is None:
            return self.raw
        return _encoder.encode({**self.fields, KV_PARAMS: params})


def parse(path: str, raw: bytes) -> Body:
    """``BadRequest`` for what no engine can read."""
    fields = _decode_fields(raw)
    changed = fields.pop(KV_PARAMS, None) is not None
    if XARGS in fields:
        changed |= _drop_from_xargs(fields)
    name = "messages" if path == CHAT else "prompt"
    prompt = bytes(fields.get(name, b""))
    if not prompt and "prompt_embeds" not in fields:
        raise BadRequest(f"'{name}' is missing", name)
    return Body(
        path,
        _encoder.encode(fields) if changed else raw,
        fields,
        _string(fields, "model"),
        prompt,
        _decode_only(path, fields, prompt),
        _num_max_tokens(fields),
        bytes(fields.get("stream", b"false")) not in (b"false", b"null", b"0", b'"false"'),
    )


def without_params(raw: bytes) -> bytes:
    """Any other JSON request, without the fields that name a peer of the engine."""
    if b"kv_transfer_params" not in raw and b"\\u" not in raw:
        _decode_any(raw)
        return raw
    value = _decode_any(raw)
    return _encoder.encode(value) if _drop_params(value) else raw


def _decode_fields(raw: bytes) -> Fields:
    try:
        return _fields_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is not a JSON object: {e}") from e


def _decode_any(raw: bytes) -> Any:
    try:
        return _any_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"the body is not JSON: {e}") from e


def _drop_from_xargs(fields: Fields) -> bool:
    xargs = _decode_any(bytes(fields[XARGS]))
    if not isinstance(xargs, dict) or KV_PARAMS not in xargs:
        return False
    del xargs[KV_PARAMS]
    fields[XARGS] = msgspec.Raw(_encoder.encode(xargs))
    return True


def _drop_params(value: Any) -> bool:
    """From an object, its ``vllm_xargs``, and objects in a list of requests."""
    if isinstance(value, list):
        return sum(_drop_params(item) for item in value) > 0
    if not isinstance(value, dict):
        return False
    dropped = value.pop(KV_PARAMS, None) is not None
    xargs = value.get(XARGS)
    if isinstance(xargs, dict):
        dropped |= xargs.pop(KV_PARAMS, None) is not None
    for key in ("requests", "generate_request", "sampling_params"):
        dropped |= _drop_params(value.get(key))
    extra = value.get("extra_args")
    if isinstance(extra, dict):
        dropped |= extra.pop(KV_PARAMS, None) is not None
    return dropped


def _string(fields: Fields, name: str) -> str | None:
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        return None
    value = _decode_any(bytes(raw))
    if not isinstance(value, str):
        raise BadRequest(f"'{name}' must be a string", name)
    return value


def _decode_only(path: str, fields: Fields, prompt: bytes) -> str | None:
    if "prompt_embeds" in fields:
        return "prompt_embeds"
    # A list of strings, or of lists of token ids.
    is_list = path == COMPLETIONS and prompt.startswith(b"[")
    return "batch" if is_list and prompt[1:64].lstrip()[:1] in (b'"', b"[") else None


def _num_max_tokens(fields: Fields) -> int:
    for name in ("max_completion_tokens", "max_tokens"):
        raw = bytes(fields.get(name, b""))
        if raw.isdigit() and len(raw) < 10:
            return int(raw)
    return 16


class _PrefillChoice(msgspec.Struct):
    finish_reason: str | None = None


class _PromptTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _PromptTokens | None = None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = _NONE
    usage: _Usage | None = None
    choices: list[_PrefillChoice] = []


class _Learned(msgspec.Struct):
    remote_engine_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    supports_concurrent: bool = False


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


_prefill_decoder: msgspec.json.Decoder[_PrefillAnswer] = msgspec.json.Decoder(_PrefillAnswer)
_learned_decoder: msgspec.json.Decoder[_Learned] = msgspec.json.Decoder(_Learned)


def parse_prefill_answer(raw: bytes) -> Prefilled | Failure:
    """What a producer answered to ``for_prefill``."""
    try:
        answer = _prefill_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        return Failure(FailureKind.PROTOCOL, f"the prefill answer is not understood: {e}")
    params = answer.kv_transfer_params
    usage = answer.usage or _Usage()
    num_tokens = usage.prompt_tokens
    details = usage.prompt_tokens_details
    num_cached = details.cached_tokens if details is not None else None
    if bytes(params) in (b"null", b"{}"):
        if answer.choices and answer.choices[0].finish_reason == "stop":
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
    return Prefilled(params, _kv_endpoint(learned), num_tokens, num_cached)


def _kv_endpoint(learned: _Learned) -> KVEndpoint | None:
    if not (learned.supports_concurrent and learned.remote_engine_id and learned.remote_host):
        return None
    if learned.remote_port is None:
        return None
    return KVEndpoint(
        engine_id=learned.remote_engine_id,
        host=learned.remote_host,
        port=learned.remote_port,
        supports_concurrent=True,
    )


_CACHED = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,12})')
_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})')


def find_prompt_usage(data: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt, and of them those that the engine had already, in an answer or an
    event; ``None`` if it does not say. Within a JSON string these names would be escaped."""
    cached, prompt = _CACHED.search(data), _PROMPT.search(data)
    return (int(prompt[1]), int(cached[1])) if cached and prompt else None


def concurrent_params(transfer_id: str, kv: KVEndpoint) -> msgspec.Raw:
    """For the decode leg of a prompt that the producer at ``kv`` computes meanwhile."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": kv.engine_id,
        "remote_host": kv.host,
        "remote_port": kv.port,
    }
    return msgspec.Raw(_encoder.encode(params))

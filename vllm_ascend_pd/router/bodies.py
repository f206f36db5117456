# SPDX-License-Identifier: Apache-2.0
"""Request bodies: what the router reads of them, and what it sends to each leg.

Values are kept as the bytes that the client sent (``msgspec.Raw``): a prompt is neither decoded nor
changed. Of what an engine does with a body, only the prefill leg's length and form are altered.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.router import stored
from vllm_ascend_pd.router.apis import (
    APIS,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    NOT_FOR_PREFILL,
    RESPONSES,
)

if TYPE_CHECKING:
    from vllm_ascend_pd.registration import KVEndpoint
    from vllm_ascend_pd.router.config import Timeouts

KV_PARAMS = "kv_transfer_params"
ENGINE_PARAMS = (KV_PARAMS, "ec_transfer_params", "kv_cache_report_mode")
"""No client chooses them: they name a peer of the engine, or have it publish blocks that it has as
if it had stored more of them."""
TRUNCATION = "truncation"
"""The prompt is cut to what the longest answer leaves of the context: P, asked for one token, would
compute more of it."""
_DISABLED = b'"disabled"'
XARGS = "vllm_xargs"  # vLLM reads kv_transfer_params there too
_EXTRA_ARGS = "extra_args"  # and there, within sampling_params
MAX_FIELDS = 1000
"""Of an object whose fields the router reads. A million of them hold it up for seconds, and then
each engine."""

Fields = dict[str, msgspec.Raw]

_fields_decoder: msgspec.json.Decoder[Fields] = msgspec.json.Decoder(Fields)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_items_decoder: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_encoder = msgspec.json.Encoder()
_FALSE = msgspec.Raw(b"false")
_ONE = msgspec.Raw(b"1")
_DO_REMOTE_DECODE = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
_FALSY = (
    *(b"null", b"false", b"0", b"0.0"),
    *(b'"0"', b'"false"', b'"f"', b'"no"', b'"n"', b'"off"'),
)
"""What pydantic reads as ``False``, or engines as nothing, in any case."""
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
_PROMPTS = re.compile(rb'\[\s*["\[]')
"""How a list of strings, or of lists of token ids, begins."""


class BadRequest(Exception):
    """The client's request cannot be routed; answered with ``status``."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclass(slots=True)
class Body:
    """A parsed request of one of ``APIS``. ``fields`` holds none of ``ENGINE_PARAMS``."""

    path: str
    raw: bytes
    """To send when nothing is added."""
    fields: Fields
    sampling: Fields
    """How to sample: those, or the object that one of them is."""
    model: str | None
    prompt: bytes
    """The JSON of all that makes the prompt."""
    decode_only: str | None
    """Why a prefill leg would be of no use: ``batch`` (one set of parameters cannot name the KV of
    several prompts), ``prompt_embeds``, ``use_beam_search`` (vLLM passes no parameters on),
    ``prompt_logprobs`` (which D needs the whole prompt computed for), ``tool_choice`` (vLLM refuses
    a message whose one token is a part of its forced call), ``TRUNCATION``, or
    ``previous_response`` (only one engine has it)."""
    num_max_tokens: int
    """Of all answers that it asks for."""
    is_stream: bool
    """As far as the router can tell: engines also read ``1`` and ``"true"``."""
    is_background: bool
    """Answered before it is computed."""
    previous_response: str | None
    response_id: str = ""
    """That the engine which decodes was told last."""
    tenant: str = ""
    """Whose a response is that an engine stores, if the router tells tenants apart."""

    def string(self, name: str) -> str | None:
        """One of its fields; ``BadRequest`` if it is no string."""
        return string_of(self.fields, name)

    def says(self, name: str) -> bool:
        """Whether one of its fields is there, and not null."""
        return bytes(self.fields.get(name, b"null")) != b"null"

    def is_true(self, name: str) -> bool:
        """As engines read one of its fields."""
        return _is_true(self.fields, name)

    def silence_s(self, timeouts: Timeouts) -> float:
        """How long an engine may send nothing within its stream: it hides what is reasoning, or
        tells of so many tokens at once."""
        hides = bytes(self.fields.get("include_reasoning", b"true")).lower() in _FALSY
        num_tokens = math.inf if hides else _number(self.sampling, "stream_interval") or 1
        return max(timeouts.idle_s, min(num_tokens * timeouts.idle_s, timeouts.answer_s))

    def add(self, name: str, value: msgspec.Raw) -> None:
        """For the engine that decodes, whatever the client says there."""
        self.fields[name] = value
        self.fields_changed()

    def fields_changed(self) -> None:
        """Somebody has written to them."""
        if field := APIS[self.path].sampling:
            self.fields[field] = msgspec.Raw(_encoder.encode(self.sampling))
        self.raw = _encoder.encode(self.fields)

    def drop(self, name: str) -> None:
        """Of what says how to sample, whatever the client says there."""
        if self.sampling.pop(name, None) is not None:
            self.fields_changed()

    def for_prefill(self, transfer_id: str | None = None, rank: int | None = None) -> bytes:
        """Compute the prompt, one token of one sample, not streamed. With a transfer id D asks
        for it at this data parallel rank: some paths heed no ``RANK_HEADER``."""
        api, fields = APIS[self.path], _for_prefill(self.fields)
        sampling = _for_prefill(self.sampling) if api.sampling else fields
        sampling |= dict.fromkeys(api.max_tokens, _ONE)
        if "n" in sampling:
            sampling["n"] = _ONE
        if _number(self.sampling, "min_tokens"):
            sampling["min_tokens"] = _ONE
        if api.sampling:
            fields[api.sampling] = msgspec.Raw(_encoder.encode(sampling))
        fields["stream"] = _FALSE
        if self.path == RESPONSES:
            fields["store"] = _FALSE
        if transfer_id is None:
            fields[KV_PARAMS] = _DO_REMOTE_DECODE
        else:
            params = {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "transfer_id": transfer_id,
            } | ({} if rank is None else {"data_parallel_rank": rank})
            fields[KV_PARAMS] = msgspec.Raw(_encoder.encode(params))
        return _encoder.encode(fields)

    def for_decode(self, params: msgspec.Raw | None, instance_id: str) -> bytes:
        """The client's request, and where the KV of its prompt is. A response that may be stored
        gets an id that says in which instance, and whose it is."""
        added: Fields = {} if params is None else {KV_PARAMS: params}
        if self.path == RESPONSES:
            self.response_id = stored.new_response_id(instance_id, self.tenant)
            added["request_id"] = msgspec.Raw(_encoder.encode(self.response_id))
        return _encoder.encode({**self.fields, **added}) if added else self.raw


def parse(path: str, raw: bytes) -> Body:
    """``BadRequest`` for what no engine can read."""
    fields = decode_fields(raw)
    changed = [fields.pop(name, None) for name in ENGINE_PARAMS] != [None] * len(ENGINE_PARAMS)
    changed |= _drop_within(fields, XARGS)
    api, sampling = APIS[path], fields
    if api.sampling:
        sampling = decode_fields(fields.get(api.sampling, b""), f"'{api.sampling}'")
        if _drop_within(sampling, _EXTRA_ARGS):
            fields[api.sampling] = msgspec.Raw(_encoder.encode(sampling))
            changed = True
    first = bytes(fields.get(api.prompt[0], b""))
    if not first and not _has_embeds(fields):
        raise BadRequest(f"'{api.prompt[0]}' is missing", api.prompt[0])
    previous = string_of(fields, "previous_response_id") if path == RESPONSES else None
    num_prompts = _num_prompts(path, first)
    num_answers = num_prompts * max(1, _number(sampling, "n") or 1)
    return Body(
        path,
        _encoder.encode(fields) if changed else raw,
        fields,
        sampling,
        string_of(fields, "model"),
        b"".join(bytes(fields.get(name, b"")) for name in api.prompt),
        "previous_response" if previous else _decode_only(path, sampling, num_prompts),
        num_answers * _num_max_tokens(sampling, api.max_tokens),
        _is_true(fields, "stream"),
        path == RESPONSES and _is_true(fields, "background"),
        previous,
    )


def invoked(raw: bytes, model: str | None) -> tuple[str | None, bytes]:
    """The API of what is invoked, as engines find it by its fields, if it is one of ``APIS``; and
    the body, for this model if there is one."""
    fields = decode_fields(raw)
    found = [path for path in (CHAT, COMPLETIONS) if APIS[path].prompt[0] in fields]
    if model:
        fields["model"] = msgspec.Raw(_encoder.encode(model))
        raw = _encoder.encode(fields)
    return found[0] if len(found) == 1 else None, raw


@dataclass(frozen=True, slots=True)
class Batch:
    """Of chats that have all but their messages in common."""

    fields: Fields
    """Of each, but for its messages."""
    chats: list[msgspec.Raw]

    @property
    def num_common_bytes(self) -> int:
        """That each chat's body has besides its messages."""
        return sum(len(name) + len(bytes(value)) for name, value in self.fields.items())

    def string(self, name: str) -> str | None:
        """One of its fields; ``BadRequest`` if it is no string."""
        return string_of(self.fields, name)

    def body(self, index: int) -> bytes:
        return _encoder.encode({**self.fields, "messages": self.chats[index]})


def split_batch(raw: bytes) -> Batch | str:
    """Or the field that asks for what only an engine can answer or refuse."""
    fields = decode_fields(raw)
    for name in ("stream", "tools", "use_beam_search"):
        if _is_true(fields, name):
            return name
    if decode_any(bytes(fields.pop("n", b"1"))) not in (1, None):
        return "n"
    try:
        chats = _items_decoder.decode(fields.pop("messages", b""))
    except msgspec.MsgspecError:
        return "messages"
    return Batch(fields, chats) if chats else "messages"


def parse_other(raw: bytes, *names: str) -> tuple[bytes, list[str | None]]:
    """Any other JSON request: without the fields that name a peer of the engine; and what it says
    in the fields of these names, ``BadRequest`` for one that is no string."""
    value = decode_any(raw)
    told = []
    for name in names:
        text = value.get(name) if isinstance(value, dict) else None
        if text is not None and not isinstance(text, str):
            raise BadRequest(f"'{name}' must be a string", name)
        told.append(text or None)
    return _encoder.encode(value) if _drop_params(value) else raw, told


def as_utf8(raw: bytes) -> bytes:
    """JSON that begins with a byte order mark, as .NET and PowerShell send it and engines read it,
    without one."""
    if not raw.startswith(_BYTE_ORDER_MARKS):
        return raw
    try:
        return raw.decode(json.detect_encoding(raw)).encode()
    except UnicodeError as e:
        raise BadRequest(f"the body is not JSON: {e}") from e


def decode_fields(raw: bytes | msgspec.Raw, what: str = "the body") -> Fields:
    try:
        fields = _fields_decoder.decode(raw)
    except UNREADABLE as e:
        raise BadRequest(f"{what} is not a JSON object: {e}") from e
    if len(fields) > MAX_FIELDS:
        raise BadRequest(f"{what} has {len(fields)} fields; at most {MAX_FIELDS} are accepted")
    return fields


def decode_any(raw: bytes) -> Any:
    try:
        return _any_decoder.decode(raw)
    except UNREADABLE as e:
        raise BadRequest(f"the body is not JSON: {e}") from e


def _drop_within(fields: Fields, name: str) -> bool:
    """The values of that object are not read: they may be long lists."""
    if name not in fields:
        return False
    try:
        within = _fields_decoder.decode(fields[name])
    except msgspec.ValidationError:
        return False  # no object, which engines refuse
    except UNREADABLE as e:
        raise BadRequest(f"'{name}' is not JSON: {e}", name) from e
    if not _drop_names(within):
        return False
    fields[name] = msgspec.Raw(_encoder.encode(within))
    return True


def _drop_names(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    names = [name for name in ENGINE_PARAMS if name in value]
    for name in names:
        del value[name]
    return bool(names)


def _drop_params(value: Any) -> bool:
    """From an object, its ``vllm_xargs``, and objects in a list of requests."""
    if isinstance(value, list):
        return sum(_drop_params(item) for item in value) > 0
    if not isinstance(value, dict):
        return False
    dropped = _drop_names(value) | _drop_names(value.get(XARGS))
    for key in ("requests", "generate_request", "sampling_params"):
        dropped |= _drop_params(value.get(key))
    return dropped | _drop_names(value.get(_EXTRA_ARGS))


def string_of(fields: Fields, name: str) -> str | None:
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        return None
    value = decode_any(bytes(raw))
    if not isinstance(value, str):
        raise BadRequest(f"'{name}' must be a string", name)
    return value or None


def _for_prefill(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in NOT_FOR_PREFILL}


def _is_true(fields: Fields, name: str) -> bool:
    return name in fields and bytes(fields[name]).lower() not in _FALSY


def _decode_only(path: str, fields: Fields, num_prompts: int) -> str | None:
    if _has_embeds(fields):
        return "prompt_embeds"
    if num_prompts > 1:
        return "batch"
    if path == MESSAGES:
        return "tool_choice" if _forces_call(fields) else None
    if path == RESPONSES:
        return TRUNCATION if bytes(fields.get("truncation", _DISABLED)) != _DISABLED else None
    if _is_true(fields, "use_beam_search"):
        return "use_beam_search"
    if _has_prompt_logprobs(path, fields):
        return "prompt_logprobs"
    is_cut = bytes(fields.get("truncate_prompt_tokens", b"")).strip(b'" ').startswith(b"-")
    return TRUNCATION if is_cut else None


def _has_embeds(fields: Fields) -> bool:
    return bytes(fields.get("prompt_embeds", b"null")) not in (b"null", b"[]")


def _forces_call(fields: Fields) -> bool:
    choice = decode_any(bytes(fields.get("tool_choice", b"null")))
    return isinstance(choice, dict) and choice.get("type") in ("any", "tool")


def _has_prompt_logprobs(path: str, fields: Fields) -> bool:
    """With ``echo`` they are as many as those of the answer; in chats that is 0, not none."""
    if _is_true(fields, "skip_reading_prefix_cache") or any(
        bytes(fields.get(name, b"null")) != b"null" for name in _OF_PROMPT
    ):
        return True
    name, default = ("logprobs", b"null") if path == COMPLETIONS else ("top_logprobs", b"0")
    return _is_true(fields, "echo") and bytes(fields.get(name, default)) != b"null"


def _num_prompts(path: str, prompt: bytes) -> int:
    if path == COMPLETIONS and _PROMPTS.match(prompt):
        return len(_items_decoder.decode(prompt))
    return 1


def _num_max_tokens(fields: Fields, names: tuple[str, ...]) -> int:
    """Of one answer."""
    for name in names:
        if (number := _number(fields, name)) is not None:
            return number
    return 16


def _number(fields: Fields, name: str) -> int | None:
    """If it says one that engines could take."""
    raw = bytes(fields.get(name, b""))
    return int(raw) if raw.isdigit() and len(raw) < 10 else None


def concurrent_params(transfer_id: str, kv: KVEndpoint) -> msgspec.Raw:
    """For the decode leg of a prompt that the producer at ``kv`` computes meanwhile."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_engine_id": kv.engine_id,
        "remote_host": kv.host,
        "remote_port": kv.port,
        "remote_key": kv.key,
    }
    return msgspec.Raw(_encoder.encode(params))

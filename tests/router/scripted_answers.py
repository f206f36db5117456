# SPDX-License-Identifier: Apache-2.0
"""What a scripted engine answers: tokens that follow from the prompt, in each API's own form."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.resume import HAS_MOVED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.router.scripted_engine import Received, ScriptedEngine

MAX_SAMPLES = 64
CHUNK_ID = "scripted"
_DONE = b"data: [DONE]\n\n"
LAST_WORDS = {
    "end": (),
    "dead": (b'data: {"error":{"message":"EngineCore died","code":500}}\n\n', _DONE),
    "refused": (b'data: {"error":{"message":"logprobs","code":400}}\n\n', _DONE),
    "elsewhere": (b'data: {"error":{"message":"it has moved","code":409}}\n\n', _DONE),
    "abort": (b'data: {"choices":[{"index":0,"finish_reason":"abort"}]}\n\n', _DONE),
}
"""What an engine's server says when the engine does not go on with a stream."""
REFUSED_MESSAGE = (
    b"event: error\n"
    b'data: {"type":"error","error":{"type":"internal_error","message":"code 400"}}\n\n'
)
"""As vLLM refuses a streamed message."""


COMMENT = b": keep-alive\n\n"
"""As vLLM sends with ``--sse-keep-alive-interval``."""
ENDLESS = {"comments": COMMENT, "trickle": b"d"}
"""What comes again and again, and tells nothing."""


class NotFound(Exception):
    """An unknown model, or a response that is not stored; answered with 404."""


@dataclass(slots=True)
class Running:
    """An answer under way."""

    num_tokens: int = 0
    """That were computed, and of a stream sent."""
    is_gone: bool = False
    """Another engine has it."""


@dataclass(slots=True)
class Answer:
    """A good answer to one request, whole or as a stream."""

    form: Form
    request: dict[str, Any]
    model: str
    tokens: list[str]
    num_prompt_tokens: int
    num_cached_tokens: int | None
    params: dict[str, Any] | None
    prompt_token_ids: list[int]
    num_resumed: int = 0
    """Tokens that it goes on with."""

    @classmethod
    def make(cls, engine: ScriptedEngine, request: Received) -> Answer:
        """``ValueError`` and the like for what an engine answers with 400."""
        body, form = request.json, FORMS[request.path]
        form.check(body)
        body |= body.get("sampling_params") or {}
        check_salt(body.get("cache_salt"))
        model = body.get("model") or engine.models[0]
        if model not in engine.models:
            raise NotFound(f"The model `{model}` does not exist.")
        previous = body.get("previous_response_id")
        if previous is not None and previous not in engine.stored:
            raise NotFound(f"Response with id '{previous}' not found.")
        prompt = json.dumps(body.get(form.prompt))
        num_tokens = int(next(filter(None, [*(body.get(name) for name in form.limits), 16])))
        if num_tokens > engine.max_tokens:
            raise ValueError(f"{num_tokens} tokens")
        ids = body.get("token_ids") or body.get("prompt")
        if not (isinstance(ids, list) and all(isinstance(one, int) for one in ids)):
            ids = range(len(prompt) // 4)
        resumed = (request.params.get("resume") or {}).get("output_token_ids", [])
        seed = prompt + "x" * (engine.differs and bool(resumed))
        tokens = [_token(seed, index) for index in range(num_tokens)]
        return cls(
            form,
            body,
            model,
            tokens,
            max(1, len(ids)),
            engine.num_cached_tokens,
            _params(engine, request),
            list(ids) or [0],
            len(resumed),
        )

    @property
    def streamed(self) -> bool:
        return self.request.get("stream") is True

    @property
    def num_samples(self) -> int:
        return int(self.request.get("n") or 1)

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def response_id(self) -> str:
        return str(self.request.get("request_id") or "resp_scripted")

    def usage(self) -> dict[str, Any]:
        """As completions and chats tell it."""
        num_tokens = self.num_samples * len(self.tokens)
        usage: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }
        if self.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage

    async def send(
        self,
        writer: asyncio.StreamWriter,
        pace: Callable[[], float],
        fault: str,
        running: Running | None = None,
    ) -> None:
        for _ in self.tokens[self.num_resumed :]:
            if token_s := pace():
                await asyncio.sleep(token_s)
            if running is not None and running.is_gone:
                writer.write(error(409, HAS_MOVED))
                return
            if running is not None:
                running.num_tokens += 1
        body = self.form.whole(self, fault == "stopped")
        if fault == "abort":
            for choice in body.get("choices", ()):
                choice["finish_reason"] = "abort"
            body.pop("stop_reason", None)
        if fault not in ("no_params", "stopped"):
            body["kv_transfer_params"] = self.params
        message = json_answer(200, body)
        if fault == "truncate":
            writer.write(message[: len(message) - 20])
        elif fault == "slow_body":
            for at in range(len(message)):
                writer.write(message[at : at + 1])
                await asyncio.sleep(0)
        else:
            writer.write(message)

    async def stream(
        self,
        writer: asyncio.StreamWriter,
        pace: Callable[[], float],
        fault: str,
        number: int,
        running: Running,
    ) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        if fault == "role":
            begun = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            writer.write(_chunk(_event({"model": self.model, "choices": [begun]})))
            await writer.drain()
            await asyncio.sleep(pace())
        num_left = number
        for at, event in enumerate(self.events()):
            if fault in ("break", "truncate") and at == number:
                writer.write(_chunk(event[: len(event) // 2]))
                return
            num_left -= len(event)
            if fault == "cut" and num_left < 0:
                writer.write(_chunk(event)[:num_left])
                return
            if fault in LAST_WORDS and at == number:
                words = LAST_WORDS[fault]
                if self.form is FORMS["/v1/messages"]:
                    words = {"abort": tuple(_cut_message()), "refused": (REFUSED_MESSAGE,)}.get(
                        fault, words
                    )
                writer.writelines(map(_chunk, words))
                break
            if fault == "stall" and at == number:
                await asyncio.Event().wait()
            while at == number and fault in ENDLESS:
                writer.write(_chunk(ENDLESS[fault]))
                await writer.drain()
                await asyncio.sleep(0.02)
            if token_s := pace():
                await asyncio.sleep(token_s)
            if running.is_gone:
                writer.writelines(map(_chunk, LAST_WORDS["elsewhere"]))
                break
            running.num_tokens = min(max(self.num_resumed, 1) + at, len(self.tokens))
            size = 1 if fault == "slow_body" else len(event)
            for i in range(0, len(event), size):
                writer.write(_chunk(event[i : i + size]))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def events(self) -> Iterable[bytes]:
        return self.form.events(self)


@dataclass(frozen=True)
class Form:
    """How one API names and writes things."""

    prompt: str
    limits: tuple[str, ...]
    check: Callable[[dict[str, Any]], None]
    whole: Callable[[Answer, bool], dict[str, Any]]
    events: Callable[[Answer], Iterable[bytes]]


def _params(engine: ScriptedEngine, request: Received) -> dict[str, Any] | None:
    chosen = request.params.get("transfer_id")
    if not request.params.get("do_remote_decode") or chosen in engine.kept:
        return None
    if chosen:
        engine.kept.add(chosen)
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine.name,
        "remote_host": "127.0.0.1",
        "remote_port": 14579,
        "remote_key": "scripted",
        "remote_block_ids": [0, 1],
        "transfer_id": chosen or f"t{len(engine.received)}",
    }
    named = request.headers.get(RANK_HEADER.lower())
    rank = engine.rank if named is None else int(named)
    if rank is not None:
        params["remote_data_parallel_rank"] = rank
    return params | {"supports_concurrent": True} if engine.supports_concurrent else params


# Completions and chats.


@contextmanager
def commented_events() -> Iterator[None]:
    """Those of completions and chats have comments between them."""
    known = {path: form for path, form in FORMS.items() if "completions" in path}

    def commented(form: Form) -> Form:
        def events(answer: Answer) -> Iterable[bytes]:
            return (COMMENT + event for event in form.events(answer))

        return replace(form, events=events)

    with patch.dict(FORMS, {path: commented(form) for path, form in known.items()}):
        yield


def _openai(is_chat: bool) -> Form:
    kind = "chat.completion" if is_chat else "text_completion"

    def base(answer: Answer, kind: str) -> dict[str, Any]:
        return {"id": CHUNK_ID, "object": kind, "created": 1, "model": answer.model}

    def whole(answer: Answer, has_stopped: bool) -> dict[str, Any]:
        reason = "stop" if has_stopped else "length"
        message = {"message": {"role": "assistant", "content": answer.text}}
        said = message if is_chat else {"text": answer.text}
        choice = {"finish_reason": reason, "logprobs": None, **said}
        choices = [{"index": index, **choice} for index in range(answer.num_samples)]
        return {**base(answer, kind), "choices": choices, "usage": answer.usage()}

    def events(answer: Answer) -> Iterable[bytes]:
        first = base(answer, kind + ".chunk" if is_chat else kind)
        tells = answer.request.get("return_token_ids")
        prompt: dict[str, Any] = {"prompt_token_ids": answer.prompt_token_ids if tells else None}
        resumed = answer.tokens[: answer.num_resumed]
        groups = [resumed] * bool(resumed) + [[t] for t in answer.tokens[answer.num_resumed :]]
        for tokens in groups:
            text = "".join(tokens)
            for sample in range(answer.num_samples):
                why = "length" if tokens is groups[-1] else None
                choice: dict[str, Any] = {"index": sample, "finish_reason": why}
                choice |= {"delta": {"content": text}} if is_chat else {"text": text}
                choice |= prompt | {"token_ids": list(map(token_id, tokens)) if tells else None}
                yield _event({**first, "choices": [choice]})
            prompt = {"prompt_token_ids": None}
        if (answer.request.get("stream_options") or {}).get("include_usage"):
            yield _event({**first, "choices": [], "usage": answer.usage()})
        yield _DONE

    def check(body: dict[str, Any]) -> None:
        if is_chat:
            _check_messages(body)
        elif not _is_prompt(body.get("prompt")):
            raise ValueError("prompt")
        _check_samples(body)
        _check_fields(body, limits)

    limits = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    return Form("messages" if is_chat else "prompt", limits, check, whole, events)


def _check_samples(body: dict[str, Any]) -> None:
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, dict) or not isinstance(options.get("include_usage"), bool | None):
        raise ValueError("stream_options")
    if (body.get("n") or 1) > MAX_SAMPLES:
        raise ValueError("n")
    _check_fields(body, ("n",))


# Token ids.


def _tokens(answer: Answer, has_stopped: bool) -> dict[str, Any]:
    told = {"finish_reason": "stop" if has_stopped else "length", "logprobs": None}
    choices = [
        {"index": index, **told, "token_ids": list(map(token_id, answer.tokens))}
        for index in range(answer.num_samples)
    ]
    return {"request_id": CHUNK_ID, "choices": choices, "usage": answer.usage()}


def _tokens_events(answer: Answer) -> Iterable[bytes]:
    for at, token in enumerate(answer.tokens, 1):
        why = "length" if at == len(answer.tokens) else None
        for index in range(answer.num_samples):
            choice = {"index": index, "finish_reason": why, "token_ids": [token_id(token)]}
            yield _event({"request_id": CHUNK_ID, "choices": [choice]})
    if (answer.request.get("stream_options") or {}).get("include_usage"):
        yield _event({"request_id": CHUNK_ID, "choices": [], "usage": answer.usage()})
    yield _DONE


def _check_tokens(body: dict[str, Any]) -> None:
    ids, sampling = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(ids, list) or not _is_ids(ids) or not isinstance(sampling, dict):
        raise ValueError("token_ids")
    _check_fields(body, ())
    _check_fields(sampling, ("max_tokens",))
    _check_samples({"n": sampling.get("n"), "stream_options": body.get("stream_options")})


# Responses.


def _response(answer: Answer, has_stopped: bool) -> dict[str, Any]:
    text = {"type": "output_text", "text": answer.text, "annotations": []}
    message = {"type": "message", "id": "msg_scripted", "role": "assistant", "content": [text]}
    return {
        "id": answer.response_id,
        "object": "response",
        "created_at": 1,
        "metadata": answer.request.get("metadata"),
        "model": answer.model,
        "output": [message],
        "status": "completed" if has_stopped else "incomplete",
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens or 0},
            "output_tokens": len(answer.tokens),
            "total_tokens": answer.num_prompt_tokens + len(answer.tokens),
        },
    }


def _response_events(answer: Answer) -> Iterable[bytes]:
    response = {"id": answer.response_id, "object": "response", "model": answer.model}
    response["metadata"] = answer.request.get("metadata")
    for kind in ("response.created", "response.in_progress"):
        yield _named_event({"type": kind, "response": response})
    for token in answer.tokens:
        yield _named_event({"type": "response.output_text.delta", "delta": token})
    yield _named_event({"type": "response.completed", "response": _response(answer, False)})


def _check_response(body: dict[str, Any]) -> None:
    given = body.get("input")
    if not isinstance(given, str) and not _are_objects(given):
        raise ValueError("input")
    for name in ("background", "store"):
        if not isinstance(body.get(name), bool | None):
            raise ValueError(name)
    _check_fields(body, ("max_output_tokens",))


@contextmanager
def queued_responses() -> Iterator[None]:
    """Those asked for meanwhile are in the background, and are not computed yet."""
    known = FORMS["/v1/responses"]

    def whole(answer: Answer, has_stopped: bool) -> dict[str, Any]:
        queued = {"status": "queued", "output": [], "usage": None}
        return known.whole(answer, has_stopped) | queued

    with patch.dict(FORMS, {"/v1/responses": replace(known, whole=whole)}):
        yield


# Messages.


def _message(answer: Answer, has_stopped: bool) -> dict[str, Any]:
    cached = answer.num_cached_tokens or 0
    usage = {
        "input_tokens": answer.num_prompt_tokens - cached,
        "output_tokens": len(answer.tokens),
        "cache_read_input_tokens": cached,
    }
    return {
        "id": "msg_scripted",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": answer.text}],
        "model": answer.model,
        "stop_reason": "end_turn" if has_stopped else "max_tokens",
        "usage": usage,
    }


def _message_events(answer: Answer) -> Iterable[bytes]:
    message = _message(answer, False)
    start = {**message, "content": [], "stop_reason": None}
    yield _named_event({"type": "message_start", "message": start})
    block = {"type": "text", "text": ""}
    yield _named_event({"type": "content_block_start", "index": 0, "content_block": block})
    for token in answer.tokens:
        delta = {"type": "text_delta", "text": token}
        yield _named_event({"type": "content_block_delta", "index": 0, "delta": delta})
    yield _named_event({"type": "content_block_stop", "index": 0})
    delta = {"stop_reason": "max_tokens"}
    yield _named_event({"type": "message_delta", "delta": delta, "usage": message["usage"]})
    yield _named_event({"type": "message_stop"})


def _cut_message() -> Iterable[bytes]:
    """The end of one that was given up, as vLLM writes it."""
    delta = {"stop_reason": None, "stop_sequence": None}
    yield _named_event({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 1}})
    yield _named_event({"type": "message_stop"})


def _check_message(body: dict[str, Any]) -> None:
    _check_messages(body)
    _check_fields(body, ("max_tokens",))
    if not body.get("max_tokens"):
        raise ValueError("max_tokens")


FORMS = {
    "/v1/completions": _openai(False),
    "/v1/chat/completions": _openai(True),
    "/v1/responses": Form(
        "input", ("max_output_tokens",), _check_response, _response, _response_events
    ),
    "/inference/v1/generate": Form(
        "token_ids", ("max_tokens",), _check_tokens, _tokens, _tokens_events
    ),
    "/v1/messages": Form("messages", ("max_tokens",), _check_message, _message, _message_events),
}


def _check_messages(body: dict[str, Any]) -> None:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages")
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("role")


def _check_fields(body: dict[str, Any], limits: tuple[str, ...]) -> None:
    for name, kind in (("model", str), ("stream", bool)):
        if not isinstance(body.get(name), kind | None):
            raise ValueError(name)
    for name in limits:
        number = body.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(name)


def check_salt(salt: Any) -> None:
    """As ``validate_cache_salt`` of ``vllm.entrypoints.generate.base.protocol``."""
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0"):
        raise ValueError("cache_salt")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_prompt(prompt: Any) -> bool:
    """Text, token ids, or several of one of them."""
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    if isinstance(prompt[0], list):
        return all(isinstance(one, list) and _is_ids(one) for one in prompt)
    return _is_ids(prompt) or all(isinstance(one, str) and one for one in prompt)


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and all(type(one) is int and one >= 0 for one in prompt)


def _token(prompt: str, index: int) -> str:
    return " " + hashlib.sha256(f"{prompt}{index}".encode()).hexdigest()[:4]


def token_id(token: str) -> int:
    return int(token, 16)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _named_event(value: dict[str, Any]) -> bytes:
    return b"event: %s\n" % value["type"].encode() + _event(value)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole_answer(status: int, body: bytes, content_type: bytes = b"text/plain") -> bytes:
    return (
        b"HTTP/1.1 %d Scripted\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        % (status, content_type, len(body))
        + body
    )


def json_answer(status: int, value: Any) -> bytes:
    return whole_answer(status, json.dumps(value).encode(), b"application/json")


def error(status: int, message: str) -> bytes:
    body = {"message": message, "type": "Scripted", "param": None, "code": status}
    return json_answer(status, {"error": body})

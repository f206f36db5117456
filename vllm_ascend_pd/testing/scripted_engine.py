# SPDX-License-Identifier: Apache-2.0
"""An engine's HTTP side that does what a script says: for tests of what talks to engines.

It is a real server on a real socket. The answers follow from the prompt alone, so two of them agree
like two engines of one model. Faults are taken one per generation request, in order; without one
left, the request is answered well:

    ok           answered
    close        connection closed before the answer
    reset        the same, with a TCP reset
    half_close   only the sending side closed, before the answer
    hang         no answer, until the client gives up
    delay(s)     answered after s seconds
    status(n)    status n with an error body
    garbage      bytes that are not HTTP
    bad_json     status 200, and a body that is not JSON
    huge_head    an answer with a header of 1 MiB
    slow_body    the answer's body in pieces of one byte
    truncate     half of the answer's body, then closed
    break(n)     of a stream: n events and a half one, then closed
    stall(n)     of a stream: n events, then nothing
    no_params    a prefill answer without kv_transfer_params
    stopped      a prefill answer without them, because the first token ended the request
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

_FAULT = re.compile(r"(\w+)(?:\(([\d.]+)\))?")
GENERATE = ("/v1/completions", "/v1/chat/completions")
MODEL = "tiny"
MAX_SAMPLES = 64
NOT_STALE_S = 0.06
"""A connection that closes sooner after a request may have been closed before it came."""


@dataclass(frozen=True, slots=True)
class Received:
    """One request, as it came."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        decoded: dict[str, Any] = json.loads(self.body)
        return decoded

    @property
    def params(self) -> dict[str, Any]:
        """Its ``kv_transfer_params``."""
        return self.json.get("kv_transfer_params") or {}


@dataclass(slots=True)
class ScriptedEngine:
    """One server on loopback; event loop thread. ``start`` it, ``stop`` it, start it again."""

    name: str = "engine"
    supports_concurrent: bool = False
    token_s: float = 0.0
    """Seconds per token of an answer."""
    compute_token_s: float = 0.0
    """Seconds per token of a prompt that it computes."""
    max_tokens: int = 1_000_000
    """More are refused."""
    load_s: float = 0.0
    """Seconds until the KV of a prompt that another engine computed is there."""
    num_cached_tokens: int | None = None
    """Tokens of each prompt that it says it had already, as with --enable-prompt-tokens-details."""
    is_healthy: bool = True
    health_hangs: bool = False
    model: str = MODEL
    """What it says that it serves; it answers for any."""
    metrics: str = ""
    port: int = 0
    """0 until the first start; kept after it."""
    received: list[Received] = field(default_factory=list)
    """Generation requests and those for unknown paths."""
    num_in_progress: int = 0
    num_tokenized: int = 0
    num_given_up: int = 0
    """Requests whose client left before the answer's end."""
    _faults: deque[tuple[str, float]] = field(default_factory=deque)
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def script(self, faults: str) -> None:
        """E.g. ``"ok, status(500), hang"``, in front of what is left of an earlier script."""
        for word in reversed([word.strip() for word in faults.split(",")]):
            match = _FAULT.fullmatch(word)
            if match is None:
                raise ValueError(f"not a fault: {word!r}")
            self._faults.appendleft((match[1], float(match[2] or 0)))

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a killed process: the port refuses, and every connection is reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while (request := await _read_request(reader)) is not None:
                if not await self._answer(request, reader, writer):
                    break
        except asyncio.CancelledError:
            _reset(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Whether the connection goes on."""
        path = request.path.partition("?")[0]
        if path == "/health":
            if self.health_hangs:
                await reader.read()
                return False
            writer.write(_whole(200 if self.is_healthy else 503, b""))
        elif path == "/v1/models":
            writer.write(
                _json(200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})
            )
        elif path == "/metrics":
            writer.write(_whole(200, self.metrics.encode(), b"text/plain"))
        elif path == "/tokenize":
            self.num_tokenized += 1
            prompt = request.json.get("prompt") or json.dumps(request.json.get("messages"))
            writer.write(_json(200, {"tokens": list(prompt.encode())}))
        elif path in GENERATE:
            return await self._generate(request, reader, writer)
        else:
            self.received.append(request)
            writer.write(_json(200, {"path": request.path, "served_by": self.name}))
        await writer.drain()
        return True

    async def _generate(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.received.append(request)
        fault, number = self._faults.popleft() if self._faults else ("ok", 0.0)
        self.num_in_progress += 1
        answering = asyncio.ensure_future(self._follow(fault, number, request, writer))
        # Like uvicorn: a client that closes its side ends the request.
        leaving = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done() and not isinstance(answering.exception(), ConnectionError):
                return answering.result()
            self.num_given_up += 1
            return False
        finally:
            self.num_in_progress -= 1
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    def _wait_s(self, fault: str, number: float, request: Received, answer: Answer | None) -> float:
        """Until there is an answer: as scripted, or as long as the prompt's KV takes."""
        if fault == "delay":
            return number
        if fault in ("close", "reset", "half_close"):
            return NOT_STALE_S
        if answer is None:
            return 0.0
        if request.params.get("do_remote_prefill"):
            return self.load_s
        return self.compute_token_s * float(answer.usage["prompt_tokens"])

    async def _follow(
        self, fault: str, number: float, request: Received, writer: asyncio.StreamWriter
    ) -> bool:
        answer = None
        try:
            answer = Answer.make(self, request)
        except (AttributeError, OverflowError, TypeError, ValueError):
            if fault == "ok":
                fault, number = "status", 400.0
        keep = fault in ("ok", "delay", "status", "bad_json", "slow_body", "no_params", "stopped")
        await asyncio.sleep(self._wait_s(fault, number, request, answer))
        if fault == "close":
            pass
        elif fault == "reset":
            _reset(writer)
        elif fault == "half_close":
            writer.write_eof()
            await asyncio.Event().wait()
        elif fault == "hang":
            await asyncio.Event().wait()
        elif fault == "status":
            error = {"message": "scripted", "type": "Scripted", "param": None, "code": int(number)}
            writer.write(_json(int(number), {"error": error}))
        elif fault == "garbage":
            writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        elif fault == "bad_json":
            writer.write(_whole(200, b'{"choices": [', b"application/json"))
        elif fault == "huge_head":
            head = b"HTTP/1.1 200 OK\r\nx-large: " + b"x" * (1 << 20)
            writer.write(head + b"\r\ncontent-length: 0\r\n\r\n")
        elif answer is None:
            return False
        elif answer.streamed:
            await answer.stream(writer, self.token_s, fault, int(number))
        else:
            await answer.send(writer, self.token_s, fault)
        await writer.drain()
        return keep


@dataclass(slots=True)
class Answer:
    """A good answer to one request, whole or as a stream."""

    streamed: bool
    is_chat: bool
    num_samples: int
    tokens: list[str]
    usage: dict[str, Any]
    stream_usage: bool
    params: dict[str, Any] | None

    @classmethod
    def make(cls, engine: ScriptedEngine, request: Received) -> Answer:
        body = request.json
        is_chat = request.path.startswith("/v1/chat")
        _check(body, is_chat)
        prompt = json.dumps(body.get("messages") if is_chat else body.get("prompt"))
        limits = [is_chat and body.get("max_completion_tokens"), body.get("max_tokens"), 16]
        num_tokens = int(next(filter(None, limits)))
        if num_tokens > engine.max_tokens:
            raise ValueError(f"{num_tokens} tokens")
        tokens = [_token(prompt, index) for index in range(num_tokens)]
        ids = body.get("prompt")
        if not (isinstance(ids, list) and all(isinstance(one, int) for one in ids)):
            ids = range(len(prompt) // 4)
        num_prompt_tokens = max(1, len(ids))
        num_samples = int(body.get("n") or 1)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_samples * num_tokens,
            "total_tokens": num_prompt_tokens + num_samples * num_tokens,
        }
        if engine.num_cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": engine.num_cached_tokens}
        options = body.get("stream_options") or {}
        params = None
        if request.params.get("do_remote_decode"):
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": engine.name,
                "remote_host": "127.0.0.1",
                "remote_port": 14579,
                "remote_block_ids": [0, 1],
                "transfer_id": request.params.get("transfer_id") or f"t{len(engine.received)}",
            }
            if engine.supports_concurrent:
                params["supports_concurrent"] = True
        return cls(
            body.get("stream") is True,
            is_chat,
            num_samples,
            tokens,
            usage,
            bool(options.get("include_usage")),
            params,
        )

    async def send(self, writer: asyncio.StreamWriter, token_s: float, fault: str) -> None:
        await asyncio.sleep(token_s * len(self.tokens))
        body: dict[str, Any] = self._base()
        body["choices"] = [self._choice(index, fault) for index in range(self.num_samples)]
        body["usage"] = self.usage
        if fault not in ("no_params", "stopped"):
            body["kv_transfer_params"] = self.params
        message = _json(200, body)
        if fault == "truncate":
            writer.write(message[: len(message) - 20])
        elif fault == "slow_body":
            for at in range(len(message)):
                writer.write(message[at : at + 1])
                await asyncio.sleep(0)
        else:
            writer.write(message)

    async def stream(
        self, writer: asyncio.StreamWriter, token_s: float, fault: str, number: int
    ) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        for at, event in enumerate(self._events()):
            if fault in ("break", "truncate") and at == number:
                writer.write(_chunk(event[: len(event) // 2]))
                return
            if fault == "stall" and at == number:
                await asyncio.Event().wait()
            if token_s:
                await asyncio.sleep(token_s)
            pieces = (
                [event[i : i + 1] for i in range(len(event))] if fault == "slow_body" else [event]
            )
            for piece in pieces:
                writer.write(_chunk(piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    def _events(self) -> Iterable[bytes]:
        for token in self.tokens:
            for sample in range(self.num_samples):
                choice: dict[str, Any] = {"index": sample, "finish_reason": None}
                choice |= {"delta": {"content": token}} if self.is_chat else {"text": token}
                yield _event({**self._base(stream=True), "choices": [choice]})
        if self.stream_usage:
            yield _event({**self._base(stream=True), "choices": [], "usage": self.usage})
        yield b"data: [DONE]\n\n"

    def _base(self, stream: bool = False) -> dict[str, Any]:
        kind = ("chat.completion" if self.is_chat else "text_completion") + (
            ".chunk" if stream and self.is_chat else ""
        )
        return {"id": "scripted", "object": kind, "created": 1, "model": MODEL}

    def _choice(self, index: int, fault: str) -> dict[str, Any]:
        text = "".join(self.tokens)
        reason = "stop" if fault == "stopped" else "length"
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self.is_chat:
            return choice | {"message": {"role": "assistant", "content": text}}
        return choice | {"text": text}


def _check(body: dict[str, Any], is_chat: bool) -> None:
    """``ValueError`` for what an engine answers with 400."""
    if is_chat:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("messages")
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise ValueError("role")
    elif not _is_prompt(body.get("prompt")):
        raise ValueError("prompt")
    for name, kind in (("model", str), ("stream", bool)):
        if not isinstance(body.get(name), kind | None):
            raise ValueError(name)
    options = {} if body.get("stream_options") is None else body["stream_options"]
    if not isinstance(options, dict) or not isinstance(options.get("include_usage"), bool | None):
        raise ValueError("stream_options")
    if (body.get("n") or 1) > MAX_SAMPLES:
        raise ValueError("n")
    for name in ("n", "max_tokens", *(["max_completion_tokens"] if is_chat else ())):
        number = body.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(name)


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


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _whole(status: int, body: bytes, content_type: bytes = b"text/plain") -> bytes:
    return (
        b"HTTP/1.1 %d Scripted\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        % (status, content_type, len(body))
        + body
    )


def _json(status: int, value: Any) -> bytes:
    return _whole(status, json.dumps(value).encode(), b"application/json")


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and writer.transport is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {}
    for line in filter(None, lines):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, path, headers, body)

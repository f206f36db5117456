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
    comments(n)  of a stream: n events, then comments for ever
    trickle(n)   of a stream: n events, then one that never ends, byte by byte
    cut(n)       of a stream: n bytes of events, then closed
    end(n)       of a stream: n events, then its regular end, without [DONE]
    dead(n)      of a stream: n events, then vLLM's error of an engine that died, and [DONE]
    abort(n)     a whole answer that was given up; of a stream: n events, then how one ends that was
    role         of a chat's stream: first an event without tokens, in a packet of its own
    lost         of a request that moves here: it was handed over, and then closed
    no_params    a prefill answer without kv_transfer_params
    stopped      a prefill answer without them, because the first token ended the request
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.router.scripted_answers import (
    CHUNK_ID,
    FORMS,
    Answer,
    NotFound,
    Running,
    error,
    json_answer,
    whole_answer,
)

RESPONSES = "/v1/responses"
PREFIXES = {"/v1/completions": "cmpl-", "/v1/chat/completions": "chatcmpl-"}
"""Of the names of requests, before the id that is sent."""
LIVE: dict[int, ScriptedEngine] = {}
"""By the port where another one can copy running requests."""
BATCH = "/v1/chat/completions/batch"
_FAULT = re.compile(r"(\w+)(?:\(([\d.]+)\))?")
NOT_STALE_S = 0.2
"""A connection that closes sooner after a request may have been closed before it came. The router
subtracts what its event loop was late, which is ours, too: we wait in many short steps, of which a
delay takes the place of one only.
"""
NUM_STEPS = 5


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
    rank: int | None = None
    """The data parallel rank that its front end chooses for a request that names none."""
    token_s: float = 0.0
    """Seconds per token of an answer, of those under way too."""
    compute_token_s: float = 0.0
    """Seconds per token of a prompt that it computes."""
    max_tokens: int = 1_000_000
    """More are refused."""
    max_model_len: int = 1_000_000
    """What it says of itself."""
    models_status: int = 200
    """To who asks for its models."""
    load_s: float = 0.0
    """Seconds until the KV of a prompt that another engine computed is there."""
    num_cached_tokens: int | None = None
    """Tokens of each prompt that it says it had already, as with --enable-prompt-tokens-details."""
    models: tuple[str, ...] = ("tiny",)
    """The first is that of requests that name none."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Which of them are adapters, and of which model."""
    differs: bool = False
    """It goes on with tokens that it would not have computed."""
    is_healthy: bool = True
    health_hangs: bool = False
    metrics_hang: bool = False
    metrics: str = ""
    num_metrics_read: int = 0
    port: int = 0
    """0 until the first start; kept after it."""
    copy_s: float = 0.0
    """Seconds until it has a running request's KV from another engine."""
    running: dict[str, Running] = field(default_factory=dict)
    """The last of its streams that began, by its chunks' id, and whole answers by their names."""
    stored: dict[str, Any] = field(default_factory=dict)
    """Responses, by id."""
    received: list[Received] = field(default_factory=list)
    """Generation requests and those for unknown paths."""
    kept: set[str] = field(default_factory=set)
    """Chosen transfer ids that are in use."""
    released: list[str] = field(default_factory=list)
    """Transfer ids of prompts that were given back."""
    num_in_progress: int = 0
    most_in_progress: int = 0
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

    def script_nothing(self) -> None:
        """What is left of a script is not done."""
        self._faults.clear()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        LIVE[self.port] = self

    async def stop(self) -> None:
        """As a killed process: the port refuses, and every connection is reset."""
        LIVE.pop(self.port, None)
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
        hangs = {"/health": self.health_hangs, "/metrics": self.metrics_hang, "/v1/hangs": True}
        if hangs.get(path):
            await reader.read()
            return False
        if path == "/health":
            writer.write(whole_answer(200 if self.is_healthy else 503, b""))
        elif path == "/v1/models" and self.models_status != 200:
            writer.write(error(self.models_status, "scripted"))
        elif path == "/v1/models":
            more = {"object": "model", "max_model_len": self.max_model_len}
            parents = self.adapters
            entries = [{"id": m, "parent": parents.get(m), **more} for m in self.models]
            writer.write(json_answer(200, {"object": "list", "data": entries}))
        elif path == "/metrics":
            self.num_metrics_read += 1
            writer.write(whole_answer(200, self.metrics.encode(), b"text/plain"))
        elif path == "/tokenize":
            self.num_tokenized += 1
            prompt = request.json.get("prompt") or json.dumps(request.json.get("messages"))
            writer.write(json_answer(200, {"tokens": list(prompt.encode())}))
        elif path in FORMS and (transfer_id := request.params.get("release_transfer_id")):
            self.released.append(transfer_id)
            self.kept.discard(transfer_id)
            await Answer.make(self, request).send(writer, lambda: 0, "ok")
        elif path in FORMS:
            return await self._generate(request, reader, writer)
        elif (response_id := path.removeprefix("/v1/responses/")) in self.stored:
            writer.write(json_answer(200, self.stored[response_id]))
        elif path == BATCH and not isinstance(request.json.get("messages") or None, list):
            self.received.append(request)
            writer.write(error(400, "messages"))
        elif path == "/invocations":
            self.received.append(request)
            writer.write(error(400, "no handler"))
        elif path == "/v1/busy":
            writer.write(error(503, "scripted"))
        elif path == "/v1/audio/transcriptions":
            self.received.append(request)
            writer.write(whole_answer(200, b'data: {"text": "a"}\n\n', b"text/event-stream"))
        else:
            self.received.append(request)
            writer.write(json_answer(200, {"path": request.path, "served_by": self.name}))
        await writer.drain()
        return True

    async def _generate(
        self, request: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        self.received.append(request)
        fault, number = self._faults.popleft() if self._faults else ("ok", 0.0)
        self.num_in_progress += 1
        self.most_in_progress = max(self.most_in_progress, self.num_in_progress)
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
        if answer is None:
            return 0.0
        if request.params.get("do_remote_prefill"):
            return self.load_s
        return self.compute_token_s * answer.num_prompt_tokens

    def _make(self, request: Received) -> tuple[Answer | None, int, str]:
        """The answer, or why there is none."""
        try:
            answer = Answer.make(self, request)
        except NotFound as e:
            return None, 404, str(e)
        except (AttributeError, OverflowError, TypeError, ValueError):
            return None, 400, "scripted"
        if request.path == RESPONSES and request.json.get("store", True):
            self.stored[answer.response_id] = answer.form.whole(answer, False)
        return answer, 200, "scripted"

    async def _follow(
        self, fault: str, number: float, request: Received, writer: asyncio.StreamWriter
    ) -> bool:
        answer, status, message = self._make(request)
        if status == 404 or (status == 400 and fault == "ok"):
            fault, number = "status", status
        keep = fault in ("ok", "delay", "status", "bad_json", "slow_body", "no_params", "stopped")
        if fault in ("close", "reset", "half_close"):
            await _until_not_stale()
        else:
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
            writer.write(error(int(number), message))
        elif fault == "garbage":
            writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        elif fault == "bad_json":
            writer.write(whole_answer(200, b'{"choices": [', b"application/json"))
        elif fault == "huge_head":
            head = b"HTTP/1.1 200 OK\r\nx-large: " + b"x" * (1 << 20)
            writer.write(head + b"\r\ncontent-length: 0\r\n\r\n")
        elif answer is None:
            return False
        else:
            await self._run(answer, request, writer, fault, int(number))
        await writer.drain()
        return keep

    async def _run(
        self,
        answer: Answer,
        request: Received,
        writer: asyncio.StreamWriter,
        fault: str,
        number: int,
    ) -> None:
        resume = request.params.get("resume") or {}
        if (source := resume.get("source")) is not None and fault != "dead":
            num_tokens = await self._take_over(source, resume["request_id"])
            if fault == "lost":
                await _until_not_stale()
                return
            if num_tokens is None and not answer.streamed:
                writer.write(error(409, "it is not there"))
                return
            fault, number = ("elsewhere", 0) if num_tokens is None else (fault, number)
            answer.num_resumed = num_tokens or 0
        prefix = PREFIXES.get(request.path, "")
        name = CHUNK_ID if answer.streamed else prefix + request.headers.get("x-request-id", "")
        running = self.running[name] = Running(answer.num_resumed)

        def pace() -> float:
            return self.token_s

        try:
            if answer.streamed:
                await answer.stream(writer, pace, fault, number, running)
            else:
                await answer.send(writer, pace, fault, running)
        finally:
            if self.running.get(name) is running:
                del self.running[name]

    async def _take_over(self, source: dict[str, Any], request_id: str) -> int | None:
        """Tokens of the request, which the source will never go on with; ``None`` if there is none
        any more."""
        await asyncio.sleep(self.copy_s)
        engine = LIVE.get(source["port"])
        running = engine.running.pop(request_id, None) if engine is not None else None
        if running is None:
            return None
        running.is_gone = True
        return running.num_tokens


async def _until_not_stale() -> None:
    for _ in range(NUM_STEPS):
        await asyncio.sleep(NOT_STALE_S / NUM_STEPS)


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

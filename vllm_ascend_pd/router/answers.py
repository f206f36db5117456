# SPDX-License-Identifier: Apache-2.0
"""What the client gets: answers, errors in OpenAI's form, and streams of events."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from vllm_ascend_pd.router.apis import CHAT, COMPLETIONS, GENERATE, INVOCATIONS, MESSAGES
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.transcript import DONE, is_error, until_failure, without_comments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from vllm_ascend_pd.router.admission import TooMany
    from vllm_ascend_pd.router.http_exchange import Response
    from vllm_ascend_pd.router.legs import Answer, Stream
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.selection import Unavailable
    from vllm_ascend_pd.router.trace import Trace

NEVER_WAITS_BYTES = 16 << 10
"""A transport's low-water mark: below it nobody waits for the client, also who did before."""
MAX_EVENT_BYTES = 16 << 20
TELLS_ITS_END = (COMPLETIONS, CHAT, MESSAGES, GENERATE, INVOCATIONS)
"""A stream of these that ends otherwise is broken."""
_MESSAGE_STOP = b"\nevent: message_stop"

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_ANSWERED = HOP_BY_HOP | {b"date", b"server", b"x-request-id"}
_ANSWERED = {FailureKind.TIMEOUT: (504, "timeout"), FailureKind.BUSY: (503, "unavailable")}
"""Status and outcome; those of other failures are 502 and ``failed``."""
_INWARD = (
    *(FailureKind.CONNECT, FailureKind.CONNECT_TIMEOUT),
    *(FailureKind.DISCONNECT, FailureKind.TRUNCATED, FailureKind.ROUTER),
)
_encoder = msgspec.json.Encoder()


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """As vLLM and OpenAI write errors; ``kind`` is for programs, ``message`` for people."""
    error = {"message": message, "type": kind, "param": param, "code": status}
    return _encoder.encode({"error": error})


def error_event(path: str, kind: str, message: str) -> bytes:
    """At the end of a stream that broke, as clients of this API read it."""
    if path == MESSAGES:
        error = {"type": "error", "error": {"type": kind, "message": message}}
        return b"event: error\ndata: " + _encoder.encode(error) + b"\n\n"
    return b"data: " + error_body(502, kind, message) + b"\n\n"


def error_response(
    status: int,
    kind: str,
    message: str,
    *,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> web.Response:
    return web.Response(
        status=status,
        body=error_body(status, kind, message, param),
        content_type="application/json",
        headers=headers,
    )


def json_response(value: Any) -> web.Response:
    return web.Response(body=_encoder.encode(value), content_type="application/json")


def not_admitted(trace: Trace, why: Unavailable | TooMany) -> web.Response:
    """For a request that no engine gets."""
    trace.status, trace.outcome, trace.error = why.status, why.outcome, why.message
    headers = {"Retry-After": str(why.retry_after_s), "x-request-id": trace.request_id}
    return error_response(why.status, why.kind, why.message, headers=headers)


def engine_failed(trace: Trace, failure: Failure, who: str) -> web.Response:
    """For a request that no engine answers, by how the last of them, ``who``, failed."""
    kind = failure.kind
    trace.status, trace.outcome = _ANSWERED.get(kind, (502, "failed"))
    headers = {"x-request-id": trace.request_id}
    if kind is FailureKind.BUSY:
        headers["Retry-After"] = "1"
    # What the system said of addresses is in the log alone.
    told = kind.value if kind in _INWARD else str(failure)
    return error_response(trace.status, kind.value, f"{who} failed: {told}", headers=headers)


def answer_headers(
    headers: Iterable[tuple[bytes, bytes]], request_id: str
) -> list[tuple[str, str]]:
    """The engine's headers, less those that belong to its connection."""
    kept = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if name not in _NOT_ANSWERED
    ]
    kept.append(("x-request-id", request_id))
    return kept


def whole_answer(answer: Answer, trace: Trace) -> web.Response:
    """What an engine answered, for the client."""
    trace.status = answer.status
    trace.answered(answer.body)
    trace.outcome = "ok" if answer.status < 400 else "client_error"
    headers = CIMultiDict(answer_headers(answer.headers, trace.request_id))
    return web.Response(status=answer.status, body=answer.body, headers=headers)


class Record(Protocol):
    """Knows what the client has of a stream."""

    failure: Failure | None
    """How the engine failed, if events told of it."""

    @property
    def is_done(self) -> bool:
        """Whether the client has all of it."""

    def take(self, events: bytes) -> bytes:
        """Whole events of the engine; what the client gets of them."""


def _stops_message(events: bytes) -> bool:
    """Not that its text says so: a line of an event is one of JSON."""
    return _MESSAGE_STOP in b"\n" + events


class EventStream:
    """Relays server-sent events to a client, whole events only.

    So an error can follow at any time, or the stream of another engine. Without a record of it the
    client sees the engine's bytes unchanged.
    """

    def __init__(
        self,
        trace: Trace,
        metrics: Metrics,
        idle_s: float,
        find_usage: Callable[[bytes], tuple[int, int] | None] | None = None,
        headers: dict[str, str] | None = None,
        silence_s: float | None = None,
    ) -> None:
        """``idle_s``: seconds that the client may not read. ``headers``: more than the engine's."""
        self._trace = trace
        self._request = trace.request
        self._find_usage = find_usage
        self.usage: tuple[int, int] | None = None
        """What ``find_usage`` found last."""
        self._metrics = metrics
        self._idle_s = idle_s
        self.silence_s = idle_s if silence_s is None else silence_s
        """Seconds that the engine's next piece may take."""
        self._headers = headers or {}
        self._answer: web.StreamResponse | None = None
        self._held = b""

    async def relay(self, stream: Stream, record: Record | None = None) -> Failure | None:
        """All of the stream, which is closed then; how it broke."""
        stream.response.is_replaceable = record is not None
        try:
            if self._answer is None:
                await self._begin(stream.response)
            return await self._relay(stream.response, stream.first, record)
        finally:
            stream.response.close()

    async def end(self, failure: Failure | None) -> web.StreamResponse:
        """Nothing more comes; ``failure``: and the client is told why."""
        assert self._answer is not None
        trace = self._trace
        if failure is not None:
            trace.outcome, trace.error = "broken_stream", f"{trace.decode}: {failure}"
            message = "the engine failed after part of the answer was sent"
            message += f": {failure.kind.value}"
            await self.write(error_event(self._request.path, "broken_stream", message))
        await self._while_it_reads(self._answer.write_eof())  # waits for all that was written
        if failure is None:
            trace.outcome = "ok"
        return self._answer

    async def _begin(self, response: Response) -> None:
        self._metrics.begun(self._trace)
        self._trace.status = response.status
        self._answer = web.StreamResponse(status=response.status, headers=self._headers)
        self._answer.headers.extend(answer_headers(response.headers, self._trace.request_id))
        self._answer.headers["X-Accel-Buffering"] = "no"  # nginx collects 4 KiB of HTTP/1.0 else
        if self._request.version < HttpVersion11:
            self._answer.force_close()  # its end is that of the connection; aiohttp keeps that open
        await self._answer.prepare(self._request)

    async def _relay(
        self, response: Response, first: bytes, record: Record | None
    ) -> Failure | None:
        self._held = b""
        piece: bytes | Failure | None = first
        last = 0.0
        is_message = self._request.path == MESSAGES
        is_done = is_message and is_error(first)  # nothing comes after that
        while isinstance(piece, bytes):
            events = self._whole_events(piece)
            # Comments and parts of an event come also from an engine that computes nothing.
            if is_new := bool(without_comments(events)):
                response.pause_deadline()
                now = time.monotonic()
                if last:
                    self._metrics.itl.observe(now - last)
                last = now
            if events:
                if record is not None:
                    events = record.take(events)
                    failure = record.failure
                else:
                    is_done |= events.endswith(DONE) or (is_message and _stops_message(events))
                    events, failure = until_failure(events)
                if events:
                    await self.write(events)
                if failure is not None:
                    return failure
            if is_new:
                response.set_deadline(self.silence_s, "the next token")
            piece = await response.next()
        if record is not None:
            is_done = record.is_done
        else:  # its lines may end otherwise than vLLM's
            is_done |= self._held.rstrip().endswith(DONE.rstrip())
            is_done |= is_message and _stops_message(self._held)
        if is_done or (piece is None and self._request.path not in TELLS_ITS_END):
            if record is None and self._held:
                await self.write(self._held)
            return None
        return piece or Failure(FailureKind.TRUNCATED, "the stream ended without its last event")

    def _whole_events(self, piece: bytes) -> bytes:
        if self._held:
            piece = self._held + piece
            self._held = b""
        if piece.endswith(b"\n\n"):
            return piece
        end = piece.rfind(b"\n\n") + 2
        if end == 1:
            end = 0 if len(piece) < MAX_EVENT_BYTES else len(piece)
        self._held = piece[end:]
        return piece[:end]

    async def write(self, data: bytes) -> None:
        assert self._answer is not None
        answer = self._answer
        self._trace.answered(data)
        if self._find_usage is not None:
            self.usage = self._find_usage(data) or self.usage
        transport = self._request.transport
        if transport is None or transport.get_write_buffer_size() + len(data) < NEVER_WAITS_BYTES:
            await answer.write(data)
        else:
            await self._while_it_reads(answer.write(data))

    async def _while_it_reads(self, writing: Awaitable[None]) -> None:
        """The client may be slow, but not for ever."""
        transport = self._request.transport
        abort = transport.abort if transport is not None else lambda: None
        stalled = asyncio.get_running_loop().call_later(self._idle_s, abort)
        try:
            await writing
        finally:
            stalled.cancel()

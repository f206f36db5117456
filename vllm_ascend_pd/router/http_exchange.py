# SPDX-License-Identifier: Apache-2.0
"""One HTTP/1.1 exchange after the other on a connection to an engine.

A general client costs more than the rest of the router together. This one knows no redirects,
cookies, proxies or compression; parsing is httptools' (llhttp), as in uvicorn on the other side.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

import httptools

from vllm_ascend_pd.router.deadlines import TICK_S, Deadline, LoopLag
from vllm_ascend_pd.router.failures import Failure, FailureKind

if TYPE_CHECKING:
    from vllm_ascend_pd.router.http_client import EngineClient

MAX_HEAD_BYTES = 64 * 1024
HIGH_WATER_BYTES = 1 << 20
STALE_S = 0.05
"""A kept connection that closes so soon after a request was probably closed before it."""


class EngineConnection(asyncio.Protocol):
    """One TCP connection. ``response`` is the exchange in progress; ``None`` while idle."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self.transport: asyncio.Transport | None = None
        self.response: Response | None = None
        self.idle_since = 0.0
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:
            self.abort()  # nothing was asked
            return
        self._client.heard_at = time.monotonic()
        response.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            response.fail(Failure(FailureKind.PROTOCOL, f"not an HTTP answer: {e}"))
            return
        if response.status == 0 and response.num_received > MAX_HEAD_BYTES:
            response.fail(Failure(FailureKind.PROTOCOL, f"head over {MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._client.forget(self)
        if self.response is not None:
            self.response.connection_lost(exc)

    # What httptools calls.

    def on_message_begin(self) -> None:
        if self.response is None:
            self.abort()  # it says more than was asked

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.response is not None:
            self.response.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        response = self.response
        status = self._parser.get_status_code()
        if response is None:
            return
        if status < 200:
            response.headers.clear()
            return
        response.status = status
        response.wake()

    def on_body(self, body: bytes) -> None:
        if self.response is not None:
            self.response.feed(body)

    def on_message_complete(self) -> None:
        response = self.response
        if response is None or response.status == 0:
            return
        self.response = None
        keep = self._parser.should_keep_alive() and not self.closed
        response.finish()
        if keep:
            self._client.keep(self)
        else:
            self.abort()

    def abort(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()


class Response:
    """An engine's answer. Read it whole, or in pieces with ``next``; then ``close`` it."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connection",
        "_deadline",
        "_failure",
        "_finished",
        "_lag",
        "_lag_before_s",
        "_loop",
        "_paused",
        "_phase",
        "_phase_s",
        "_sent_at",
        "_waiter",
        "headers",
        "is_replaceable",
        "num_received",
        "status",
    )

    def __init__(
        self, connection: EngineConnection, loop: asyncio.AbstractEventLoop, lag: LoopLag
    ) -> None:
        self._connection = connection
        self._loop = loop
        self._lag = lag
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._finished = False
        self._failure: Failure | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: Deadline | None = None
        self._phase = ""
        self._phase_s = 0.0
        self._paused = False
        self._sent_at = time.monotonic()
        self._lag_before_s = lag.total_s(self._sent_at)
        self.status = 0
        """0 until the head has arrived."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.num_received = 0
        self.is_replaceable = False
        """Another engine can go on with it."""

    def header(self, name: bytes) -> bytes | None:
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def _is_until_eof(self) -> bool:
        """Its head has arrived, and tells no other end of the body."""
        has_body = self.status not in (0, 204, 304)
        lengths = self.header(b"content-length"), self.header(b"transfer-encoding")
        return has_body and lengths == (None, None)

    def set_deadline(self, seconds: float, phase: str) -> None:
        """From now on until the next call."""
        self._phase, self._phase_s = phase, seconds
        if self._deadline is not None:
            self._deadline.begin(seconds)
        elif not self._finished and self._failure is None:
            self._deadline = Deadline(seconds, self._lag, self._expire)

    def pause_deadline(self) -> None:
        """Until the next one is set."""
        if self._deadline is not None:
            self._deadline.pause()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._paused:  # it is the client that does not read
            self.set_deadline(self._phase_s, self._phase)
            return
        message = f"{self._phase} took longer than {self._phase_s:g} s"
        self.fail(Failure(FailureKind.TIMEOUT, message))

    async def head(self) -> Failure | None:
        """Wait for status and headers."""
        while self.status == 0 and self._failure is None:
            await self._news()
        return self._failure if self.status == 0 else None

    async def next(self) -> bytes | Failure | None:
        """The next bytes of the body, all that are there; ``None`` at its end."""
        while not self._chunks and not self._finished and self._failure is None:
            await self._news()
        if self._chunks:
            data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self._buffered = 0
            if self._paused:
                self._resume()
            return data
        return self._failure

    async def read(self) -> bytes | Failure:
        """The whole body."""
        parts: list[bytes] = []
        while True:
            part = await self.next()
            if part is None:
                return parts[0] if len(parts) == 1 else b"".join(parts)
            if isinstance(part, Failure):
                return part
            parts.append(part)

    def was_stale(self, failure: Failure) -> bool:
        """Whether the engine had closed the kept connection before our request came to it."""
        now = time.monotonic()
        late_s = self._lag.total_s(now) - self._lag_before_s
        waited_s = now - self._sent_at - late_s
        at_once = waited_s < STALE_S + (TICK_S if late_s > 0 else 0)
        return failure.kind is FailureKind.DISCONNECT and at_once and not self.num_received

    def close(self) -> None:
        """End of the exchange: an unfinished answer closes its connection, which engines notice."""
        if not self._finished:
            self.fail(Failure(FailureKind.DISCONNECT, "given up by the router"))

    # What the connection calls.

    def wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def feed(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > HIGH_WATER_BYTES and not self._paused:
            transport = self._connection.transport
            if transport is not None and not transport.is_closing():
                self._paused = True
                transport.pause_reading()
        self.wake()

    def finish(self) -> None:
        self._finished = True
        if self._paused:
            self._resume()
        self._end_deadline()
        self.wake()

    def fail(self, failure: Failure) -> None:
        """Ends the exchange and its connection; the first failure stays."""
        if self._finished or self._failure is not None:
            return
        self._end_deadline()
        self._failure = failure
        self._connection.abort()
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_until_eof and exc is None:
            self.finish()
        elif self.status:
            self.fail(Failure(FailureKind.TRUNCATED, f"connection lost within the answer: {exc}"))
        else:
            reason = str(exc) if exc else "closed"
            self.fail(
                Failure(FailureKind.DISCONNECT, f"connection lost before the answer: {reason}")
            )

    def _resume(self) -> None:
        self._paused = False
        transport = self._connection.transport
        if transport is not None and not transport.is_closing():
            transport.resume_reading()

    def _news(self) -> asyncio.Future[None]:
        """Done when there is more of it, or none will come."""
        self._waiter = self._loop.create_future()
        return self._waiter

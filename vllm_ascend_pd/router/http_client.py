# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 to engines: one exchange at a time on a kept connection, with a deadline for each phase.

A general client costs more than the rest of the router together. This one knows no redirects,
cookies, proxies or compression; parsing is httptools' (llhttp), as in uvicorn on the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Iterable
from urllib.parse import urlsplit

import httptools

from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout
from vllm_ascend_pd.router.failures import Failure, FailureKind

MAX_HEAD_BYTES = 64 * 1024
HIGH_WATER_BYTES = 1 << 20
KEEP_IDLE_S = 4.0
"""Below uvicorn's 5 s, so that it is rarely the engine that closes."""

STALE_S = 0.05
"""A kept connection that closes so soon after a request was probably closed before it."""

Headers = Iterable[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
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
        response.num_received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as e:
            response.fail(Failure(FailureKind.PROTOCOL, f"not an HTTP answer: {e}"))
            return
        if response.status == 0 and response.num_received > MAX_HEAD_BYTES:
            response.fail(Failure(FailureKind.PROTOCOL, f"head over {MAX_HEAD_BYTES} bytes"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._client.forget(self)
        if self.response is not None:
            self.response.connection_lost(exc)

    # What httptools calls.

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
        names = {name for name, _ in response.headers}
        no_body = status in (204, 304)
        response.until_eof = not (
            no_body or b"content-length" in names or b"transfer-encoding" in names
        )
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
        "_failure",
        "_finished",
        "_loop",
        "_paused",
        "_sent_at",
        "_timer",
        "_waiter",
        "headers",
        "num_received",
        "status",
        "until_eof",
    )

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._finished = False
        self._failure: Failure | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._sent_at = loop.time()
        self.status = 0
        """0 until the head has arrived."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Names in lower case."""
        self.num_received = 0
        self.until_eof = False

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    def set_deadline(self, seconds: float | None, phase: str) -> None:
        """From now on until the next call; ``None`` is no deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not self._finished and self._failure is None:
            self._timer = self._loop.call_later(seconds, self._expire, seconds, phase)

    def _expire(self, seconds: float, phase: str) -> None:
        if self._paused:  # it is the client that does not read
            self.set_deadline(seconds, phase)
            return
        self.fail(Failure(FailureKind.TIMEOUT, f"{phase} took longer than {seconds:g} s"))

    async def head(self) -> Failure | None:
        """Wait for status and headers."""
        while self.status == 0 and self._failure is None:
            await self._wait()
        return self._failure if self.status == 0 else None

    async def next(self) -> bytes | Failure | None:
        """The next bytes of the body, all that are there; ``None`` at its end."""
        while not self._chunks and not self._finished and self._failure is None:
            await self._wait()
        if self._chunks:
            data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
            self._buffered = 0
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
        at_once = self._loop.time() - self._sent_at < STALE_S
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
        self._resume()
        self.set_deadline(None, "")
        self.wake()

    def fail(self, failure: Failure) -> None:
        """Ends the exchange and its connection; the first failure stays."""
        if self._finished or self._failure is not None:
            return
        self.set_deadline(None, "")
        self._failure = failure
        self._connection.abort()
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.until_eof and exc is None and self.status:
            self.finish()
        elif self.status:
            self.fail(Failure(FailureKind.TRUNCATED, f"connection lost within the answer: {exc}"))
        else:
            reason = str(exc) if exc else "closed"
            self.fail(
                Failure(FailureKind.DISCONNECT, f"connection lost before the answer: {reason}")
            )

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            transport = self._connection.transport
            if transport is not None and not transport.is_closing():
                transport.resume_reading()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter


class EngineClient:
    """Connections to one engine; event loop thread. ``num_busy`` exchanges are in progress."""

    def __init__(
        self, url: str, *, connect_timeout_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._connect_timeout_s = connect_timeout_s
        if parts.scheme == "https" and tls is None:
            tls = ssl.create_default_context()
        self._tls = tls if parts.scheme == "https" else None
        self._host_header = b"host: " + parts.netloc.encode() + b"\r\n"
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_open(self) -> int:
        """TCP connections, idle ones too."""
        return len(self._open)

    @property
    def num_busy(self) -> int:
        return sum(connection.response is not None for connection in self._open)

    async def request(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        *,
        head_timeout_s: float | None,
        phase: str,
    ) -> Response | Failure:
        """Send, and wait for the head of the answer. The deadline goes on over the body until
        the caller sets another one. A cancelled caller closes the connection."""
        lines = [method, b" ", target, b" HTTP/1.1\r\n", self._host_header]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        lines.append(body)
        message = b"".join(lines)
        while True:
            connection = self._take_idle()
            reused = connection is not None
            if connection is None:
                connected = await self._connect()
                if isinstance(connected, Failure):
                    return connected
                connection = connected
            response = self._send(connection, message)
            response.set_deadline(head_timeout_s, phase)
            try:
                failure = await response.head()
            except asyncio.CancelledError:
                response.close()
                raise
            if failure is None:
                return response
            if not (reused and response.was_stale(failure)):
                return failure

    def _send(self, connection: Connection, message: bytes) -> Response:
        response = Response(connection, asyncio.get_running_loop())
        connection.response = response
        assert connection.transport is not None
        connection.transport.write(message)
        return response

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return None

    async def _connect(self) -> Connection | Failure:
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(
            lambda: Connection(self), self._host, self._port, ssl=self._tls
        )
        try:
            async with timeout(self._connect_timeout_s):
                _, connection = await opening
        except TIMED_OUT:
            return Failure(
                FailureKind.CONNECT, f"no connection within {self._connect_timeout_s:g} s"
            )
        except (OSError, ssl.SSLError) as e:
            return Failure(FailureKind.CONNECT, str(e))
        self._open.add(connection)
        if connection.closed:
            self._open.discard(connection)
            return Failure(FailureKind.CONNECT, "closed as soon as it was open")
        return connection

    def keep(self, connection: Connection) -> None:
        """An exchange is over, and the connection can carry another one."""
        if self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_IDLE_S, self._close_idle)

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _close_idle(self) -> None:
        """Those idle for too long, oldest first."""
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._idle and loop.time() - self._idle[0].idle_since >= KEEP_IDLE_S:
            self._idle.popleft().abort()
        if self._idle:
            wait_s = KEEP_IDLE_S - (loop.time() - self._idle[0].idle_since)
            self._sweep = loop.call_later(max(wait_s, 0.05), self._close_idle)

    def fail_waiting(self, failure: Failure) -> None:
        """End all exchanges whose answer has not begun: the engine is known to be gone."""
        for connection in list(self._open):
            response = connection.response
            if response is not None and response.status == 0:
                response.fail(failure)

    def retire(self) -> None:
        """Close every connection as soon as its exchange is over."""
        self._closed = True
        for connection in list(self._idle):
            connection.abort()
        self._idle.clear()

    def close(self) -> None:
        """Close every connection; exchanges in progress fail."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

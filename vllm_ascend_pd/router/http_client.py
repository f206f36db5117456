# SPDX-License-Identifier: Apache-2.0
"""The connections to one engine: kept, given on, and made a few at a time.

Not aiohttp's client, since each request of a client is two of these: in a second of processor time
this one makes 34,000 requests and ``aiohttp.ClientSession`` 7,800 (32 at a time, of 0.4 KiB, to one
nginx; uvloop, aiohttp 3.14).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections import deque
from collections.abc import Iterable
from urllib.parse import urlsplit

from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.router.deadlines import Deadline, LoopLag
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.http_exchange import EngineConnection, Response

KEEP_IDLE_S = 4.0
"""Below uvicorn's 5 s, so that it is rarely the engine that closes."""

MAX_CONNECTING = 32
"""Connections to one engine that are being made at a time: more would only fill its backlog, and
each looks the name up."""

OWN_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)

Headers = Iterable[tuple[bytes, bytes]]


class EngineClient:
    """Connections to one engine; event loop thread. ``num_busy`` exchanges are in progress."""

    def __init__(
        self,
        url: str,
        *,
        rank: int | None = None,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        lag: LoopLag | None = None,
    ) -> None:
        """``rank``: of the data parallel rank behind ``url`` that all requests are for."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._connect_timeout_s = connect_timeout_s
        self._lag = lag or LoopLag()
        if parts.scheme == "https" and tls is None:
            tls = ssl.create_default_context()
        self._tls = tls if parts.scheme == "https" else None
        self._own_headers = b"host: " + parts.netloc.encode() + b"\r\n"
        if rank is not None:
            self._own_headers += f"{RANK_HEADER.lower()}: {rank}\r\n".encode()
        self._idle: deque[EngineConnection] = deque()
        self._open: set[EngineConnection] = set()
        self._num_connecting = 0
        self._waiters: deque[asyncio.Future[EngineConnection | Failure | None]] = deque()
        """Exchanges without a connection. ``None``: it may make one now."""
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False
        self.heard_at = 0.0
        """When something came from the engine last, on the monotonic clock."""

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
        head_timeout_s: float,
        phase: str,
    ) -> Response | Failure:
        """Send, and wait for the head of the answer. The deadline goes on over the body until
        the caller sets another one. A cancelled caller closes the connection."""
        lines = [method, b" ", target, b" HTTP/1.1\r\n", self._own_headers]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        lines.append(body)
        message = b"".join(lines)
        while True:
            connection, reused = self._take_idle(), True
            if connection is None:
                found, reused = await self._find_connection(head_timeout_s)
                if isinstance(found, Failure):
                    return found
                connection = found
            if connection.closed:
                continue
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

    async def fetch(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> tuple[int, bytes] | Failure:
        """Status and body of an answer that is small, both within this time."""
        response = await self.request(
            method, target, headers, body, head_timeout_s=timeout_s, phase=target.decode()
        )
        if isinstance(response, Failure):
            return response
        try:
            data = await response.read()
        finally:
            response.close()
        return data if isinstance(data, Failure) else (response.status, data)

    def _send(self, connection: EngineConnection, message: bytes) -> Response:
        response = Response(connection, asyncio.get_running_loop(), self._lag)
        connection.response = response
        assert connection.transport is not None
        connection.transport.write(message)
        return response

    def _take_idle(self) -> EngineConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since > KEEP_IDLE_S:
                connection.abort()  # the sweep is late
            elif not connection.closed:
                return connection
        return None

    async def _find_connection(self, timeout_s: float) -> tuple[EngineConnection | Failure, bool]:
        """A new one, or one that became free before it was this caller's turn to make one (then
        ``True``). Turns are taken in order."""
        if self._num_connecting < MAX_CONNECTING:
            self._num_connecting += 1
        else:
            given = await self._wait_for_turn(timeout_s)
            if given is not None:
                return given, True
        try:
            return await self._connect(), False
        finally:
            self._num_connecting -= 1
            if self._give(None):
                self._num_connecting += 1

    async def _wait_for_turn(self, timeout_s: float) -> EngineConnection | Failure | None:
        turn: asyncio.Future[EngineConnection | Failure | None]
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        late = Failure(FailureKind.CONNECT_TIMEOUT, f"no connection was free within {timeout_s} s")
        deadline = Deadline(timeout_s, self._lag, lambda: _settle(turn, late))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._take_back(turn.result())
            raise
        finally:
            deadline.cancel()

    def _take_back(self, given: EngineConnection | Failure | None) -> None:
        """Of a caller that left before it could use it."""
        if isinstance(given, EngineConnection) and not given.closed:
            self.keep(given)
        elif given is None and not self._give(None):
            self._num_connecting -= 1

    def _give(self, given: EngineConnection | Failure | None) -> bool:
        """To the first that waits; whether there is one."""
        while self._waiters:
            if _settle(self._waiters.popleft(), given):
                return True
        return False

    async def _connect(self) -> EngineConnection | Failure:
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(
            loop.create_connection(
                lambda: EngineConnection(self), self._host, self._port, ssl=self._tls
            )
        )
        deadline = Deadline(self._connect_timeout_s, self._lag, opening.cancel)
        try:
            await asyncio.wait({opening})
        except asyncio.CancelledError:
            opening.cancel()
            opening.add_done_callback(_abort_opened)
            raise
        finally:
            deadline.cancel()
        if opening.cancelled():
            detail = f"no connection within {self._connect_timeout_s:g} s"
            return Failure(FailureKind.CONNECT_TIMEOUT, detail)
        error = opening.exception()
        if isinstance(error, OSError):  # of TLS, too
            return Failure(kind_of(error), str(error))
        if isinstance(error, ValueError):  # no name that can be looked up
            return Failure(FailureKind.CONNECT, f"{self._host!r}: {error}")
        _, connection = opening.result()
        self._open.add(connection)
        if connection.closed:
            self._open.discard(connection)
            return Failure(FailureKind.CONNECT, "closed as soon as it was open")
        return connection

    def keep(self, connection: EngineConnection) -> None:
        """An exchange is over, and the connection can carry another one."""
        if self._closed:
            connection.abort()
            return
        if self._give(connection):
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(KEEP_IDLE_S, self._close_idle)

    def forget(self, connection: EngineConnection) -> None:
        self._open.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def _close_idle(self) -> None:
        """Those idle for too long, oldest first."""
        self._sweep = None
        now = time.monotonic()
        while self._idle and now - self._idle[0].idle_since >= KEEP_IDLE_S:
            self._idle.popleft().abort()
        if self._idle:
            wait_s = KEEP_IDLE_S - (now - self._idle[0].idle_since)
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(max(wait_s, 0.05), self._close_idle)

    def fail_waiting(self, failure: Failure, *, is_silent: bool = False) -> None:
        """End all exchanges whose answer has not begun: the engine is known to be gone. If nothing
        comes from it, also those with an answer that can be had elsewhere."""
        for connection in list(self._open):
            response = connection.response
            if response is None:
                continue
            if response.status == 0 or (is_silent and response.is_replaceable):
                response.fail(failure)
        while self._give(failure):
            pass

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
        while self._give(Failure(FailureKind.ROUTER, "the router stops")):
            pass


def kind_of(error: OSError) -> FailureKind:
    if isinstance(error, socket.gaierror):
        return FailureKind.CONNECT_TIMEOUT
    return FailureKind.ROUTER if error.errno in OWN_ERRORS else FailureKind.CONNECT


def _settle(
    turn: asyncio.Future[EngineConnection | Failure | None],
    given: EngineConnection | Failure | None,
) -> bool:
    """Whether somebody still waits for it."""
    if turn.done():
        return False
    turn.set_result(given)
    return True


def _abort_opened(opening: asyncio.Future[tuple[asyncio.Transport, EngineConnection]]) -> None:
    """A connection that nobody wants any more."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[1].abort()

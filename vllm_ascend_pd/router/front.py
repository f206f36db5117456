# SPDX-License-Identifier: Apache-2.0
"""Where a request comes in: its target is read once, and whatever goes wrong is JSON.

A target that another server might read differently (``..``, ``//``, an encoded slash, a whole URL)
is refused, so no client reaches a path of an engine that the router would not pass on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from aiohttp import hdrs, web
from aiohttp.http_exceptions import LineTooLong

from vllm_ascend_pd.router.answers import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Refused = Callable[[web.BaseRequest, int, str], None]
    """Told of a request, the status of its answer, and why."""

logger = logging.getLogger(__name__)

TARGET = web.RequestKey("target", str)
"""Of a request: what an engine is asked for."""
_PLAIN = re.compile(r"(?:/[A-Za-z0-9_~:@!$&'()*+,=.-]+)*/?")
"""A path as it is sent to an engine, before other characters are quoted."""
_DOTS = frozenset({".", ".."})
_LOOK_S = 0.02


class BadTarget(web.HTTPBadRequest):
    """``text`` says why."""

    def __init__(self, text: str) -> None:
        super().__init__(text=text)


def engine_target(raw_target: str) -> str:
    """What an engine is asked for, from what the client's request line says."""
    raw_path, question, query = raw_target.partition("?")
    is_plain = raw_target.startswith("/") and "/." not in raw_path and raw_target.isascii()
    if is_plain and _PLAIN.fullmatch(raw_path):
        return raw_target
    if not raw_path.startswith("/"):
        raise BadTarget("the request target must be a path that begins with '/'")
    try:
        raw_target.encode("ascii")
        path = unquote(raw_path, errors="strict") if "%" in raw_path else raw_path
    except UnicodeError as e:
        raise BadTarget("the request target must be ASCII, and percent-encoded UTF-8") from e
    segments = path[1:].removesuffix("/").split("/") if path != "/" else []
    if "" in segments or _DOTS.intersection(segments):
        raise BadTarget("the path has an empty segment, '.' or '..'")
    if path.count("/") != raw_path.count("/") or "%" in path or "\\" in path:
        raise BadTarget("the path has an encoded slash, a percent sign or a backslash")
    if not path.isprintable():
        raise BadTarget("the path has control characters")
    return (path if _PLAIN.fullmatch(path) else quote(path)) + question + query


@web.middleware
async def check_target(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Refuse a bad target; a handler finds a good one as ``TARGET``."""
    target = request[TARGET] = engine_target(request.raw_path)
    path, question, query = target.partition("?")
    if path.endswith("/") and path != "/":
        # As vLLM answers, but with our address and not the engine's.
        raise web.HTTPTemporaryRedirect(path.rstrip("/") + question + query)
    return await handler(request)


class _Connection(web.RequestHandler):
    """One of a client."""

    refused: Refused
    idle_since: float | None
    """On the event loop's clock; ``None`` while a request of it is in progress."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What no handler has answered: bytes that are not HTTP, or a bug of ours."""
        if isinstance(exc, LineTooLong) or "Too many headers" in str(exc):
            status = 431
        if isinstance(exc, ConnectionError) or self.transport is None:
            raise ConnectionError("the client has left")
        if status >= 500:
            logger.error("%s %r", request.method, request.path, exc_info=exc)
            message = None
        else:
            self.refused(request, status, f"no HTTP: {message!r}")
        if request.writer.output_size > 0:
            raise ConnectionError("a part of another answer was sent")
        phrase = HTTPStatus(status).phrase
        response = error_response(status, phrase, message or phrase)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Not that the rest of a body cannot be read, either: its client has been told."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self.idle_since = self._loop.time()

    @property
    def is_sending(self) -> bool:
        """What is written has not all left for the client."""
        return self.transport is not None and self.transport.get_write_buffer_size() > 0


class _Server(web.Server):
    refused: Refused

    def __call__(self) -> web.RequestHandler:
        connection = _Connection(self, loop=self._loop, **self._kwargs)
        connection.refused = self.refused
        connection.idle_since = self._loop.time()
        return connection


class Runner(web.AppRunner):
    """aiohttp's, with our connections and our errors."""

    def __init__(self, app: web.Application, refused: Refused, **options: Any) -> None:
        """``refused`` hears of each request that no handler has answered."""
        super().__init__(app, **options)
        self._refused = refused
        self._is_leaving = False
        app.on_response_prepare.append(self._prepare)

    async def leave(self, patience_s: float, idle_s: float) -> None:
        """No new connection; until those that are there have been idle for ``idle_s``, or
        ``patience_s`` have gone by.

        What is answered from now on says that it is the last of its connection. An answer that
        began before did not, and its client's next request may be on its way already.
        """
        for site in list(self.sites):
            await site.stop()
        self._is_leaving = True
        assert self.server is not None
        loop = asyncio.get_running_loop()
        began = loop.time()

        def is_idle(connection: web.RequestHandler) -> bool:
            assert isinstance(connection, _Connection)
            since = connection.idle_since
            if since is not None and connection.is_sending:
                since = connection.idle_since = loop.time()
            return since is not None and loop.time() >= max(since, began) + idle_s

        while loop.time() < began + patience_s and not all(map(is_idle, self.server.connections)):
            await asyncio.sleep(_LOOK_S)

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        if self._is_leaving:
            response.headers[hdrs.CONNECTION] = "close"
            response.force_close()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, _Connection)
            connection.idle_since = None
            try:
                return await made.request_handler(request)
            except web.HTTPException as e:
                return self._answer(request, e)

        server = _Server(
            handle,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            loop=made._loop,
            **made._kwargs,
        )
        server.refused = self._refused
        return server

    def _answer(self, request: web.BaseRequest, e: web.HTTPException) -> web.Response:
        phrase = HTTPStatus(e.status).phrase
        message = f"{phrase}: {request.method} {request.path}"
        if isinstance(e, BadTarget):
            message = e.text or phrase
        self._refused(request, e.status, message)
        headers = {name: e.headers[name] for name in ("Allow", "Location") if name in e.headers}
        return error_response(e.status, phrase, message, headers=headers)

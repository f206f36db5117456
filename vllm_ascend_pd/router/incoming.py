# SPDX-License-Identifier: Apache-2.0
"""What is read of a client's request before it is routed: its id, its headers, its body."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import TypeVar

import msgspec
from aiohttp import web

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.router.answers import HOP_BY_HOP
from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout

T = TypeVar("T")
REQUEST_ID = b"x-request-id"
SESSION_HEADERS = ("x-session-id", "x-user-id")
BODY_BYTES_PER_S = 16 << 10
"""A client that sends so many, or more, may take as long as its body needs."""
ORDER_TIMEOUT_S = 5.0
"""For the body of an order, or of a registration."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_ROUTERS = "x-vllm-pd-routers"
"""Through which a request has come, by their ids."""
_NOT_FORWARDED = HOP_BY_HOP | {
    b"accept-encoding",
    b"content-encoding",
    b"content-type",
    b"cookie",
    b"expect",
    b"host",
    b"origin",  # the router answers other origins itself
    RANK_HEADER.lower().encode(),  # the router chooses
    REQUEST_ID,
    _ROUTERS.encode(),
}


class BodyError(Exception):
    """The body did not come whole; ``status`` says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def request_id(request: web.BaseRequest) -> str:
    """The client's, if it is one that logs can carry; else a new one."""
    given = request.headers.get("x-request-id")
    return given if given and is_request_id(given) else secrets.token_hex(16)


def is_request_id(text: str) -> bool:
    """That logs can carry."""
    return _REQUEST_ID.fullmatch(text) is not None


def session_of(request: web.Request, key: str | None) -> str | None:
    """What a client that wants to stay with an instance sends, in ``key`` first."""
    for name in (key, *SESSION_HEADERS) if key else SESSION_HEADERS:
        if value := request.headers.get(name):
            return value[:256]
    return None


def was_here(request: web.Request, router_id: str) -> bool:
    """Whether this router has sent it, to an engine that turned out to be itself, or another router
    that has it as an engine."""
    return router_id in request.headers.get(_ROUTERS, "").split(",")


def forwarded_headers(
    request: web.Request, identifier: str, authorization: bytes | None, router_id: str
) -> list[tuple[bytes, bytes]]:
    """The client's headers for an engine, tracing ones too. ``authorization`` replaces the
    client's, if it is given."""
    routers = ",".join(filter(None, (request.headers.get(_ROUTERS), router_id)))
    headers = [
        (name, value)
        for name, value in request.raw_headers
        if name.lower() not in _NOT_FORWARDED
        and not (authorization is not None and name.lower() == b"authorization")
    ]
    headers += [(REQUEST_ID, identifier.encode()), (_ROUTERS.encode(), routers.encode())]
    if authorization is not None:
        headers.append((b"authorization", authorization))
    return headers


async def read_body(request: web.Request, timeout_s: float) -> bytes:
    """All of it; ``BodyError`` if it is too long, too slow or broken. ``timeout_s``: seconds that
    it may take, and one for each ``BODY_BYTES_PER_S`` that came."""
    try:
        if (request.content_length or 0) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size)
        if request.content.is_eof():  # as it is when a short body came with the head
            return await request.read()
        return await _read_as_it_comes(request, timeout_s)
    except web.HTTPRequestEntityTooLarge as e:
        raise BodyError(413, "the body is larger than this router accepts") from e
    except TIMED_OUT as e:
        message = f"the body did not come within {timeout_s:g} s"
        message += f", and a second for each {BODY_BYTES_PER_S} bytes of it"
        raise BodyError(408, message) from e
    except web.RequestPayloadError as e:
        raise BodyError(400, f"the body is broken: {e}") from e


async def _read_as_it_comes(request: web.Request, timeout_s: float) -> bytes:
    loop = asyncio.get_running_loop()
    began, body = loop.time(), bytearray()
    while True:
        until = began + timeout_s + len(body) / BODY_BYTES_PER_S
        async with timeout(until - loop.time()):
            part = await request.content.readany()
        if not part:
            return bytes(body)
        body += part
        if len(body) > request.client_max_size:
            raise web.HTTPRequestEntityTooLarge(request.client_max_size, len(body))


async def read_order(request: web.Request, kind: type[T], fix: str) -> T:
    """What an operator orders, as JSON: nothing is an empty object. ``BodyError`` says what to
    give."""
    body = await read_body(request, ORDER_TIMEOUT_S)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except UNREADABLE as e:
        raise BodyError(400, f"give {fix}: {e}") from e

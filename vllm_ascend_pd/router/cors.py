# SPDX-License-Identifier: Apache-2.0
"""What pages of other origins may ask, as in ``vllm serve`` (Starlette's ``CORSMiddleware``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from vllm_ascend_pd import operating, registration
from vllm_ascend_pd.router.answers import error_response

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import CORS

METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
MAX_AGE_S = "600"
OPERATORS = (registration.PATH, operating.REQUESTS, "/status", "/instances")
"""No page of another origin is told of these, nor may it register an engine or move a request."""


class CrossOrigin:
    """Headers for answers, and answers to preflights."""

    def __init__(self, cors: CORS) -> None:
        self._cors = cors
        self._any_origin = "*" in cors.allowed_origins
        self._any_header = "*" in cors.allowed_headers
        self._methods = METHODS if "*" in cors.allowed_methods else cors.allowed_methods
        self._headers = {header.lower() for header in (*SAFE_HEADERS, *cors.allowed_headers)}

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before the head of any answer is sent."""
        origin = request.headers.get("Origin")
        if origin is None or request.path.startswith(OPERATORS):
            return
        if self._any_origin and not self._cors.allow_credentials:
            response.headers["Access-Control-Allow-Origin"] = "*"
            return
        if self._any_origin or origin in self._cors.allowed_origins:
            response.headers["Access-Control-Allow-Origin"] = origin
        if self._cors.allow_credentials:
            response.headers["Access-Control-Allow-Credentials"] = "true"
        response.headers.add("Vary", "Origin")

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks what it may ask; ``None``: it is no such question."""
        method = request.headers.get("Access-Control-Request-Method")
        is_asked = request.method == "OPTIONS" and "Origin" in request.headers and method
        if not is_asked or request.path.startswith(OPERATORS):
            return None
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        names = [name.strip().lower() for name in wanted.split(",") if name.strip()]
        refused = []
        if not self._any_origin and request.headers["Origin"] not in self._cors.allowed_origins:
            refused.append("origin")
        if method not in self._methods:
            refused.append("method")
        if not self._any_header and not self._headers.issuperset(names):
            refused.append("headers")
        if refused:
            return error_response(400, "cors", f"Disallowed CORS {', '.join(refused)}")
        allowed = wanted if self._any_header else ", ".join(sorted(self._headers))
        headers = {
            "Access-Control-Allow-Methods": ", ".join(self._methods),
            "Access-Control-Allow-Headers": allowed,
            "Access-Control-Max-Age": MAX_AGE_S,
        }
        return web.Response(text="OK", headers=headers)

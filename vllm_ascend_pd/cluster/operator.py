# SPDX-License-Identifier: Apache-2.0
"""How a command asks a running router for what ``vllm_ascend_pd.operating`` names."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from vllm_ascend_pd import registration
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.operating import (
    REQUESTS,
    TRUST_FIX,
    MoveOrder,
    MoveReport,
    RunningRequests,
)
from vllm_ascend_pd.registration import DrainOrder, InstanceStatus, Role, RoleOrder

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable

T = TypeVar("T")
CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0
"""But for a move, which takes its time."""
_FIX = "give it with --router"
_TOKEN_FIX = (
    "name the router's --registration-token-file with --token-file (of a `vllm-pd up`: .token in"
    " the folder of its logs, unless its topology names one)"
)
"""Without it only that of an own ``vllm-pd up`` is known, and only at a loopback URL."""


class RouterAway(ConfigError):
    """It does not answer."""


class NotFound(ConfigError):
    """It does not know what was named."""


@dataclass(slots=True)
class RouterOperator:
    """An operator's connection to one router, from ``async with``. Everything raises
    ``ConfigError`` with the router's own words where it refuses or is away."""

    url: str
    token: str | None = None
    tls: ssl.SSLContext | None = None
    """Of an https router; ``None``: the system's certificate authorities."""
    _session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RouterOperator:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connector = aiohttp.TCPConnector(ssl=self.tls or True)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def requests(self) -> RunningRequests:
        """All that engines answer now."""
        return await self._ask("GET", REQUESTS, RunningRequests)

    async def move(self, request_id: str, order: MoveOrder) -> list[MoveReport]:
        """What became of those of this id."""
        path = f"{REQUESTS}/{quote(request_id)}/move"
        return await self._ask("POST", path, list[MoveReport], order, timeout_s=None)

    async def instances(self) -> list[InstanceStatus]:
        """All that the router knows."""
        return await self._ask("GET", registration.PATH, list[InstanceStatus])

    async def refuse_unknown(self, names: Iterable[str]) -> None:
        """``ConfigError`` says which of these the router does not know, and whom it does."""
        known = sorted(one.instance_id for one in await self.instances())
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(f"{self.url} knows no engine {', '.join(unknown)}; there are {known}")

    async def drain(self, instance_id: str, order: DrainOrder) -> None:
        """No new requests, and those in progress move; as long as the order says."""
        await self._ask("PUT", f"{registration.PATH}/{instance_id}/drain", type(None), order)

    async def use_for(self, instance_id: str, role: Role) -> None:
        """Of a ``kv_both`` engine: prompts, answers, or both."""
        path = f"{registration.PATH}/{instance_id}/role"
        await self._ask("PUT", path, type(None), RoleOrder(role=role))

    async def undo_drain(self, instance_id: str) -> None:
        await self._ask("DELETE", f"{registration.PATH}/{instance_id}/drain", type(None))

    async def _ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        sent: Any = None,
        timeout_s: float | None = ANSWER_TIMEOUT_S,
    ) -> T:
        assert self._session is not None
        data = None if sent is None else msgspec.json.encode(sent)
        url = self.url.rstrip("/") + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(method, url, data=data, timeout=timeout) as response:
                body = await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            why = str(e) or repr(e)
            is_distrusted = isinstance(e, aiohttp.ClientConnectorCertificateError)
            fix = TRUST_FIX if is_distrusted else _FIX
            message = f"no router answers at {self.url} ({why}): {fix}"
            raise RouterAway(message) from e
        if response.status >= 400:
            kind_of_error, message = _error(body)
            if response.status in (404, 405) and kind_of_error != "not_found":
                raise ConfigError(
                    f"{method} {url}: {response.status}: {self.url} answers, and not as a router"
                    " does: give the URL of a router with --router, not that of an engine"
                )
            hint = f"; {_TOKEN_FIX}" if response.status in (401, 403) else ""
            refused = NotFound if response.status == 404 else ConfigError
            raise refused(f"{method} {url}: {response.status}: {message}{hint}")
        try:
            return msgspec.json.decode(body or b"null", type=kind)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{method} {url}: this is no vllm-pd router's answer: {e}") from e


def _error(body: bytes) -> tuple[str, str]:
    """Its kind, and what a person is told."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["type"]), str(error["message"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return "", body[:200].decode(errors="replace")

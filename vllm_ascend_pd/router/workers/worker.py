# SPDX-License-Identifier: Apache-2.0
"""One of several router processes. Clients reach it at the shared port, its keeper at a socket.

The keeper starts it with a pickled ``Order`` on its standard input, and keeps that pipe open: one
byte means stop, a second one hurry, and the end of the pipe that the keeper is gone.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.config import RouterConfig, set_up_logging
from vllm_ascend_pd.router.instances import InstanceSpec
from vllm_ascend_pd.router.server import (
    BACKLOG,
    RouterServer,
    Stopping,
    bind,
    raise_file_limit,
    run_until_stopped,
)
from vllm_ascend_pd.router.snapshot import Snapshot

if TYPE_CHECKING:
    from pathlib import Path

STDIN = 0
KEEPER_SOCKET = "keeper"
KEEPER_TIMEOUT_S = 5.0
WRONG_CONFIG = 2
"""Exit code: another start would not help."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker is to be."""

    config: RouterConfig
    """With the port that is shared."""
    index: int
    folder: Path
    """Of the sockets."""


class RegisteredEngines(msgspec.Struct):
    """All engines that registered; a higher version is newer."""

    version: int = 0
    specs: list[InstanceSpec] = []


class KeeperLink:
    """What a worker asks its keeper. Event loop thread."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._version = 0
        self._router: Router | None = None

    async def open(self, router: Router) -> None:
        """Open the worker's own socket, and ask the keeper which engines registered."""
        self._router = router
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_put("/registered", self._registered)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        path = self._order.folder / str(self._order.index)
        path.unlink(missing_ok=True)  # of a worker that was killed
        await web.UnixSite(self._runner, str(path)).start()
        connector = aiohttp.UnixConnector(str(self._order.folder / KEEPER_SOCKET))
        timeout = aiohttp.ClientTimeout(total=KEEPER_TIMEOUT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        await self._hear(await self._ask("GET", "/registered"))

    async def announce(self) -> None:
        """The worker serves; from now on the keeper tells it of engines by itself."""
        await self._hear(await self._ask("PUT", f"/workers/{self._order.index}"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def snapshot(self) -> Snapshot:
        return msgspec.json.decode(await self._ask("GET", "/snapshot"), type=Snapshot)

    async def beat(self, spec: InstanceSpec) -> None:
        await self._ask("PUT", f"/registered/{spec.instance_id}", msgspec.json.encode(spec))

    async def leave(self, instance_id: str) -> None:
        await self._ask("DELETE", f"/registered/{instance_id}")

    async def drain(self, instance_id: str) -> bool:
        return bool(await self._ask("PUT", f"/registered/{instance_id}/drain"))

    async def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        assert self._session is not None
        async with self._session.request(method, f"http://keeper{path}", data=body) as response:
            response.raise_for_status()
            return await response.read()

    # What the keeper asks.

    async def _snapshot(self, request: web.Request) -> web.Response:
        assert self._router is not None
        return web.Response(body=msgspec.json.encode(self._router.metrics.snapshot()))

    async def _registered(self, request: web.Request) -> web.Response:
        await self._hear(await request.read())
        return web.Response()

    async def _hear(self, told: bytes) -> None:
        known = msgspec.json.decode(told, type=RegisteredEngines)
        if known.version > self._version:
            self._version = known.version
            assert self._router is not None
            await self._router.follow(known.specs)


def main() -> None:
    """A worker process, from its order to its end."""
    size = int.from_bytes(_read(4), "big")
    order: Order = pickle.loads(_read(size))
    set_up_logging(order.config)
    try:
        uvloop.run(_run(order))
    except ConfigError as e:
        print(f"Error: {e}", file=sys.stderr)
        sys.exit(WRONG_CONFIG)


def _read(size: int) -> bytes:
    """From standard input, not more: what follows is for ``_heard``."""
    data = b""
    while len(data) < size:
        more = os.read(STDIN, size - len(data))
        if not more:
            sys.exit("a worker is started by `vllm-pd router --workers N`")
        data += more
    return data


async def _run(order: Order) -> None:
    raise_file_limit()
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # of a terminal: the keeper gets it, too
    loop.add_signal_handler(signal.SIGTERM, stopping.asked.set)
    loop.add_reader(STDIN, _heard, loop, stopping)
    sock = bind(order.config.host, order.config.port, shared=True)
    sock.listen(BACKLOG)
    link = KeeperLink(order)
    server = RouterServer(order.config, Router(order.config, keeper=link))
    await link.open(server.router)
    await server.start(sock)
    await link.announce()
    await run_until_stopped(server, stopping)
    await link.close()


def _heard(loop: asyncio.AbstractEventLoop, stopping: Stopping) -> None:
    """From the keeper."""
    asked = os.read(STDIN, 16)
    for _ in asked:
        stopping.ask()
    if not asked:
        loop.remove_reader(STDIN)
        stopping.asked.set()

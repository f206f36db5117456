# SPDX-License-Identifier: Apache-2.0
"""One of several router processes. Clients reach it at the shared port, its keeper at a socket.

The keeper starts it with the folder of their sockets, in which its configuration is.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.operating import MoveOrder, MoveReport, RequestStatus, RunningRequests
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.config import set_up_logging, unpack
from vllm_ascend_pd.router.instances import InstanceSpec, Words
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
    from vllm_ascend_pd.router.config import RouterConfig

CONFIG_FILE = "config"
KEEPER_SOCKET = "keeper"
KEEPER_TIMEOUT_S = 5.0
WRONG_CONFIG = 2
"""Exit code: another start would not help."""


class RegisteredEngines(msgspec.Struct):
    """All engines that registered, and what an operator says of engines; a higher version is
    newer."""

    version: int = 0
    specs: list[InstanceSpec] = []
    words: Words = {}


class KeeperLink:
    """What a worker asks its keeper. Event loop thread."""

    def __init__(self, folder: Path, name: str) -> None:
        """``name``: of this worker and its socket."""
        self._folder = folder
        self._name = name
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
        app.router.add_get("/requests", self._requests)
        app.router.add_post("/moves", self._move)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        path = self._folder / self._name
        path.unlink(missing_ok=True)  # of a worker that was killed
        await web.UnixSite(self._runner, str(path), backlog=BACKLOG).start()
        connector = aiohttp.UnixConnector(str(self._folder / KEEPER_SOCKET), limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        await self._hear(await self._ask("GET", "/registered"))

    async def announce(self) -> None:
        """The worker serves; from now on the keeper tells it of engines by itself."""
        await self._hear(await self._ask("PUT", f"/workers/{self._name}"))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def snapshot(self) -> Snapshot:
        return msgspec.json.decode(await self._ask("GET", "/snapshot"), type=Snapshot)

    async def beat(self, spec: InstanceSpec) -> None:
        await self._ask("PUT", f"/registered/{spec.instance_id}", msgspec.json.encode(spec))

    async def leave(self, instance_id: str, epoch: str | None) -> None:
        await self._ask("DELETE", f"/registered/{instance_id}", msgspec.json.encode(epoch))

    async def say(self, instance_id: str, epoch: str, changes: dict[str, Any]) -> None:
        said = msgspec.json.encode((epoch, changes))
        await self._ask("PUT", f"/registered/{instance_id}/word", said)

    async def requests(self) -> RunningRequests:
        told = await self._ask("GET", "/requests")
        found, silent = msgspec.json.decode(told, type=tuple[list[RequestStatus], list[str]])
        return RunningRequests(requests=found, silent_workers=silent)

    async def move(self, request_id: str, order: MoveOrder) -> tuple[list[MoveReport], list[str]]:
        sent = msgspec.json.encode((request_id, order))
        told = await self._ask("POST", "/moves", sent, timeout_s=None)
        return msgspec.json.decode(told, type=tuple[list[MoveReport], list[str]])

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        timeout_s: float | None = KEEPER_TIMEOUT_S,
    ) -> bytes:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        url = f"http://keeper{path}"
        async with self._session.request(method, url, data=body, timeout=timeout) as response:
            response.raise_for_status()
            return await response.read()

    # What the keeper asks.

    async def _snapshot(self, request: web.Request) -> web.Response:
        assert self._router is not None
        return web.Response(body=msgspec.json.encode(self._router.metrics.snapshot()))

    async def _requests(self, request: web.Request) -> web.Response:
        assert self._router is not None
        own = await self._router.requests.requests()
        return web.Response(body=msgspec.json.encode(own.requests))

    async def _move(self, request: web.Request) -> web.Response:
        assert self._router is not None
        request_id, order = msgspec.json.decode(await request.read(), type=tuple[str, MoveOrder])
        reports, _ = await self._router.requests.move(request_id, order)
        return web.Response(body=msgspec.json.encode(reports))

    async def _registered(self, request: web.Request) -> web.Response:
        await self._hear(await request.read())
        return web.Response()

    async def _hear(self, told: bytes) -> None:
        known = msgspec.json.decode(told, type=RegisteredEngines)
        if known.version > self._version:
            self._version = known.version
            assert self._router is not None
            await self._router.follow(known.specs, known.words)


def main() -> None:
    """A worker process, with the folder and its name as arguments."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    try:
        config = unpack((folder / CONFIG_FILE).read_bytes())
        set_up_logging(config)
        uvloop.run(_run(config, KeeperLink(folder, name)))
    except ConfigError as e:
        print(f"Error: {e}", file=sys.stderr)
        sys.exit(WRONG_CONFIG)


async def _run(config: RouterConfig, link: KeeperLink) -> None:
    raise_file_limit()
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    # systemd and the keeper may both send SIGTERM: only the keeper's SIGINT after it is a hurry.
    loop.add_signal_handler(signal.SIGTERM, stopping.asked.set)
    loop.add_signal_handler(signal.SIGINT, stopping.ask)
    sock = bind(config.host, config.port, shared=True)
    sock.listen(BACKLOG)
    server = RouterServer(config, Router(config, keeper=link))
    try:
        await link.open(server.router)
        await server.start(sock)
        await link.announce()
        await run_until_stopped(server, stopping)
    finally:
        await link.close()

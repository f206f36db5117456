# SPDX-License-Identifier: Apache-2.0
"""A router process: socket, event loop, signals, and a slow end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.discovery.kubernetes import KubernetesDiscovery
from vllm_ascend_pd.router.discovery.static import StaticDiscovery
from vllm_ascend_pd.router.tls import server_context

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.config import RouterConfig

logger = logging.getLogger(__name__)

BACKLOG = 4096
REFRESH_S = 1.0
LINGER_S = 1.0
"""For the rest of a body that was refused, so that its client reads why."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; ``ConfigError`` says why there is none."""
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if ":" in host else socket.AF_INET,
            backlog=BACKLOG,
        )
    except OSError as e:
        raise ConfigError(f"--host {host} --port {port}: {e}") from e


class RouterServer:
    """One router, serving on a socket. ``start`` and ``stop`` run on its event loop."""

    def __init__(self, config: RouterConfig, router: Router | None = None) -> None:
        self.config = config
        self.router = router or Router(config)
        self._static = StaticDiscovery(config, self.router.registry)
        self._kubernetes: KubernetesDiscovery | None = None
        if config.kubernetes is not None:
            self._kubernetes = KubernetesDiscovery(config, self.router.registry)
        self._runner: web.AppRunner | None = None
        self._refresher: asyncio.Task[None] | None = None

    async def start(self, sock: socket.socket) -> None:
        limits = self.config.limits
        runner = self._runner = web.AppRunner(
            self.router.application(),
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.config.timeouts.head_s,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.num_headers,
            shutdown_timeout=self.config.drain_s,
            lingering_time=LINGER_S,
        )
        await runner.setup()
        self._static.read()
        if self._kubernetes is not None:
            await self._kubernetes.start()
        site = web.SockSite(runner, sock, ssl_context=server_context(self.config.tls))
        await site.start()
        self._refresher = asyncio.ensure_future(self._refresh())

    async def stop(self) -> None:
        """No new connection; requests in progress have ``drain_s`` to end."""
        self.router.is_draining = True
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
        if self._kubernetes is not None:
            await self._kubernetes.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _refresh(self) -> None:
        """What changes without a request."""
        while True:
            await asyncio.sleep(REFRESH_S)
            self._static.refresh()
            self.router.refresh(asyncio.get_running_loop().time())


def serve(config: RouterConfig, on_ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT; a second one ends the requests in progress."""
    sock = bind(config.host, config.port)
    uvloop.run(_serve(config, sock, on_ready))


async def _serve(
    config: RouterConfig, sock: socket.socket, on_ready: Callable[[str], None]
) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server = RouterServer(config)
    await server.start(sock)
    gc.freeze()  # what is there now stays, and need not be looked at again and again
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.tls.certificate is None else "https"
    on_ready(f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}")
    await stopping.wait()
    logger.info("stopping: up to %g s for requests in progress", config.drain_s)
    stopping.clear()
    stop = asyncio.ensure_future(server.stop())
    again = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({stop, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not stop.done():
        logger.warning("stopping now")
        stop.cancel()
    await asyncio.gather(stop, again, return_exceptions=True)

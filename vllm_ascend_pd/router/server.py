# SPDX-License-Identifier: Apache-2.0
"""A router process: socket, event loop, signals, and a slow end."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING

import uvloop
from aiohttp import web

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.discovery.kubernetes import KubernetesDiscovery
from vllm_ascend_pd.router.discovery.static import StaticDiscovery
from vllm_ascend_pd.router.front import Runner
from vllm_ascend_pd.router.tls import ServerCertificate

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.config import RouterConfig

logger = logging.getLogger(__name__)

BACKLOG = 4096
MAX_HEADER_BYTES = 16 << 10
"""Of one header line."""
MAX_HEADERS = 128
REFRESH_S = 1.0
LINGER_S = 1.0
"""For the rest of a body that was refused, so that its client reads why; and for one more request
on a connection, when the router stops.
"""


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; ``ConfigError`` says why there is none. One that is ``shared`` does not
    listen yet, and others of this user can be bound to its port. ``::`` is IPv4, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.socket(family)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            if shared:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind((host, port))
            if not shared:
                sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as e:
        raise ConfigError(f"--host {host} --port {port}: {e}") from e


def raise_file_limit() -> None:
    """As many connections as the system allows: each request has one, and one to each engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if soft != hard:
        logger.info("up to %d open files, not %d", hard, soft)


def url_of(config: RouterConfig, sock: socket.socket) -> str:
    """Where clients find it."""
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.tls.certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class RouterServer:
    """One router, serving on a socket. ``start`` and ``stop`` run on its event loop."""

    def __init__(self, config: RouterConfig, router: Router | None = None) -> None:
        self.config = config
        self.router = router or Router(config)
        self._static = StaticDiscovery(config, self.router.registry)
        self._kubernetes: KubernetesDiscovery | None = None
        if config.kubernetes is not None:
            self._kubernetes = KubernetesDiscovery(config, self.router.registry)
        self._runner: Runner | None = None
        self._refresher: asyncio.Task[None] | None = None
        self._certificate: ServerCertificate | None = None
        self._has_files = True

    async def start(self, sock: socket.socket) -> None:
        runner = self._runner = Runner(
            self.router.application(),
            self.router.refused,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self.config.timeouts.keep_alive_s,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            shutdown_timeout=LINGER_S,
            lingering_time=LINGER_S,
        )
        await runner.setup()
        self._static.read()
        if self._kubernetes is not None:
            await self._kubernetes.start()
        tls = self.config.tls
        if tls.certificate is not None and tls.key is not None:
            self._certificate = ServerCertificate(tls.certificate, tls.key)
        context = self._certificate.context if self._certificate is not None else None
        await web.SockSite(runner, sock, ssl_context=context).start()
        self._refresher = asyncio.ensure_future(self._refresh())

    async def stop(self) -> None:
        """No new connection; requests in progress have ``drain_s`` to end."""
        self.router.is_draining = True
        if self._refresher is not None:
            self._refresher.cancel()
            await asyncio.gather(self._refresher, return_exceptions=True)
        if self._kubernetes is not None:
            await self._kubernetes.close()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.leave(self.config.drain_s, LINGER_S)
            await runner.cleanup()

    async def _refresh(self) -> None:
        """What changes without a request."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                self._look_for_files()
                if self._certificate is not None:
                    self._certificate.refresh()
                self._static.refresh()
                await self.router.refresh(time.monotonic())
            except Exception:
                logger.exception("refreshing")  # the next round may find what this one did not

    def _look_for_files(self) -> None:
        """Whether a descriptor is left. Who connects without one is cut off by libuv, which tells
        nobody.
        """
        had_files, self._has_files = self._has_files, True
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as e:
            if e.errno not in (errno.EMFILE, errno.ENFILE):
                return
            self._has_files = False
            self.router.metrics.add("out_of_files")
        if had_files and not self._has_files:
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.warning("clients are cut off: this router may open no file more (%d)", limit)
        elif self._has_files and not had_files:
            logger.info("clients are taken again: there are files left")


class Stopping:
    """How a server is told to stop: with patience, then without. Event loop thread."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()

    def ask(self) -> None:
        """The second time it is in a hurry."""
        (self.hurry if self.asked.is_set() else self.asked).set()


async def run_until_stopped(server: RouterServer, stopping: Stopping) -> None:
    """Of a server that has started: wait, then let requests in progress end."""
    gc.freeze()  # what is there now stays, and need not be looked at again and again
    await stopping.asked.wait()
    logger.info("stopping: up to %g s for requests in progress", server.config.drain_s)
    stop = asyncio.ensure_future(server.stop())
    hurry = asyncio.ensure_future(stopping.hurry.wait())
    await asyncio.wait({stop, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stop.done():
        logger.warning("stopping now")
        stop.cancel()
    await asyncio.gather(stop, hurry, return_exceptions=True)


def serve(config: RouterConfig, on_ready: Callable[[str], None]) -> None:
    """Run one process until SIGTERM or SIGINT; a second one ends the requests in progress."""
    sock = bind(config.host, config.port)
    uvloop.run(_serve(config, sock, on_ready))


async def _serve(
    config: RouterConfig, sock: socket.socket, on_ready: Callable[[str], None]
) -> None:
    raise_file_limit()
    stopping = Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.ask)
    server = RouterServer(config)
    await server.start(sock)
    on_ready(url_of(config, sock))
    await run_until_stopped(server, stopping)

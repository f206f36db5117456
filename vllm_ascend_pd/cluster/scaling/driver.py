# SPDX-License-Identifier: Apache-2.0
"""The process that keeps a fleet on Ray at its target: ``python -m`` this, with a ``DriverSpec``.

A process of its own beside the router, for Ray ends a driver that has lost its cluster. Then the
router waits, and the driver is started again until there is a cluster. What it is to have is in a
file, which `vllm-pd scale` changes; what there is it tells on loopback:

GET /health      200
GET /engines     ``FleetStatus``
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.cluster.scaling.orders import Shared, order_engine
from vllm_ascend_pd.cluster.scaling.ray_fleet import RayFleet, connect
from vllm_ascend_pd.cluster.scaling.reconciler import Reconciler
from vllm_ascend_pd.cluster.up_socket import Scaling
from vllm_ascend_pd.errors import ConfigError, PDError
from vllm_ascend_pd.private_file import read_token

STEP_S = 0.5


class DriverSpec(msgspec.Struct, frozen=True):
    """What `vllm-pd up` has it do."""

    address: str
    """Of the Ray cluster."""
    shared: Shared
    target_file: str
    status_port: int
    secret_files: dict[str, str]
    """``security.secret_file`` and ``router.token_file`` of this host, which no node has."""
    token_file: str | None
    """What the router asks of an operator."""


async def drive(spec: DriverSpec) -> None:
    """Until SIGTERM."""
    secrets = {key: read_token(key, path) for key, path in spec.secret_files.items()}
    shared = msgspec.structs.replace(spec.shared, secrets=secrets)
    token = read_token("router.token_file", spec.token_file) if spec.token_file else None
    scaling, stop = Scaling(Path(spec.target_file), ""), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fleet = RayFleet(shared.resources, partial(order_engine, shared))
    async with RouterOperator(shared.router_url, token) as router:
        reconciler = Reconciler(fleet, router, scaling.target(), time.monotonic, say)
        runner = await _tell(reconciler, spec.status_port)
        unread = ""
        try:
            while not stop.is_set():
                try:
                    reconciler.target, unread = scaling.target(), ""
                except ConfigError as e:
                    if str(e) != unread:
                        say(f"{e}; the engines stay as they were to be")
                    unread = str(e)
                await reconciler.step()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), STEP_S)
        finally:
            await fleet.close()
            await runner.cleanup()


async def _tell(reconciler: Reconciler, port: int) -> web.AppRunner:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def engines(request: web.Request) -> web.Response:
        body = msgspec.json.encode(reconciler.status)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/engines", engines)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


def say(line: str) -> None:
    """Into the log of this process. The fleet is kept although the disk of that is full."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def main() -> None:
    """See the module."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=DriverSpec)
    try:
        connect(spec.address)
        asyncio.run(drive(spec))
    except PDError as e:
        say(str(e))
        sys.exit(1)


if __name__ == "__main__":
    main()

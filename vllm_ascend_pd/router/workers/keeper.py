# SPDX-License-Identifier: Apache-2.0
"""Keeps the workers of one router up, and what they have in common. It serves no client.

    client ──> shared port ──> worker 0, 1, ...      the kernel chooses, by connection
                                  │   ▲
       who registered, /metrics   ▼   │   all engines that registered, give me your counts
                                 keeper              Unix sockets in a folder of its own

Each worker is a whole router with its own connections, probes and breakers. An engine that
registers with one of them is known to all before it gets its answer. ``/metrics``, ``/status`` and
``/instances`` are answered by whichever worker was asked, for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.discovery.registered import Registered
from vllm_ascend_pd.router.instances import InstanceSpec
from vllm_ascend_pd.router.server import REFRESH_S, Stopping, bind, url_of
from vllm_ascend_pd.router.snapshot import Snapshot, add_up
from vllm_ascend_pd.router.workers.worker import (
    KEEPER_SOCKET,
    Order,
    RegisteredEngines,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.router.config import RouterConfig

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 2.0
"""For a worker's answer to its keeper; the last one counts until it comes."""
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
"""Who was up for so long starts again at once."""
HURRY_S = 5.0
"""Then workers that were told to hurry are killed."""

_START = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0);"
    " from vllm_ascend_pd.router.workers.worker import main; main()"
)
"""Without the working directory on the path, as the installed command has it."""


@dataclass(slots=True)
class Worker:
    """One process, from its start to its end."""

    process: asyncio.subprocess.Process
    session: aiohttp.ClientSession
    started: float
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    told: int = 0
    """Version of the engines that it knows."""
    last: Snapshot = field(default_factory=Snapshot)
    """What it had counted when it was last asked."""


class Keeper:
    """What the workers have in common. Event loop thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.workers: dict[int, Worker] = {}
        self._engines = RegisteredEngines()
        self._registered = Registered(self._changed)
        self._ended = Snapshot()
        self._collecting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 20)
        app.router.add_put("/workers/{index}", self._announced)
        app.router.add_get("/registered", self._known)
        app.router.add_put("/registered/{instance_id}", self._beat)
        app.router.add_delete("/registered/{instance_id}", self._leave)
        app.router.add_put("/registered/{instance_id}/drain", self._drain)
        app.router.add_get("/snapshot", self._snapshot)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(self._folder / KEEPER_SOCKET)).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def refresh(self) -> None:
        """Called every second: what a worker counted must outlive it."""
        await self._registered.expire(time.monotonic())
        await self._tell_all()
        await self.collect()

    async def collect(self) -> Snapshot:
        """Of all workers, those that ended too: no count ever goes back."""
        async with self._collecting:
            await asyncio.gather(*(self._read(worker) for worker in self.workers.values()))
            return add_up([self._ended], [worker.last for worker in self.workers.values()])

    def ended(self, index: int, *, restarts: bool) -> None:
        """This worker's process is gone."""
        last = self.workers.pop(index).last
        self._ended = add_up([self._ended, last, *([_ONE_RESTART] if restarts else ())], [])

    async def _read(self, worker: Worker) -> None:
        if not worker.announced.is_set():
            return
        try:
            async with worker.session.get("http://worker/snapshot") as response:
                worker.last = msgspec.json.decode(await response.read(), type=Snapshot)
        except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.MsgspecError) as e:
            logger.warning("worker %d does not say what it counted: %r", worker.process.pid, e)

    async def _changed(self, specs: list[InstanceSpec]) -> None:
        self._engines = RegisteredEngines(self._engines.version + 1, specs)
        await self._tell_all()

    async def _tell_all(self) -> None:
        """Workers that do not know the engines of now."""
        known = self._engines
        behind = [
            worker
            for worker in self.workers.values()
            if worker.announced.is_set() and worker.told < known.version
        ]
        if behind:
            told = msgspec.json.encode(known)
            await asyncio.gather(*(self._tell(worker, known.version, told) for worker in behind))

    async def _tell(self, worker: Worker, version: int, told: bytes) -> None:
        try:
            async with worker.session.put("http://worker/registered", data=told) as response:
                response.raise_for_status()
                worker.told = max(worker.told, version)
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            logger.warning("worker %d was not told of engines: %r", worker.process.pid, e)

    # What workers ask.

    async def _announced(self, request: web.Request) -> web.Response:
        worker = self.workers[int(request.match_info["index"])]
        worker.announced.set()
        worker.told = self._engines.version
        return web.Response(body=msgspec.json.encode(self._engines))

    async def _known(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._engines))

    async def _beat(self, request: web.Request) -> web.Response:
        await self._registered.beat(msgspec.json.decode(await request.read(), type=InstanceSpec))
        return web.Response()

    async def _leave(self, request: web.Request) -> web.Response:
        await self._registered.leave(request.match_info["instance_id"])
        return web.Response()

    async def _drain(self, request: web.Request) -> web.Response:
        known = await self._registered.drain(request.match_info["instance_id"])
        return web.Response(text="drained" if known else "")

    async def _snapshot(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await self.collect()))


_ONE_RESTART = Snapshot(counters={"worker_restarts": [((), 1.0)]})


class Processes:
    """Starts the workers, starts them again, and stops them. Event loop thread."""

    def __init__(self, config: RouterConfig, folder: Path, keeper: Keeper) -> None:
        self._config = config
        self._folder = folder
        self._keeper = keeper
        self._stopping = Stopping()
        self._is_up = False
        self._failed = False

    def ask_to_stop(self) -> None:
        """The second time they hurry."""
        self._stopping.ask()
        for worker in self._keeper.workers.values():
            _say_stop(worker)

    async def run(self, on_ready: Callable[[], None]) -> bool:
        """Until they have stopped; ``False`` if one could not start at all."""
        tasks: list[asyncio.Task[None]] = []
        for index in range(self._config.num_workers):
            tasks.append(asyncio.create_task(self._keep(index)))
            while not self._stopping.asked.is_set() and not self._has_announced(index):
                await asyncio.sleep(0.01)
        if not self._stopping.asked.is_set():
            self._is_up = True
            on_ready()
        await asyncio.gather(*tasks)
        return not self._failed

    def _has_announced(self, index: int) -> bool:
        worker = self._keeper.workers.get(index)
        return worker is not None and worker.announced.is_set()

    async def _keep(self, index: int) -> None:
        backoff_s = MIN_BACKOFF_S
        while not self._stopping.asked.is_set():
            worker = await self._start(index)
            code = await self._wait(worker)
            await worker.session.close()
            stopping = self._stopping.asked.is_set()
            self._keeper.ended(index, restarts=not stopping)
            if stopping:
                return
            if not self._is_up:  # a wrong option, which no restart mends
                self._failed = True
                logger.error("worker %d did not come up: code %d", index, code)
                self.ask_to_stop()
                return
            if time.monotonic() - worker.started > STABLE_S:
                backoff_s = MIN_BACKOFF_S
            logger.error("worker %d ended, code %d: starts again in %g s", index, code, backoff_s)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopping.asked.wait(), backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    async def _start(self, index: int) -> Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _START, stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        order = pickle.dumps(Order(self._config, index, self._folder))
        process.stdin.write(len(order).to_bytes(4, "big") + order)
        session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._folder / str(index))),
            timeout=aiohttp.ClientTimeout(total=WORKER_TIMEOUT_S),
        )
        worker = Worker(process, session, time.monotonic())
        self._keeper.workers[index] = worker
        logger.info("worker %d is pid %d", index, process.pid)
        if self._stopping.asked.is_set():
            _say_stop(worker)
        return worker

    async def _wait(self, worker: Worker) -> int:
        """For the end of its process; in a hurry not for ever."""
        ended = asyncio.ensure_future(worker.process.wait())
        hurry = asyncio.ensure_future(self._stopping.hurry.wait())
        await asyncio.wait({ended, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        await asyncio.wait({ended}, timeout=HURRY_S if self._stopping.hurry.is_set() else None)
        if not ended.done():
            worker.process.kill()
        return await ended


def _say_stop(worker: Worker) -> None:
    if worker.process.returncode is None and worker.process.stdin is not None:
        worker.process.stdin.write(b"s")


def serve(config: RouterConfig, on_ready: Callable[[str], None]) -> None:
    """Run workers until SIGTERM or SIGINT; a second one ends the requests in progress.

    Raises:
        ConfigError: the port is not free, or the workers did not come up.
    """
    if config.port:
        bind(config.host, config.port).close()  # sharing alone would join another router's workers
    with (
        bind(config.host, config.port, shared=True) as sock,  # keeps the port for the workers
        tempfile.TemporaryDirectory(prefix="vllm-pd-router-") as folder,
    ):
        shared = replace(config, port=sock.getsockname()[1])
        url = url_of(config, sock)
        if not uvloop.run(_serve(shared, Path(folder), lambda: on_ready(url))):
            raise ConfigError("the workers did not come up: see above")


async def _serve(config: RouterConfig, folder: Path, on_ready: Callable[[], None]) -> bool:
    keeper = Keeper(folder)
    await keeper.start()
    processes = Processes(config, folder, keeper)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, processes.ask_to_stop)
    refreshing = asyncio.create_task(_refresh(keeper))
    try:
        return await processes.run(on_ready)
    finally:
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)
        await keeper.close()


async def _refresh(keeper: Keeper) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        await keeper.refresh()

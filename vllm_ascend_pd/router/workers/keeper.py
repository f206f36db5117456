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
import logging
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web

from vllm_ascend_pd.backends.socket_folder import SocketFolder
from vllm_ascend_pd.processes.child import Child, ChildSpec, Patience, State
from vllm_ascend_pd.processes.supervisor import Supervisor
from vllm_ascend_pd.router.config import pack
from vllm_ascend_pd.router.discovery.registered import Roster
from vllm_ascend_pd.router.instances import InstanceSpec, Words
from vllm_ascend_pd.router.server import BACKLOG, REFRESH_S, bind, raise_file_limit, url_of
from vllm_ascend_pd.router.snapshot import Snapshot, add_up
from vllm_ascend_pd.router.workers.worker import CONFIG_FILE, KEEPER_SOCKET, RegisteredEngines

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from vllm_ascend_pd.router.config import RouterConfig

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 2.0
"""For a worker's answer to its keeper; the last one counts until it comes."""
NUM_SILENT = 3
"""Questions in a row without an answer, after which nothing more is waited for from a worker."""
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STABLE_S = 30.0
"""Who was up for so long starts again at once."""
SILENT_S = 60.0
"""Who does not answer its keeper for so long is started again: it answers no client either."""
WATCH_S = 1.0
HURRY_S = 5.0
"""Then workers that were told to hurry are killed, or have had too long to stop by themselves."""

_START = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0);"
    " from vllm_ascend_pd.router.workers.worker import main; main()"
)
"""Without the working directory on the path, as the installed command has it."""


class RouterWorker:
    """One worker as its keeper knows it, over all its starts."""

    def __init__(self, socket: Path) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=WORKER_TIMEOUT_S),
        )
        self.announced = False
        self.told = 0
        """Version of the engines that it knows."""
        self.telling: asyncio.Task[bool] | None = None
        """Of newer ones, under way or over: whether it heard."""
        self.last = Snapshot()
        """What it had counted when it was last asked."""
        self.num_silent = 0
        """Times in a row that it did not say what it counted."""

    @property
    def has_told(self) -> bool:
        """What it has counted, and knows, by now."""
        return self.announced and not self.num_silent

    async def is_up(self, group: int) -> bool:
        return self.announced

    async def is_alive(self) -> bool:
        return not self.num_silent


class Keeper:
    """What the workers have in common. Event loop thread."""

    def __init__(self, folder: Path, config: RouterConfig) -> None:
        self._folder = folder
        self._config = pack(config)
        self.workers = {
            str(index): RouterWorker(folder / str(index)) for index in range(config.num_workers)
        }
        self._engines = RegisteredEngines()
        self._told_engines = -1, b""
        """Their version, and what is sent of them."""
        self._registered = Roster(self._changed)
        self._ended = Snapshot()
        self._collecting = asyncio.Lock()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._write_config()
        app = web.Application(client_max_size=1 << 20)
        app.router.add_put("/workers/{name}", self._announced)
        app.router.add_get("/registered", self._known)
        app.router.add_put("/registered/{instance_id}", self._beat)
        app.router.add_delete("/registered/{instance_id}", self._leave)
        app.router.add_put("/registered/{instance_id}/word", self._word)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_get("/requests", self._ask_all)
        app.router.add_post("/moves", self._ask_all)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        path = str(self._folder / KEEPER_SOCKET)
        await web.UnixSite(self._runner, path, backlog=BACKLOG).start()

    def _write_config(self) -> None:
        """For workers that start, one of which may read it now: it is whole, or it is gone."""
        path = self._folder / CONFIG_FILE
        if not path.exists():
            new = path.with_suffix(".new")
            new.write_bytes(self._config)
            new.replace(path)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for worker in self.workers.values():
            if worker.telling is not None:
                worker.telling.cancel()
            await worker.session.close()

    async def refresh(self) -> None:
        """Called every second: what a worker counted must outlive it."""
        await self._registered.expire(time.monotonic())
        await self._tell_all()
        await self.collect(also_silent=True)

    async def collect(self, *, also_silent: bool = False) -> Snapshot:
        """Of all workers, those that ended too: no count ever goes back. Of who was silent before,
        what it told last, unless it is asked again."""
        async with self._collecting:
            asked = {
                name: worker
                for name, worker in self.workers.items()
                if also_silent or worker.num_silent < NUM_SILENT
            }
            await asyncio.gather(*(self._read(*item) for item in asked.items()))
            if all(worker.has_told for worker in self.workers.values()):
                self._forget_gone()
            return add_up([self._ended], [worker.last for worker in self.workers.values()])

    def _forget_gone(self) -> None:
        """Legs to engines that no worker knows any more, as each worker does of its own."""
        counters = self._ended.counters
        known = {one.instance_id for w in self.workers.values() for one in w.last.instances}
        legs = [(labels, n) for labels, n in counters.get("legs", ()) if labels[0] in known]
        self._ended = msgspec.structs.replace(self._ended, counters={**counters, "legs": legs})

    def changed(self, child: Child) -> None:
        """A worker's process has another state."""
        if child.state is State.STARTING:
            logger.info("%s is pid %s", child.spec.name, child.pid)
        elif child.state in (State.BACKOFF, State.STOPPED):
            worker = self.workers[child.spec.name.removeprefix("worker ")]
            self._ended = add_up([self._ended, worker.last], [])
            worker.announced, worker.last, worker.num_silent = False, Snapshot(), 0
            if child.state is State.BACKOFF:
                logger.error("%s: %s", child.spec.name, child.note)
                self._ended = add_up([self._ended, _ONE_RESTART], [])
                try:
                    self._write_config()
                except OSError as e:
                    logger.error("cannot write the configuration of workers: %s", e)

    async def _read(self, name: str, worker: RouterWorker) -> None:
        if not worker.announced:
            return
        before = worker.last
        try:
            async with worker.session.get("http://worker/snapshot") as response:
                counted = msgspec.json.decode(await response.read(), type=Snapshot)
        except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.MsgspecError) as e:
            logger.warning("worker %s does not say what it counted: %r", name, e)
            worker.num_silent += 1
            return
        worker.num_silent = 0
        if worker.last is before:  # else it has ended meanwhile, and is among those that did
            worker.last = counted

    async def _changed(self, specs: list[InstanceSpec], words: Words) -> None:
        self._engines = RegisteredEngines(self._engines.version + 1, specs, words)
        await self._tell_all()

    async def _tell_all(self) -> None:
        """Workers that do not know the engines of now."""
        version = self._engines.version
        await asyncio.gather(*(self._told(*item, version) for item in self.workers.items()))

    async def _told(self, name: str, worker: RouterWorker, version: int) -> None:
        """Until it knows these engines, or does not answer. Of changes that come while it is told
        of one it is told at once."""
        has_heard = True
        while has_heard and worker.announced and worker.told < version:
            if worker.telling is None or worker.telling.done():
                worker.telling = asyncio.ensure_future(self._tell(name, worker))
            has_heard = await asyncio.shield(worker.telling)

    async def _tell(self, name: str, worker: RouterWorker) -> bool:
        version, told = self._engines.version, self._encoded()
        try:
            async with worker.session.put("http://worker/registered", data=told) as response:
                response.raise_for_status()
                worker.told = max(worker.told, version)
        except (aiohttp.ClientError, asyncio.TimeoutError) as e:
            logger.warning("worker %s was not told of engines: %r", name, e)
            return False
        return True

    def _encoded(self) -> bytes:
        """The engines of now, as workers are told them."""
        if self._told_engines[0] != self._engines.version:
            self._told_engines = self._engines.version, msgspec.json.encode(self._engines)
        return self._told_engines[1]

    # What workers ask.

    async def _announced(self, request: web.Request) -> web.Response:
        worker = self.workers[request.match_info["name"]]
        worker.announced = True
        worker.told = self._engines.version
        return web.Response(body=self._encoded())

    async def _known(self, request: web.Request) -> web.Response:
        return web.Response(body=self._encoded())

    async def _beat(self, request: web.Request) -> web.Response:
        await self._registered.beat(msgspec.json.decode(await request.read(), type=InstanceSpec))
        return web.Response()

    async def _leave(self, request: web.Request) -> web.Response:
        epoch = msgspec.json.decode(await request.read(), type=str | None)
        await self._registered.leave(request.match_info["instance_id"], epoch)
        return web.Response()

    async def _word(self, request: web.Request) -> web.Response:
        said = msgspec.json.decode(await request.read(), type=tuple[str, dict[str, Any]])
        await self._registered.say(request.match_info["instance_id"], *said)
        return web.Response()

    async def _snapshot(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(await self.collect()))

    async def _ask_all(self, request: web.Request) -> web.Response:
        """The same of each worker; their lists as one, and who did not answer. A move takes as
        long as it takes, at a worker that answers other questions meanwhile."""
        body = await request.read()
        asked = {name: worker for name, worker in self.workers.items() if worker.announced}
        answers = await asyncio.gather(
            *(
                self._ask_one(name, worker, request.method, request.path, body)
                for name, worker in asked.items()
            )
        )
        silent = [name for name, told in zip(asked, answers, strict=True) if told is None]
        found = [one for told in answers for one in told or ()]
        return web.Response(body=msgspec.json.encode((found, silent)))

    async def _ask_one(
        self, name: str, worker: RouterWorker, method: str, path: str, body: bytes
    ) -> list[msgspec.Raw] | None:
        asking = asyncio.ensure_future(_ask(worker, method, path, body))
        try:
            while not asking.done() and worker.num_silent < NUM_SILENT:
                await asyncio.wait({asking}, timeout=REFRESH_S)
            if asking.done():
                return asking.result()
            logger.warning("worker %s does not answer %s, nor anything else", name, path)
        except (aiohttp.ClientError, asyncio.TimeoutError, msgspec.MsgspecError) as e:
            logger.warning("worker %s does not answer %s: %r", name, path, e)
        finally:
            asking.cancel()
        return None


async def _ask(worker: RouterWorker, method: str, path: str, body: bytes) -> list[msgspec.Raw]:
    timeout = aiohttp.ClientTimeout(total=WORKER_TIMEOUT_S if method == "GET" else None)
    url = f"http://worker{path}"
    async with worker.session.request(method, url, data=body, timeout=timeout) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read(), type=list[msgspec.Raw])


_ONE_RESTART = Snapshot(counters={"worker_restarts": [((), 1.0)]})


def serve(config: RouterConfig, on_ready: Callable[[str], None]) -> None:
    """Run workers until SIGTERM or SIGINT; a second one ends the requests in progress.

    Raises:
        ConfigError: the port is not free.
        StartError: the workers did not come up.
    """
    if config.port:
        bind(config.host, config.port).close()  # sharing alone would join another router's workers
    with bind(config.host, config.port, shared=True) as sock:  # keeps the port for the workers
        shared = replace(config, port=sock.getsockname()[1])
        url = url_of(config, sock)
        folder = SocketFolder()
        try:
            asyncio.run(_serve(shared, folder.path, lambda: on_ready(url)))
        finally:
            folder.remove()


async def _serve(config: RouterConfig, folder: Path, on_ready: Callable[[], None]) -> None:
    raise_file_limit()
    keeper = Keeper(folder, config)
    await keeper.start()
    specs = [
        ChildSpec(
            f"worker {name}",
            (sys.executable, "-c", _START, str(folder), name),
            {},
            worker.is_up,
            worker.is_alive,
            HURRY_S,
        )
        for name, worker in keeper.workers.items()
    ]
    patience = Patience(
        stop_s=config.drain_s + HURRY_S,
        orphan_s=config.drain_s + HURRY_S,
        first_backoff_s=MIN_BACKOFF_S,
        max_backoff_s=MAX_BACKOFF_S,
        stable_s=STABLE_S,
        probe_s=0.02,
        watch_s=WATCH_S,
        silent_s=SILENT_S,
    )
    supervisor = Supervisor(specs, None, keeper.changed, on_ready, patience)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, supervisor.stop)
    refreshing = asyncio.create_task(_refresh(keeper))
    try:
        await supervisor.run()
    finally:
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)
        await keeper.close()


async def _refresh(keeper: Keeper) -> None:
    while True:
        await asyncio.sleep(REFRESH_S)
        try:
            await keeper.refresh()
        except Exception:
            logger.exception("refreshing")  # the next round may find what this one did not

# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd router --workers 3``: real processes that share a port and are one router."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest

from tests.router.harness import JSON_POST, run
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd import registration
from vllm_ascend_pd.backends.socket_folder import SocketFolder
from vllm_ascend_pd.cluster.machine import answers
from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.operating import MoveOrder, RunningRequests
from vllm_ascend_pd.registration import DrainOrder
from vllm_ascend_pd.router.workers.worker import CONFIG_FILE

NUM_WORKERS = 3
PATIENCE_S = 30.0
_KEEPER = (
    "from vllm_ascend_pd.cli.main import app; from vllm_ascend_pd.router.workers import keeper; "
)


class Cluster:
    """A router of several processes, a prefill and a decode engine."""

    def __init__(self, folder: Path, silent_s: float | None = None) -> None:
        self.prefill, self.decode = ScriptedEngine("p"), ScriptedEngine("d")
        self._program = [str(Path(sys.executable).with_name("vllm-pd"))]
        if silent_s is not None:
            patience = f"keeper.SILENT_S, keeper.WATCH_S = {silent_s}, 0.1"
            self._program = [sys.executable, "-c", f"{_KEEPER}{patience}; app()"]
        self.log = folder / "router.log"
        self.url = ""
        self.process: asyncio.subprocess.Process
        self._is_ending = False

    async def start(self, *options: str) -> None:
        command = [*self._program, "router", "--port", "0"]
        command += ["--workers", str(NUM_WORKERS), "--probe-interval", "0.2", *options]
        with self.log.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, start_new_session=True
            )

    async def ready(self) -> None:
        await self.until(lambda: "listens on" in self.output)
        self.url = re.findall(r"listens on (\S+)", self.output)[0]

    @property
    def output(self) -> str:
        return self.log.read_text()

    def worker_pids(self) -> list[int]:
        return [int(pid) for pid in re.findall(r"worker \d is pid (\d+)", self.output)]

    async def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            gone = self.process.returncode is not None and not self.url
            assert not gone, self.output
            assert time.monotonic() < end, self.output
            await asyncio.sleep(0.05)

    async def restarted(self) -> None:
        """One worker more than at the start was started, and listens."""
        await self.until(lambda: len(self.worker_pids()) == NUM_WORKERS + 1)
        newest = psutil.Process(self.worker_pids()[-1])
        await self.until(lambda: newest.net_connections("tcp"))

    async def get(self, path: str) -> str:
        """On a connection of its own, so that any worker may answer."""
        async with aiohttp.ClientSession() as http, http.get(self.url + path) as response:
            return await response.text()

    async def post(self, **fields: Any) -> int:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, **fields}
        url = f"{self.url}/v1/completions"
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            await response.read()
            return response.status

    async def metric(self, name: str) -> float:
        found = re.findall(rf"^vllm:pd_router_{name} (\S+)$", await self.get("/metrics"), re.M)
        return float(found[0]) if found else 0.0

    def terminate(self) -> None:
        """Once: a process that has ended nearly has no handler for a second signal any more."""
        self._is_ending = True
        self.process.terminate()

    async def stop(self) -> int:
        if self.process.returncode is None and not self._is_ending:
            self.terminate()
        code = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        for engine in (self.prefill, self.decode):
            await engine.stop()
        return code


@asynccontextmanager
async def cluster(
    folder: Path, *, registered: bool = False, silent_s: float | None = None
) -> AsyncIterator[Cluster]:
    """``silent_s``: after which a worker that does not answer is started again."""
    c = Cluster(folder, silent_s)
    for engine in (c.prefill, c.decode):
        await engine.start()
    flags = ["--prefill", c.prefill.url, "--decode", c.decode.url]
    await c.start(*(["--require-prefill"] if registered else flags))
    try:
        await c.ready()
        yield c
        is_killed = c.process.returncode is not None
        workers = [] if is_killed else psutil.Process(c.process.pid).children(recursive=True)
        assert await c.stop() == (-signal.SIGKILL if is_killed else 0), c.output
        assert not [worker for worker in workers if worker.is_running()]
    finally:
        if c.process.returncode is None:
            os.killpg(c.process.pid, signal.SIGKILL)


async def register(one: Cluster, engine: ScriptedEngine, role: str, name: str) -> None:
    body = {"url": engine.url, "role": role, "epoch": "one"}
    url = f"{one.url}{registration.PATH}/{name}"
    async with aiohttp.ClientSession() as http, http.put(url, json=body) as response:
        assert response.status == 200, await response.text()


def test_counts_and_page_are_those_of_all_workers(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            assert await asyncio.gather(*(c.post() for _ in range(30))) == [200] * 30
            listening = [
                connection.laddr
                for pid in c.worker_pids()
                for connection in psutil.Process(pid).net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            ]
            assert len(listening) == NUM_WORKERS
            assert len(set(listening)) == 1
            for _ in range(6):  # whichever worker answers
                assert await c.metric(r'requests_total\{outcome="ok"\}') == 30
                assert await c.metric("ttft_seconds_count") == 30
                status = json.loads(await c.get("/status"))
                assert status["num_workers"] == NUM_WORKERS
                assert status["requests"]["ok"] == 30
                assert [i["role"] for i in status["instances"]] == ["prefill", "decode"]

    run(test)


def test_who_has_started_it_sees_that_it_is_up(tmp_path: Path) -> None:
    """Its workers listen, not it, and have process groups of their own."""

    async def test() -> None:
        async with cluster(tmp_path) as c:
            is_up = answers(f"{c.url}/health")
            assert await is_up(c.process.pid)
            stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
            assert not await is_up(stranger.pid)
            stranger.kill()
            await stranger.wait()

    run(test)


def test_engines_that_register_are_known_to_every_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, registered=True) as c:
            assert await c.post() == 503
            await register(c, c.prefill, "prefill", "p0")
            await register(c, c.decode, "decode", "d0")
            assert await asyncio.gather(*(c.post() for _ in range(24))) == [200] * 24
            listed = json.loads(await c.get(registration.PATH))
            assert {i["instance_id"] for i in listed} == {"p0", "d0"}
            # A worker that comes later knows them from its keeper.
            victim = c.worker_pids()[0]
            os.kill(victim, signal.SIGKILL)
            await c.restarted()
            assert await asyncio.gather(*(c.post() for _ in range(24))) == [200] * 24
            url = f"{c.url}{registration.PATH}/d0"
            async with aiohttp.ClientSession() as http:
                async with http.delete(f"{url}?epoch=another") as response:
                    assert response.status == 204
                assert await c.post() == 200
                async with http.delete(url) as response:
                    assert response.status == 204
            for _ in range(24):
                assert await c.post() == 503

    run(test)


def test_killed_worker_is_started_again_and_no_count_goes_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            assert await asyncio.gather(*(c.post() for _ in range(30))) == [200] * 30
            assert await c.metric(r'requests_total\{outcome="ok"\}') == 30
            victim = c.worker_pids()[1]
            *_, folder, _ = psutil.Process(victim).cmdline()
            Path(folder, CONFIG_FILE).unlink()  # as one does who cleans /tmp
            os.kill(victim, signal.SIGKILL)
            await c.until(lambda: "worker 1: killed by SIGKILL; starts again" in c.output)
            await c.restarted()
            assert await c.metric(r'requests_total\{outcome="ok"\}') == 30
            assert await c.metric("worker_restarts_total") == 1
            assert await asyncio.gather(*(c.post() for _ in range(30))) == [200] * 30
            assert await c.metric(r'requests_total\{outcome="ok"\}') == 60

    run(test)


def test_requests_in_progress_end_before_the_workers_do(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            c.decode.token_s = 0.1
            posting = [asyncio.ensure_future(c.post(max_tokens=10)) for _ in range(6)]
            await c.until(lambda: c.decode.num_in_progress == 6)
            c.terminate()
            assert await asyncio.gather(*posting) == [200] * 6

    run(test)


def test_signal_from_two_sides_is_not_a_second_one(tmp_path: Path) -> None:
    """As systemd sends SIGTERM to every process of a service, beside what the keeper sends."""

    async def test() -> None:
        async with cluster(tmp_path) as c:
            c.decode.token_s = 0.1
            posting = [asyncio.ensure_future(c.post(max_tokens=20)) for _ in range(6)]
            await c.until(lambda: c.decode.num_in_progress == 6)
            c.terminate()
            await c.until(lambda: c.output.count("stopping: up to") == NUM_WORKERS)
            for pid in c.worker_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            assert await asyncio.gather(*posting) == [200] * 6

    run(test)


def test_second_signal_ends_the_requests_in_progress(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            c.decode.token_s = 1.0
            posting = asyncio.ensure_future(c.post(max_tokens=1000))
            await c.until(lambda: c.decode.num_in_progress)
            c.terminate()
            await c.until(lambda: c.output.count("stopping: up to") == NUM_WORKERS)
            assert not posting.done()
            c.process.terminate()
        # The end of ``cluster`` waits for less than --drain-timeout.
        assert await asyncio.gather(posting, return_exceptions=True) != [200]

    run(test)


def test_workers_end_with_their_keeper(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            workers = [psutil.Process(pid) for pid in c.worker_pids()]
            *_, folder, _ = workers[0].cmdline()
            c.process.kill()
            await c.process.wait()
            await c.until(lambda: not [w for w in workers if w.is_running()])
            SocketFolder().remove()  # as the next engine or router of this host makes one
            assert not Path(folder).exists()

    run(test)


def test_port_of_another_router_is_not_shared_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            (tmp_path / "other").mkdir()
            other = Cluster(tmp_path / "other")
            await other.start("--port", c.url.rpartition(":")[2])
            assert await asyncio.wait_for(other.process.wait(), PATIENCE_S) == 2
            assert "in use" in other.output

    run(test)


def test_long_path_of_temporary_files_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))

    async def test() -> None:
        async with cluster(tmp_path) as c:
            assert await c.post() == 200

    run(test)


def test_wrong_option_ends_all_with_its_reason(tmp_path: Path) -> None:
    async def test() -> None:
        c = Cluster(tmp_path)
        await c.start("--instances", str(tmp_path / "missing.json"))
        assert await asyncio.wait_for(c.process.wait(), PATIENCE_S) == 2
        assert "missing.json" in c.output
        await c.stop()

    run(test)


async def leave(port: int, number: int) -> None:
    """Ask for a long answer, and leave at some point, with a reset."""
    body = json.dumps({"prompt": "x", "stream": number % 4 != 0, "max_tokens": 10_000}).encode()
    head = JSON_POST + b"Content-Length: %d\r\n\r\n" % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.write((head + body)[: -5 if number % 8 == 1 else None])
    if number % 4 > 1:
        for _ in range(number % 7):
            await reader.readuntil(b"data: ")
    writer.transport.abort()


def test_clients_that_leave_are_no_errors(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c:
            c.decode.token_s = 2e-4
            port = int(c.url.rpartition(":")[2])
            for _ in range(2):
                await asyncio.gather(*(leave(port, number) for number in range(100)))
            await c.until(lambda: not c.decode.num_in_progress)
            assert await c.post() == 200
            assert "outcome=disconnected" in c.output
            assert not re.findall(r".* ERROR .*|Traceback", c.output)

    run(test)


def test_operator_reaches_the_requests_of_all_workers(tmp_path: Path) -> None:
    """Whichever worker hears of an order."""

    async def test() -> None:
        async with cluster(tmp_path) as c:
            c.prefill.token_s = c.decode.token_s = 0.05
            sent = {"stream": True, "temperature": 0, "max_tokens": 100}
            posting = [asyncio.ensure_future(c.post(**sent)) for _ in range(12)]
            name = c.decode.url.removeprefix("http://")
            async with RouterOperator(c.url) as operator:
                while sum(one.stays is None for one in (await operator.requests()).requests) < 12:
                    await asyncio.sleep(0.05)
                first, *_ = (await operator.requests()).requests
                to = MoveOrder(to=c.prefill.url.removeprefix("http://"))
                [report] = await operator.move(first.request_id, to)
                assert report.outcome == "moved"
                await operator.drain(name, DrainOrder(seconds=None))
                await c.until(lambda: c.decode.num_in_progress == 0)
                assert {one.instance for one in (await operator.requests()).requests} == {to.to}
                assert not any(one.done() for one in posting)
                c.prefill.token_s = c.decode.token_s = 0
                assert await asyncio.gather(*posting) == [200] * 12
                assert (
                    await c.metric(r'moves_total\{cause="",outcome="moved",reason="drain"\}') == 11
                )
                await operator.undo_drain(name)
                assert await asyncio.gather(*(c.post() for _ in range(12))) == [200] * 12

    run(test)


def test_worker_that_hangs_is_started_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, silent_s=4.0) as c:
            await c.until(lambda: len(c.worker_pids()) == NUM_WORKERS)
            hung = c.worker_pids()[1]
            os.kill(hung, signal.SIGSTOP)
            await c.until(lambda: len(c.worker_pids()) == NUM_WORKERS + 1)
            assert "worker 1: did not answer for 4 s" in c.output
            assert not psutil.pid_exists(hung)
            await c.restarted()
            assert await asyncio.gather(*(c.post() for _ in range(24))) == [200] * 24
            assert await c.metric("worker_restarts_total") == 1

    run(test)


def test_worker_that_hangs_is_named_to_an_operator_and_not_waited_for(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as c, aiohttp.ClientSession() as http:
            await c.until(lambda: len(c.worker_pids()) == NUM_WORKERS)
            hung = c.worker_pids()[1]
            os.kill(hung, signal.SIGSTOP)

            async def move() -> tuple[int, str]:
                async with http.post(f"{c.url}/requests/none/move") as response:
                    return response.status, await response.text()

            async def listed() -> RunningRequests:
                async with http.get(f"{c.url}/requests") as response:
                    return msgspec.json.decode(await response.read(), type=RunningRequests)

            # On connections of their own, of which some are to the one that hangs.
            looking = [asyncio.ensure_future(listed()) for _ in range(20)]
            asking = [asyncio.ensure_future(move()) for _ in range(20)]
            try:
                done, _ = await asyncio.wait(
                    looking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                assert done.pop().result().silent_workers == ["1"]
                done, _ = await asyncio.wait(
                    asking, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED
                )
                told = {one.result() for one in done}
                assert {status for status, _ in told} == {504}
                assert "worker 1 of this router does not answer" in told.pop()[1]
            finally:
                os.kill(hung, signal.SIGCONT)
                await asyncio.gather(*asking, *looking)

    run(test)

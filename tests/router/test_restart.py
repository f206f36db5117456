# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd restart``: supervised engines restarted one after another behind a real router.

The engines are processes of scripted engines that register, beat, drain and leave as real ones do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from tests.router.broken_streams import text
from tests.router.harness import FAST, Deployment, deployed, events, free_port, run, until
from vllm_ascend_pd import registration
from vllm_ascend_pd.cluster import restart
from vllm_ascend_pd.cluster.machine import answers
from vllm_ascend_pd.cluster.operator import NotFound, RouterOperator
from vllm_ascend_pd.cluster.restart import RestartError, RollingRestart
from vllm_ascend_pd.cluster.up_socket import (
    RestartOrder,
    RestartProgress,
    UpSocket,
    ask_to_restart,
    socket_path,
)
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.processes.child import Child, ChildSpec, Patience, State
from vllm_ascend_pd.processes.supervisor import Supervisor
from vllm_ascend_pd.registration import DrainOrder, name_of_rank

PATIENT = replace(
    FAST,
    timeouts=replace(FAST.timeouts, prefill_s=20, first_token_s=20, idle_s=20, answer_s=20),
    probes=replace(FAST.probes, timeout_s=20),
)
"""Engines are processes that are started meanwhile, and nothing is about slow ones."""

ENGINE = """
import asyncio, os, signal, sys
import aiohttp
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.registration import name_of_rank

async def main(name, role, port, router, num_ranks):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    engine = ScriptedEngine(name, port=int(port), token_s=0.01)
    await engine.start()
    described = {"url": engine.url, "role": role, "epoch": str(os.getpid())}
    ranks = range(int(num_ranks)) if num_ranks != "1" else [None]
    urls = {f"{router}/registry/instances/{name_of_rank(name, rank)}": rank for rank in ranks}
    async with aiohttp.ClientSession() as http:
        while not stop.is_set():
            if "DIES" in os.environ and engine.received:
                os._exit(3)
            for url, rank in urls.items():
                sent = described | {"data_parallel_rank": rank}
                async with http.put(url, json=sent) as answer:
                    answer.raise_for_status()
            try:
                await asyncio.wait_for(stop.wait(), 0.1)
            except asyncio.TimeoutError:
                pass
        for url in urls:
            async with http.delete(url):
                pass
    await engine.stop()

asyncio.run(main(*sys.argv[1:]))
"""


class Cluster:
    """Engines under a supervisor, one router, and the socket for restarts."""

    def __init__(self, deployment: Deployment, supervisor: Supervisor, socket: Path) -> None:
        self.deployment = deployment
        self.supervisor = supervisor
        self.socket = socket

    def child(self, name: str) -> Child:
        return next(c for c in self.supervisor.children if c.spec.name == name)

    def pid(self, name: str) -> int | None:
        return self.child(name).pid

    async def restart(self, *names: str, drain_s: float = 30) -> list[RestartProgress]:
        order = RestartOrder(names, drain_s)
        return [progress async for progress in ask_to_restart(self.socket, order)]


@asynccontextmanager
async def cluster(
    folder: Path, *names: str, num_ranks: int = 1, lasts_s: float = 0.0
) -> AsyncIterator[Cluster]:
    async with deployed(0, 0, PATIENT) as d:
        specs = []
        ranks = range(num_ranks) if num_ranks > 1 else [None]
        instances = {name: [name_of_rank(name, rank) for rank in ranks] for name in names}
        for name in names:
            role, port = "prefill" if name.startswith("p") else "decode", free_port()
            argv = (sys.executable, "-c", ENGINE, name, role, str(port), d.url, str(num_ranks))
            specs.append(ChildSpec(name, argv, {}, answers(f"http://127.0.0.1:{port}/health")))
        ready = asyncio.Event()
        patience = Patience(startup_s=30, probe_s=0.05)
        supervisor = Supervisor(specs, folder, lambda child: None, ready.set, patience)
        running = asyncio.create_task(supervisor.run())
        async with RouterOperator(d.url) as router:
            children = {child.spec.name: child for child in supervisor.children}
            restart = RollingRestart(supervisor, router, instances, lasts_s)
            socket = UpSocket(folder / "up", children, restart)
            await socket.start()
            await asyncio.wait_for(ready.wait(), 30)
            for name in chain.from_iterable(instances.values()):
                while (known := d.router.registry.get(name)) is None or not known.is_available:
                    await asyncio.sleep(0.01)
            try:
                yield Cluster(d, supervisor, folder / "up")
            finally:
                supervisor.stop()
                await running
                await socket.close()


def test_all_engines_restart_and_no_request_fails(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "p1", "d0", "d1") as c:
            before = {name: c.pid(name) for name in ("p0", "p1", "d0", "d1")}
            statuses: list[int] = []
            done = asyncio.Event()

            async def client(number: int) -> None:
                while not done.is_set():
                    fields = {"stream": number % 2 == 0, "max_tokens": 20}
                    status, _, body = await c.deployment.post(**fields)
                    statuses.append(status)
                    assert not fields["stream"] or body.endswith(b"data: [DONE]\n\n")

            clients = [asyncio.create_task(client(number)) for number in range(8)]
            told = await c.restart()
            done.set()
            await asyncio.gather(*clients)
            assert not [line for line in told if line.failed], told
            assert [line.text.partition(" ")[0] for line in told[::3]] == [
                "p0:",
                "p1:",
                "d0:",
                "d1:",
            ]
            assert all(c.pid(name) != pid for name, pid in before.items())
            assert set(statuses) == {200}
            assert len(statuses) > 8

    run(test)


def test_all_ranks_of_an_engine_are_drained_before_it_restarts(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1", num_ranks=2) as c:
            posts = [
                asyncio.create_task(c.deployment.post(max_tokens=50, stream=True)) for _ in range(4)
            ]
            registry = c.deployment.router.registry
            ranks = [registry.get(f"d0-dp{rank}") for rank in (0, 1)]
            while not all(rank.num_active for rank in ranks):
                await asyncio.sleep(0.01)
            pid = c.pid("d0")
            restarting = asyncio.create_task(c.restart("d0"))
            while not all(rank.spec.state == "draining" for rank in ranks):
                assert c.pid("d0") == pid
                await asyncio.sleep(0.01)
            told = await restarting
            assert not [line for line in told if line.failed], told
            assert c.pid("d0") != pid
            for status, _, body in await asyncio.gather(*posts):
                assert status == 200
                assert body.endswith(b"data: [DONE]\n\n")

    run(test)


def test_engine_whose_requests_do_not_end_is_not_restarted(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1") as c:
            pids = [c.pid(name) for name in ("d0", "d1")]
            posts = [
                asyncio.create_task(c.deployment.post(max_tokens=200, stream=True))
                for _ in range(2)
            ]
            registry = c.deployment.router.registry
            while not all(registry.get(name).num_active for name in ("d0", "d1")):
                await asyncio.sleep(0.01)
            told = await c.restart("d0", "d1", drain_s=0.5)
            assert [line.failed for line in told] == [False, True]
            left = "(1 requests are left, 1 cannot move (sampled))"
            assert f"d0 is not idle after 0.5 s {left}" in told[1].text
            assert [c.pid(name) for name in ("d0", "d1")] == pids
            assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}

    run(test)


def test_engine_that_an_operator_has_drained_stays_so_if_it_is_not_restarted(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0") as c:
            posting = asyncio.create_task(c.deployment.post(max_tokens=200, stream=True, n=2))
            registry = c.deployment.router.registry
            await until(lambda: registry.get("d0").num_active == 1)
            async with RouterOperator(c.deployment.url) as router:
                await router.drain("d0", DrainOrder(seconds=None))
                told = await c.restart("d0", drain_s=0.5)
                assert told[-1].failed
                assert registry.word("d0").until is None
                await router.drain("d0", DrainOrder(seconds=0))
                assert registry.get("d0").spec.state == "draining"
                await router.undo_drain("d0")
                assert registry.get("d0").spec.state == "ready"
            assert (await posting)[0] == 200

    run(test)


def test_engine_is_not_idle_while_another_computes_a_prompt_for_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with deployed(1, 1, PATIENT) as d:
            d.prefills[0].script("delay(1)")
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.prefills[0].num_in_progress == 1)
            name = next(i.instance_id for i in d.router.registry if i.spec.role == "decode")
            async with RouterOperator(d.url) as router:
                supervisor = Supervisor([], tmp_path, lambda child: None, lambda: None)
                restart = RollingRestart(supervisor, router, {"d0": [name]})
                with pytest.raises(RestartError, match=r"\(1 requests are left\)"):
                    await restart._drain("d0", 0.3)
                await restart._drain("d0", 20)
            assert (await posting)[0] == 200

    run(test)


def test_long_answers_move_and_hold_no_restart_up(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1") as c:
            sent = {"max_tokens": 1000, "temperature": 0, "stream": True}
            posts = [asyncio.create_task(c.deployment.post(**sent)) for _ in range(4)]
            registry = c.deployment.router.registry
            while not all(registry.get(name).num_active for name in ("d0", "d1")):
                await asyncio.sleep(0.01)
            pids = [c.pid(name) for name in ("d0", "d1")]
            told = await c.restart("d0", "d1")
            assert not [line for line in told if line.failed], told
            assert not all(post.done() for post in posts)
            assert not {c.pid(name) for name in ("d0", "d1")} & set(pids)
            for status, _, body in await asyncio.gather(*posts):
                got = events(body)
                assert (status, got[-1], len(text(got).split())) == (200, "[DONE]", 1000)
                assert got[-2]["provenance"]["resumed"] == 0

    run(test)


def test_with_no_time_to_drain_an_engine_is_restarted_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0") as c:
            before = c.pid("d0")
            told = await c.restart("d0", drain_s=0)
            assert [line.text.split()[1] for line in told] == ["restarting", "ready"]
            assert c.pid("d0") != before

    run(test)


def test_engine_that_is_up_is_said_to_be_watched(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", lasts_s=1000) as c:
            told = []
            async for line in ask_to_restart(c.socket, RestartOrder(("d0",), 0)):
                told.append(line.text)
                if re.fullmatch(r"d0: up, and must last \d+ s more", line.text):
                    pid = c.pid("d0")
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
            assert len(told) == 3
            assert told[0] == "d0: restarting"
            assert told[2].startswith("d0 came up and did not stay so (killed by SIGKILL")

    run(test)


def test_engine_that_does_not_come_back_ends_the_round(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1") as c:
            child = c.child("d0")
            child.spec = ChildSpec("d0", ("/no/such/program",), {}, child.spec.is_up)
            other = c.pid("d1")
            told = await c.restart("d0", "d1")
            assert told[-1].failed
            assert told[-1].text.startswith("d0 did not come up: cannot be started")
            assert c.pid("d1") == other
            told = await c.restart("d0")
            assert "d0 is backoff, not ready" in told[0].text

    run(test)


def test_engine_that_ends_at_its_first_request_takes_no_other_with_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1", lasts_s=1000) as c:
            d0, other, done = c.child("d0"), c.pid("d1"), asyncio.Event()
            d0.spec = replace(d0.spec, env={"DIES": ""})
            before = d0.pid

            async def client() -> None:
                await until(lambda: d0.pid != before and d0.state is State.READY)
                while not done.is_set():
                    await c.deployment.post()

            clients = [asyncio.create_task(client()) for _ in range(2)]
            told = await c.restart("d0", "d1")
            done.set()
            await asyncio.gather(*clients)
            assert told[-1].failed
            # It may have been up for less time than lies between two looks.
            ways = ("d0 came up and did not stay so (", "d0 did not come up: ")
            assert told[-1].text.startswith(tuple(f"{way}exited with code 3" for way in ways))
            assert [line.text for line in told[:2]] == ["d0: draining", "d0: restarting"]
            assert all(line.text.startswith("d0: up, and must last ") for line in told[2:-1])
            assert c.pid("d1") == other

    run(test)


class Meddler(RouterOperator):
    """Before it has an engine drained, ``meanwhile`` happens."""

    async def meanwhile(self, instance_id: str) -> None: ...

    async def drain(self, instance_id: str, order: DrainOrder) -> None:
        await self.meanwhile(instance_id)
        await super().drain(instance_id, order)


async def roll(c: Cluster, router: RouterOperator, *names: str) -> list[str]:
    rolling = RollingRestart(c.supervisor, router, {name: [name] for name in names}, 0.0)
    return [line async for line in rolling.run([c.child(name) for name in names], 30)]


def test_engine_that_ends_while_the_next_one_is_drained_takes_it_not_with_it(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1") as c:

            class Kills(Meddler):
                async def meanwhile(self, instance_id: str) -> None:
                    child = c.child("d0")
                    if instance_id == "d1" and not child.num_crashes:
                        os.kill(child.pid or 0, signal.SIGKILL)
                        await until(lambda: child.num_crashes == 1)
                        await until(lambda: child.state is State.READY)

            other = c.pid("d1")
            async with Kills(c.deployment.url) as router:
                with pytest.raises(
                    RestartError, match=r"did not stay so \(killed by SIGKILL\): see"
                ):
                    await roll(c, router, "d0", "d1")
            assert c.pid("d1") == other

    run(test)


def test_router_that_is_started_anew_does_not_end_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows its engines after their next heartbeats."""

    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0", "d1") as c:

            class Forgets(Meddler):
                num_left = 2

                async def meanwhile(self, instance_id: str) -> None:
                    if self.num_left:
                        self.num_left -= 1
                        raise NotFound(f"404: {instance_id} has not registered here")

            before = [c.pid(name) for name in ("d0", "d1")]
            async with Forgets(c.deployment.url) as router:
                await roll(c, router, "d0", "d1")
                assert not set(before) & {c.pid(name) for name in ("d0", "d1")}
                router.num_left = 1000
                monkeypatch.setattr(restart, "KNOWN_AGAIN_S", 0.0)
                with pytest.raises(RestartError, match="d0 has not registered here"):
                    await roll(c, router, "d0")

    run(test)


def test_unknown_names_and_a_second_restart_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, "p0", "d0") as c:
            [refused] = await c.restart("router")
            assert refused == RestartProgress(
                "no engines ['router'] here; there are ['d0', 'p0']", True
            )
            post = asyncio.create_task(c.deployment.post(max_tokens=100, stream=True))
            d0 = c.deployment.router.registry.get("d0")
            while not d0.num_active:
                await asyncio.sleep(0.01)
            first = asyncio.create_task(c.restart("d0"))
            while d0.spec.state != "draining":
                await asyncio.sleep(0.01)
            [refused] = await c.restart("p0")
            assert refused == RestartProgress(
                "a restart is in progress: wait until it has ended", True
            )
            assert (await post)[0] == 200
            assert not (await first)[-1].failed

    run(test)


def test_drained_engine_gets_no_requests_until_it_starts_anew() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            url = f"{d.url}{registration.PATH}/late"
            body = {"url": d.prefills[0].url, "role": "decode", "epoch": "one"}

            async def is_available(**changes: str) -> bool:
                async with d.http.put(url, json={**body, **changes}) as answer:
                    assert answer.status == 200
                return bool(d.router.registry.get("late").spec.state == "ready")

            async with d.http.put(f"{url}/drain") as answer:
                assert answer.status == 404
                assert "has not registered" in json.loads(await answer.read())["error"]["message"]
            assert await is_available()
            async with d.http.put(f"{url}/drain") as answer:
                assert answer.status == 204
            assert not await is_available()  # its own heartbeat does not end it
            assert await is_available(epoch="two")
            async with d.http.put(f"{url}/drain", json={"seconds": 0}) as answer:
                assert answer.status == 204
            assert await is_available(epoch="two")  # who asked does not ask any more
            await d.http.delete(url)

    run(test)


def test_socket_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = socket_path(8000)
    assert path == tmp_path / f"vllm-pd-{os.geteuid()}" / "up-8000.sock"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        socket_path(8000)


def test_nobody_to_ask_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="give the port of its router with --port"):
            async for _ in ask_to_restart(tmp_path / "none", RestartOrder((), 1)):
                pass

    run(test)

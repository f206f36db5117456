# SPDX-License-Identifier: Apache-2.0
"""What the workers of a router have in common, while workers and engines come and go."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from tests.full_disk import room_for
from tests.router.harness import FAST, run, until
from tests.unit.router.test_snapshot import instance
from vllm_ascend_pd.operating import MoveOrder
from vllm_ascend_pd.processes.child import Child, ChildSpec, State
from vllm_ascend_pd.registration import TTL_S
from vllm_ascend_pd.router import config as config_module
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.config import pack, unpack
from vllm_ascend_pd.router.discovery import registered
from vllm_ascend_pd.router.discovery.registered import SOURCE, Roster
from vllm_ascend_pd.router.instances import InstanceSpec, Word, Words
from vllm_ascend_pd.router.snapshot import Snapshot
from vllm_ascend_pd.router.workers import keeper as keeper_module
from vllm_ascend_pd.router.workers.keeper import Keeper
from vllm_ascend_pd.router.workers.worker import (
    CONFIG_FILE,
    WRONG_CONFIG,
    KeeperLink,
    RegisteredEngines,
    main,
)

COUNTED = Snapshot(counters={"requests": [((), 7.0)]})


def child(keeper: Keeper, name: str) -> Child:
    return Child(ChildSpec(f"worker {name}", (), {}, keeper.workers[name].is_up), None)


def test_worker_that_ends_while_it_is_asked_counts_once(tmp_path: Path) -> None:
    async def test() -> None:
        keeper = Keeper(tmp_path, replace(FAST, num_workers=1))
        ended = child(keeper, "0")

        async def snapshot(request: web.Request) -> web.Response:
            if is_ending:
                ended.state = State.STOPPED
                keeper.changed(ended)
            return web.Response(body=msgspec.json.encode(COUNTED))

        app = web.Application()
        app.router.add_get("/snapshot", snapshot)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "0")).start()
        keeper.workers["0"].announced = True
        is_ending = False
        assert (await keeper.collect()).counters["requests"] == [((), 7.0)]
        is_ending = True
        assert (await keeper.collect()).counters["requests"] == [((), 7.0)]
        assert (await keeper.collect()).counters["requests"] == [((), 7.0)]
        await keeper.close()
        await runner.cleanup()

    run(test)


def test_legs_to_an_engine_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    """Also those that a worker has counted that has ended; not while one has yet to tell."""

    async def test() -> None:
        keeper = Keeper(tmp_path, replace(FAST, num_workers=1))
        worker = keeper.workers["0"]
        legs = [(("d0", "decode", "ok"), 3.0), (("d1", "decode", "ok"), 4.0)]
        worker.last = Snapshot(counters={"legs": legs})
        ended = child(keeper, "0")
        ended.state = State.STOPPED
        keeper.changed(ended)
        assert (await keeper.collect()).counters["legs"] == legs

        async def snapshot(request: web.Request) -> web.Response:
            return web.Response(body=msgspec.json.encode(Snapshot(instances=[instance("d1")])))

        app = web.Application()
        app.router.add_get("/snapshot", snapshot)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "0")).start()
        worker.announced = True
        assert (await keeper.collect()).counters["legs"] == legs[1:]
        await keeper.close()
        await runner.cleanup()

    run(test)


def test_refreshing_goes_on_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "REFRESH_S", 0.0)
    refreshed = asyncio.Event()

    class Failing:
        is_first = True

        async def refresh(self) -> None:
            if self.is_first:
                self.is_first = False
                raise KeyError("gone")
            refreshed.set()

    async def test() -> None:
        refreshing = asyncio.create_task(keeper_module._refresh(Failing()))  # type: ignore[arg-type]
        await asyncio.wait_for(refreshed.wait(), 5)
        refreshing.cancel()
        await asyncio.gather(refreshing, return_exceptions=True)

    run(test)


def test_router_that_was_stopped_itself_takes_nobody_for_silent() -> None:
    told: list[int] = []

    async def hear(known: list[InstanceSpec], words: Words) -> None:
        told.append(len(known))

    async def test() -> None:
        roster = Roster(hear)
        url = "http://127.0.0.1:1"
        await roster.beat(InstanceSpec(instance_id="a", url=url, role="both", source=SOURCE))
        now = time.monotonic()
        await roster.expire(now)
        now += 10 * TTL_S
        await roster.expire(now)
        assert told == [1]
        for later_s in range(1, round(TTL_S)):
            await roster.expire(now + later_s)
        assert told == [1]
        await roster.expire(now + TTL_S + 1)
        assert told == [1, 0]

    run(test)


def test_engines_that_are_silent_go_together_and_one_that_is_heard_meanwhile_is_back() -> None:
    specs = {
        name: InstanceSpec(instance_id=name, url=f"http://{name}:1", role="both", source=SOURCE)
        for name in ("silent", "leaving", "back")
    }
    told: list[list[str]] = []

    async def hear(known: list[InstanceSpec], words: Words) -> None:
        told.append([spec.instance_id for spec in known])
        if not told[-1]:
            await roster.leave("leaving", None)
            await roster.beat(specs["back"])

    roster = Roster(hear)

    async def test() -> None:
        for spec in specs.values():
            await roster.beat(spec)
        await roster.expire(time.monotonic() + TTL_S + 1)

    run(test)
    assert told[3:] == [[], ["back"]]


def test_oldest_words_are_forgotten_where_engines_have_ever_new_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registered, "MAX_WORDS", 2)
    told: list[Words] = []

    async def hear(known: list[InstanceSpec], words: Words) -> None:
        told.append(words)

    async def test() -> None:
        roster = Roster(hear)
        for name in ("pod-1", "pod-2", "pod-1", "pod-3"):
            role = "decode" if told else "prefill"
            await roster.say(name, name, {"drained": True, "role": role})

    run(test)
    assert list(told[-1]) == ["pod-1", "pod-3"]


def test_words_that_two_workers_say_at_a_time_are_both_heard() -> None:
    """Neither knows yet of the other's."""
    told: list[Words] = []

    async def hear(known: list[InstanceSpec], words: Words) -> None:
        told.append(words)

    async def test() -> None:
        roster = Roster(hear)
        await roster.say("pod", "first", {"drained": True})
        await roster.say("pod", "first", {"role": "prefill"})
        assert told[-1] == {"pod": Word(drained=True, epoch="first", role="prefill")}
        await roster.say("pod", "second", {"until": None})
        assert told[-1] == {"pod": Word(epoch="second", role="prefill")}

    run(test)


def test_a_worker_of_another_version_than_its_keeper_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is started again once the package has been replaced."""

    @dataclass(frozen=True, slots=True)
    class OlderQueueing:
        max_requests: int = 1

    packed = pack(FAST)
    assert unpack(packed) == FAST
    (tmp_path / CONFIG_FILE).write_bytes(packed)
    monkeypatch.setattr(config_module, "Queueing", OlderQueueing)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path), "0"])
    with pytest.raises(SystemExit, match=str(WRONG_CONFIG)):
        main()
    assert "started by another version of vllm-pd" in capsys.readouterr().err


def test_workers_find_their_configuration_once_a_full_disk_has_room_again(tmp_path: Path) -> None:
    async def test() -> None:
        keeper = Keeper(tmp_path, replace(FAST, num_workers=1))
        crashed = child(keeper, "0")
        crashed.state = State.BACKOFF
        with room_for(10):
            keeper.changed(crashed)
        assert not (tmp_path / CONFIG_FILE).exists()
        keeper.changed(crashed)
        assert unpack((tmp_path / CONFIG_FILE).read_bytes()) == replace(FAST, num_workers=1)
        await keeper.close()

    run(test)


class Worker:
    """As its keeper reaches it."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        """Of the engines that it was told."""
        self.goes_on = asyncio.Event()
        self.hangs = False
        """When it is asked what it has counted, until it ``goes_on``."""
        self.num_moves = 0
        self._runner: web.AppRunner | None = None

    async def start(self, socket: Path) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/snapshot", self._snapshot)
        app.router.add_put("/registered", self._registered)
        app.router.add_post("/moves", self._move)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.UnixSite(self._runner, str(socket), backlog=1000).start()

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _snapshot(self, request: web.Request) -> web.Response:
        if self.hangs:
            await self.goes_on.wait()
        return web.Response(body=msgspec.json.encode(COUNTED))

    async def _registered(self, request: web.Request) -> web.Response:
        told = msgspec.json.decode(await request.read(), type=RegisteredEngines)
        self.versions.append(told.version)
        await self.goes_on.wait()
        return web.Response()

    async def _move(self, request: web.Request) -> web.Response:
        self.num_moves += 1
        await self.goes_on.wait()
        return web.Response(body=b"[]")


def test_worker_is_told_at_once_of_engines_that_register_while_it_is_told(tmp_path: Path) -> None:
    async def test() -> None:
        keeper, worker, num_engines = Keeper(tmp_path, FAST), Worker(), 100
        await worker.start(tmp_path / "0")
        keeper.workers["0"].announced = True
        specs = [
            InstanceSpec(instance_id=f"e{i}", url=f"http://e{i}:1", role="both", source=SOURCE)
            for i in range(num_engines)
        ]
        beats = [asyncio.ensure_future(keeper._registered.beat(spec)) for spec in specs]
        await until(lambda: bool(worker.versions))
        assert not any(beat.done() for beat in beats)
        worker.goes_on.set()
        await asyncio.gather(*beats)
        assert worker.versions[-1] == keeper.workers["0"].told == num_engines
        assert len(worker.versions) <= 2
        await keeper.close()
        await worker.stop()

    run(test)


def test_worker_that_does_not_hear_of_engines_keeps_nobody_who_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "WORKER_TIMEOUT_S", 0.1)

    async def test() -> None:
        keeper, worker = Keeper(tmp_path, FAST), Worker()
        await worker.start(tmp_path / "0")
        keeper.workers["0"].announced = True
        specs = [
            InstanceSpec(instance_id=f"e{i}", url=f"http://e{i}:1", role="both", source=SOURCE)
            for i in range(100)
        ]
        await asyncio.gather(*(keeper._registered.beat(spec) for spec in specs))
        assert len(worker.versions) == 1
        assert keeper.workers["0"].told == 0
        worker.goes_on.set()
        await keeper.refresh()
        assert keeper.workers["0"].told == worker.versions[-1] == 100
        await keeper.close()
        await worker.stop()

    run(test)


def test_who_asks_for_counts_waits_for_no_worker_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And they are those that it told last."""
    monkeypatch.setattr(keeper_module, "WORKER_TIMEOUT_S", 0.2)

    async def test() -> None:
        keeper, worker = Keeper(tmp_path, replace(FAST, num_workers=1)), Worker()
        await worker.start(tmp_path / "0")
        known = keeper.workers["0"]
        known.announced = True
        await keeper.refresh()
        worker.hangs = True
        for _ in range(keeper_module.NUM_SILENT):
            await keeper.refresh()
        asking = asyncio.gather(*(keeper.collect() for _ in range(100)))
        for counted in await asyncio.wait_for(asking, 5):
            assert counted.counters["requests"] == [((), 7.0)]
        worker.hangs = False
        await keeper.refresh()
        assert known.num_silent == 0
        await keeper.close()
        worker.goes_on.set()
        await worker.stop()

    run(test)


def test_moves_of_hundreds_leave_room_for_other_questions(tmp_path: Path) -> None:
    async def test() -> None:
        keeper, worker, num_moves = Keeper(tmp_path, FAST), Worker(), 150
        await keeper.start()
        await worker.start(tmp_path / "0")
        keeper.workers["0"].announced = True
        link = KeeperLink(tmp_path, "asks")
        await link.open(Router(FAST))
        order = MoveOrder(to=None)
        moves = [asyncio.ensure_future(link.move(f"r{i}", order)) for i in range(num_moves)]
        await until(lambda: worker.num_moves == num_moves, "all moves under way")
        assert (await link.snapshot()).counters["requests"] == [((), 7.0)]
        assert keeper.workers["0"].num_silent == 0
        worker.goes_on.set()
        await asyncio.gather(*moves)
        await link.close()
        await keeper.close()
        await worker.stop()

    run(test)

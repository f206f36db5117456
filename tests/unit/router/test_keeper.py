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

from tests.router.harness import FAST, run
from vllm_ascend_pd.processes.child import Child, ChildSpec, State
from vllm_ascend_pd.registration import TTL_S
from vllm_ascend_pd.router import config as config_module
from vllm_ascend_pd.router.config import pack, unpack
from vllm_ascend_pd.router.discovery import registered
from vllm_ascend_pd.router.discovery.registered import SOURCE, Roster
from vllm_ascend_pd.router.instances import InstanceSpec, Word, Words
from vllm_ascend_pd.router.snapshot import Snapshot
from vllm_ascend_pd.router.workers import keeper as keeper_module
from vllm_ascend_pd.router.workers.keeper import Keeper
from vllm_ascend_pd.router.workers.worker import CONFIG_FILE, WRONG_CONFIG, main

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


def test_engine_leaves_or_is_heard_while_others_expire() -> None:
    specs = {
        name: InstanceSpec(instance_id=name, url=f"http://{name}:1", role="both", source=SOURCE)
        for name in ("silent", "leaving", "back")
    }
    told: list[list[str]] = []

    async def hear(known: list[InstanceSpec], words: Words) -> None:
        told.append([spec.instance_id for spec in known])
        if told[-1] == ["leaving", "back"]:
            await roster.leave("leaving", None)
            roster._last_heard["back"] += 2 * TTL_S

    roster = Roster(hear)

    async def test() -> None:
        for spec in specs.values():
            await roster.beat(spec)
        await roster.expire(time.monotonic() + TTL_S + 1)

    run(test)
    assert told[-1] == ["back"]


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
            await roster.say(name, Word(drained=True, epoch=name, role=role))

    run(test)
    assert list(told[-1]) == ["pod-1", "pod-3"]


def test_a_worker_of_another_version_than_its_keeper_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is started again once the package has been replaced."""

    @dataclass(frozen=True, slots=True)
    class OlderLimits:
        body_bytes: int = 1

    packed = pack(FAST)
    assert unpack(packed) == FAST
    (tmp_path / CONFIG_FILE).write_bytes(packed)
    monkeypatch.setattr(config_module, "Limits", OlderLimits)
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path), "0"])
    with pytest.raises(SystemExit, match=str(WRONG_CONFIG)):
        main()
    assert "started by another version of vllm-pd" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""A new target, from `vllm-pd scale` to whoever keeps it, and word of it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.full_disk import room_for
from vllm_ascend_pd.cluster.restart import RollingRestart
from vllm_ascend_pd.cluster.scaling import fleet_status
from vllm_ascend_pd.cluster.scaling.fleet_status import EngineStatus, FleetStatus, follow
from vllm_ascend_pd.cluster.scaling.target import Ratio, Target
from vllm_ascend_pd.cluster.up_socket import (
    RestartOrder,
    ScaleOrder,
    Scaling,
    UpSocket,
    ask_to_restart,
    ask_to_scale,
    socket_path,
)
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.processes.child import Child

NO_RESTART = cast("RollingRestart", None)
URL = "http://127.0.0.1:1"


def ask(scaling: Scaling | None, *orders: ScaleOrder) -> list[str]:
    """The answers of a socket that runs."""

    async def run() -> list[str]:
        socket = UpSocket(socket_path(8123), {}, NO_RESTART, None, scaling)
        await socket.start()
        try:
            return [await ask_to_scale(socket_path(8123), order) for order in orders]
        finally:
            await socket.close()

    return asyncio.run(run())


@pytest.fixture
def scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scaling:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    made = Scaling(tmp_path / "target.json", URL)
    made.aim(Target(Ratio(1, 2), 3))
    return made


def test_an_order_changes_what_it_names(scaling: Scaling) -> None:
    assert ask(scaling, ScaleOrder(maximum=6)) == [URL]
    assert scaling.target() == Target(Ratio(1, 2), 6)
    ask(scaling, ScaleOrder(ratio=Ratio(2, 1)), ScaleOrder())
    assert scaling.target() == Target(Ratio(2, 1), 6)


def test_a_wrong_order_is_refused_and_changes_nothing(scaling: Scaling) -> None:
    with pytest.raises(ConfigError, match="--max-instances: 1 is less than one P and one D"):
        ask(scaling, ScaleOrder(maximum=1))
    with pytest.raises(ConfigError, match="--pd-ratio: 0:1 has a role without an engine"):
        ask(scaling, ScaleOrder(ratio=Ratio(0, 1)))
    assert scaling.target() == Target(Ratio(1, 2), 3)


async def replaced(scaling: Scaling, *names: str) -> list[str]:
    """The answers to an order to replace them."""
    socket = UpSocket(socket_path(8123), {}, NO_RESTART, None, scaling)
    await socket.start()
    try:
        order = RestartOrder(names, drain_s=30)
        return [one.text async for one in ask_to_restart(socket_path(8123), order)]
    finally:
        await socket.close()


def test_orders_that_a_full_disk_does_not_take_say_so_and_change_nothing(scaling: Scaling) -> None:
    full = f"the target in {scaling.target_file} cannot be written: "
    with room_for(10):
        with pytest.raises(ConfigError, match=full):
            ask(scaling, ScaleOrder(maximum=6))
        (text,) = asyncio.run(replaced(scaling))
    assert text.startswith(full)
    assert scaling.target() == Target(Ratio(1, 2), 3)


def test_orders_without_a_target_to_change_say_so(scaling: Scaling) -> None:
    scaling.target_file.unlink()
    with pytest.raises(ConfigError, match=f"in {scaling.target_file} cannot be read: "):
        ask(scaling, ScaleOrder(maximum=6))


def test_a_restart_is_a_new_generation_of_all_engines(scaling: Scaling) -> None:
    told = asyncio.run(replaced(scaling, "engine-0"))
    assert told == ["with --ray all engines are replaced: give --rolling"]
    assert scaling.target().generation == 0
    (text,) = asyncio.run(replaced(scaling))
    assert "the driver of the engines is away" in text
    assert scaling.target() == Target(Ratio(1, 2), 3, generation=1, drain_s=30)
    ask(scaling, ScaleOrder(maximum=6))
    assert scaling.target() == Target(Ratio(1, 2), 6, generation=1)


@pytest.mark.usefixtures("scaling")
def test_an_up_that_ends_while_it_restarts_an_engine_is_named() -> None:
    class Drains:
        async def run(self, engines: list[str], drain_s: float) -> AsyncIterator[str]:
            yield "decode-0: draining"
            await asyncio.Event().wait()

    async def run() -> None:
        path, engine = socket_path(8123), cast("Child", "decode-0")
        socket = UpSocket(path, {"decode-0": engine}, cast("RollingRestart", Drains()))
        await socket.start()
        answer = ask_to_restart(path, RestartOrder(("decode-0",), 600))
        assert (await anext(answer)).text == "decode-0: draining"
        await socket.close()
        with pytest.raises(ConfigError, match="has ended before it had answered"):
            await anext(answer)

    asyncio.run(run())


@pytest.mark.usefixtures("scaling")
def test_engines_of_one_host_are_those_they_are() -> None:
    with pytest.raises(ConfigError, match="was not started with --ray"):
        ask(None, ScaleOrder(maximum=3))


@pytest.mark.usefixtures("scaling")
def test_without_a_running_up_the_port_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="give the port of its router with --port"):
        asyncio.run(ask_to_scale(socket_path(8124), ScaleOrder()))


def status(step: int, *states: str, is_settled: bool = False) -> FleetStatus:
    engines = tuple(
        EngineStatus(f"e{n}", state, "decode" if state == "serving" else None, "", "")
        for n, state in enumerate(states)
    )
    return FleetStatus(Target(Ratio(1, 1), 2), engines, is_settled, step)


def followed(told: list[FleetStatus | None], *, until_settled: bool) -> list[str]:
    """Of a driver that says these things one after another."""
    left = list(told)

    async def engines(request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(left.pop(0)))

    async def run() -> list[str]:
        app = web.Application()
        app.router.add_get("/engines", engines)
        async with TestServer(app) as server:
            url = str(server.make_url(""))
            return [line async for line in follow(url, until_settled=until_settled)]

    lines = asyncio.run(run())
    assert not left
    return lines


def test_what_changes_is_told_until_a_step_that_knows_the_target_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_ascend_pd.cluster.scaling.fleet_status.POLL_S", 0)
    lines = followed(
        [
            None,
            status(7, "serving", is_settled=True),
            status(8, "serving", is_settled=True),
            status(9, "serving", "starting"),
            status(10, "serving", "serving", is_settled=True),
        ],
        until_settled=True,
    )
    assert lines == [
        "0 P and 1 D serve; wanted are 1:1, 2 engines at most",
        "e1 starting",
        "0 P and 2 D serve; wanted are 1:1, 2 engines at most",
    ]


def test_what_there_is_is_told_once() -> None:
    assert followed([status(0, "serving", "waiting")], until_settled=False) == [
        "0 P and 1 D serve; wanted are 1:1, 2 engines at most",
        "e1 waiting",
    ]


async def follow_driver(answer: Callable[[web.Request], Awaitable[web.Response]]) -> None:
    app = web.Application()
    app.router.add_get("/engines", answer)
    async with TestServer(app) as server:
        async for _ in follow(str(server.make_url("")), until_settled=True):
            pass


def test_a_driver_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_status, "ANSWER_S", 0.1)

    async def hang(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(ConfigError, match=r"does not answer within 0\.1 s: see ray\.log"):
        asyncio.run(asyncio.wait_for(follow_driver(hang), 20))


def test_a_driver_of_another_version_is_named() -> None:
    async def engines(request: web.Request) -> web.Response:
        return web.json_response({"engines": [], "step": 1})

    with pytest.raises(ConfigError, match="is of another version than this command"):
        asyncio.run(follow_driver(engines))


def test_a_driver_that_is_away_is_named() -> None:
    async def run() -> None:
        async for _ in follow(URL, until_settled=True):
            pass

    with pytest.raises(ConfigError, match=r"driver of the engines is away .* see ray.log"):
        asyncio.run(run())

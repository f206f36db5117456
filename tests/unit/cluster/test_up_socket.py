# SPDX-License-Identifier: Apache-2.0
"""The socket of a ``vllm-pd up``, and others of the same router's port."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web

from vllm_ascend_pd.cluster.restart import RollingRestart
from vllm_ascend_pd.cluster.up_socket import (
    RestartOrder,
    RestartProgress,
    ScaleOrder,
    UpSocket,
    ask_to_restart,
    ask_to_scale,
    token_path,
)
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.processes.child import Child


def made(path: Path, engine: str, token: Path | None = None) -> UpSocket:
    engines = {engine: cast("Child", None)} if engine else {}
    return UpSocket(path, engines, cast("RollingRestart", None), token)


async def told(path: Path, *names: str) -> list[RestartProgress]:
    return [one async for one in ask_to_restart(path, RestartOrder(names, 0.0))]


def test_a_second_one_is_refused_and_takes_nothing_from_the_first(tmp_path: Path) -> None:
    path, token = tmp_path / "up", tmp_path / "token"

    async def test() -> None:
        first, second = made(path, "decode-0", token), made(path, "decode-1")
        await first.start()
        with pytest.raises(ConfigError, match="give this router another port"):
            await second.start()
        await second.close()
        assert token_path(path).readlink() == token
        [progress] = await told(path, "nobody")
        assert "there are ['decode-0']" in progress.text
        await first.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(test())


def test_who_ends_leaves_the_socket_of_another_one(tmp_path: Path) -> None:
    """Of one that could not see that it listens."""
    path = tmp_path / "up"

    async def test() -> None:
        first, second = made(path, "decode-0"), made(path, "decode-1", tmp_path / "token")
        await first.start()
        path.unlink()
        await second.start()
        await first.close()
        assert token_path(path).is_symlink()
        [progress] = await told(path, "nobody")
        assert "there are ['decode-1']" in progress.text
        await second.close()

    asyncio.run(test())


def test_a_restart_where_no_engine_runs_says_so(tmp_path: Path) -> None:
    async def test() -> None:
        socket = made(tmp_path / "up", "")
        await socket.start()
        [progress] = await told(tmp_path / "up")
        assert progress.failed
        assert "runs no engines" in progress.text
        await socket.close()

    asyncio.run(test())


class LaterRestart(msgspec.Struct):
    """Of a version to come."""

    names: tuple[str, ...] = ()
    drain_s: float = 0.0
    reason: str = ""


class LaterScale(msgspec.Struct):
    nodes: int = 2


def test_a_command_of_another_version_hears_of_it(tmp_path: Path) -> None:
    path = tmp_path / "up"

    async def ask(restart: Any, scale: Any) -> None:
        with pytest.raises(ConfigError, match="is of another version than this command"):
            [_ async for _ in ask_to_restart(path, restart)]
        with pytest.raises(ConfigError, match="is of another version than this command"):
            await ask_to_scale(path, scale)

    async def test() -> None:
        socket = made(path, "decode-0")
        await socket.start()
        await ask(LaterRestart(), LaterScale())
        await socket.close()
        runner = web.AppRunner(web.Application())  # an earlier one, which has none of these
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        await ask(RestartOrder((), 0.0), ScaleOrder())
        await runner.cleanup()

    asyncio.run(test())

# SPDX-License-Identifier: Apache-2.0
"""A router and scripted engines in one event loop, and the proof that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.router.config import Probes, Retries, RouterConfig, Timeouts
from vllm_ascend_pd.router.server import RouterServer, bind

FAST = RouterConfig(
    port=0,
    policy="round-robin",
    access_log="off",
    drain_s=1.0,
    timeouts=Timeouts(
        connect_s=0.5,
        keep_alive_s=0.6,
        body_s=0.6,
        prefill_s=1.0,
        first_token_s=1.0,
        idle_s=0.4,
        answer_s=2.0,
    ),
    probes=Probes(interval_s=0.05, timeout_s=0.2, failure_threshold=3),
    retries=Retries(max_attempts=3),
)
STRICT = replace(FAST, require_prefill=True)
PATIENCE_S = 20.0
JSON_TYPE = {"Content-Type": "application/json"}
JSON_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LOOPBACK_6 = Path("/proc/net/if_inet6")
needs_ipv6 = pytest.mark.skipif(
    not LOOPBACK_6.exists() or f"{1:032x}" not in LOOPBACK_6.read_text(),
    reason="this host has no ::1",
)
REFRESH_S = 0.1
"""Instead of a second: files that changed, roles, loads."""


@dataclass
class Deployment:
    """A running router with its engines."""

    server: RouterServer
    url: str
    prefills: list[ScriptedEngine]
    decodes: list[ScriptedEngine]
    http: aiohttp.ClientSession
    expected_leaks: set[str] = field(default_factory=set)

    @property
    def router(self) -> Any:
        return self.server.router

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def count(self, name: str, **labels: str) -> float:
        return float(self.router.metrics.snapshot().sample(name, **labels))

    def hurry(self) -> None:
        """What a test is about has happened: the rest of all answers at once."""
        for one in (*self.prefills, *self.decodes):
            one.token_s = 0

    async def post(
        self, path: str = "/v1/completions", *, headers: dict[str, str] | None = None, **fields: Any
    ) -> tuple[int, Any, bytes]:
        body = {"model": "tiny", "prompt": "Hello, my name is", "max_tokens": 4, **fields}
        if path.endswith("chat/completions"):
            body.pop("prompt")
            body.setdefault("messages", [{"role": "user", "content": "Hello"}])
        async with self.http.post(self.url + path, json=body, headers=headers) as response:
            return response.status, response.headers, await response.read()


@asynccontextmanager
async def deployed(
    num_prefills: int = 1,
    num_decodes: int = 1,
    config: RouterConfig = FAST,
    ready: bool = True,
    **engine: Any,
) -> AsyncIterator[Deployment]:
    """Started, and ready if told so; at the end stopped, with nothing left."""
    files_before, tasks_before = num_sockets(), asyncio.all_tasks()
    prefills = [ScriptedEngine(f"p{i}", **engine) for i in range(num_prefills)]
    decodes = [ScriptedEngine(f"d{i}", **engine) for i in range(num_decodes)]
    for one in (*prefills, *decodes):
        await one.start()
    config = replace(
        config,
        prefills=(*config.prefills, *(one.url for one in prefills)),
        decodes=(*config.decodes, *(one.url for one in decodes)),
    )
    sock = bind(config.host, 0)
    server = RouterServer(config)
    with patch("vllm_ascend_pd.router.server.REFRESH_S", REFRESH_S):
        await server.start(sock)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            # A connection that rests may be closed as the next request is sent.
            connector = aiohttp.TCPConnector(force_close=True)
            async with aiohttp.ClientSession(connector=connector) as http:
                deployment = Deployment(server, url, prefills, decodes, http)
                router = server.router
                if ready:
                    known = router.prober.models
                    await until(lambda: all(i in known for i in router.registry), "ready")
                yield deployment
                await nothing_in_progress(deployment)
        finally:
            await server.stop()
            for one in (*prefills, *decodes):
                await one.stop()
    others = asyncio.all_tasks() - tasks_before
    await until(lambda: all(task.done() for task in others), f"tasks left: {others}")
    await until(lambda: num_sockets() <= files_before, "sockets left")


async def nothing_in_progress(deployment: Deployment) -> None:
    """No request, leg, exchange or token is counted any more, on either side."""
    router = deployment.router
    metrics = router.metrics
    await until(lambda: metrics.num_requests == 0, "requests left")
    assert (metrics.num_waiting, metrics.num_queued()) == (0, 0)
    for instance in router.registry:
        await until(lambda i=instance: i.num_active == 0, "legs left")  # type: ignore[misc]
        assert instance.num_active_tokens == 0
    engines = (*deployment.prefills, *deployment.decodes)
    await until(lambda: not any(e.num_in_progress for e in engines), "engines still work")


async def until(
    condition: Callable[[], bool], what: str = "condition", patience_s: float = PATIENCE_S
) -> None:
    """Wait for something that must come true soon."""
    loop = asyncio.get_running_loop()
    end = loop.time() + patience_s
    while not condition():
        assert loop.time() < end, what
        await asyncio.sleep(0.005)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """An asynchronous test on a fresh event loop."""
    asyncio.run(asyncio.wait_for(test(), 60))


def num_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def events(body: bytes) -> list[Any]:
    """Of a stream: each event's JSON, or its text; without comments."""
    assert body.endswith(b"\n\n"), body[-200:]
    found: list[Any] = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


async def raw_exchange(port: int, data: bytes, timeout_s: float = PATIENCE_S) -> bytes:
    """Send these bytes, and read until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

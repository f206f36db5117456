# SPDX-License-Identifier: Apache-2.0
"""Routers that share nothing but what engines tell each of them: registrations and KV events."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq.asyncio

from tests.router.harness import FAST, Deployment, deployed, events, free_port, run, until
from tests.router.scripted_engine import ScriptedEngine
from tests.router.test_discovery import described, register
from tests.router.test_prefix_aware import Publisher, index
from tests.unit.router.test_prefix_index import BLOCK, stored
from vllm_ascend_pd import registration
from vllm_ascend_pd.router.prefix.index import chain

NAMES = ("p0", "p1", "p2", "d0", "d1", "d2")


@dataclass
class CachingEngine:
    """It keeps every prompt that it gets, and tells of it."""

    engine: ScriptedEngine
    publisher: Publisher
    held: set[bytes] = field(default_factory=set)
    num_tokens: int = 0
    num_hit_tokens: int = 0
    num_seen: int = 0

    async def settle(self) -> None:
        """Count the hits of the requests that have come, and hold their prompts from now on."""
        prompts = [request.json["prompt"] for request in self.engine.received[self.num_seen :]]
        self.num_seen += len(prompts)
        for prompt in prompts:
            hashes = list(chain(prompt, BLOCK))
            num_hits = next((i for i, h in enumerate(hashes) if h not in self.held), len(hashes))
            self.num_tokens += len(prompt)
            self.num_hit_tokens += num_hits * BLOCK
        for prompt in prompts:
            hashes = list(chain(prompt, BLOCK))
            self.held |= set(hashes)
            await self.publisher.publish(stored(hashes, None, prompt))


@asynccontextmanager
async def cluster(num_routers: int) -> AsyncIterator[tuple[list[Deployment], list[CachingEngine]]]:
    """Each router knows all of ``NAMES``."""
    context = zmq.asyncio.Context()
    found = [CachingEngine(ScriptedEngine(name), Publisher(context)) for name in NAMES]
    async with AsyncExitStack() as stack:
        for one in found:
            await one.engine.start()
            stack.push_async_callback(one.engine.stop)
        config = replace(FAST, policy="prefix-aware")
        routers = [
            await stack.enter_async_context(deployed(0, 0, config)) for _ in "r" * num_routers
        ]
        for one in found:
            role = "prefill" if one.engine.name[0] == "p" else "decode"
            told = {
                "endpoint": one.publisher.endpoint,
                "replay_endpoint": one.publisher.replay_endpoint,
            }
            body = described(one.engine, role=role, kv_events=told)
            for d in routers:
                assert (await register(d, one.engine.name, body))[0] == 200
            await one.publisher.wait_subscriber()
        yield routers, found
        for d in routers:
            for one in found:
                async with d.http.delete(f"{d.url}/registry/instances/{one.engine.name}"):
                    pass
    for one in found:
        await one.publisher.close()
    context.destroy(linger=0)


def waves(seed: int) -> list[list[list[int]]]:
    """Turns of conversations, six at a time, each with all that was said before."""
    rng = random.Random(seed)
    systems = [rng.choices(range(1000, 60_000), k=6 * BLOCK) for _ in range(4)]
    said = [list(rng.choice(systems)) for _ in range(24)]
    found = []
    for _ in range(24):
        wave = rng.sample(range(len(said)), 6)
        for number in wave:
            said[number] += rng.choices(range(1000, 60_000), k=2 * BLOCK)
        found.append([list(said[number]) for number in wave])
    return found


async def hit_rate(num_routers: int, seed: int) -> float:
    """Of the prefill engines, when clients take the routers in turns."""
    async with cluster(num_routers) as (routers, found):
        for wave in waves(seed):
            asking = (routers[i % num_routers].post(prompt=prompt) for i, prompt in enumerate(wave))
            assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * len(wave)
            for one in found:
                await one.settle()
            for d in routers:
                for one in found:
                    name, held = one.engine.name, one.held
                    await until(lambda d=d, n=name, h=held: len(index(d, n)) >= len(h), "index")  # type: ignore[misc]
        prefills = [one for one in found if one.engine.name[0] == "p"]
        return sum(p.num_hit_tokens for p in prefills) / sum(p.num_tokens for p in prefills)


@pytest.mark.parametrize("seed", [1, 2])
def test_two_routers_find_prefixes_as_often_as_one(seed: int) -> None:
    rates = []
    for num_routers in (1, 2):

        async def test(num_routers: int = num_routers) -> None:
            rates.append(await hit_rate(num_routers, seed))

        run(test)
    one, two = rates
    assert one > 0.4
    assert two >= one - 0.03


def test_a_router_that_is_killed_takes_only_its_own_streams_with_it() -> None:
    ask = {"model": "tiny", "prompt": [7] * 8, "stream": True, "max_tokens": 60}

    async def test() -> None:
        async with cluster(1) as ((kept,), found):
            url, engines = f"http://127.0.0.1:{free_port()}", [one.engine for one in found]
            command = [str(Path(sys.executable).with_name("vllm-pd")), "router"]
            lost = subprocess.Popen(
                [*command, "--port", url.rpartition(":")[2]],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                for engine in engines:
                    role = "prefill" if engine.name[0] == "p" else "decode"
                    await registered_at(kept.http, url, engine.name, described(engine, role=role))
                    engine.token_s = 0.05
                decodes = [engine for engine in engines if engine.name[0] == "d"]
                ending = [asyncio.ensure_future(streamed(kept.http, url, ask)) for _ in "12"]
                going_on = [asyncio.ensure_future(kept.post(**ask)) for _ in "12"]
                await until(lambda: sum(e.num_in_progress for e in decodes) == 4, "streams")
                lost.kill()
                for stream in ending:
                    with pytest.raises(aiohttp.ClientError):
                        await stream
                for stream in going_on:
                    status, _, body = await stream
                    assert (status, events(body)[-1]) == (200, "[DONE]")
                await until(lambda: not any(e.num_in_progress for e in engines), "streams left")
                assert (await kept.post(prompt=[7] * 8))[0] == 200
                assert not any(instance.num_failures for instance in kept.router.registry)
            finally:
                lost.kill()
                lost.wait()

    run(test)


async def registered_at(
    http: aiohttp.ClientSession, url: str, name: str, body: dict[str, Any]
) -> None:
    """As an engine does it, which tries until its router is there."""
    for _ in range(400):
        with contextlib.suppress(aiohttp.ClientError):
            async with http.put(f"{url}{registration.PATH}/{name}", json=body) as response:
                assert response.status == 200, await response.text()
                return
        await asyncio.sleep(0.05)
    raise AssertionError("no router")


async def streamed(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> bytes:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        return await response.read()

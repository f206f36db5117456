# SPDX-License-Identifier: Apache-2.0
"""A router that is told to stop, and the connections that its clients keep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.router import scripted_engine
from tests.router.harness import FAST, Deployment, deployed, run, until
from tests.router.scripted_answers import whole_answer
from tests.router.test_releases import ORDERS, kept_ids

PATIENT = replace(FAST, drain_s=20, timeouts=replace(FAST.timeouts, answer_s=20, idle_s=20))


@asynccontextmanager
async def one_connection() -> AsyncIterator[aiohttp.ClientSession]:
    """Of a client that sends one request after the other on it."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as client:
        yield client


def is_listening(port: int) -> bool:
    """Without a connection: asyncio loses one that comes just as it stops listening."""
    return f"0100007F:{port:04X} 00000000:0000 0A" in Path("/proc/net/tcp").read_text()


@asynccontextmanager
async def answering(
    d: Deployment, client: aiohttp.ClientSession, **fields: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 50, **fields}
    async with client.post(f"{d.url}/v1/completions", json=body) as response:
        yield response


@pytest.mark.parametrize("stream", [False, True])
def test_next_request_on_a_connection_whose_answer_began_before_is_answered(stream: bool) -> None:
    async def test() -> None:
        async with deployed(config=PATIENT, token_s=0.1) as d, one_connection() as client:
            async with answering(d, client, stream=True) as response:
                await response.content.readline()
                assert is_listening(d.port)
                stop = asyncio.ensure_future(d.server.stop())
                await until(lambda: not is_listening(d.port))
                d.hurry()
                assert b"[DONE]" in await response.read()
            async with answering(d, client, stream=stream) as response:
                assert (response.status, response.headers["connection"]) == (200, "close")
                await response.read()
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(f"{d.url}/health")
            await stop

    run(test)


def test_answers_that_begin_while_it_stops_are_the_last_of_their_connections() -> None:
    async def test() -> None:
        async with deployed(config=PATIENT, token_s=0.1) as d, one_connection() as idle:
            assert (await (await idle.get(f"{d.url}/health")).json())["status"] == "ok"
            waiting = asyncio.ensure_future(d.post(stream=False))
            await until(lambda: bool(d.decodes[0].num_in_progress))
            stop = asyncio.ensure_future(d.server.stop())
            await until(lambda: d.router.is_draining)
            health = await idle.get(f"{d.url}/health/ready")
            assert (health.status, health.headers["connection"]) == (503, "close")
            status, headers, _ = await waiting
            assert (status, headers["connection"]) == (200, "close")
            await stop

    run(test)


def test_it_does_not_wait_for_clients_who_ask_nothing() -> None:
    async def test() -> None:
        async with deployed(config=replace(PATIENT, drain_s=1000)) as d:
            await (await d.http.get(f"{d.url}/health")).read()
            _, writer = await asyncio.open_connection("127.0.0.1", d.port)
            await d.server.stop()
            writer.close()

    run(test)


def test_whole_answer_that_its_client_reads_slowly_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = b"x" * (16 << 20)  # more than the kernel takes
    monkeypatch.setattr(scripted_engine, "json_answer", lambda *_: whole_answer(200, body))
    monkeypatch.setattr("vllm_ascend_pd.router.server.LINGER_S", 0.05)

    async def test() -> None:
        async with deployed(config=PATIENT, ready=False) as d:
            reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
            head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
            writer.write(head + b"{}")
            await reader.readuntil(b"\r\n\r\n")
            stop = asyncio.ensure_future(d.server.stop())
            await asyncio.wait({stop}, timeout=0.5)
            assert not stop.done()  # then its process would end
            assert await reader.readexactly(len(body)) == body
            await stop
            writer.close()

    run(test)


@pytest.mark.parametrize("order", ORDERS)
def test_prompts_of_requests_that_it_ends_are_given_back(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr("vllm_ascend_pd.router.server.LINGER_S", 0.05)
    config = replace(PATIENT, drain_s=0.05, order=ORDERS[order].order)

    async def test() -> None:
        async with deployed(config=config, supports_concurrent=True) as d:
            await d.post()
            d.decodes[0].script("hang, hang")
            asking = [asyncio.ensure_future(d.post()) for _ in range(2)]
            await until(lambda: d.decodes[0].num_in_progress == 2)
            await until(lambda: d.prefills[0].num_in_progress == 0)
            await d.server.stop()
            assert sorted(d.prefills[0].released) == sorted(kept_ids(d)[1:])
            assert d.count("releases_total", outcome="ok") == 2
            for one in await asyncio.gather(*asking, return_exceptions=True):
                assert isinstance(one, aiohttp.ServerDisconnectedError)

    run(test)

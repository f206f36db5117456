# SPDX-License-Identifier: Apache-2.0
"""A client leaves at each step that the event loop makes for its request: whatever the router was
about to do, nothing of it is left, it is counted once, and the next request is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.router.harness import FAST, Deployment, deployed, run, until
from tests.router.moving import name
from tests.router.scripted_engine import BATCH
from tests.router.test_live_moves import movable
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.config import RouterConfig, Timeouts
from vllm_ascend_pd.router.http_exchange import EngineConnection
from vllm_ascend_pd.router.metrics import OUTCOMES
from vllm_ascend_pd.router.moves import Move

LEAVES = {"x-leaves": "yes"}
CONFIG = replace(
    FAST,
    probes=replace(FAST.probes, interval_s=30),
    timeouts=Timeouts(),
)
ENGINE = {"supports_concurrent": True, "token_s": 0.001, "compute_token_s": 0.0005}


@dataclass
class Leaver:
    """A client whose connection is lost after so many steps."""

    request: web.Request | None = None
    """Once it has come."""
    num_steps: int | None = None
    """Until then; ``None`` while they are not counted."""

    def step(self) -> None:
        if self.num_steps is None or self.request is None:
            return
        self.num_steps -= 1
        if self.num_steps == 0:
            transport = self.request.transport
            assert transport is not None
            self.request.protocol.connection_lost(None)
            transport.abort()


@pytest.fixture
def leaver(monkeypatch: pytest.MonkeyPatch) -> Leaver:
    one, serve = Leaver(), Router._serve

    async def served(router: Router, request: web.Request, handle: Any) -> web.StreamResponse:
        if "x-leaves" in request.headers:
            one.request = request
        try:
            return await serve(router, request, handle)
        finally:
            if one.request is request:
                one.request = None

    monkeypatch.setattr(Router, "_serve", served)
    return one


def step_with_the_loop(monkeypatch: pytest.MonkeyPatch, leaver: Leaver) -> None:
    """Behind everything that it runs."""
    run_handle = asyncio.Handle._run

    def ran(handle: asyncio.Handle) -> None:
        run_handle(handle)
        leaver.step()

    monkeypatch.setattr(asyncio.Handle, "_run", ran)


def step_with_engines(monkeypatch: pytest.MonkeyPatch, leaver: Leaver) -> None:
    """Before each piece of an engine that has come already."""
    receive = EngineConnection.data_received

    def received(connection: EngineConnection, data: bytes) -> None:
        leaver.step()
        receive(connection, data)

    monkeypatch.setattr(EngineConnection, "data_received", received)


def left(d: Deployment) -> list[int]:
    """What is counted of requests in progress."""
    metrics, registry = d.router.metrics, d.router.registry
    counts = [metrics.num_requests, metrics.num_waiting, metrics.num_queued()]
    counts += [len(d.router.moves.running)]
    counts += [engine.num_in_progress for engine in (*d.prefills, *d.decodes)]
    for one in registry:
        counts += [one.num_active, one.num_active_tokens, one.num_decoding]
        counts += [one.num_admitted, one.num_to_answer, one.num_awaiting, one.client.num_busy]
    return counts


async def leave_at_each_step(
    d: Deployment, leaver: Leaver, ask: Callable[[int], Awaitable[Any]]
) -> int:
    """Until a request has ended before. ``ask`` is told after how many steps its client leaves."""
    num_asked = sum(d.count("requests_total", outcome=outcome) for outcome in OUTCOMES)
    for num_steps in itertools.count(1):
        has_left = False
        try:
            await ask(num_steps)
        except aiohttp.ClientError:
            has_left = True
        leaver.num_steps = None
        await until(lambda: not any(left(d)), f"left after {num_steps} steps", 5)
        assert (await d.post(max_tokens=1))[0] == 200
        counted = sum(d.count("requests_total", outcome=outcome) for outcome in OUTCOMES)
        assert counted == num_asked + 2 * num_steps
        for engine in (*d.prefills, *d.decodes):
            engine.script_nothing()
            assert len(set(engine.released)) == len(engine.released)
        if not has_left:
            return num_steps
    raise AssertionError


PATHS: dict[str, tuple[RouterConfig, int, dict[str, Any]]] = {
    "prefill-first": (replace(CONFIG, order="prefill-first"), 1, {}),
    "concurrent": (CONFIG, 1, {}),
    "concurrent, streamed": (CONFIG, 1, {"stream": True}),
    "decode-only, streamed": (CONFIG, 0, {"stream": True}),
    "batch": (
        CONFIG,
        1,
        {"path": BATCH, "messages": [[{"role": "user", "content": text}] for text in "ab"]},
    ),
}


@pytest.mark.parametrize("path", PATHS)
def test_client_leaves_at_each_step(
    monkeypatch: pytest.MonkeyPatch, leaver: Leaver, path: str
) -> None:
    step_with_the_loop(monkeypatch, leaver)
    config, num_prefills, fields = PATHS[path]

    async def test() -> None:
        async with deployed(num_prefills, 1, config, **ENGINE) as d:
            await d.post()

            async def ask(num_steps: int) -> None:
                leaver.num_steps = num_steps
                assert (await d.post(headers=LEAVES, temperature=0, **fields))[0] == 200

            assert await leave_at_each_step(d, leaver, ask) > 10

    run(test)


def test_client_of_a_stream_that_goes_on_elsewhere_leaves_at_each_step(
    monkeypatch: pytest.MonkeyPatch, leaver: Leaver
) -> None:
    step_with_the_loop(monkeypatch, leaver)

    async def test() -> None:
        async with deployed(0, 2, CONFIG, **ENGINE) as d:

            async def ask(num_steps: int) -> None:
                for engine in d.decodes:
                    engine.script("break(3)")
                leaver.num_steps = num_steps
                body = (await d.post(headers=LEAVES, temperature=0, stream=True))[2]
                assert b"[DONE]" in body

            assert await leave_at_each_step(d, leaver, ask) > 30

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_client_of_an_answer_that_moves_leaves_before_each_piece(
    monkeypatch: pytest.MonkeyPatch, leaver: Leaver, stream: bool
) -> None:
    """The target is quicker than the source, which has not said yet that it has given it away."""
    step_with_engines(monkeypatch, leaver)

    async def test() -> None:
        async with movable(2, CONFIG, token_s=0.05) as d:

            async def ask(num_steps: int) -> None:
                asking = asyncio.ensure_future(
                    d.post(headers=LEAVES, temperature=0, stream=stream, max_tokens=40)
                )
                running = d.router.moves.running
                await until(lambda: any(e.running for e in d.decodes))
                await until(lambda: bool(running) and not any(a.obstacle() for a in running))
                (answering,) = running
                (target,) = (e for e in d.decodes if name(e) != answering.instance.instance_id)
                target.token_s = 0
                leaver.num_steps = num_steps
                move = d.router.moves.start(answering, None, "operator")
                assert isinstance(move, Move)
                try:
                    assert (await asking)[0] == 200
                finally:
                    target.token_s = 0.05
                    await asyncio.wait_for(move.ended, 5)

            assert await leave_at_each_step(d, leaver, ask) > 1

    run(test)

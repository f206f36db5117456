# SPDX-License-Identifier: Apache-2.0
"""What is measured of engines whose times are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner.measure import Access, EngineLimits, Grid, Measurement
from vllm_ascend_pd.planner.profile import HandoverPoint, PrefillPoint

GRID = Grid(
    num_tokens=(1000,),
    batches=(1,),
    contexts=(8,),
    most_tokens=4000,
    rounds=2,
    token_ids=(300, 400),
)


class NoWaiting(asyncio.SelectorEventLoop):
    """Its time goes on to whatever is next."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


class OneServer(Measurement):
    """P computes 1,000 tokens a second, in one step those of all that wait; a prompt that is handed
    over keeps it for ``sending_s`` more, and is at the client ``later_s`` after that."""

    def __init__(self, sending_s: float, later_s: float) -> None:
        super().__init__(None, Access("router"), GRID, lambda line: None)  # type: ignore[arg-type]
        self._prefill = "P"
        self.sending_s, self.later_s = sending_s, later_s
        self.waiting: list[tuple[float, asyncio.Future[None]]] = []
        self.steps: asyncio.Task[None] | None = None

    async def _token_times(
        self,
        url: str,
        prompt: Sequence[int],
        num_tokens: int,
        came: Callable[[], None] = lambda: None,
    ) -> Sequence[float]:
        is_sent = url == "router"
        computed = asyncio.get_running_loop().create_future()
        self.waiting.append((len(prompt) / 1000 + self.sending_s * is_sent, computed))
        if self.steps is None or self.steps.done():
            self.steps = asyncio.create_task(self._compute())
        await computed
        await asyncio.sleep(0.001 + self.later_s * is_sent)
        return [time.perf_counter()]

    async def _compute(self) -> None:
        while self.waiting:
            step, self.waiting = self.waiting, []
            await asyncio.sleep(sum(seconds for seconds, _ in step))
            for _, computed in step:
                computed.set_result(None)


@pytest.mark.parametrize(
    ("sending_s", "later_s", "found_s"), [(0.06, 0.1, 0.06), (0.0, 0.3, 0.0), (0.06, 0.9, 0.0)]
)
def test_what_p_spends_on_sending_is_told_from_what_a_request_waits_for(
    sending_s: float, later_s: float, found_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = NoWaiting()
    monkeypatch.setattr(time, "perf_counter", loop.time)
    prefill = [PrefillPoint(num_tokens=1000, batch=1, seconds=1.001)]
    handover = [HandoverPoint(num_tokens=1000, seconds=sending_s + later_s)]

    async def measure() -> Any:
        return await OneServer(sending_s, later_s)._sending_s(prefill, handover)

    try:
        # A P that would wait for its prompts, for they come late, is not measured.
        assert loop.run_until_complete(measure()) == pytest.approx(found_s / 1000, abs=1e-9)
    finally:
        loop.close()


class TwoServers(Measurement):
    """P's 1,000 tokens a second become fewer by a thousandth for each token that D gives in one,
    which is 40 by stream. Every ``fails``th request of D fails."""

    def __init__(self, fails: int = 0) -> None:
        self.said: list[str] = []
        super().__init__(None, Access("router"), replace(GRID, both_busy=True), self.said.append)  # type: ignore[arg-type]
        self._prefill, self._decode = "P", "D"
        self.fails, self.num_asked, self.num_streams = fails, 0, 0

    async def _token_times(
        self,
        url: str,
        prompt: Sequence[int],
        num_tokens: int,
        came: Callable[[], None] = lambda: None,
    ) -> Sequence[float]:
        if url == "P":
            await asyncio.sleep(len(prompt) / 1000 * (1 + 40 * self.num_streams / 1000))
            self._num_tokens += 1
            return [time.perf_counter()]
        self.num_asked += 1
        is_failing = bool(self.fails) and self.num_asked % self.fails == 0
        await asyncio.sleep(0.01)
        if is_failing:
            raise ConfigError("D: 503")
        came()
        self.num_streams += 1
        try:
            for _ in range(num_tokens):
                await asyncio.sleep(1 / 40)
                self._num_tokens += 1
        finally:
            self.num_streams -= 1
        return [time.perf_counter()]


def measured(made: Callable[[], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch) -> Any:
    loop = NoWaiting()
    monkeypatch.setattr(time, "perf_counter", loop.time)
    try:
        return loop.run_until_complete(made())
    finally:
        loop.close()


def test_how_much_slower_p_is_while_d_streams_is_told_by_its_tokens_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = EngineLimits(max_num_batched_tokens=2048, max_num_seqs=6)
    points = measured(lambda: TwoServers()._beside(limits), monkeypatch)
    rates = [point.tokens_per_second for point in points]
    assert rates == pytest.approx([0, 160, 240], abs=5)
    # The 256 tokens of an answer take 6.4 s, and a moment later comes the next one.
    assert [p.slowdown for p in points] == pytest.approx([1 / 1.16, 1.0, 1.24 / 1.16], rel=0.01)
    few = EngineLimits(max_num_batched_tokens=2048, max_num_seqs=4)
    server = TwoServers()
    assert measured(lambda: server._beside(few), monkeypatch) == ()
    assert "not measured" in server.said[-1]


def test_requests_that_were_to_keep_an_engine_busy_and_failed_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def busy(server: TwoServers) -> None:
        async with server._busy("D", 3, 40):
            await asyncio.sleep(3.0)

    some, none = TwoServers(fails=4), TwoServers(fails=1)
    measured(lambda: busy(some), monkeypatch)
    assert some.said == ["2 requests that were to keep D busy failed: D: 503"]
    with pytest.raises(ConfigError, match="requests that were to keep D busy failed: D: 503"):
        measured(lambda: busy(none), monkeypatch)
    assert none.num_asked == 3


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_error_in_a_stream_is_no_token(num_tokens: int) -> None:
    error = '{"error": {"message": "EngineCore has ended", "code": 500}}'
    token = '{"choices": [{"text": "say \\"error\\""}], "error": null}'

    async def answer(request: web.Request) -> web.Response:
        events = [token] * num_tokens + [error] * (await request.json())["max_tokens"] + ["[DONE]"]
        return web.Response(text="".join(f"data: {event}\n\n" for event in events))

    async def test() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = str(server.make_url(""))
            measurement = Measurement(http, Access(url), GRID, lambda line: None)
            if num_tokens:
                assert len(await measurement._token_times(url, [1], 0)) == num_tokens
            with pytest.raises(ConfigError, match="failed: EngineCore has ended"):
                await measurement._token_times(url, [1], 1)

    asyncio.run(test())


@pytest.mark.parametrize(("is_router", "key"), [(True, "clients"), (False, "engines")])
def test_router_and_engines_may_want_different_keys(is_router: bool, key: str) -> None:
    shown: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization"))
        return web.Response(text='data: {"choices": []}\n\n')

    async def test() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = str(server.make_url("")).rstrip("/")
            access = Access(url if is_router else "http://router:1", "clients", "engines")
            measurement = Measurement(http, access, GRID, lambda line: None)
            await measurement._get(url, "/metrics")
            await measurement._token_times(url, [1], 1)

    asyncio.run(test())
    assert shown == [f"Bearer {key}"] * 2


@pytest.mark.parametrize("text", ["no", 299 * "x" + "é"])
def test_server_that_answers_otherwise_is_named(text: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=401, text=text)

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/v1/models", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as http:
            url = str(server.make_url("")).rstrip("/")
            measurement = Measurement(http, Access("http://router:1"), GRID, lambda line: None)
            with pytest.raises(ConfigError, match=f"401: {text[:299]}.*--engine-api-key-file"):
                await measurement._max_model_len(url)

    asyncio.run(test())

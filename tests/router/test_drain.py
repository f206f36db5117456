# SPDX-License-Identifier: Apache-2.0
"""Engines that drain: what runs on them goes on at others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.router.broken_streams import PATIENT, Fingerprints, resumes
from tests.router.harness import Deployment, deployed, run, until
from tests.router.moving import SLOW, Client, is_whole, listed, move, name
from tests.router.scripted_answers import queued_responses
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd import registration
from vllm_ascend_pd.cluster.emptying import drain
from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import background

SPREAD = replace(PATIENT, policy="least-loaded")


async def told(d: Deployment, instance_id: str, undo: bool = False) -> int:
    method = "DELETE" if undo else "PUT"
    url = f"{d.url}{registration.PATH}/{instance_id}/drain"
    async with d.http.request(method, url, json={"seconds": None}) as response:
        return int(response.status)


async def registers(d: Deployment, engine: ScriptedEngine, **changes: str) -> None:
    body = {"url": engine.url, "role": "decode", "epoch": "one", **changes}
    async with d.http.put(f"{d.url}{registration.PATH}/late", json=body) as answer:
        assert answer.status == 200


async def say_drain(d: Deployment, engine: ScriptedEngine, who: str) -> None:
    if who == "operator":
        assert await told(d, name(engine)) == 204
    else:
        instance = d.router.registry.get(name(engine))
        d.router.registry.put(msgspec.structs.replace(instance.spec, state="draining"))


@pytest.mark.parametrize("who", ["operator", "discovery"])
def test_all_streams_of_an_engine_that_drains_move_and_no_client_notices(who: str) -> None:
    async def test() -> None:
        async with deployed(1, 3, SPREAD, **SLOW) as d:
            clients = [Client(d, f"r{i}", max_tokens=60) for i in range(30)]
            for client in clients:
                await client.has(2)
            leaving = d.decodes[0]
            num_there = leaving.num_in_progress
            assert num_there >= 5
            await say_drain(d, leaving, who)
            await until(lambda: leaving.num_in_progress == 0)
            assert not any(client.task.done() for client in clients)
            num_received = len(leaving.received)
            late = Client(d, "late", max_tokens=60)
            for client in (*clients, late):
                assert is_whole(await client.rest(), leaving)
            assert len(leaving.received) == num_received
            assert len(resumes(d)) == num_there == leaving.num_given_up
            assert d.count("moves_total", reason="drain", outcome="moved", cause="") == num_there
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)


def test_engine_that_says_that_it_ends_is_emptied() -> None:
    async def test() -> None:
        async with deployed(1, 1, PATIENT, **SLOW) as d:
            late = ScriptedEngine("late", **SLOW)
            await late.start()
            try:
                await registers(d, late)
                await until(lambda: d.router.registry.get("late").models)
                clients = [Client(d, f"r{i}", max_tokens=60) for i in range(4)]
                for client in clients:
                    await client.has(2)
                assert late.num_in_progress
                await registers(d, late, state="draining")
                await until(lambda: late.num_in_progress == 0)
                for client in clients:
                    assert is_whole(await client.rest(), late)
            finally:
                await late.stop()
                d.router.registry.remove("late", "the test ends")

    run(test)


def test_what_cannot_move_is_waited_for_and_told() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            clients = [Client(d, f"r{i}", logprobs=1) for i in range(2)]
            clients += [Client(d, f"s{i}") for i in range(2)]
            for client in clients:
                await client.has(2)
            leaving = d.decodes[0]
            async with RouterOperator(d.url) as operator:
                lines = [line async for line in drain(operator, name(leaving))]
            assert "1 cannot move (logprobs)" in lines[0]
            assert lines[-1] == f"{name(leaving)} is empty: it may be stopped"
            assert leaving.num_in_progress == 0
            for client in clients:
                assert is_whole(await client.rest(), leaving)
            assert d.count("not_moved_total", reason="drain", cause="logprobs") == 1

    run(test)


def test_undone_drain_ends_the_moves_and_brings_requests_back() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            leaving, other = d.decodes
            assert await told(d, name(leaving)) == await told(d, name(leaving)) == 204
            clients = [Client(d, f"r{i}") for i in range(2)]
            for client in clients:
                await client.has(1)
            assert not leaving.received
            assert await told(d, name(leaving), undo=True) == 204
            assert await told(d, name(leaving), undo=True) == 204
            again = [Client(d, f"s{i}") for i in range(2)]
            for client in (*clients, *again):
                assert is_whole(await client.events(), other)
            assert leaving.received
            assert not resumes(d)

    run(test)


@pytest.mark.parametrize(("num_workers", "at_once"), [(1, 8), (3, 3)])
def test_few_requests_move_at_a_time(num_workers: int, at_once: int) -> None:
    """Of one of several workers its share."""

    async def test() -> None:
        async with deployed(1, 2, replace(SPREAD, num_workers=num_workers), **SLOW) as d:
            leaving, other = d.decodes
            assert await told(d, name(other)) == 204
            clients = [Client(d, f"r{i}", max_tokens=100) for i in range(20)]
            for client in clients:
                await client.has(1)
            other.script(", ".join(["hang"] * 20))
            assert await told(d, name(other), undo=True) == 204
            assert await told(d, name(leaving)) == 204
            await until(lambda: other.num_in_progress == at_once)
            assert sum(one["stays"] == "moving" for one in await listed(d)) == at_once
            for client in clients:
                assert is_whole(await client.events(), leaving)
            assert other.most_in_progress == at_once

    run(test)


def test_request_that_others_refuse_is_offered_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        monkeypatch.setattr("vllm_ascend_pd.router.drains.RETRY_S", 0.05)
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d, max_tokens=200)
            await client.has(1)
            leaving = next(e for e in d.decodes if e.num_in_progress)
            other = next(e for e in d.decodes if e is not leaving)
            other.script(", ".join(["status(400)"] * 100))
            assert await told(d, name(leaving)) == 204
            assert is_whole(await client.events(), leaving)
            assert 2 <= len(other.received) <= 10

    run(test)


def test_only_engine_that_drains_keeps_its_streams() -> None:
    """New requests find none; those that it has end there."""

    async def test() -> None:
        config = replace(PATIENT, require_prefill=True)
        async with deployed(1, 1, config, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            assert await told(d, name(d.decodes[0])) == 204
            assert (await d.post())[0] == 503
            assert is_whole(await client.events(), d.decodes[0])
            outcome: dict[str, Any] = {"outcome": "stayed", "cause": "unavailable"}
            assert d.count("moves_total", reason="drain", **outcome) >= 1

    run(test)


@pytest.mark.parametrize("way", ["registered", "in_metrics"])
def test_streams_stay_where_others_are_of_another_version_and_an_operator_hears_why(
    way: str,
) -> None:
    async def test() -> None:
        async with deployed(0, 2, PATIENT, **SLOW) as d:
            told = ("vllm=0.30.0 weights=a", "vllm=0.32.0 weights=a")
            await getattr(Fingerprints(d, *told), way)()
            client = Client(d, max_tokens=200)
            await client.has(2)
            leaving = next(e for e in d.decodes if e.num_in_progress)
            other = next(e for e in d.decodes if e is not leaving)
            [report] = await move(d, to=name(other))
            assert (report["outcome"], report["cause"]) == ("stayed", "incompatible")
            async with RouterOperator(d.url) as operator:
                lines = [line async for line in drain(operator, name(leaving))]
            assert any("1 cannot move (incompatible)" in line for line in lines), lines
            assert is_whole(await client.rest(), leaving)
            assert not resumes(d)
            stayed = {"outcome": "stayed", "cause": "incompatible"}
            assert d.count("moves_total", reason="drain", **stayed) >= 1

    run(test)


def test_engine_that_starts_anew_is_not_drained() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            await registers(d, d.decodes[0])
            assert await told(d, "late") == 204
            assert d.router.registry.get("late").spec.state == "draining"
            await registers(d, d.decodes[0])
            assert d.router.registry.get("late").spec.state == "draining"
            await registers(d, d.decodes[0], epoch="two")
            assert d.router.registry.get("late").spec.state == "ready"
            d.router.registry.remove("late", "the test ends")

    run(test)


def test_engine_that_starts_anew_and_gets_a_role_is_not_drained() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d, RouterOperator(d.url) as operator:
            await registers(d, d.decodes[0], role="both")
            assert await told(d, "late") == 204
            await operator.use_for("late", "decode")
            assert d.router.registry.get("late").spec.state == "draining"
            await registers(d, d.decodes[0], role="both", epoch="two")
            await operator.use_for("late", "both")
            await registers(d, d.decodes[0], role="both", epoch="two")
            late = d.router.registry.get("late")
            assert (late.spec.state, late.used_for) == ("ready", "both")
            d.router.registry.remove("late", "the test ends")

    run(test)


def test_engine_is_not_empty_while_another_computes_a_prompt_for_it() -> None:
    async def test() -> None:
        timeouts = replace(PATIENT.timeouts, prefill_s=20.0)
        async with deployed(1, 1, replace(PATIENT, timeouts=timeouts)) as d:
            d.prefills[0].script("delay(1)")
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.prefills[0].num_in_progress == 1)
            leaving = name(d.decodes[0])
            async with RouterOperator(d.url) as operator:
                lines = [line async for line in drain(operator, leaving)]
            assert posting.done()
            assert "has 1 requests" in lines[0]
            assert lines[-1] == f"{leaving} is empty: it may be stopped"
            assert (await posting)[0] == 200

    run(test)


def test_engine_is_not_empty_while_it_computes_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "LOOK_S", 0.01)

    async def test() -> None:
        async with deployed(1, 1, PATIENT) as d:
            leaving, sent = d.decodes[0], {"input": "Hello", "background": True}
            with queued_responses():
                status, _, body = await d.post("/v1/responses", **sent)
            assert status == 200
            async with RouterOperator(d.url) as operator:
                lines = drain(operator, name(leaving))
                assert "has 1 requests" in await anext(lines)
                leaving.stored[msgspec.json.decode(body)["id"]]["status"] = "completed"
                assert await anext(lines) == f"{name(leaving)} is empty: it may be stopped"

    run(test)


@pytest.mark.parametrize("how", ["lost", "engine died"])
def test_response_in_the_background_that_is_gone_is_not_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LOOK_S", 0.01)

    async def test() -> None:
        async with deployed(1, 1, PATIENT) as d:
            with queued_responses():
                await d.post("/v1/responses", input="Hello", background=True)
            instance = d.router.registry.get(name(d.decodes[0]))
            assert instance.num_background == 1
            if how == "lost":
                d.decodes[0].stored.clear()
            else:
                await d.decodes[0].stop()
            await until(lambda: instance.num_background == 0)

    run(test)


def test_operator_hears_what_is_wrong() -> None:
    async def test() -> None:
        async with deployed(1, 1, PATIENT, **SLOW) as d:
            async with RouterOperator(d.url) as operator:
                with pytest.raises(ConfigError, match="404: d9 has not registered"):
                    await anext(drain(operator, "d9"))
                client = Client(d, n=2, max_tokens=1000)
                await until(lambda: d.decodes[0].num_in_progress == 1)
                lines = drain(operator, name(d.decodes[0]))
                await anext(lines)
                await operator.undo_drain(name(d.decodes[0]))
                with pytest.raises(ConfigError, match="drained no more"):
                    await asyncio.wait_for(anext(lines), 20)
                assert d.decodes[0].num_in_progress == 1
                await client.rest()
            async with RouterOperator("http://127.0.0.1:1") as nobody:
                with pytest.raises(ConfigError, match="give it with --router"):
                    await nobody.requests()

    run(test)

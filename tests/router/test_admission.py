# SPDX-License-Identifier: Apache-2.0
"""More requests than engines have room for: they wait in line, and a busy moment harms nobody."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.router.harness import FAST, STRICT, Deployment, deployed, events, free_port, run, until
from tests.router.moving import Client, move
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import Role
from vllm_ascend_pd.router.config import Queueing, RouterConfig, Timeouts
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.instances import Instance, InstanceSpec
from vllm_ascend_pd.router.policies.base import Routed

PATIENT = Timeouts(connect_s=10, prefill_s=40, first_token_s=40, idle_s=40, answer_s=40)


def spec(name: str, url: str, role: Role) -> InstanceSpec:
    return InstanceSpec(instance_id=name, url=url, role=role, source="test")


def limited(
    max_requests: int = 1,
    max_queued: int = 1000,
    timeout_s: float = 40,
    config: RouterConfig = FAST,
) -> RouterConfig:
    queueing = Queueing(max_requests, max_queued, timeout_s)
    return replace(config, queueing=queueing, timeouts=PATIENT)


async def busy(d: Deployment, **fields: Any) -> asyncio.Future[Any]:
    """A request that has an engine until it is cancelled."""
    before = sum(engine.num_in_progress for engine in d.decodes)
    for engine in d.decodes:
        engine.script("hang")
    posting = asyncio.ensure_future(d.post(**fields))
    await until(lambda: sum(engine.num_in_progress for engine in d.decodes) > before)
    for engine in d.decodes:
        engine.script_nothing()
    return posting


async def queued(d: Deployment, **fields: Any) -> asyncio.Future[Any]:
    """A request that waits in line."""
    before = d.router.admission.num_queued
    posting = asyncio.ensure_future(d.post(**fields))
    await until(lambda: d.router.admission.num_queued > before)
    return posting


async def end(posting: asyncio.Future[Any]) -> None:
    posting.cancel()
    await asyncio.gather(posting, return_exceptions=True)


def test_many_streams_at_once_end_well_and_no_engine_gets_more_than_its_bound() -> None:
    async def test() -> None:
        async with deployed(1, 1, limited(16)) as d:
            answers = await asyncio.gather(
                *(d.post(stream=True, prompt=f"{i}") for i in range(300))
            )
            for status, _, body in answers:
                assert (status, events(body)[-1]) == (200, "[DONE]")
            assert all(0 < e.most_in_progress <= 16 for e in (*d.prefills, *d.decodes))
            assert d.count("queue_seconds_count") > 100
            assert d.count("requests_total", outcome="ok") == 300
            assert d.router.admission.num_queued == 0
            assert not any(i.num_admitted or i.num_failures for i in d.router.registry)

    run(test)


def test_first_come_first_served() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            first = await busy(d, prompt="first")
            others = [await queued(d, prompt=f"{i}") for i in range(10)]
            assert d.count("requests_queued") == 10
            await end(first)
            assert [(await other)[0] for other in others] == [200] * 10
            came = [request.json["prompt"] for request in d.decodes[0].received]
            assert came == ["first", *(f"{i}" for i in range(10))]

    run(test)


def test_who_waits_too_long_gets_429() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited(timeout_s=0.05)) as d:
            first = await busy(d)
            status, headers, body = await d.post()
            assert status == 429
            assert int(headers["Retry-After"]) >= 1
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("too_many_requests", 429)
            assert d.count("refused_total", reason="deadline") == 1
            assert d.count("requests_total", outcome="refused") == 1
            await end(first)
            assert (await d.post())[0] == 200

    run(test)


def test_move_that_waits_too_long_refuses_nobody() -> None:
    async def test() -> None:
        config = limited(timeout_s=0.05, config=replace(FAST, policy="least-loaded"))
        async with deployed(0, 2, config, token_s=0.02) as d:
            clients = [Client(d, name) for name in ("one", "two")]
            for client in clients:
                await client.has(1)
            [report] = await move(d)
            assert (report["outcome"], report["cause"]) == ("stayed", "unavailable")
            assert d.count("queue_seconds_count") == 1
            assert d.count("refused_total", reason="deadline") == 0
            for client in clients:
                await client.rest()

    run(test)


def test_who_finds_too_many_waiting_gets_429_at_once() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited(max_queued=2)) as d:
            first = await busy(d)
            others = [await queued(d) for _ in range(2)]
            assert (await d.post())[0] == 429
            assert d.count("refused_total", reason="full") == 1
            await end(first)
            assert [(await other)[0] for other in others] == [200, 200]

    run(test)


def test_client_that_leaves_the_line_is_never_sent_to_an_engine() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            first = await busy(d, prompt="first")
            leaving = await queued(d, prompt="leaving")
            staying = await queued(d, prompt="staying")
            await end(leaving)
            await until(lambda: d.router.admission.num_queued == 1)
            await end(first)
            assert (await staying)[0] == 200
            came = [request.json["prompt"] for request in d.decodes[0].received]
            assert came == ["first", "staying"]
            assert d.count("queue_seconds_count") == 2

    run(test)


def test_line_of_one_model_is_not_behind_that_of_another() -> None:
    async def test() -> None:
        async with deployed(0, 2, limited()) as d:
            for engine, model in zip(d.decodes, ("big", "small"), strict=True):
                engine.models = (model,)
            await until(
                lambda: {m for i in d.router.registry for m in i.models} == {"big", "small"}
            )
            d.decodes[0].script("hang")
            first = asyncio.ensure_future(d.post(model="big"))
            await until(lambda: d.decodes[0].num_in_progress == 1)
            waiting = await queued(d, model="big")
            assert (await d.post(model="small"))[0] == 200
            await end(first)
            assert (await waiting)[0] == 200

    run(test)


def test_engine_that_comes_takes_from_the_line() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            first = await busy(d)
            waiting = await queued(d)
            other = ScriptedEngine("other")
            await other.start()
            d.router.registry.put(spec("other", other.url, "decode"))
            assert (await waiting)[0] == 200
            assert len(other.received) == 1
            await end(first)
            await other.stop()

    run(test)


def test_line_ends_when_the_last_engine_goes() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            first = await busy(d)
            waiting = await queued(d)
            d.router.registry.remove(d.router.registry.decodes[0].instance_id, "test")
            assert (await waiting)[0] == 503
            await end(first)

    run(test)


def test_prefill_engine_has_room_again_when_its_part_is_done() -> None:
    async def test() -> None:
        async with deployed(1, 2, limited(config=STRICT)) as d:
            both = [await busy(d) for _ in range(2)]
            assert sum(engine.num_in_progress for engine in d.decodes) == 2
            for posting in both:
                await end(posting)

    run(test)


def test_prefill_engine_has_room_while_decode_engines_compute_prompts() -> None:
    async def test() -> None:
        config = replace(FAST, skip="always")
        async with deployed(1, 2, limited(config=config)) as d:
            both = [await busy(d) for _ in range(2)]
            (prefill,) = d.router.registry.prefills
            assert prefill.num_admitted == 0
            for posting in both:
                await end(posting)

    run(test)


def test_request_that_no_engine_can_be_chosen_for_harms_nobody_in_line() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            policy = d.router.policy
            choose = policy.choose_decode

            def raising(request: Routed, decodes: Sequence[Instance]) -> Instance:
                if request.num_max_tokens == 13:
                    raise OverflowError("scripted")
                chosen: Instance = choose(request, decodes)
                return chosen

            policy.choose_decode = raising
            first = await busy(d)
            others = [await queued(d, max_tokens=number) for number in (4, 13, 13, 4)]
            await end(first)
            assert [(await other)[0] for other in others] == [200, 500, 500, 200]
            assert (await d.post(max_tokens=13))[0] == 500  # and nobody waits
            assert d.router.admission.num_queued == 0
            assert (await d.post())[0] == 200
            assert not any(i.num_admitted or i.num_failures for i in d.router.registry)

    run(test)


def test_failed_request_gets_another_engine_before_those_that_came_later() -> None:
    async def test() -> None:
        config = replace(limited(), probes=replace(FAST.probes, failure_threshold=1))
        async with deployed(0, 2, config) as d:
            postings = [await busy(d, prompt=f"{i}") for i in range(2)]
            later = await queued(d, prompt="later")
            failing, other = sorted(d.decodes, key=lambda e: e.received[0].json["prompt"])
            await failing.stop()  # of "0", which the other engine has no room for
            await until(lambda: d.router.admission.num_queued == 2)
            await end(postings[1])
            assert (await postings[0])[0] == (await later)[0] == 200
            assert [r.json["prompt"] for r in other.received] == ["1", "0", "later"]

    run(test)


@pytest.mark.parametrize("role", ["prefill", "both"])
def test_nobody_holds_one_engine_while_waiting_for_another(role: Role) -> None:
    async def test() -> None:
        async with deployed(0, 0, limited()) as d:
            engines = [ScriptedEngine(f"e{i}") for i in range(2)]
            for engine, one in zip(engines, (role, "both"), strict=True):
                await engine.start()
                d.router.registry.put(spec(engine.name, engine.url, one))
            answers = await asyncio.gather(*(d.post(prompt=f"{i}") for i in range(40)))
            assert [status for status, *_ in answers] == [200] * 40
            assert all(engine.most_in_progress == 1 for engine in engines)
            for engine in engines:
                await engine.stop()

    run(test)


def test_passed_on_requests_wait_in_line_too() -> None:
    async def test() -> None:
        async with deployed(0, 1, limited()) as d:
            first = await busy(d)
            passing = asyncio.ensure_future(d.post("/v1/embeddings", input="x"))
            await until(lambda: d.router.admission.num_queued == 1)
            assert d.count("requests_waiting") == d.count("requests_in_progress") == 2
            async with d.http.get(f"{d.url}/v1/what") as response:
                assert response.status == 200  # what has no body is small
            await end(first)
            assert (await passing)[0] == 200

    run(test)


def stop_accepting(engine: ScriptedEngine) -> None:
    """As a process that has no time to: connections that are open go on."""
    assert engine._server is not None
    for sock in engine._server.sockets:
        asyncio.get_running_loop().remove_reader(sock.fileno())
        with socket.socket(fileno=os.dup(sock.fileno())) as own:
            own.listen(0)


def test_connections_that_come_too_late_take_no_engine_out() -> None:
    async def test() -> None:
        config = replace(STRICT, timeouts=replace(FAST.timeouts, connect_s=0.1, prefill_s=0.5))
        async with deployed(1, 1, config) as d:
            (instance,) = d.router.registry.prefills
            stop_accepting(d.prefills[0])
            answers = await asyncio.gather(*(d.post() for _ in range(12)))
            assert {status for status, *_ in answers} <= {200, 502, 504}
            legs = {"instance": instance.instance_id, "leg": "prefill"}
            assert d.count("legs_total", outcome="connect_timeout", **legs) >= 3
            assert instance.is_available  # it answers probes
            assert instance.num_failures >= 3

    run(test)


def test_what_the_router_itself_lacks_takes_no_engine_out() -> None:
    async def test() -> None:
        async with deployed(0, 1) as d:
            (instance,) = d.router.registry.decodes
            for _ in range(9):
                instance.failed(Failure(FailureKind.ROUTER, "too many open files"), "decode")
            assert instance.is_available

    run(test)


def test_engine_that_answers_no_probe_but_sends_is_there() -> None:
    async def test() -> None:
        async with deployed(0, 1) as d:
            (instance,) = d.router.registry.decodes
            d.decodes[0].token_s = 0.02
            streaming = asyncio.ensure_future(d.post(stream=True, max_tokens=60))
            await until(lambda: d.router.metrics.ttft.total > 0)
            d.decodes[0].health_hangs = True
            status, _, body = await streaming
            assert (status, events(body)[-1]) == (200, "[DONE]")
            assert instance.num_failures == 0
            await until(lambda: not instance.is_available)  # it sends nothing any more

    run(test)


@pytest.mark.parametrize("option", [{"max_requests": 0}, {"max_queued": -1}])
def test_wrong_limits_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--max-requests must be"):
        Queueing(**option)


def test_workers_share_the_limits() -> None:
    assert Queueing(1024, 10, 5).share(3) == Queueing(342, 4, 5)


def test_router_opens_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = 128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    command = [str(Path(sys.executable).with_name("vllm-pd")), "router", "--port", str(free_port())]
    with (tmp_path / "log").open("wb") as log:
        router = subprocess.Popen(
            ["bash", "-c", f'ulimit -Sn {soft}; exec "$@"', "bash", *command],
            stdout=log,
            stderr=log,
        )

    async def test() -> None:
        await until(lambda: b"listens on" in (tmp_path / "log").read_bytes(), patience_s=50)
        limits = Path(f"/proc/{router.pid}/limits").read_text()
        found = re.search(r"Max open files +(\d+)", limits)
        assert found is not None
        assert int(found[1]) == hard > soft

    try:
        run(test)
    finally:
        router.terminate()
        router.wait()

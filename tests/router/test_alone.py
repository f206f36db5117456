# SPDX-License-Identifier: Apache-2.0
"""One engine answers where a pair is missing or fails, and the router says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.router.harness import (
    FAST,
    STRICT,
    Deployment,
    deployed,
    events,
    free_port,
    run,
    until,
)
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.router import app
from vllm_ascend_pd.router.config import Retries
from vllm_ascend_pd.router.instances import InstanceSpec

FAULTS = ("close", "reset", "status(500)", "status(503)", "garbage", "bad_json", "no_params")


async def get(d: Deployment, path: str) -> tuple[int, dict[str, Any]]:
    async with d.http.get(d.url + path) as response:
        return response.status, await response.json()


async def degraded(d: Deployment) -> dict[str, str]:
    """As ``/health``, ``/status`` and ``/metrics`` say, which must agree."""
    status, health = await get(d, "/health")
    found: dict[str, str] = (await get(d, "/status"))[1]["degraded"]
    assert (status, health["status"]) == (200, "degraded" if found else "ok")
    for model, reason in found.items():
        assert d.count("degraded", model=model, reason=reason) == 1
    return found


@pytest.mark.parametrize(("roles", "reason"), [((0, 1), "no_prefill"), ((1, 0), "no_decode")])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_engine_answers_alone(roles: tuple[int, int], reason: str, stream: bool) -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            assert await degraded(d) == {}
            expected = await d.post(stream=stream)
        async with deployed(*roles) as d:
            assert await degraded(d) == {"tiny": reason}
            status, _, body = await d.post(stream=stream)
            assert (status, body) == (200, expected[2])
            (engine,) = (*d.prefills, *d.decodes)
            assert [request.params for request in engine.received] == [{}]
            assert d.count("prefill_skips_total", reason=reason) == 1
            assert d.count("requests_total", outcome="ok") == 1
            assert (await get(d, "/v1/models"))[1]["data"][0]["id"] == "tiny"

    run(test)


def test_several_prompts_are_answered_by_a_prefill_engine_if_there_is_no_other() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            assert (await d.post(prompt=["one", "two"]))[0] == 200
            assert (await get(d, "/v1/what"))[1]["served_by"] == "p0"

    run(test)


def test_engines_of_different_fingerprints_do_not_meet_and_the_prompt_is_computed() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            for instance, own in zip(d.router.registry, ("a", "b"), strict=True):
                d.router.registry.put(msgspec.structs.replace(instance.spec, fingerprint=own))
            assert await degraded(d) == {"tiny": "no_partner"}
            assert (await d.post())[0] == 200
            assert not d.prefills[0].received

    run(test)


def test_nor_do_those_that_tell_their_fingerprints_in_metrics_alone() -> None:
    """One of them was started anew, with other weights or another version."""

    async def test() -> None:
        async with deployed(2, 1, replace(FAST, policy="least-loaded")) as d:
            for engine, own in zip((*d.prefills, *d.decodes), "abb", strict=True):
                engine.metrics = f'vllm:pd_engine_info{{engine="0",fingerprint="{own}"}} 1.0\n'
            await until(lambda: all(one.fingerprint for one in d.router.registry), "told")
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert [len(one.received) for one in d.prefills] == [0, 4]
            await d.prefills[1].stop()
            await until(lambda: not d.router.registry.prefills[1].is_available, "down")
            assert await degraded(d) == {"tiny": "no_partner"}
            assert (await d.post())[0] == 200
            assert not d.prefills[0].received

    run(test)


def test_nothing_at_all_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEARS_ALL_S", 0)

    async def test() -> None:
        async with deployed(0, 0) as d:
            status, headers, body = await d.post()
            assert status == 503
            assert int(headers["Retry-After"]) >= 1
            message = json.loads(body)["error"]["message"]
            assert message == "no prefill or decode instance is known"
            assert (await get(d, "/health"))[0] == 503
            assert (await get(d, "/health/ready"))[0] == 503
            assert (await get(d, "/health/live"))[0] == 200

    run(test)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_prefill_that_fails_leaves_the_prompt_to_the_decode_engine(order: str, fault: str) -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=order == "concurrent") as d:
            expected = await d.post(stream=True)
            d.prefills[0].script(fault)
            if order == "concurrent":
                d.decodes[0].script("hang")  # as one that waits for a transfer
            status, _, body = await d.post(stream=True)
            assert (status, body) == (200, expected[2])
            assert d.count("prefill_skips_total", reason="prefill_failed") == 1
            assert d.decodes[0].received[-1].params == {}
            assert d.decodes[0].num_given_up == int(order == "concurrent")
            assert d.count("requests_total", outcome="ok") == 2

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_prefill_that_fails_is_tried_elsewhere_first(order: str) -> None:
    async def test() -> None:
        async with deployed(2, 1, supports_concurrent=order == "concurrent") as d:
            await d.post()
            await d.post()
            d.prefills[0].script("close")
            d.decodes[0].script("hang" if order == "concurrent" else "ok")
            assert (await d.post())[0] == 200
            assert [len(engine.received) for engine in d.prefills] == [2, 2]
            assert d.decodes[0].received[-1].params["remote_engine_id"] == "p1"
            assert d.count("prefill_skips_total", reason="prefill_failed") == 0

    run(test)


def test_prefill_engine_that_refuses_connections_costs_no_request() -> None:
    async def test() -> None:
        async with deployed() as d:
            await d.post()
            await d.prefills[0].stop()
            for _ in range(5):
                assert (await d.post())[0] == 200
            await until(lambda: not d.router.registry.prefills[0].is_available)
            assert await degraded(d) == {"tiny": "no_prefill"}
            await d.prefills[0].start()
            await until(lambda: d.router.registry.prefills[0].is_available)
            assert await degraded(d) == {}
            num_prompts = len(d.prefills[0].received)
            assert (await d.post())[0] == 200
            assert len(d.prefills[0].received) == num_prompts + 1

    run(test)


def test_prefill_engine_that_drains_gets_no_prompt() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.router.registry.put(
                msgspec.structs.replace(d.router.registry.prefills[0].spec, state="draining")
            )
            assert (await d.post())[0] == 200
            assert not d.prefills[0].received
            assert await degraded(d) == {"tiny": "no_prefill"}

    run(test)


def test_prefill_that_dies_while_it_computes() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("hang")
            posting = asyncio.ensure_future(d.post(stream=True))
            await until(lambda: d.prefills[0].num_in_progress == 1)
            await d.prefills[0].stop()
            status, _, body = await posting
            assert status == 200
            assert events(body)[-1] == "[DONE]"

    run(test)


def test_prefill_that_takes_too_long_is_given_up() -> None:
    async def test() -> None:
        timeouts = replace(FAST.timeouts, prefill_s=0.1)
        async with deployed(2, 1, replace(FAST, timeouts=timeouts)) as d:
            d.prefills[0].script("hang")
            assert (await d.post())[0] == 200
            assert not d.prefills[1].received  # the client has waited long enough
            assert d.count("prefill_skips_total", reason="prefill_failed") == 1

    run(test)


def test_prefill_that_fails_needs_no_budget_of_retries() -> None:
    async def test() -> None:
        none = Retries(max_attempts=1, budget_ratio=0, budget_burst=0)
        async with deployed(2, 1, replace(FAST, retries=none)) as d:
            for engine in d.prefills:
                engine.script("close, close, close, close")
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert d.count("prefill_skips_total", reason="prefill_failed") == 4

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_prefill_that_refuses_a_request_is_no_failure(order: str) -> None:
    """D says what is wrong, or answers. In concurrent order it would wait for KV in vain."""

    async def test() -> None:
        async with deployed(supports_concurrent=order == "concurrent") as d:
            await d.post()
            for _ in range(4):
                d.prefills[0].script("status(422)")
                d.decodes[0].script("hang" if order == "concurrent" else "ok")
                assert (await d.post())[0] == 200
            assert d.count("prefill_skips_total", reason="prefill_refused") == 4
            assert d.router.registry.prefills[0].breaker.state.value == "closed"
            assert await degraded(d) == {}

    run(test)


def test_decode_that_fails_leaves_all_to_the_prefill_engine() -> None:
    async def test() -> None:
        async with deployed() as d:
            expected = await d.post(stream=True)
            await d.decodes[0].stop()
            status, _, body = await d.post(stream=True)
            assert (status, body) == (200, expected[2])
            assert d.prefills[0].received[-1].params == {}
            assert d.count("prefill_skips_total", reason="no_decode") == 1

    run(test)


@asynccontextmanager
async def two_models() -> AsyncIterator[Deployment]:
    """P and D of one model, and D of another one."""
    async with deployed(1, 2) as d:
        d.decodes[1].models = ("small",)
        await until(lambda: d.router.registry.decodes[1].models == ("small",))
        yield d


def test_model_without_a_prefill_engine_is_not_sent_to_that_of_another_model() -> None:
    async def test() -> None:
        async with two_models() as d:
            assert d.router.selector.degraded() == {"small": "no_prefill"}
            for _ in range(2):
                status, _, _ = await d.post(model="small")
                assert status == 200
            assert not d.prefills[0].received
            assert len(d.decodes[1].received) == 2

    run(test)


def test_model_of_one_engine_of_both_roles_is_not_degraded() -> None:
    """As one that embeds: it needs no P."""

    async def test() -> None:
        async with two_models() as d:
            registry = d.router.registry
            registry.put(msgspec.structs.replace(registry.decodes[1].spec, role="both"))
            await until(lambda: d.router.selector.degraded() == {})
            for model, engine in (("small", d.decodes[1]), ("tiny", d.decodes[0])):
                request = {"model": model, "input": "x"}
                async with d.http.post(f"{d.url}/v1/embeddings", json=request) as response:
                    assert response.status == 200
                assert [one.path for one in engine.received] == ["/v1/embeddings"]

    run(test)


def test_model_whose_engines_are_all_away_is_503_whatever_others_serve() -> None:
    async def test() -> None:
        async with two_models() as d:
            registry = d.router.registry
            registry.put(msgspec.structs.replace(registry.decodes[1].spec, state="draining"))
            status, _, body = await d.post(model="small")
            assert status == 503
            assert "'small'" in json.loads(body)["error"]["message"]
            assert await degraded(d) == {"small": "unavailable"}

    run(test)


@pytest.mark.parametrize("order", ["prefill-first", "concurrent"])
def test_required_prefill_is_never_left_out_for_lack_of_one(order: str) -> None:
    async def test() -> None:
        async with deployed(config=STRICT, supports_concurrent=order == "concurrent") as d:
            await d.post()
            d.prefills[0].script("close")
            d.decodes[0].script("hang" if order == "concurrent" else "ok")
            assert (await d.post())[0] == 502
            await d.prefills[0].stop()
            await until(lambda: not d.router.registry.prefills[0].is_available)
            assert (await d.post())[0] == 503
            assert (await get(d, "/health"))[0] == 503
            assert (await d.post(prompt=["one", "two"]))[0] == 200  # no pair could

    run(test)


def test_router_has_started_when_each_engine_was_asked() -> None:
    async def test() -> None:
        async with deployed() as d:
            assert (await get(d, "/health/startup"))[0] == 200
            new = InstanceSpec(
                instance_id="new",
                url=f"http://127.0.0.1:{free_port()}",
                role="decode",
                source="test",
            )
            d.router.registry.put(new)
            assert (await get(d, "/health/startup"))[0] == 200  # once is enough

    run(test)


def test_router_whose_engines_were_not_asked_yet_has_not_started() -> None:
    async def test() -> None:
        away = ScriptedEngine("away", health_hangs=True)
        await away.start()
        config = replace(FAST, probes=replace(FAST.probes, timeout_s=5.0), decodes=(away.url,))
        async with deployed(0, 0, config, ready=False) as d:
            assert (await get(d, "/health/startup"))[0] == 503
            assert (await get(d, "/health/live"))[0] == 200
            await away.stop()
            await until(lambda: d.router.prober.has_asked(d.router.registry.decodes[0]))
            assert (await get(d, "/health/startup"))[0] == 200

    run(test)

# SPDX-License-Identifier: Apache-2.0
"""Engines that can do both, and what an operator uses them for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.router.broken_streams import PATIENT
from tests.router.harness import Deployment, deployed, run, until
from tests.router.moving import SLOW, Client, is_whole, name
from vllm_ascend_pd import registration
from vllm_ascend_pd.cluster.emptying import switch
from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner import profile
from vllm_ascend_pd.registration import Role
from vllm_ascend_pd.router.config import Planning, RouterConfig
from vllm_ascend_pd.router.instances import EngineLoad
from vllm_ascend_pd.router.roles import EngineWork

STRICT = replace(PATIENT, require_prefill=True)


@asynccontextmanager
async def of_both_kinds(num: int, config: RouterConfig = STRICT) -> AsyncIterator[Deployment]:
    async with deployed(0, num, config, **SLOW) as d:
        for one in d.decodes:
            spec = d.router.registry.get(name(one)).spec
            told = {"role": "both", "fingerprint": "weights=a"}
            d.router.registry.put(msgspec.structs.replace(spec, **told))
        yield d


async def use(d: Deployment, index: int, role: Role) -> int:
    url = f"{d.url}{registration.PATH}/{name(d.decodes[index])}/role"
    async with d.http.put(url, json={"role": role}) as response:
        return int(response.status)


async def use_all(d: Deployment, *roles: Role) -> None:
    for index, role in enumerate(roles):
        assert await use(d, index, role) == 204


def prompts(d: Deployment, index: int) -> int:
    """Legs in which it computed a prompt for another engine."""
    return sum(bool(r.params.get("do_remote_decode")) for r in d.decodes[index].received)


def answers(d: Deployment, index: int) -> int:
    return len(d.decodes[index].received) - prompts(d, index)


def test_engines_do_what_the_operator_says() -> None:
    async def test() -> None:
        async with of_both_kinds(3) as d:
            assert [await use(d, 0, "prefill"), await use(d, 1, "decode")] == [204, 204]
            assert await use(d, 2, "decode") == 204
            for _ in range(6):
                assert (await d.post())[0] == 200
            assert [prompts(d, i) for i in range(3)] == [6, 0, 0]
            assert [answers(d, i) for i in range(3)] == [0, 3, 3]
            assert await use(d, 2, "prefill") == 204
            for _ in range(6):
                assert (await d.post())[0] == 200
            assert [prompts(d, i) for i in range(3)] == [9, 0, 3]
            assert answers(d, 1) == 9

    run(test)


def test_what_an_engine_answers_moves_before_it_computes_prompts() -> None:
    async def test() -> None:
        async with of_both_kinds(3) as d:
            await use_all(d, "prefill", "decode", "decode")
            clients = [Client(d, f"r{i}", max_tokens=100) for i in range(6)]
            for client in clients:
                await client.has(2)
            switching, other = d.decodes[1:]
            assert switching.num_in_progress == 3
            async with RouterOperator(d.url) as operator:
                lines = [line async for line in switch(operator, name(switching), "prefill")]
            assert lines[-1] == f"{name(switching)} is used for prefill"
            assert (switching.num_in_progress, other.num_in_progress) == (0, 6)
            for client in clients:
                assert is_whole(await client.rest(), other)
            moved = d.count("moves_total", reason="drain", outcome="moved", cause="")
            assert moved == 3

    run(test)


def test_answers_whose_prompts_others_still_compute_are_waited_for() -> None:
    async def test() -> None:
        timeouts = replace(STRICT.timeouts, prefill_s=20.0)
        async with of_both_kinds(3, replace(STRICT, timeouts=timeouts)) as d:
            await use_all(d, "prefill", "decode", "decode")
            d.decodes[0].script("delay(1)")
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.decodes[0].num_in_progress == 1)
            busy = next(i for i in d.router.registry if i.used_for == "decode" and i.num_admitted)
            async with RouterOperator(d.url) as operator:
                lines = switch(operator, busy.instance_id, "prefill")
                assert "has 1 requests" in await anext(lines)
                assert not busy.does("prefill")
                assert [line async for line in lines][-1].endswith("is used for prefill")
            assert busy.does("prefill")
            assert (await posting)[0] == 200

    run(test)


def test_no_prompt_goes_to_an_engine_that_still_answers() -> None:
    async def test() -> None:
        async with of_both_kinds(3) as d:
            await use_all(d, "prefill", "decode", "decode")
            clients = [Client(d, f"r{i}", logprobs=1) for i in range(2)]
            for client in clients:
                await client.has(1)
            assert await use(d, 1, "prefill") == 204
            assert (await d.post())[0] == 200
            assert prompts(d, 1) == 0
            for client in clients:
                await client.task
            for _ in range(2):
                assert (await d.post())[0] == 200
            assert prompts(d, 1) == 1

    run(test)


def test_last_engine_of_a_kind_stays_what_it_is() -> None:
    async def test() -> None:
        async with of_both_kinds(2) as d:
            assert await use(d, 0, "prefill") == 204
            assert await use(d, 1, "prefill") == 409
            assert await use(d, 1, "decode") == 204
            assert await use(d, 0, "decode") == 409
            assert (await d.post())[0] == 200

    run(test)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engines_of_the_other_kind_take_over_when_the_last_of_one_is_gone(role: Role) -> None:
    """Also where an answer needs a pair."""

    async def test() -> None:
        async with of_both_kinds(3) as d:
            other: Role = "decode" if role == "prefill" else "prefill"
            assert await use(d, 0, role) == 204
            assert [await use(d, i, other) for i in (1, 2)] == [204, 204]
            await d.decodes[0].stop()
            first = d.router.registry.get(name(d.decodes[0]))
            await until(lambda: not first.is_available)
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert prompts(d, 1) + prompts(d, 2) >= 2
            assert answers(d, 1) + answers(d, 2) == 4
            await d.decodes[0].start()
            await until(lambda: first.is_available)
            done = [prompts(d, i) for i in (1, 2)], [answers(d, i) for i in (1, 2)]
            for _ in range(4):
                assert (await d.post())[0] == 200
            now = [prompts(d, i) for i in (1, 2)], [answers(d, i) for i in (1, 2)]
            assert now[role == "decode"] == done[role == "decode"]

    run(test)


def test_answers_stay_where_they_are_while_nobody_is_used_for_them() -> None:
    """Of two engines for prompts each would send them on to the other, again and again."""

    async def test() -> None:
        async with of_both_kinds(3) as d:
            await use_all(d, "prefill", "prefill", "decode")
            clients = [Client(d, f"r{i}", max_tokens=100) for i in range(2)]
            for client in clients:
                await client.has(2)
            await d.decodes[2].stop()
            for client in clients:
                assert is_whole(await client.events(), d.decodes[2])
            assert answers(d, 0) + answers(d, 1) == 2
            ends = ("moved", ""), ("stayed", "unavailable")
            for outcome, cause in ends:
                assert d.count("moves_total", reason="drain", outcome=outcome, cause=cause) == 0

    run(test)


@pytest.mark.parametrize("has_left", [False, True])
def test_answers_of_an_engine_that_switches_move_to_whoever_may_have_them(has_left: bool) -> None:
    """Also one that is used for prompts, if the source says that it ends."""

    async def test() -> None:
        async with of_both_kinds(3) as d:
            await use_all(d, "prefill", "prefill", "decode")
            client = Client(d, max_tokens=1000)
            await client.has(2)
            await d.decodes[2].stop()
            instances = [d.router.registry.get(name(one)) for one in d.decodes]
            await until(lambda: any(i.num_decoding for i in instances[:2]), "resumed")
            source = instances[0] if instances[0].num_decoding else instances[1]
            target = instances[2]
            if has_left:
                target = next(i for i in instances[:2] if i is not source)
                d.router.registry.put(msgspec.structs.replace(source.spec, state="draining"))
            else:
                await d.decodes[2].start()
            await until(lambda: target.num_decoding == 1 and not source.num_decoding, "moved")
            d.hurry()
            assert is_whole(await client.rest(), d.decodes[2])
            assert d.count("moves_total", reason="drain", outcome="moved", cause="") == 1

    run(test)


def test_last_engine_of_a_model_stays_what_it_is() -> None:
    async def test() -> None:
        async with of_both_kinds(4) as d:
            for one in d.decodes[2:]:
                one.models = ("large", "large-adapter")
            large = [d.router.registry.get(name(one)) for one in d.decodes[2:]]
            await until(lambda: all("large" in one.models for one in large), "models read again")
            assert [await use(d, i, "prefill") for i in range(4)] == [204, 409, 204, 409]
            assert [await use(d, i, "decode") for i in (1, 3)] == [204, 204]
            assert [await use(d, i, "decode") for i in (0, 2)] == [409, 409]

    run(test)


def test_engine_of_one_kind_cannot_do_the_other() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d, RouterOperator(d.url) as operator:
            with pytest.raises(ConfigError, match=r"409: .* start it with .* router\.role both"):
                await anext(switch(operator, name(d.decodes[0]), "prefill"))
            with pytest.raises(ConfigError, match="404: d9 has not registered"):
                await anext(switch(operator, "d9", "prefill"))

    run(test)


def test_role_outlives_the_engine_and_a_drain() -> None:
    async def test() -> None:
        async with of_both_kinds(2) as d:
            registry = d.router.registry
            body = {"url": d.decodes[0].url, "role": "both"}
            url = f"{d.url}{registration.PATH}/late"
            for epoch in ("one", "two"):
                async with d.http.put(url, json={**body, "epoch": epoch}) as response:
                    assert response.status == 200
                if epoch == "one":
                    async with d.http.put(f"{url}/role", json={"role": "decode"}) as response:
                        assert response.status == 204
                    async with d.http.put(f"{url}/drain") as response:
                        assert response.status == 204
                    assert registry.get("late").spec.state == "draining"
                assert registry.get("late").used_for == "decode"
            assert registry.get("late").spec.state == "ready"
            registry.remove("late", "the test ends")

    run(test)


def test_a_service_of_both_kinds_always_finds_a_pair() -> None:
    """Whatever they are used for, and whichever of them are away."""

    async def test() -> None:
        async with of_both_kinds(3) as d:
            instances = list(d.router.registry)
            roles: tuple[Role, ...] = ("prefill", "decode", "both")
            states = ("ready", "draining")
            for used in itertools.product(roles, repeat=3):
                for told in itertools.product(states, repeat=3):
                    for one, role, state in zip(instances, used, told, strict=True):
                        one.used_for = role
                        one.spec = msgspec.structs.replace(one.spec, state=state)
                    degraded = d.router.selector.degraded()
                    assert bool(degraded) == ("ready" not in told), (used, told)

    run(test)


def test_roles_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        timeouts = replace(STRICT.timeouts, prefill_s=30, answer_s=30)
        async with of_both_kinds(4, replace(STRICT, roles="auto", timeouts=timeouts)) as d:
            await until(lambda: "both" not in [i.used_for for i in d.router.registry])
            used = [i.used_for for i in d.router.registry]
            assert sorted(used) == ["decode", "decode", "decode", "prefill"]
            monkeypatch.setattr("vllm_ascend_pd.router.roles.HOLD_S", 0.0)
            monkeypatch.setattr("vllm_ascend_pd.router.roles.REST_S", 0.0)
            for one in d.decodes:
                one.compute_token_s = 0.03
            posts = [asyncio.create_task(d.post(prompt="long " * 64)) for _ in range(12)]
            await until(lambda: [i.used_for for i in d.router.registry].count("prefill") > 1)
            assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
            for one in d.decodes:
                one.compute_token_s = 0.0
                one.metrics = "vllm:kv_cache_usage_perc{} 1.0\nvllm:num_requests_waiting{} 9\n"
            await until(lambda: [i.used_for for i in d.router.registry].count("decode") == 3)
            assert (await d.post())[0] == 200
            assert d.count("role_switches_total", role="decode") >= 4

    run(test)


def test_prompts_that_others_compute_do_not_make_an_engine_full() -> None:
    """Sent to both at once, they wait at D for as long as P is busy: which asks for a P more."""

    async def test() -> None:
        timeouts = replace(STRICT.timeouts, prefill_s=20.0)
        config = replace(STRICT, timeouts=timeouts)
        async with deployed(1, 1, config, supports_concurrent=True) as d:
            assert (await d.post())[0] == 200
            d.prefills[0].script("delay(1)")
            d.decodes[0].script("delay(1)")
            decode = d.router.registry.get(name(d.decodes[0]))
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.prefills[0].num_in_progress == 1)
            decode.load = EngineLoad(num_waiting=1.0)
            assert EngineWork.of(decode).fullness == 0.0
            decode.load = EngineLoad(num_waiting=2.0)
            assert EngineWork.of(decode).fullness == 1.0
            assert (await posting)[0] == 200
            assert d.count("orders_total", order="concurrent") == 1
            decode.load = EngineLoad(num_waiting=1.0)
            assert EngineWork.of(decode).fullness == 1.0

    run(test)


SLOW_PREFILL = {
    "format": profile.FORMAT,
    "model": "tiny",
    "prefill": [{"num_tokens": 10, "batch": 1, "seconds": 5.0}],
    "decode": [{"batch": 1, "context_tokens": 10, "seconds": 0.001}],
    "handover": [{"num_tokens": 10, "seconds": 0.001}],
    "max_num_batched_tokens": 1000,
    "max_num_seqs": 100,
    "prefill_kv_tokens": 10_000,
    "decode_kv_tokens": 10_000,
}


def test_roles_follow_the_plan_for_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No engine has much to do; by the profile one P would be too slow for as many prompts."""
    path = tmp_path / "profile.json"
    profile.save(profile.check(SLOW_PREFILL), path)
    for name_, value in (("HOLD_S", 0.0), ("REST_S", 0.0), ("PLAN_S", 0.0)):
        monkeypatch.setattr(f"vllm_ascend_pd.router.roles.{name_}", value)

    async def test() -> None:
        async with of_both_kinds(
            4, replace(STRICT, roles="auto", planning=Planning(path, 60.0))
        ) as d:
            await until(lambda: "both" not in [i.used_for for i in d.router.registry])
            for _ in range(30):
                assert (await d.post())[0] == 200
            await until(lambda: [i.used_for for i in d.router.registry].count("prefill") == 3)
            assert d.count("role_switches_total", role="prefill") == 3
            assert (await d.post(stream=True))[0] == 200

    run(test)


def test_profile_is_refused_where_nobody_goes_by_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--profile is for --roles auto"):
        RouterConfig(planning=Planning(tmp_path))
    with pytest.raises(ConfigError, match="must be positive"):
        Planning(tmp_path, slo_ttft_s=0)

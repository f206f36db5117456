# SPDX-License-Identifier: Apache-2.0
"""Instances that come, change and go while the router runs."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from tests.router.harness import FAST, STRICT, Deployment, deployed, needs_ipv6, run, until
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd import registration
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.breaker import BreakerState
from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.router import app
from vllm_ascend_pd.router.config import Order
from vllm_ascend_pd.router.discovery import registered
from vllm_ascend_pd.router.discovery.static import (
    FileInstance,
    StaticDiscovery,
    decode_instances,
)
from vllm_ascend_pd.router.instances import Instance, InstanceSpec, Registry
from vllm_ascend_pd.router.stored import new_response_id

if TYPE_CHECKING:
    from vllm_ascend_pd.router.http_client import EngineClient


RESPONSE = f"/v1/responses/{new_response_id('third')}"
"""Of an engine that nobody knows."""


def described(engine: ScriptedEngine, **changes: Any) -> dict[str, Any]:
    return {"url": engine.url, "role": "decode", "epoch": "one", **changes}


async def register(
    d: Deployment, name: str, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    url = f"{d.url}{registration.PATH}/{name}"
    async with d.http.put(url, json=body, headers=headers) as response:
        return response.status, await response.json()


async def look_on(d: Deployment, seconds: float) -> None:
    """As if so long nobody were heard."""
    now = time.monotonic()
    for later_s in range(round(seconds) + 1):
        await d.router.refresh(now + later_s)


def test_engine_registers_drains_and_leaves() -> None:
    async def test() -> None:
        async with deployed(1, 0, STRICT) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            assert (await d.post())[0] == 503
            status, answer = await register(d, "late", described(engine))
            assert (status, set(answer)) == (200, {"heartbeat_s", "ttl_s"})
            assert (await d.post())[0] == 200
            await register(d, "late", described(engine, state="draining"))
            assert (await d.post())[0] == 503
            await register(d, "late", described(engine))
            assert (await d.post())[0] == 200
            async with d.http.get(d.url + registration.PATH) as response:
                listed = {i["instance_id"]: i["source"] for i in await response.json()}
            assert listed["late"] == "registered"
            async with d.http.delete(f"{d.url}{registration.PATH}/late") as response:
                assert response.status == 204
            assert (await d.post())[0] == 503
            await engine.stop()

    run(test)


def test_requests_wait_for_engines_to_register_with_a_router_that_has_just_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "HEARS_ALL_S", 1000)

    async def test() -> None:
        async with deployed(0, 0, ready=False) as d:
            first, second = ScriptedEngine("first"), ScriptedEngine("second", models=("other",))
            await first.start()
            await second.start()
            of_second = asyncio.ensure_future(d.post(model="other"))
            await until(lambda: d.router.admission.num_queued == 1)
            of_first = asyncio.ensure_future(d.post())
            await until(lambda: d.router.admission.num_queued == 2)
            await register(d, "first", described(first, models=("tiny",)))
            assert (await of_first)[0] == 200  # though the other one was there before
            late = asyncio.ensure_future(d.post(model="third"))
            await until(lambda: d.router.admission.num_queued == 2)
            assert (await d.post())[0] == 200
            async with d.http.get(f"{d.url}{RESPONSE}") as response:
                assert response.status == 503
                assert "just started" in (await response.json())["error"]["message"]
            await register(d, "second", described(second, models=("other",)))
            assert (await of_second)[0] == 200
            assert [len(one.received) for one in (first, second)] == [2, 1]
            d.router.selector.hears_all_at = 0.0
            assert (await late)[0] == 404  # an engine says so
            async with d.http.get(f"{d.url}{RESPONSE}") as response:
                assert response.status == 200  # an engine has said so
            await first.stop()
            await second.stop()

    run(test)


def test_requests_wait_though_engines_of_another_model_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who has a token for engines to register is not given all of them."""
    monkeypatch.setattr(app, "HEARS_ALL_S", 1000)
    token = tmp_path / "token"
    token.write_text("secret")

    async def test() -> None:
        other = ScriptedEngine("other", models=("embeds",))
        await other.start()
        listed = tmp_path / "instances.json"
        listed.write_text(json.dumps({"instances": [{"url": other.url, "role": "both"}]}))
        config = replace(FAST, instances_file=listed, registration_token_file=token)
        async with deployed(0, 0, config, ready=False) as d:
            await until(lambda: "embeds" in d.router.registry.models)
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.router.admission.num_queued == 1)
            assert not other.received
            engine = ScriptedEngine("late")
            await engine.start()
            right = {"Authorization": "Bearer secret"}
            assert (await register(d, "late", described(engine, models=("tiny",)), right))[0] == 200
            assert (await posting)[0] == 200
            await engine.stop()
        await other.stop()

    run(test)


def test_router_that_has_heard_of_all_refuses_what_nobody_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "HEARS_ALL_S", 1.0)

    async def test() -> None:
        async with deployed(0, 0, ready=False) as d:
            posting = asyncio.ensure_future(d.post())
            await until(lambda: d.router.admission.num_queued == 1)
            status, _, body = await posting
            assert status == 503
            assert json.loads(body)["error"]["message"] == (
                "no prefill or decode instance is known"
            )
            assert (await d.post())[0] == 503

    run(test)


@pytest.mark.parametrize(("query", "is_gone"), [("?epoch=one", False), ("?epoch=two", True)])
def test_late_goodbye_does_not_remove_the_engine_that_has_its_id_now(
    query: str, is_gone: bool
) -> None:
    async def test() -> None:
        async with deployed(0, 0, ready=False) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            await register(d, "late", described(engine, epoch="one"))
            await register(d, "late", described(engine, epoch="two"))
            url = f"{d.url}{registration.PATH}/late"
            async with d.http.delete(url + query) as response:
                assert response.status == 204
            assert (d.router.registry.get("late") is None) is is_gone
            await engine.stop()

    run(test)


def test_request_in_progress_outlives_its_instances_registration() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            await register(d, "late", described(engine))
            engine.script("delay(0.2)")
            posting = asyncio.ensure_future(d.post())
            await until(lambda: engine.num_in_progress == 1)
            async with d.http.delete(f"{d.url}{registration.PATH}/late") as response:
                assert response.status == 204
            assert (await posting)[0] == 200
            await until(lambda: d.router.metrics.num_requests == 0)
            counted = dict(d.router.metrics.snapshot().counters["legs"])
            assert not [labels for labels in counted if labels[0] == "late"]
            await engine.stop()

    run(test)


def test_request_of_a_removed_engine_whose_host_dies_silently_is_sent_elsewhere() -> None:
    timeouts = replace(FAST.timeouts, first_token_s=30.0, answer_s=30.0)

    async def test() -> None:
        async with deployed(0, 1, replace(FAST, timeouts=timeouts)) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            await register(d, "late", described(engine))
            await until(lambda: d.router.registry.get("late") in d.router.prober.models)
            removed = d.router.registry.get("late")
            engine.script("hang")
            posts = [asyncio.ensure_future(d.post()) for _ in range(2)]  # one to each of the two
            await until(lambda: engine.num_in_progress == 1)
            async with d.http.delete(f"{d.url}{registration.PATH}/late"):
                pass
            engine.health_hangs = True
            done, _ = await asyncio.wait(posts, timeout=10)
            assert [post.result()[0] for post in done] == [200, 200]
            await until(lambda: removed not in d.router.prober._tasks)
            assert removed not in d.router.prober.models
            await engine.stop()

    run(test)


def test_silent_engine_is_removed_and_a_restarted_one_is_new() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            engine = ScriptedEngine("late")
            await engine.start()
            await register(
                d, "late", described(engine, kv={"engine_id": "a", "host": "::1", "port": 1})
            )
            first = d.router.registry.get("late")
            await register(d, "late", described(engine, epoch="two"))
            second = d.router.registry.get("late")
            assert second is not first
            assert second.kv is None
            await look_on(d, registration.TTL_S - 1)
            assert d.router.registry.get("late") is second
            await look_on(d, registration.TTL_S + 1)
            assert d.router.registry.get("late") is None
            await engine.stop()

    run(test)


@pytest.mark.parametrize(
    ("changes", "headers", "status"),
    [
        ({"url": "http://10.0.0.1:80"}, {}, 403),
        ({"kv": {"engine_id": "x", "host": "10.0.0.1", "port": 1}}, {}, 403),
        ({"kv_events": {"endpoint": "tcp://10.0.0.1:1"}}, {}, 403),
        ({}, {"X-Forwarded-For": "1.2.3.4"}, 403),
        ({"role": "king"}, {}, 400),
        ({"epoch": "x" * 70_000}, {}, 400),
    ],
)
def test_registration_that_is_refused(
    changes: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    async def test() -> None:
        async with deployed() as d:
            got, body = await register(d, "x", described(d.decodes[0], **changes), headers)
            assert got == status
            assert body["error"]["code"] == status
            assert d.router.registry.get("x") is None

    run(test)


def test_number_of_registrations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "MAX_INSTANCES", 2)

    async def test() -> None:
        async with deployed() as d:
            engine = d.decodes[0]
            for name in ("a", "b"):
                assert (await register(d, name, described(engine)))[0] == 200
            url = f"{d.url}{registration.PATH}/c"
            async with d.http.put(url, json=described(engine)) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) > 0
            assert (await register(d, "b", described(engine)))[0] == 200
            async with d.http.delete(f"{d.url}{registration.PATH}/a") as response:
                assert response.status == 204
            assert (await register(d, "c", described(engine)))[0] == 200

    run(test)


@needs_ipv6
def test_engine_on_loopback_registers_by_either_protocol() -> None:
    async def test() -> None:
        async with deployed(1, 0, replace(FAST, host="::")) as d:
            for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]"):
                url = f"http://{host}:{d.port}{registration.PATH}/late"
                async with d.http.put(url, json=described(d.prefills[0])) as response:
                    assert response.status == 200

    run(test)


def test_registration_takes_no_static_instance_over() -> None:
    async def test() -> None:
        async with deployed() as d:
            name = f"127.0.0.1:{d.decodes[0].port}"
            assert (await register(d, name, described(d.decodes[0])))[0] == 409

    run(test)


def test_second_engine_of_an_id_is_refused_while_the_first_is_there() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            first, second = ScriptedEngine("first"), ScriptedEngine("second")
            await first.start()
            await second.start()
            for epoch in ("one", "two"):  # it starts anew
                assert (await register(d, "x", described(first, epoch=epoch)))[0] == 200
            status, body = await register(d, "x", described(second))
            assert status == 409
            assert body["error"]["message"].startswith(f"x is the engine at {first.url}")
            assert "router.instance_id" in body["error"]["message"]
            assert (await register(d, "x", described(first, epoch="two")))[0] == 200
            assert d.router.registry.get("x").spec.url == first.url

            await look_on(d, registration.TTL_S + 1)
            assert (await register(d, "x", described(second)))[0] == 200
            assert (await register(d, "x", described(first)))[0] == 409
            await first.stop()
            await second.stop()

    run(test)


def test_engine_that_starts_keeps_its_id_though_probes_do_not_find_it_yet() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            first, second = ScriptedEngine("first"), ScriptedEngine("second")
            await first.start()
            await second.start()
            await first.stop()
            await second.stop()
            assert (await register(d, "x", described(first, state="starting")))[0] == 200
            instance = d.router.registry.get("x")
            await until(lambda: instance.breaker.state is BreakerState.OPEN)
            status, body = await register(d, "x", described(second, state="starting"))
            assert status == 409
            assert "which starts" in body["error"]["message"]
            assert (await register(d, "x", described(first, state="starting")))[0] == 200

            await look_on(d, registration.TTL_S + 1)
            assert (await register(d, "x", described(second, state="starting")))[0] == 200

    run(test)


def test_engine_that_moved_takes_its_id_along_once_it_is_not_to_be_reached_where_it_was() -> None:
    async def test() -> None:
        async with deployed(1, 0) as d:
            before, after = ScriptedEngine("before"), ScriptedEngine("after")
            await before.start()
            await after.start()
            assert (await register(d, "x", described(before)))[0] == 200
            await before.stop()
            instance = d.router.registry.get("x")
            await until(lambda: instance.breaker.state is BreakerState.OPEN)
            assert (await register(d, "x", described(after, epoch="two")))[0] == 200
            assert d.router.registry.get("x").spec.url == after.url
            await after.stop()

    run(test)


def test_registration_token(tmp_path: Path) -> None:
    async def test() -> None:
        token = tmp_path / "token"
        token.write_text("secret\n")
        async with deployed(config=replace(FAST, registration_token_file=token)) as d:
            body = described(d.decodes[0], url="http://192.0.2.1:9")
            assert (await register(d, "x", body))[0] == 403
            wrong = {"Authorization": "Bearer wrong"}
            assert (await register(d, "x", body, wrong))[0] == 403
            right = {"Authorization": "Bearer secret", "X-Forwarded-For": "1.2.3.4"}
            assert (await register(d, "x", body, right))[0] == 200

    run(test)


def test_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        path = tmp_path / "instances.json"
        path.write_text('{"instances": []}')
        extra = ScriptedEngine("extra")
        await extra.start()
        async with deployed(1, 0, replace(STRICT, instances_file=path)) as d:
            assert (await d.post())[0] == 503
            entry = {"url": extra.url, "role": "decode", "id": "extra"}
            path.write_text(json.dumps({"instances": [entry]}))
            await until(lambda: d.router.registry.get("extra") is not None)
            assert (await d.post())[0] == 200
            path.write_text('{"instances": [')
            os.utime(path, (1, 1))
            await until(lambda: "kept what was read before" in caplog.text)
            assert d.router.registry.get("extra") is not None
            path.write_text(json.dumps({"instances": [entry | {"state": "draining"}]}))
            await until(lambda: d.router.registry.get("extra").spec.state == "draining")
            assert (await d.post())[0] == 503
        await extra.stop()

    run(test)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "truncated"),
        ('{"instances": [{"url": "http://a:1"}]}', "role"),
        ('{"instances": [{"url": "http://a:1", "role": "decode", "rolle": 1}]}', "rolle"),
    ],
)
def test_wrong_file_names_the_field(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        decode_instances(text.encode(), "file")


def test_operators_file_may_name_a_socket_for_events() -> None:
    """Who registers may not."""
    events = {"endpoint": "ipc:///run/p0", "replay_endpoint": "ipc:///run/p0-replay"}
    entry = {"url": "http://a:1", "role": "prefill", "kv_events": events}
    [instance] = decode_instances(json.dumps({"instances": [entry]}).encode(), "file")
    found = instance.spec().kv_events
    assert found is not None
    assert (found.endpoint, found.replay_endpoint) == tuple(events.values())
    with pytest.raises(ConfigError, match=r"'\^tcp://' - at `\$\.kv_events\.endpoint`"):
        registration.decode(json.dumps({**entry, "epoch": "e"}).encode())


def ranks(engine: ScriptedEngine, role: str) -> list[dict[str, Any]]:
    return [{"url": engine.url, "role": role, "data_parallel_rank": rank} for rank in (0, 1)]


@pytest.mark.parametrize("order", ["auto", "prefill-first"])
def test_ranks_of_one_server_are_instances_and_requests_name_them(
    tmp_path: Path, order: Order
) -> None:
    async def test() -> None:
        path = tmp_path / "instances.json"
        p, d = ScriptedEngine("p", supports_concurrent=True), ScriptedEngine("d")
        await p.start()
        await d.start()
        listed = [*ranks(p, "prefill"), *ranks(d, "decode")]
        path.write_text(json.dumps({"instances": listed}))
        async with deployed(0, 0, replace(STRICT, instances_file=path, order=order)) as made:
            names = {i.instance_id for i in made.router.registry}
            assert names == {f"{e.url[7:]}-dp{rank}" for e in (p, d) for rank in (0, 1)}
            for _ in range(4):
                assert (await made.post(headers={RANK_HEADER: "7"}))[0] == 200
            for engine in (p, d):
                sent = [r.headers[RANK_HEADER.lower()] for r in engine.received]
                assert sorted(sent) == ["0", "0", "1", "1"]
        await p.stop()
        await d.stop()

    run(test)


def test_metrics_of_a_server_are_read_once_for_all_of_its_ranks() -> None:
    async def test() -> None:
        config = replace(FAST, probes=replace(FAST.probes, interval_s=60.0))
        async with deployed(0, 1, config) as d:
            engine, num_ranks = ScriptedEngine("late"), 8
            engine.metrics = "".join(
                f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.{rank + 1}\n'
                f'vllm:kv_cache_usage_perc_of_another{{engine="{rank}"}} 7\n'
                for rank in range(num_ranks)
            )
            await engine.start()
            specs = [
                InstanceSpec(
                    instance_id=f"rank-{rank}",
                    url=engine.url,
                    role="decode",
                    source="test",
                    data_parallel_rank=rank,
                )
                for rank in range(num_ranks)
            ]
            d.router.registry.replace("test", specs)
            of_ranks = [d.router.registry.get(spec.instance_id) for spec in specs]
            await until(lambda: all(one.load.read_at > 0 for one in of_ranks))
            usages = [round(10 * one.load.kv_usage) for one in of_ranks]
            assert usages == [rank + 1 for rank in range(num_ranks)]
            assert engine.num_metrics_read == 1
            again = [msgspec.structs.replace(spec, epoch="two") for spec in specs]
            d.router.registry.replace("test", again)
            of_ranks = [d.router.registry.get(spec.instance_id) for spec in specs]
            await until(lambda: all(one.load.read_at > 0 for one in of_ranks))
            assert engine.num_metrics_read == 2
            await engine.stop()

    run(test)


def test_engine_cores_behind_a_url_without_ranks_are_asked_prefill_first() -> None:
    """The front end chooses one, so nothing says where the prompt of a second request would go."""

    async def test() -> None:
        async with deployed(1, 1) as d:
            d.prefills[0].supports_concurrent, d.prefills[0].rank = True, 1
            for _ in range(3):
                assert (await d.post(headers={RANK_HEADER: "0"}))[0] == 200
            assert d.count("orders_total", order="prefill-first") == 3
            assert not any(RANK_HEADER.lower() in r.headers for r in d.prefills[0].received)

    run(test)


def test_prompt_of_a_rank_names_it_where_engines_heed_no_header(tmp_path: Path) -> None:
    """On ``/v1/responses``, whose requests are sent at once, too."""

    async def test() -> None:
        path = tmp_path / "instances.json"
        p, d = ScriptedEngine("p", supports_concurrent=True), ScriptedEngine("d")
        await p.start()
        await d.start()
        listed = [*ranks(p, "prefill")[1:], *ranks(d, "decode")[:1]]
        path.write_text(json.dumps({"instances": listed}))
        async with deployed(0, 0, replace(STRICT, instances_file=path)) as made:
            for _ in range(2):
                assert (await made.post())[0] == 200
            assert (await made.post("/v1/responses", input="Hello", prompt=None))[0] == 200
            assert made.count("orders_total", order="concurrent") == 2
            learning, *at_once = [r.params.get("data_parallel_rank") for r in p.received]
            assert (learning, at_once) == (None, [1, 1])
        await p.stop()
        await d.stop()

    run(test)


def test_instance_given_twice_is_an_error() -> None:
    config = replace(FAST, prefills=("http://a:1",), decodes=("http://a:1",))
    with pytest.raises(ConfigError, match="twice"):
        StaticDiscovery(config, None).read()  # type: ignore[arg-type]


def test_engine_at_an_address_that_begins_with_a_colon_has_an_id() -> None:
    """As it has when it registers."""
    assert FileInstance(url="http://[::1]:8100", role="prefill").spec().instance_id == "0::1:8100"


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        (("http://127.0.0.1:1", None), ("http://localhost:1/", None), True),
        (("http://127.0.0.1:1", None), ("http://[::1]:1", 1), True),
        (("http://10.0.0.1", None), ("http://10.0.0.1:80", None), True),
        (("http://10.0.0.1:1", 0), ("http://10.0.0.1:1", 1), False),
        (("http://10.0.0.1:1", None), ("http://10.0.0.2:1", None), False),
        (("http://10.0.0.1:1", None), ("http://10.0.0.1:2", None), False),
    ],
)
def test_engine_that_is_known_twice_is_told_of(
    first: tuple[str, int | None],
    second: tuple[str, int | None],
    is_one: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = Registry(lambda spec: Instance(spec, cast("EngineClient", None), 3))
    for number, (url, rank) in enumerate((first, second)):
        spec = InstanceSpec(
            url=url, role="decode", data_parallel_rank=rank, instance_id=f"d{number}", source="s"
        )
        for _ in "12":
            registry.put(spec)
    assert caplog.text.count("d0 and d1 are one engine") == is_one


def test_instance_whose_host_has_no_name_is_an_error() -> None:
    config = replace(FAST, prefills=("http://10.0.0..5:8000",))
    with pytest.raises(ConfigError, match="no name of a host"):
        StaticDiscovery(config, None)  # type: ignore[arg-type]


def test_only_labelled_instances_serve() -> None:
    async def test() -> None:
        config = replace(FAST, decode_labels=("good",))
        async with deployed(1, 0, config) as d:
            engines = [ScriptedEngine("good"), ScriptedEngine("bad")]
            for engine in engines:
                await engine.start()
                labels = {"model": engine.name}
                await register(d, engine.name, described(engine, labels=labels))
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert [len(e.received) for e in engines] == [4, 0]
            for engine in engines:
                await engine.stop()

    run(test)


def test_incompatible_engines_are_not_paired() -> None:
    async def test() -> None:
        async with deployed(0, 0, STRICT) as d:
            engines = {name: ScriptedEngine(name) for name in ("p1", "p2", "d1", "d2")}
            for name, engine in engines.items():
                await engine.start()
                role = "prefill" if name[0] == "p" else "decode"
                body = described(engine, role=role, fingerprint=name[1])
                await register(d, name, body)
            for _ in range(8):
                assert (await d.post())[0] == 200
            for name in ("d1", "d2"):
                assert engines[name].received
                for request in engines[name].received:
                    assert request.params["remote_engine_id"] == "p" + name[1]
            await register(d, "d1", described(engines["d1"], state="draining"))
            await register(d, "p2", described(engines["p2"], role="prefill", state="draining"))
            status, _, body = await d.post()
            assert status == 503
            assert b"exchange KV" in body
            for engine in engines.values():
                await engine.stop()

    run(test)


def test_model_goes_to_who_serves_it() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            other = ScriptedEngine("other")
            await other.start()
            await register(d, "other", described(other, models=("other-model",)))
            await d.post()
            assert len(d.decodes[0].received) == 1
            status, _, _ = await d.post(model="nobody-serves-this")
            assert status == 404  # an engine says so
            await other.stop()

    run(test)

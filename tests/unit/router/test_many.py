# SPDX-License-Identifier: Apache-2.0
"""Of many engines, models and streams none costs more than its own: what is counted is how often
each is looked at."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import make_mocked_request

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.router import stored
from vllm_ascend_pd.router.apis import COMPLETIONS
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.bodies import parse
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.deadlines import LoopLag
from vllm_ascend_pd.router.discovery.registered import SOURCE, Roster
from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.http_exchange import EngineConnection, Response
from vllm_ascend_pd.router.instances import EngineLoad, Instance, InstanceSpec, Registry, Word
from vllm_ascend_pd.router.metrics import Metrics
from vllm_ascend_pd.router.moves import Answering
from vllm_ascend_pd.router.policies import Routed
from vllm_ascend_pd.router.policies.round_robin import RoundRobin
from vllm_ascend_pd.router.rebalance import Rebalancing
from vllm_ascend_pd.router.relay import Job
from vllm_ascend_pd.router.resumable import Promise
from vllm_ascend_pd.router.selection import Labels, Pair, Selector
from vllm_ascend_pd.router.trace import Trace
from vllm_ascend_pd.router.transcript import Transcript

CLIENT = EngineClient("http://127.0.0.1:1", connect_timeout_s=1)


def counting(
    monkeypatch: pytest.MonkeyPatch,
    kind: type,
    name: str,
    key: Callable[..., Any] = lambda one, *args: one.instance_id,
) -> Counter[Any]:
    """How often each instance's property or method of this name is used; or by another ``key``."""
    counts: Counter[Any] = Counter()
    found = getattr(kind, name)

    def counted(one: Any, *args: Any) -> Any:
        counts[key(one, *args)] += 1
        return found.fget(one) if isinstance(found, property) else found(one, *args)

    monkeypatch.setattr(kind, name, property(counted) if isinstance(found, property) else counted)
    return counts


def spec(number: int, **fields: Any) -> InstanceSpec:
    known = {"role": "both", "source": SOURCE, "fingerprint": "f", "models": ("m",), **fields}
    return InstanceSpec(instance_id=f"e{number}", url=f"http://10.0.0.{number}:8000", **known)


def registered(*specs: InstanceSpec) -> Registry:
    registry = Registry(lambda spec: Instance(spec, CLIENT, 3))
    for one in specs:
        registry.put(one)
    return registry


def test_what_becomes_of_each_model_is_asked_of_its_own_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec(i, models=(f"m{i // 2}",)) for i in range(80)]
    adapters = tuple(f"a{i}" for i in range(100))
    specs += [spec(i, models=adapters) for i in range(80, 90)]
    selector = Selector(registered(*specs), RoundRobin(), Labels())
    looked_at = counting(monkeypatch, Instance, "is_available")
    assert selector.by_model() == {f"m{i}": None for i in range(40)} | dict.fromkeys(adapters)
    assert max(looked_at.values()) <= 4


def test_models_nobody_can_be_asked_for_are_told_with_those_that_some_can() -> None:
    specs = [spec(i, models=("there",) if i else ("gone", "away")) for i in range(3)]
    registry = registered(*specs)
    selector = Selector(registry, RoundRobin(), Labels())
    assert selector.degraded() == {}
    registry.put(msgspec.structs.replace(specs[0], state="draining"))
    assert selector.degraded() == {"away": "unavailable", "gone": "unavailable"}
    registry.put(msgspec.structs.replace(specs[1], state="starting", models=("away",)))
    registry.remove("e2", "")
    assert selector.by_model() == {"away": "unavailable", "gone": "unavailable"}


def test_choice_for_a_model_looks_at_its_own_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registered(
        *(spec(i, models=(f"m{i // 4}", f"m{i // 4}-{i % 2}")) for i in range(80))
    )
    selector = Selector(registry, RoundRobin(), Labels())
    excluded = set(list(registry)[:2])
    registry.settle()
    looked_at = counting(monkeypatch, Instance, "is_available")
    found = selector.choose(Routed(model="m0", excluded=excluded))
    assert isinstance(found, Pair)
    assert {found.prefill.instance_id, found.decode.instance_id} == {"e2", "e3"}
    assert looked_at.keys() <= {"e0", "e1", "e2", "e3"}


def test_engines_that_come_start_anew_and_go_are_not_compared_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = counting(monkeypatch, Instance, "is_at")
    put = counting(monkeypatch, Registry, "put", lambda _, spec: spec.instance_id)
    router = Router(RouterConfig())
    router.registry.on_added = router.registry.on_removed = lambda one: None
    num_engines = 50
    told: list[int] = []

    async def follow(specs: list[InstanceSpec], words: dict[str, Word]) -> None:
        told.append(len(specs))
        await router.follow(specs, words)

    async def test() -> None:
        roster = Roster(follow)
        for state in ("starting", "ready"):
            for i in range(num_engines):
                await roster.beat(spec(i, state=state))
        assert len(router.registry.decodes) == len(list(router.registry)) == num_engines
        assert set(put.values()) == {2}
        heard_at = max(roster._last_heard.values())
        roster._last_heard = dict.fromkeys(roster._last_heard, heard_at)
        for later_s in range(40):
            await roster.expire(heard_at + later_s)

    asyncio.run(test())
    assert not compared
    assert told[-2:] == [num_engines, 0]
    assert not list(router.registry)


def test_heartbeat_looks_at_no_word_of_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = counting(monkeypatch, Word, "after", lambda *args: None)

    async def follow(specs: list[InstanceSpec], words: dict[str, Word]) -> None:
        pass

    async def test() -> None:
        roster = Roster(follow)
        specs = [spec(i) for i in range(50)]
        for one in specs:
            await roster.beat(one)
            await roster.say(one.instance_id, "", {"role": "prefill"})
        looks.clear()
        for one in specs:
            await roster.beat(one)
        assert looks.total() == len(specs)
        looks.clear()
        await roster.expire(max(roster._last_heard.values()))
        assert looks.total() == len(specs)

    asyncio.run(test())


def test_two_names_of_one_engine_are_noticed_among_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = [f"http://{host}:8000" for host in ("localhost", "10.0.0.1", "127.0.0.1")]
    specs = [msgspec.structs.replace(spec(i), url=url) for i, url in enumerate(at)]
    registry = registered(*specs)
    registry.remove("e0", "")
    registry.remove("e2", "")
    registry.put(specs[2])
    warned = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert [args[:2] for args in warned] == [("e0", "e2")]  # type: ignore[index]


def test_legs_of_an_engine_that_is_gone_are_found_without_those_of_others() -> None:
    metrics = Metrics(tuple, dict, dict, 60)
    for i in range(3):
        for outcome in ("ok", "ok", "aborted"):
            metrics.leg_ended(f"e{i}", "decode", outcome)
    metrics.forget("e1")
    metrics.forget("nobody")
    snapshot = metrics.snapshot()
    assert sorted(snapshot.counters["legs"]) == [
        ((f"e{i}", "decode", outcome), count)
        for i in (0, 2)
        for outcome, count in (("aborted", 1), ("ok", 2))
    ]


def test_owner_of_a_response_is_found_without_hashing_every_name_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = registered(*(spec(i) for i in range(50)))
    response = stored.new_response_id("e49")
    found = stored.owner(response, registry)
    assert found is registry.get("e49")
    monkeypatch.setattr("vllm_ascend_pd.router.stored.hashlib", None)
    assert stored.owner(response, registry) is found


def streams(router: Router, engine: Instance, num: int) -> list[Answering]:
    """That an engine gives, and that may move."""
    loop = asyncio.get_running_loop()
    sent = json.dumps({"prompt": "Hello", "stream": True}).encode()
    for number in range(num):
        trace = Trace(make_mocked_request("POST", COMPLETIONS), f"{number}")
        job = Job(parse(COMPLETIONS, sent), Routed(8, 8), trace, promise=Promise("exact"))
        response = Response(EngineConnection(CLIENT), loop, LoopLag())
        one = Answering(job, engine, response, Transcript(shows_token_ids=False))
        router.moves.running[one] = None
    return list(router.moves.running)


def with_streams(num: int, test: Callable[[Router, list[Instance], list[Answering]], None]) -> None:
    """Of a router with two engines, the first of which gives them."""

    async def run() -> None:
        router = Router(RouterConfig(rebalance="load"))
        router.registry.on_added = lambda one: None
        for i in range(2):
            router.registry.put(instance(f"e{i}", "f").spec)
        engines = list(router.registry)
        test(router, engines, streams(router, engines[0], num))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


def test_stream_is_not_compared_with_all_of_its_engine_to_see_that_it_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: Counter[Answering] = Counter()
    watch = Rebalancing._watch

    class Seen(dict[Answering, Any]):
        def __getitem__(self, one: Answering) -> Any:
            looks[one] += 1
            return super().__getitem__(one)

    def watching(self: Rebalancing, now: float) -> None:
        watch(self, now)
        self._seen = Seen(self._seen)

    monkeypatch.setattr(Rebalancing, "_watch", watching)

    def test(router: Router, engines: list[Instance], there: list[Answering]) -> None:
        full, empty = engines
        router._rebalancing.look(0.0)
        full.load = EngineLoad(num_running=100, num_waiting=1, kv_usage=0.95, read_at=1)
        empty.load = EngineLoad(read_at=1)
        for one in there[:-1]:
            one.job.trace.num_bytes += 1
        router._rebalancing.look(10.0)
        assert [one.move.reason for one in there if one.move is not None] == ["preempted"]
        assert there[-1].move is not None

    with_streams(100, test)
    assert looks
    assert max(looks.values()) <= 4


def test_streams_of_engines_that_do_not_drain_are_not_asked_whether_they_may_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = counting(monkeypatch, Instance, "is_leaving")
    whether = counting(monkeypatch, Answering, "obstacle", lambda one: one)

    def test(router: Router, engines: list[Instance], there: list[Answering]) -> None:
        leaves = engines[1]
        router._drains.look(0.0)
        assert not whether
        assert asked == {"e0": 1}
        for one in there[:3]:
            one.instance = leaves
        there[0].job.promise = Promise("none", "logprobs")
        router.registry.put(msgspec.structs.replace(leaves.spec, state="draining"))
        for _ in range(2):
            router._drains.look(0.0)
        assert whether.keys() == set(there[:3])
        assert [one.move is not None for one in there[:4]] == [False, True, True, False]
        counted = dict(router.metrics.snapshot().counters["not_moved"])
        assert counted == {("drain", "logprobs"): 1}

    with_streams(100, test)

# SPDX-License-Identifier: Apache-2.0
"""Streams that move to another engine while theirs is alive."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.clock import Clock
from tests.router.broken_streams import ANY, PATIENT, Fingerprints, resumes, text, told_ids
from tests.router.harness import Deployment, deployed, nothing_in_progress, run, until
from tests.router.moving import (
    NUM_TOKENS,
    SLOW,
    Client,
    is_whole,
    leave_while_it_moves,
    listed,
    move,
    name,
)
from tests.router.scripted_answers import token_id
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.operating import MoveOrder
from vllm_ascend_pd.resume import Resume, ResumeKey
from vllm_ascend_pd.router import relay
from vllm_ascend_pd.router.bodies import Body
from vllm_ascend_pd.router.config import Queueing
from vllm_ascend_pd.router.metrics import MOVE_GAPS_S, Recent
from vllm_ascend_pd.router.rebalance import Rebalancing

BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def source_and_target(d: Deployment) -> tuple[ScriptedEngine, ScriptedEngine]:
    """The one that decodes now, and another one."""
    busy = [e for e in d.decodes if e.num_in_progress]
    assert len(busy) == 1
    return busy[0], next(e for e in d.decodes if e is not busy[0])


@BOTH
@pytest.mark.parametrize("num_events", [1, 2, 7, 16])
def test_stream_moves_and_its_client_gets_each_token_once(path: str, num_events: int) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            fields = {"stream_options": {"include_usage": True}, "return_token_ids": True}
            client = Client(d, path=path, **fields)
            await client.has(num_events)
            source, target = source_and_target(d)
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["target"]) == ("moved", name(target))
            got = await client.rest()
            assert is_whole(got, source)
            ids = [i for chunk in got[:-1] for told in told_ids(chunk) for i in told or ()]
            assert ids == [token_id(token) for token in text(got).split()]
            assert got[-2]["usage"]["completion_tokens"] == NUM_TOKENS
            assert got[-2]["provenance"] == {"resumed": 0, "kind": "exact", "moved": 1}
            (resumed,) = resumes(d)
            resume = Resume.from_params(resumed.params["resume"])
            assert ResumeKey(None).accepts(resume)
            assert num_events <= len(resume.output_token_ids) < NUM_TOKENS
            assert source.num_given_up == 1
            assert d.count("moves_total", reason="operator", outcome="moved", cause="") == 1
            assert d.count("move_seconds_count") == d.count("move_gap_seconds_count") == 1
            assert d.router.metrics.recent_move_gaps.sums()[0] == 1
            assert d.count("resumes_total", kind="exact", outcome="ok") == 0
            assert sum(i.num_failures for i in d.router.registry) == 0
            (timeline,) = d.router.metrics.snapshot().timelines
            assert [s.instance for s in timeline.stages if s.name == "moved"] == [name(target)]

    run(test)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("close", "disconnect"),
        ("status(500)", "status"),
        ("status(400)", "refused"),
        ("dead(0)", "refused"),
        ("refused(0)", "refused"),
        ("dead(1)", "refused"),
        ("abort(1)", "refused"),
        ("elsewhere(0)", "refused"),
        ("break(1)", "truncated"),
        ("end(1)", "truncated"),
        ("hang", "timeout"),
        ("stall(1)", "timeout"),
    ],
)
def test_target_that_does_not_begin_leaves_the_stream_where_it_is(fault: str, cause: str) -> None:
    async def test() -> None:
        patience_s = 0.3 if cause == "timeout" else 20
        config = replace(PATIENT, timeouts=replace(PATIENT.timeouts, first_token_s=patience_s))
        async with deployed(1, 2, config, **SLOW) as d:
            client = Client(d, max_tokens=80)
            await client.has(2)
            source, target = source_and_target(d)
            target.script(fault)
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", cause)
            await until(lambda: target.num_in_progress == 0)
            assert is_whole(await client.rest(), source)
            assert source.num_given_up == 0
            assert d.count("moves_total", reason="operator", outcome="stayed", cause=cause) == 1

    run(test)


def test_target_that_begins_with_other_tokens_gets_nothing() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            source, target = source_and_target(d)
            target.differs = True
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", "differs")
            assert is_whole(await client.rest(), source)

    run(test)


def test_request_that_has_failed_to_move_can_move() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            source, target = source_and_target(d)
            target.script("close")
            outcomes = [(await move(d, to=name(target)))[0]["outcome"] for _ in range(2)]
            assert outcomes == ["stayed", "moved"]
            assert is_whole(await client.rest(), source)

    run(test)


def test_answer_that_ends_before_the_target_begins_needs_no_move() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d, max_tokens=6)
            await client.has(2)
            source, target = source_and_target(d)
            target.script("hang")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "not_needed"
            assert is_whole(await client.rest(), source)
            await until(lambda: target.num_given_up == 1)

    run(test)


async def client_of_a_source_that_breaks(
    d: Deployment,
) -> tuple[Client, ScriptedEngine, ScriptedEngine]:
    """After five tokens, of which the client has two; and another engine."""
    for engine in d.decodes:
        engine.script("break(5)")
    client = Client(d)
    await client.has(2)
    for engine in d.decodes:
        engine.script_nothing()
    return client, *source_and_target(d)


def test_source_that_breaks_meanwhile_is_followed_by_the_target_that_was_asked() -> None:
    async def test() -> None:
        async with deployed(1, 3, PATIENT, **SLOW) as d:
            client, source, target = await client_of_a_source_that_breaks(d)
            target.script("delay(0.3)")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            assert [e for e in d.decodes if e.received] == [
                e for e in d.decodes if e in (source, target)
            ]
            assert d.count("resumes_total", kind="exact", outcome="ok") == 0

    run(test)


def test_source_and_target_that_both_break_are_followed_by_a_third() -> None:
    async def test() -> None:
        async with deployed(1, 3, PATIENT, **SLOW) as d:
            client, source, target = await client_of_a_source_that_breaks(d)
            target.script("close")
            moving = asyncio.ensure_future(move(d, to=name(target)))
            assert is_whole(await client.events(), source)
            [report] = await moving
            assert report["outcome"] in ("broken", "stayed")  # as who was the first to fail
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1

    run(test)


def test_target_that_dies_after_the_move_is_followed_by_another() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            source, target = source_and_target(d)
            target.script("break(3)")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            got = await client.rest()
            assert is_whole(got, source)
            assert got[-2]["provenance"] == {"resumed": 1, "kind": "exact", "moved": 1}

    run(test)


def test_one_request_moves_many_times() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, token_s=0.005) as d:
            client = Client(d, max_tokens=600)
            await client.has(2)
            source, _ = source_and_target(d)
            num_moved = 0
            while not client.task.done() and num_moved < 40:
                num_moved += sum(report["outcome"] == "moved" for report in await move(d))
            got = await client.rest()
            assert is_whole(got, source)
            assert num_moved >= 20
            assert got[-2]["provenance"] == {"resumed": 0, "kind": "exact", "moved": num_moved}
            await nothing_in_progress(d)
            assert not d.router.moves.running

    run(test)


def test_many_move_at_once_without_a_name_of_the_target() -> None:
    async def test() -> None:
        config = replace(PATIENT, policy="least-loaded")
        async with deployed(1, 3, config, **SLOW) as d:
            clients = [Client(d, f"r/{i}") for i in range(12)]
            for client in clients:
                await client.has(2)
            reports = await asyncio.gather(*(move(d, c.request_id) for c in clients))
            assert {report["outcome"] for [report] in reports} == {"moved"}
            for client in clients:
                got = await client.rest()
                assert is_whole(got, next(e for e in d.decodes if e.received))
                assert got[-2]["provenance"]["moved"] == 1

    run(test)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"temperature": 0.7}, "sampled"),
        ({"stream": False, "n": 2}, "n"),
        ({"path": "/v1/messages", "messages": [{"role": "user", "content": "Hello"}]}, "api"),
    ],
)
def test_request_that_cannot_move_says_why_and_stays(fields: dict[str, Any], cause: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d, **fields)
            await until(lambda: any(e.num_in_progress for e in d.decodes))
            await until(lambda: bool(d.router.moves.running))
            [status] = await listed(d)
            assert (status["request_id"], status["stays"]) == ("one", cause)
            [report] = await move(d)
            assert (report["outcome"], report["cause"]) == ("stayed", cause)
            assert d.count("not_moved_total", reason="operator", cause=cause) == 1
            d.hurry()
            await client.task
            assert sum(len(e.received) for e in d.decodes) == 1

    run(test)


def test_running_requests_are_listed_with_their_engines() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            source, target = source_and_target(d)
            [status] = await listed(d)
            assert status["instance"] == name(source)
            assert status["stays"] is None
            assert status["num_bytes"] > 0
            target.script("delay(0.2)")
            moving = asyncio.ensure_future(move(d, to=name(target)))
            await until(lambda: target.num_in_progress == 1)
            [status] = await listed(d)
            assert (status["moves_to"], status["stays"]) == (name(target), "moving")
            [second] = await move(d, to=name(target))
            assert second["cause"] == "moving"
            await moving
            [status] = await listed(d)
            assert status["instance"] == name(target)
            [again] = await move(d, to=name(target))
            assert again["cause"] == "same_instance"
            await client.rest()
            assert await listed(d) == []

    run(test)


def test_sampled_stream_leaves_its_engine_before_another_goes_on() -> None:
    """Two engines would give different tokens."""

    async def test() -> None:
        async with deployed(1, 2, ANY, **SLOW) as d:
            client = Client(d, temperature=0.7)
            await client.has(3)
            source, target = source_and_target(d)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            (resumed,) = resumes(d)
            assert not resumed.params["resume"]["only_exact"]

    run(test)


def test_client_that_leaves_meanwhile_leaves_nothing() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            source, target = source_and_target(d)
            target.script("hang")
            await leave_while_it_moves(d, client, source, target)

    run(test)


def test_client_that_leaves_as_a_move_is_ordered_leaves_nothing() -> None:
    async def test() -> None:
        async with deployed(0, 2, PATIENT, **SLOW) as d:
            client = Client(d, max_tokens=60)
            await client.has(2)
            (one,) = d.router.moves.running
            _, target = source_and_target(d)
            order = MoveOrder(to=name(target))
            moving = asyncio.ensure_future(d.router.requests.move("one", order))
            one.job.trace.request.task.cancel()  # as when the client has left
            [report], _ = await asyncio.wait_for(moving, 20)
            assert report.outcome == "not_needed"
            await asyncio.gather(client.task, return_exceptions=True)
            assert all(i.num_admitted == 0 for i in d.router.registry)

    run(test)


def test_client_that_leaves_as_its_stream_is_cut_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In concurrent order, while the end of the prefill leg is waited for."""
    cancel = relay._cancel

    async def test() -> None:
        async with deployed(1, 2, PATIENT, supports_concurrent=True, **SLOW) as d:
            await d.post()  # which tells where P's KV is
            client = Client(d)
            await client.has(2)
            (one,) = d.router.moves.running
            assert one.job.trace.order == "concurrent"
            _, target = source_and_target(d)

            async def cancelled(leg: asyncio.Task[Any]) -> None:
                one.job.trace.request.task.cancel()
                await cancel(leg)

            monkeypatch.setattr(relay, "_cancel", cancelled)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            await asyncio.gather(client.task, return_exceptions=True)
            await until(lambda: target.num_in_progress == 0)
            assert all(i.num_admitted == 0 for i in d.router.registry)

    run(test)


def test_move_waits_for_room_while_the_stream_goes_on() -> None:
    async def test() -> None:
        config = replace(PATIENT, queueing=Queueing(max_requests=1))
        async with deployed(1, 2, config, **SLOW) as d:
            first, second = Client(d, "a"), Client(d, "b", max_tokens=8)
            await first.has(1)
            await second.has(1)
            target = next(e for e in d.decodes if e.received[0].headers["x-request-id"] == "b")
            [report] = await move(d, "a", to=name(target))
            assert report["outcome"] == "moved"
            assert second.task.done()
            source = next(e for e in d.decodes if e is not target)
            assert is_whole(await first.rest(), source)

    run(test)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
def test_engine_of_other_weights_that_comes_while_a_move_waits_for_room_is_no_target(
    sampling: dict[str, Any],
) -> None:
    async def test() -> None:
        config = replace(ANY, queueing=Queueing(max_requests=1))
        async with deployed(0, 3, config, **SLOW) as d:
            await Fingerprints(d, "weights=a", "weights=a", "weights=b").registered()
            registry, late = d.router.registry, d.decodes[2]
            spec = registry.get(name(late)).spec
            registry.remove(name(late), "it is started later")
            first, second = Client(d, "a", **sampling), Client(d, "b")
            await first.has(1)
            await second.has(1)
            moving = asyncio.ensure_future(move(d, "a"))
            await until(lambda: any(one.move for one in d.router.moves.running))
            registry.put(spec)
            [report] = await moving
            assert (report["outcome"], report["cause"]) == ("stayed", "incompatible")
            source = next(e for e in d.decodes if e.received[0].headers["x-request-id"] == "a")
            assert is_whole(await first.rest(), source)
            await second.task
            assert not late.received
            await nothing_in_progress(d)

    run(test)


@pytest.mark.parametrize("fault", ["break(16)", "dead(16)"])
def test_source_that_breaks_while_the_move_waits_for_room_is_followed_by_a_third(
    fault: str,
) -> None:
    async def test() -> None:
        config = replace(PATIENT, queueing=Queueing(max_requests=1))
        async with deployed(1, 3, config, **SLOW) as d:
            for engine in d.decodes:
                engine.script(fault)
            first = Client(d, "a")
            await first.has(1)
            for engine in d.decodes:
                engine.script_nothing()
            second = Client(d, "b")
            await second.has(1)
            busy = [e for e in d.decodes if e.received]
            source, target = sorted(busy, key=lambda e: e.received[0].headers["x-request-id"])
            moving = asyncio.ensure_future(move(d, "a", to=name(target)))
            await until(lambda: any(one.move for one in d.router.moves.running))
            [report] = await moving
            assert report["outcome"] == "broken"
            assert is_whole(await first.rest(), source)
            assert is_whole(await second.rest(), target)
            assert len(target.received) == 1
            broken = {"instance": name(source), "leg": "decode", "outcome": "broken_stream"}
            assert d.count("legs_total", **broken) == 1
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1
            await nothing_in_progress(d)

    run(test)


def test_bug_on_the_way_leaves_the_stream_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT, **SLOW) as d:
            client = Client(d)
            await client.has(1)
            monkeypatch.setattr(Body, "for_decode", None)
            source, target = source_and_target(d)
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", "bug")
            assert is_whole(await client.rest(), source)
            await nothing_in_progress(d)

    run(test)


def test_unknown_names_and_bad_orders_are_refused() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            for path, order, status, word in (
                ("none", {}, 404, "no request 'none'"),
                ("none", {"to": "d9"}, 404, "no instance 'd9'"),
                ("none", {"from": "d0"}, 400, "from"),
                ("none", {"to": 3}, 400, "to"),
            ):
                url = f"{d.url}/requests/{path}/move"
                async with d.http.post(url, json=order) as response:
                    assert response.status == status
                    assert word in (await response.json())["error"]["message"]

    run(test)


def test_client_can_move_nothing(tmp_path: Path) -> None:
    """It has a key of clients, and no token of engines."""

    async def test() -> None:
        token = tmp_path / "token"
        token.write_text("t" * 40)
        token.chmod(0o600)
        config = replace(PATIENT, registration_token_file=token)
        async with deployed(1, 2, config, **SLOW) as d:
            client = Client(d)
            await client.has(2)
            for method, path in (("POST", "/requests/one/move"), ("GET", "/requests")):
                async with d.http.request(method, d.url + path) as response:
                    assert response.status == 403
            headers = {"authorization": "Bearer " + "t" * 40}
            async with d.http.get(f"{d.url}/requests", headers=headers) as response:
                assert response.status == 200
            await client.rest()
            assert not resumes(d)

    run(test)


def test_streams_move_from_a_full_engine_to_an_empty_one() -> None:
    async def test() -> None:
        config = replace(PATIENT, rebalance="load")
        async with deployed(1, 2, config, **SLOW) as d:
            full, empty = d.decodes
            full.metrics = "vllm:kv_cache_usage_perc{} 0.9\n"
            empty.metrics = "vllm:kv_cache_usage_perc{} 0.1\n"
            clients = [Client(d, f"r{i}", max_tokens=150) for i in range(6)]
            for client in clients:
                await client.has(2)
            num_there = full.num_in_progress
            await until(lambda: full.num_in_progress < num_there)
            empty.metrics = full.metrics
            for client in clients:
                assert is_whole(await client.rest(), full)
            assert d.count("moves_total", reason="load", outcome="moved", cause="") >= 1
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)


def test_streams_move_among_engines_that_are_alike_beside_one_that_is_not() -> None:
    """One with a drafter has most room, and cannot go on with what others have computed."""

    async def test() -> None:
        config = replace(PATIENT, rebalance="load")
        async with deployed(1, 3, config, **SLOW) as d:
            drafting, full, empty = d.decodes
            for instance in tuple(d.router.registry):
                plain = instance.spec.url in (full.url, empty.url)
                fingerprint = "weights=a" if plain else "weights=a draft=it"
                d.router.registry.put(
                    msgspec.structs.replace(instance.spec, fingerprint=fingerprint)
                )
            for engine, usage in ((drafting, 0.0), (full, 0.9), (empty, 0.1)):
                engine.metrics = f"vllm:kv_cache_usage_perc{{}} {usage}\n"
            clients = [Client(d, f"r{i}", max_tokens=150) for i in range(9)]
            for client in clients:
                await client.has(2)
            await until(lambda: d.count("moves_total", reason="load", outcome="moved", cause=""))
            empty.metrics = full.metrics
            for client in clients:
                assert is_whole(await client.rest(), full)
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)


def test_clients_that_waited_long_keep_others_where_they_are_for_a_minute() -> None:
    async def test() -> None:
        config = replace(PATIENT, policy="least-loaded")
        async with deployed(0, 2, config, **SLOW) as d:
            full, empty = d.decodes
            registry, metrics, clock = d.router.registry, d.router.metrics, Clock()
            clients = [Client(d, f"r{i}", max_tokens=200) for i in range(4)]
            for client in clients:
                await client.has(2)
            full.metrics = "vllm:kv_cache_usage_perc{} 0.95\n"
            empty.metrics = "vllm:kv_cache_usage_perc{} 0.05\n"
            await until(lambda: all(registry.get(name(e)).load.kv_usage > 0 for e in d.decodes))
            metrics.recent_move_gaps = Recent(MOVE_GAPS_S, clock)
            metrics.moved(6.0)
            rebalancing = Rebalancing(registry, d.router.moves, metrics)
            for now, num_moving in ((59.0, 0), (62.0, 1)):
                clock.now = 100.0 + now
                rebalancing.look(now)
                assert sum(one.move is not None for one in d.router.moves.running) == num_moving
            for client in clients:
                await client.rest()

    run(test)


def test_stream_that_stands_still_goes_on_elsewhere() -> None:
    """Its engine has preempted it, and goes on with others."""

    async def test() -> None:
        timeouts = replace(PATIENT.timeouts, idle_s=20)
        config = replace(PATIENT, rebalance="load", timeouts=timeouts)
        async with deployed(1, 2, config, **SLOW) as d:
            full, empty = d.decodes
            full.metrics = "vllm:kv_cache_usage_perc{} 0.9\nvllm:num_requests_waiting{} 1\n"
            empty.metrics = full.metrics
            full.script("stall(4)")
            clients = [Client(d, f"r{i}", max_tokens=350) for i in range(12)]
            await until(lambda: sum(c.body.count(b"\n\n") > 200 for c in clients) == 11)
            empty.metrics = "vllm:kv_cache_usage_perc{} 0.1\n"
            moved = {"reason": "preempted", "outcome": "moved", "cause": ""}
            await until(lambda: d.count("moves_total", **moved) == 1)
            for client in clients:
                assert is_whole(await client.rest(), full)
            assert d.count("moves_total", **moved) == 1
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)

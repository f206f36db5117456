# SPDX-License-Identifier: Apache-2.0
"""Answers that come whole: their engine hands the request over while it computes, or they begin
anew, and their clients get one answer of one engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.router.broken_streams import ANY, resumes
from tests.router.harness import Deployment, run, until
from tests.router.moving import NUM_TOKENS, listed, move, name
from tests.router.moving import Client as Stream
from tests.router.scripted_answers import Answer
from tests.router.scripted_engine import Received, ScriptedEngine
from tests.router.test_drain import told
from tests.router.test_live_moves import movable, sources
from vllm_ascend_pd.resume import Resume, ResumeKey
from vllm_ascend_pd.router.rebalance import Rebalancing

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
ALLOWING = replace(ANY, timeouts=replace(ANY.timeouts, answer_s=20))
MOVED = {"reason": "operator", "outcome": "moved", "cause": ""}


class Client:
    """One request; it begins at once."""

    def __init__(self, d: Deployment, **fields: Any) -> None:
        fields = {"temperature": 0, "max_tokens": NUM_TOKENS, **fields}
        headers = {"x-request-id": "one"}
        self._d = d
        self.task = asyncio.ensure_future(d.post(headers=headers, **fields))

    async def has_all_of(self, engine: ScriptedEngine) -> bool:
        """What one engine answers, the rest of it at once; ``engine`` was the first that got the
        request.
        """
        self._d.hurry()
        status, _, body = await self.task
        sent = engine.received[0]
        plain = json.dumps({k: v for k, v in sent.json.items() if k != "kv_transfer_params"})
        one = Answer.make(ScriptedEngine(), Received("POST", sent.path, {}, plain.encode()))
        expected = {**one.form.whole(one, False), "kv_transfer_params": None}
        assert (status, json.loads(body)) == (200, expected)
        return True


async def running(d: Deployment, **fields: Any) -> tuple[Client, ScriptedEngine, ScriptedEngine]:
    """A request of which some tokens are computed, its engine, and another one."""
    client = Client(d, **fields)
    await until(lambda: any(r.num_tokens > 2 for e in d.decodes for r in e.running.values()))
    (source,) = [e for e in d.decodes if e.num_in_progress]
    return client, source, next(e for e in d.decodes if e is not source)


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_request_is_handed_over_and_its_client_gets_the_whole_answer(path: str, kind: str) -> None:
    async def test() -> None:
        async with movable(2, ALLOWING, copy_s=0.1) as d:
            temperature = 0.7 if kind == "sampled" else 0
            client, source, target = await running(d, path=path, temperature=temperature)
            [report] = await move(d, to=name(target))
            assert (report["outcome"], client.task.done()) == ("moved", False)
            [status] = await listed(d)
            assert (status["instance"], status["stays"]) == (name(target), None)
            assert d.router.registry.get(name(source)).num_active == 0
            assert await client.has_all_of(source)
            (leg,) = resumes(d)
            resume = Resume.from_params(leg.params["resume"])
            assert ResumeKey(None).accepts(resume)
            assert resume.request_id == ("chatcmpl-one" if path == CHAT else "cmpl-one")
            assert (resume.prompt_digest, resume.output_token_ids) == ("", ())
            assert resume.only_exact == (kind == "exact")
            assert "return_token_ids" not in leg.json
            assert d.count("moves_total", **MOVED) == 1
            assert d.count("legs_total", instance=name(source), leg="decode", outcome="moved") == 1
            assert d.count("legs_total", instance=name(target), leg="decode", outcome="ok") == 1
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)


def test_request_is_handed_to_and_fro() -> None:
    async def test() -> None:
        async with movable(2, ALLOWING, token_s=0.2) as d:
            client, source, _ = await running(d)
            num_moved = 0
            while num_moved < 3:
                assert not client.task.done()
                reports = await move(d) if await listed(d) else []
                num_moved += sum(report["outcome"] == "moved" for report in reports)
            assert await client.has_all_of(source)
            assert all(sources(d))
            assert sum(len(e.received) for e in d.decodes) >= num_moved + 1

    run(test)


@pytest.mark.parametrize(
    ("fault", "cause"), [("status(400)", "refused"), ("close", "disconnect"), ("hang", "timeout")]
)
def test_target_that_does_not_take_it_leaves_it_where_it_is(fault: str, cause: str) -> None:
    async def test() -> None:
        patience_s = 0.2 if cause == "timeout" else 20
        config = replace(ALLOWING, timeouts=replace(ALLOWING.timeouts, first_token_s=patience_s))
        async with movable(2, config) as d:
            client, source, target = await running(d)
            target.script(fault)
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", cause)
            assert await client.has_all_of(source)
            assert source.num_given_up == 0
            assert len(source.received) == 1

    run(test)


def test_engine_without_transfers_has_its_answers_to_the_end() -> None:
    async def test() -> None:
        async with movable(2, ALLOWING) as d:
            client, source, target = await running(d)
            instance = d.router.registry.get(name(source))
            d.router.registry.put(msgspec.structs.replace(instance.spec, kv=None))
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", "not_live")
            assert await client.has_all_of(source)
            assert not target.received

    run(test)


def test_answer_that_is_complete_before_needs_no_move() -> None:
    async def test() -> None:
        async with movable(2, ALLOWING, copy_s=5) as d:
            client, source, target = await running(d)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "not_needed"
            assert await client.has_all_of(source)
            await until(lambda: target.num_given_up == 1)

    run(test)


@pytest.mark.parametrize("when", ["before", "while it is copied", "after"])
def test_killed_source_costs_the_client_nothing(when: str) -> None:
    async def test() -> None:
        async with movable(2, ALLOWING, copy_s=0.2 if when == "while it is copied" else 0.0) as d:
            client, source, target = await running(d)
            if when == "after":
                [report] = await move(d, to=name(target))
                assert report["outcome"] == "moved"
            elif when == "while it is copied":
                moving = asyncio.ensure_future(move(d, to=name(target)))
                await until(lambda: target.num_in_progress == 1)
            await source.stop()
            if when == "while it is copied":
                [report] = await moving
                assert (report["outcome"], report["cause"]) == ("broken", "refused")
            assert await client.has_all_of(source)
            assert len(target.received) == 1 + (when == "while it is copied")
            assert len(resumes(d)) == (when != "before")

    run(test)


@pytest.mark.parametrize("when", ["handed over", "answering"])
def test_target_that_dies_with_the_request_in_its_hands_makes_it_begin_anew(when: str) -> None:
    async def test() -> None:
        async with movable(3, ALLOWING) as d:
            client, source, target = await running(d)
            target.script("lost" if when == "handed over" else "truncate")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert await client.has_all_of(source)
            assert sources(d) == [True]
            assert sum(len(e.received) for e in d.decodes) == 3
            kind = "disconnect" if when == "handed over" else "truncated"
            assert d.count("retries_total", cause=kind) == 1

    run(test)


def test_client_that_leaves_leaves_nothing() -> None:
    async def test() -> None:
        for when in ("while it is copied", "after"):
            async with movable(2, ALLOWING, copy_s=5 if when == "while it is copied" else 0) as d:
                client, source, target = await running(d, max_tokens=200)
                moving = asyncio.ensure_future(move(d, to=name(target)))
                await until(lambda: target.num_in_progress == 1)  # noqa: B023
                if when == "after":
                    await moving
                client.task.cancel()
                [report] = await moving
                assert report["outcome"] == ("moved" if when == "after" else "not_needed")
                await until(lambda: target.num_given_up == 1)  # noqa: B023
                assert source.num_given_up == (when != "after")
                assert all(i.num_admitted == 0 for i in d.router.registry)

    run(test)


@pytest.mark.parametrize("is_ours", [True, False])
def test_conflict_is_an_answer_unless_it_says_that_the_request_has_moved(is_ours: bool) -> None:
    """Whoever had it moved, it begins anew."""

    async def test() -> None:
        async with movable(2, ALLOWING) as d:
            if is_ours:
                client, source, _ = await running(d)
                source.running["cmpl-one"].is_gone = True
                assert await client.has_all_of(source)
            else:
                for engine in d.decodes:
                    engine.script("status(409)")
                assert (await d.post(temperature=0))[0] == 409
            assert sum(len(e.received) for e in d.decodes) == 1 + is_ours

    run(test)


def test_whole_answer_is_not_taken_for_a_stream_that_stands_still() -> None:
    async def test() -> None:
        async with movable(2, ALLOWING, token_s=0.05) as d:
            full, empty = d.decodes
            registry = d.router.registry
            assert await told(d, name(empty)) == 204
            client, stream = Client(d, max_tokens=60), Stream(d, "stream", max_tokens=60)
            await stream.has(2)
            rebalancing = Rebalancing(registry, d.router.moves, d.router.metrics)
            rebalancing.look(0.0)
            assert await told(d, name(empty), undo=True) == 204
            full.metrics = "vllm:kv_cache_usage_perc{} 0.9\nvllm:num_requests_waiting{} 1\n"
            empty.metrics = "vllm:kv_cache_usage_perc{} 0.1\n"
            await until(lambda: all(registry.get(name(e)).load.kv_usage > 0 for e in d.decodes))
            await stream.has(stream.body.count(b"\n\n") + 1)
            rebalancing.look(10.0)
            assert [m.move.reason for m in d.router.moves.running if m.move] == ["load"]
            assert (await stream.rest())[-1] == "[DONE]"
            assert (await client.task)[0] == 200

    run(test)

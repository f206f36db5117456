# SPDX-License-Identifier: Apache-2.0
"""Streams whose target copies them from the engine that runs them: the two engines agree when one
stops and the other goes on, and the router follows them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.router.broken_streams import ANY, PATIENT, resumes
from tests.router.harness import Deployment, deployed, run, until
from tests.router.moving import SLOW, Client, is_whole, leave_while_it_moves, move, name
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.registration import KVEndpoint
from vllm_ascend_pd.resume import Resume, ResumeKey, RunningAt
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.health import parse_infos, place_of


@asynccontextmanager
async def movable(
    num_decodes: int, config: RouterConfig = PATIENT, **engine: Any
) -> AsyncIterator[Deployment]:
    """Engines that can hand a running request over to each other."""
    async with deployed(0, num_decodes, config, **{**SLOW, **engine}) as d:
        registry = d.router.registry
        for one in d.decodes:
            endpoint = KVEndpoint(engine_id=one.name, host="127.0.0.1", port=one.port, key="k")
            spec = registry.get(name(one)).spec
            registry.put(msgspec.structs.replace(spec, kv=endpoint, epoch="e"))
        await until(lambda: all(i.models for i in registry))
        yield d


async def running(d: Deployment, **fields: Any) -> tuple[Client, ScriptedEngine, ScriptedEngine]:
    """A stream, its engine, and another one."""
    client = Client(d, **fields)
    await client.has(3)
    (source,) = [e for e in d.decodes if e.num_in_progress]
    return client, source, next(e for e in d.decodes if e is not source)


def sources(d: Deployment) -> list[bool]:
    """Of each leg that went on with a request: whether it copied from a running one."""
    return [bool(r.params["resume"].get("source")) for r in resumes(d)]


def info(port: int, epoch: str = "e", value: str = "1.0", rank: int = 0) -> str:
    """A line of an engine's metrics."""
    labels = {
        "engine": rank,
        "engine_id": 'a\\",epoch=\\"b',
        "epoch": epoch,
        "kv_endpoint": f"127.0.0.1:{port}" if port else "",
        "model_name": "tiny",
    }
    told = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:pd_engine_info{{{told}}} {value}\n"


def test_engine_that_did_not_register_says_in_its_metrics_where_it_is_copied_from() -> None:
    async def test() -> None:
        async with deployed(0, 2, PATIENT, **SLOW, copy_s=0.1) as d:
            for one in d.decodes:
                one.metrics = info(one.port, "before", "0.0") + info(one.port)
            await until(lambda: all(i.runs_at for i in d.router.registry))
            client, source, target = await running(d)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            (leg,) = resumes(d)
            found = Resume.from_params(leg.params["resume"]).source
            assert found == RunningAt("127.0.0.1", source.port, "", "e")

    run(test)


@pytest.mark.parametrize(
    ("page", "rank"),
    [
        pytest.param("", None, id="no_such_engine"),
        pytest.param(info(0), None, id="consumer"),
        pytest.param(info(7, epoch=""), None, id="no_epoch"),
        pytest.param(info(7) + info(8, rank=1), None, id="several_ranks"),
        pytest.param(info(7), 1, id="another_rank"),
    ],
)
def test_metrics_that_do_not_say_where_a_request_is_are_no_place(
    page: str, rank: int | None
) -> None:
    assert place_of(parse_infos(page.encode(), rank)) is None
    both = (info(7) + info(8, rank=1)).encode()
    assert place_of(parse_infos(both, 1)) == RunningAt("127.0.0.1", 8, "", "e")


@pytest.mark.parametrize("kind", ["exact", "sampled"])
def test_request_is_handed_over_and_each_token_is_computed_once(kind: str) -> None:
    async def test() -> None:
        async with movable(2, ANY, copy_s=0.1) as d:
            fields = {"temperature": 0.7} if kind == "sampled" else {}
            client, source, target = await running(d, **fields)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            got = await client.rest()
            assert is_whole(got, source)
            assert got[-2]["provenance"] == {"resumed": 0, "kind": kind, "moved": 1}
            (leg,) = resumes(d)
            resume = Resume.from_params(leg.params["resume"])
            assert ResumeKey(None).accepts(resume)
            assert resume.request_id == got[0]["id"]
            assert not resume.output_token_ids
            assert resume.source is not None
            assert (resume.source.port, resume.source.epoch) == (source.port, "e")
            assert d.count("legs_total", instance=name(source), leg="decode", outcome="moved") == 1
            assert sum(i.num_failures for i in d.router.registry) == 0

    run(test)


def test_chat_is_handed_over_though_it_begins_with_an_event_without_tokens() -> None:
    async def test() -> None:
        async with movable(2, copy_s=0.1) as d:
            client, source, target = await running(d, path="/v1/chat/completions")
            target.script("role")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            assert sources(d) == [True]

    run(test)


def test_target_that_copies_nothing_gets_the_tokens() -> None:
    async def test() -> None:
        async with movable(2) as d:
            client, source, target = await running(d)
            target.script("dead(0)")
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            assert sources(d) == [True, False]

    run(test)


def test_target_is_told_what_has_made_the_tokens() -> None:
    """So it refuses them as well where it computes with something else."""

    async def test() -> None:
        async with movable(2, copy_s=None) as d:
            for instance in tuple(d.router.registry):
                spec = msgspec.structs.replace(instance.spec, fingerprint="weights=a block=16")
                d.router.registry.put(spec)
            client, source, target = await running(d)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            assert [r.params["resume"]["made_by"] for r in resumes(d)] == ["", "weights=a"]

    run(test)


def test_target_that_takes_neither_leaves_the_stream_where_it_is() -> None:
    async def test() -> None:
        async with movable(2) as d:
            client, source, target = await running(d)
            target.script("dead(0), dead(0)")
            [report] = await move(d, to=name(target))
            assert (report["outcome"], report["cause"]) == ("stayed", "refused")
            assert is_whole(await client.rest(), source)
            assert source.num_given_up == 0

    run(test)


def test_answer_that_ends_while_it_is_copied_needs_no_move() -> None:
    async def test() -> None:
        async with movable(2, copy_s=5) as d:
            client, source, target = await running(d, max_tokens=8)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "not_needed"
            assert is_whole(await client.rest(), source)
            await until(lambda: target.num_given_up == 1)

    run(test)


def test_source_that_dies_while_it_is_copied_is_followed_by_the_target() -> None:
    async def test() -> None:
        async with movable(3, copy_s=0.3) as d:
            for engine in d.decodes:
                engine.script("break(6)")
            client, source, target = await running(d)
            for engine in d.decodes:
                engine.script_nothing()
            [report] = await move(d, to=name(target))
            assert report["outcome"] == "moved"
            assert is_whole(await client.rest(), source)
            assert sources(d) == [True, False]
            assert len([e for e in d.decodes if e.received]) == 2

    run(test)


@pytest.mark.parametrize("again", ["", ", dead(0)"], ids=["goes on", "refuses"])
def test_target_that_dies_with_the_request_in_its_hands_loses_no_token(again: str) -> None:
    """The source has stopped for good."""

    async def test() -> None:
        async with movable(3) as d:
            client, source, target = await running(d)
            target.script("lost" + again)
            [report] = await move(d, to=name(target))
            assert report["outcome"] == ("broken" if again else "moved")
            got = await client.rest()
            assert is_whole(got, source)
            assert got[-2]["provenance"]["resumed"] == bool(again)

    run(test)


def test_client_that_leaves_while_it_is_copied_leaves_nothing() -> None:
    async def test() -> None:
        async with movable(2, copy_s=5) as d:
            client, source, target = await running(d, max_tokens=200)
            await leave_while_it_moves(d, client, source, target)

    run(test)


def test_request_is_handed_to_and_fro() -> None:
    async def test() -> None:
        async with movable(2, token_s=0.005) as d:
            client, source, _ = await running(d, max_tokens=400)
            num_moved = 0
            while not client.task.done() and num_moved < 30:
                num_moved += sum(report["outcome"] == "moved" for report in await move(d))
            got = await client.rest()
            assert is_whole(got, source)
            assert num_moved >= 20
            assert all(sources(d))
            assert got[-2]["provenance"]["moved"] == num_moved

    run(test)

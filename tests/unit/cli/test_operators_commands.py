# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd move``, ``drain`` and ``restart`` as a user types them, beside a real router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tests.router.broken_streams import PATIENT
from tests.router.harness import Deployment, deployed, until
from tests.router.moving import SLOW, Client, name
from vllm_ascend_pd.cli import main
from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.operating import MoveOrder, MoveReport, RunningRequests

Typed = Callable[..., Awaitable[Result]]


def run(*words: str) -> Result:
    return CliRunner().invoke(main.app, list(words), env={"COLUMNS": "200"})


def beside_a_router(test: Callable[[Deployment, Typed], Awaitable[None]]) -> None:
    """``test`` gets one P, two D, and how to run a command about them."""

    async def all_of_it() -> None:
        async with deployed(1, 2, replace(PATIENT, policy="least-loaded"), **SLOW) as d:

            async def typed(*words: str) -> Result:
                return await asyncio.to_thread(run, *words, "--router", d.url)

            await test(d, typed)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


def test_a_slip_in_one_name_drains_nobody() -> None:
    async def test(d: Deployment, typed: Typed) -> None:
        first = name(d.decodes[0])
        for undo in ((), ("--undo",)):
            result = await typed("drain", first, "decode-O", *undo)
            assert result.exit_code == 2
            assert "knows no engine decode-O; there are [" in result.output
            assert first in result.output
        assert d.router.registry.get(first).spec.state == "ready"
        assert (await typed("drain", first, "--wait", "0")).exit_code == 0
        assert d.router.registry.get(first).spec.state == "draining"

    beside_a_router(test)


def test_an_engine_without_requests_and_one_that_there_is_not_are_told_apart() -> None:
    async def test(d: Deployment, typed: Typed) -> None:
        idle = name(d.decodes[0])
        result = await typed("move", "--from", idle)
        assert (result.exit_code, result.output) == (0, f"nothing runs on {idle}\n")
        for option in (("--from", "decode-O"), ("--from", idle, "--to", "decode-O")):
            result = await typed("move", *option)
            assert result.exit_code == 2
            assert "knows no engine decode-O; there are [" in result.output

    beside_a_router(test)


def test_a_request_that_has_ended_keeps_no_other_from_moving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Typed, it may be a slip; after ``--from`` it was there a moment ago."""
    ask = RouterOperator.requests

    async def and_one_that_ends(operator: RouterOperator) -> RunningRequests:
        found = (await ask(operator)).requests
        ended = msgspec.structs.replace(found[0], request_id="ended")
        return RunningRequests(requests=[ended, *found])

    async def test(d: Deployment, typed: Typed) -> None:
        client = Client(d, "one", max_tokens=400)
        await client.has(2)
        source, target = sorted(d.decodes, key=lambda engine: -engine.num_in_progress)
        result = await typed("move", "ended", "one", "--to", name(target))
        assert result.exit_code == 1
        assert "404: no request 'ended' is answered" in result.stderr
        assert result.stdout.startswith(f"one  {name(source)} -> {name(target)}, ")

        await until(lambda: source.num_in_progress == 0)
        monkeypatch.setattr(RouterOperator, "requests", and_one_that_ends)
        result = await typed("move", "--from", name(target))
        assert result.exit_code == 0, result.output
        assert sorted(line.partition("  ")[0] for line in result.stdout.splitlines()) == [
            "ended",
            "one",
        ]
        assert "ended  its answer was complete before\n" in result.stdout
        await client.rest()

    beside_a_router(test)


@pytest.mark.parametrize("option", ["--list", "--from"])
def test_a_list_that_lacks_a_workers_requests_says_so(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    async def of_one_worker(operator: RouterOperator) -> RunningRequests:
        return RunningRequests(requests=[], silent_workers=["1"])

    async def known(operator: RouterOperator, names: object) -> None: ...

    monkeypatch.setattr(RouterOperator, "requests", of_one_worker)
    monkeypatch.setattr(RouterOperator, "refuse_unknown", known)
    result = run("move", option, *(["d"] if option == "--from" else []))
    assert result.exit_code == 1
    assert "worker 1 of the router does not answer: its requests are not among" in result.stderr


def test_an_outcome_that_only_a_later_router_knows_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def postponed(operator: RouterOperator, request_id: str, order: MoveOrder) -> Any:
        told = {"request_id": request_id, "source": "a", "target": "", "seconds": 0.0}
        return [MoveReport(**told, outcome="postponed", cause="busy")]

    monkeypatch.setattr(RouterOperator, "move", postponed)
    result = run("move", "one")
    assert (result.exit_code, result.output) == (1, "one  postponed: busy\n")


@pytest.mark.parametrize(
    "words",
    [
        ("restart", "--rolling", "--drain-timeout"),
        ("drain", "d", "--wait"),
        ("scale", "--wait"),
        ("up", "m", "--startup-timeout"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize("seconds", ["inf", "nan", "-1"])
def test_seconds_that_are_no_time_are_named(words: tuple[str, ...], seconds: str) -> None:
    result = run(*words, seconds)
    assert result.exit_code == 2
    assert f"Invalid value for '{words[-1]}'" in result.output

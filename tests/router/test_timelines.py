# SPDX-License-Identifier: Apache-2.0
"""What is kept of the last requests' way through prefill and decode engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.router.broken_streams import broken
from tests.router.harness import FAST, Deployment, deployed, run
from vllm_ascend_pd.router import app
from vllm_ascend_pd.router.config import Queueing
from vllm_ascend_pd.router.trace import MAX_STAGES, NUM_TIMELINES

PREFILL_FIRST = replace(FAST, order="prefill-first")


async def timelines(d: Deployment) -> list[dict[str, Any]]:
    async with d.http.get(f"{d.url}/status") as response:
        found: list[dict[str, Any]] = (await response.json())["timelines"]
    for timeline in found:
        for stage in timeline["stages"]:
            first = stage["first_token_s"]
            times = [0, stage["start_s"], *([] if first is None else [first]), stage["end_s"]]
            assert times == sorted(times)
            assert stage["end_s"] <= timeline["duration_s"]
    return found


def names(timeline: dict[str, Any]) -> list[str]:
    return [stage["name"] for stage in timeline["stages"]]


def test_prefill_first_is_a_prefill_leg_and_then_a_decode_leg() -> None:
    async def test() -> None:
        async with deployed(config=PREFILL_FIRST) as d:
            await d.post(stream=True, headers={"X-Request-Id": "mine"})
            [timeline] = await timelines(d)
            assert names(timeline) == ["queue", "prefill", "decode"]
            queue, prefill, decode = timeline["stages"]
            assert queue["end_s"] <= prefill["start_s"] < prefill["end_s"] <= decode["start_s"]
            assert decode["first_token_s"] == pytest.approx(timeline["ttft_s"])
            assert prefill["instance"] == f"127.0.0.1:{d.prefills[0].port}"
            assert decode["instance"] == f"127.0.0.1:{d.decodes[0].port}"
            told = {key: timeline[key] for key in ("request_id", "model", "order", "outcome")}
            assert told == {
                "request_id": "mine",
                "model": "tiny",
                "order": "prefill-first",
                "outcome": "ok",
            }

    run(test)


def test_legs_of_the_concurrent_order_overlap() -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=True) as d:
            await d.post()  # the answer tells how P is reached
            d.prefills[0].script("delay(0.05)")
            await d.post()
            timeline = (await timelines(d))[-1]
            assert timeline["order"] == "concurrent"
            stages = {stage["name"]: stage for stage in timeline["stages"]}
            assert set(stages) == {"queue", "prefill", "decode"}
            assert stages["decode"]["start_s"] < stages["prefill"]["end_s"]

    run(test)


def test_each_attempt_has_its_stages_and_a_failed_one_ends_before_the_next() -> None:
    async def test() -> None:
        async with deployed(2, 1, PREFILL_FIRST) as d:
            d.prefills[0].script("status(500)")
            d.prefills[1].script("status(500)")
            await d.post()
            [timeline] = await timelines(d)
            assert names(timeline) == ["queue", "prefill", "queue", "prefill", "queue", "alone"]
            assert timeline["num_attempts"] == 3
            assert timeline["order"] == "decode-only"
            ends = [stage["end_s"] for stage in timeline["stages"]]
            assert ends == sorted(ends)

    run(test)


def test_stream_that_goes_on_elsewhere_shows_where_it_broke_off() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            await broken(d, "break(3)")
            [timeline] = await timelines(d)
            first, moved = [s for s in timeline["stages"] if s["name"] in ("decode", "resumed")]
            assert (first["name"], moved["name"]) == ("decode", "resumed")
            assert first["instance"] != moved["instance"]
            assert first["first_token_s"] < moved["first_token_s"]
            assert first["failure"].startswith("truncated: ")
            assert not moved["failure"]
            assert timeline["outcome"] == "ok"

    run(test)


def test_request_that_no_engine_gets_has_waited_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "HEARS_ALL_S", 0)

    async def test() -> None:
        config = replace(FAST, queueing=Queueing(1, 0, 1.0))
        async with deployed(0, 0, config, ready=False) as d:
            assert (await d.post())[0] == 503
            [timeline] = await timelines(d)
            assert (names(timeline), timeline["outcome"]) == (["queue"], "unavailable")
            assert timeline["ttft_s"] is None

    run(test)


def test_a_batch_has_the_stages_of_all_its_chats() -> None:
    async def test() -> None:
        async with deployed(config=PREFILL_FIRST) as d:
            chats = [[{"role": "user", "content": text}] for text in ("One", "Two")]
            body = {"model": "tiny", "messages": chats, "max_tokens": 4}
            url = f"{d.url}/v1/chat/completions/batch"
            async with d.http.post(url, json=body) as response:
                assert response.status == 200
            [timeline] = await timelines(d)
            assert sorted(names(timeline)) == sorted(2 * ["queue", "prefill", "decode"])
            assert timeline["model"] == "tiny"

    run(test)


def test_of_a_long_batch_the_first_stages_are_kept() -> None:
    async def test() -> None:
        async with deployed(config=PREFILL_FIRST) as d:
            chats = [[{"role": "user", "content": "Hello"}]] * 40
            body = {"model": "tiny", "messages": chats, "max_tokens": 1}
            async with d.http.post(f"{d.url}/v1/chat/completions/batch", json=body) as response:
                assert response.status == 200
            [timeline] = await timelines(d)
            assert len(timeline["stages"]) == MAX_STAGES
            assert timeline["num_more_stages"] == 3 * len(chats) - MAX_STAGES

    run(test)


def test_the_last_ones_are_kept_and_what_only_passes_is_not() -> None:
    async def test() -> None:
        async with deployed() as d:
            for number in range(NUM_TIMELINES + 3):
                await d.post(headers={"X-Request-Id": str(number)})
            async with d.http.post(f"{d.url}/tokenize", json={"model": "tiny", "prompt": "x"}):
                pass
            kept = [timeline["request_id"] for timeline in await timelines(d)]
            assert kept == [str(number) for number in range(3, NUM_TIMELINES + 3)]

    run(test)

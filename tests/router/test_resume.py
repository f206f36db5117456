# SPDX-License-Identifier: Apache-2.0
"""Streams whose engine dies: they go on from another one."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.router.broken_streams import (
    ANY,
    GREEDY,
    PATIENT,
    Fingerprints,
    broken,
    resumes,
    sent,
    text,
    told_ids,
    uninterrupted,
)
from tests.router.harness import FAST, deployed, events, run, until
from tests.router.scripted_answers import COMMENT, commented_events, token_id
from tests.router.scripted_engine import Received
from vllm_ascend_pd.resume import Resume, ResumeKey
from vllm_ascend_pd.router.answers import EventStream
from vllm_ascend_pd.router.config import Queueing, Retries, RouterConfig
from vllm_ascend_pd.router.health import parse_makers
from vllm_ascend_pd.router.instances import TokensMadeBy

SEEDED = {"temperature": 0.7, "seed": 3}
BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        "break(1)",
        "break(3)",
        "stall(3)",
        "comments(3)",
        "trickle(3)",
        "end(2)",
        "dead(4)",
        "abort(2)",
        "break(5)",
        "elsewhere(3)",
    ],
)
def test_broken_stream_goes_on_from_another_engine(path: str, fault: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, fault, path=path)
            (resumed,) = resumes(d)
            whole = uninterrupted(d.decodes[0].received[0])
            assert text(got) == text(whole)
            assert got[-1] == "[DONE]"
            assert got.count("[DONE]") == 1
            assert all(ids is None for chunk in got[:-1] for ids in told_ids(chunk))
            resume = Resume.from_params(resumed.params["resume"])
            assert ResumeKey(None).accepts(resume)
            assert resume.only_exact
            expected = [token_id(token) for token in text(whole).split()[: int(fault[-2])]]
            assert list(resume.output_token_ids) == expected
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1
            assert d.count("resume_seconds_count") == 1
            assert d.count("requests_total", outcome="ok") == 1
            assert len(d.prefills[0].received) == 1

    run(test)


@pytest.mark.parametrize("size", [1, 3])
def test_stream_cut_at_any_byte_goes_on(size: int) -> None:
    """Also when the second engine dies while it replays."""

    async def test() -> None:
        async with deployed(1, 3, PATIENT) as d:
            whole = uninterrupted(await sent(d, max_tokens=size))
            num_bytes = len(b"".join(b"data: " + json.dumps(c).encode() for c in whole))
            for at in range(0, num_bytes, 7):
                for engine in d.decodes:
                    engine.script_nothing()
                    engine.received.clear()
                    engine.script(f"cut({at})")
                d.decodes[at % 3].script_nothing()
                status, _, body = await d.post(**{**GREEDY, "max_tokens": size})
                assert status == 200
                got = events(body)
                assert text(got) == text(whole), at
                assert got.count("[DONE]") == 1
                await until(lambda: all(i.is_available for i in d.router.registry))

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fault", ["break(2)", "break(5)"])
def test_stream_with_comments_goes_on(path: str, fault: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.decodes[0].script(fault)
            with commented_events():
                status, _, body = await d.post(path, **GREEDY)
            assert status == 200
            assert body.count(COMMENT) >= 6
            got = events(body.replace(COMMENT, b""))
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            assert got[-1] == "[DONE]"
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1

    run(test)


def test_finished_stream_needs_no_other_engine() -> None:
    """All but [DONE] had come."""

    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "end(6)")
            assert got[-1] == "[DONE]"
            assert got[-2]["choices"][0]["finish_reason"] == "length"
            assert not resumes(d)

    run(test)


def test_finished_stream_gets_its_usage_from_another_engine() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "end(6)", stream_options={"include_usage": True})
            assert got[-1] == "[DONE]"
            assert got[-2]["usage"]["completion_tokens"] == 6
            assert len(resumes(d)) == 1

    run(test)


def test_usage_and_provenance_are_told_of_the_whole_answer() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "break(2)", stream_options={"include_usage": True})
            assert got[-2]["usage"]["completion_tokens"] == 6
            assert got[-2]["provenance"] == {"resumed": 1, "kind": "exact"}

    run(test)


@pytest.mark.parametrize("asked", [True, 1, "true", "yes"])
def test_client_that_asked_gets_each_token_id_once(asked: Any) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            got = await broken(d, "break(2)", return_token_ids=asked)
            whole = uninterrupted(d.decodes[0].received[0])
            ids = [i for chunk in got[:-1] for told in told_ids(chunk) for i in told or ()]
            assert ids == [token_id(token) for token in text(whole).split()]
            prompts = [c["choices"][0]["prompt_token_ids"] for c in got[:-1]]
            assert [bool(prompt) for prompt in prompts] == [True] + [False] * 5

    run(test)


def test_second_engine_that_dies_is_followed_by_the_first_again() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.decodes[1].script("break(2)")  # the replay, and one token
            got = await broken(d, "break(2)")
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            lengths = sorted(len(r.params["resume"]["output_token_ids"]) for r in resumes(d))
            assert lengths == [2, 3]
            assert d.count("resumes_total", kind="exact", outcome="truncated") == 1
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1

    run(test)


def test_stream_goes_on_a_limited_number_of_times() -> None:
    """A request may be what kills its engines."""

    async def test() -> None:
        config = replace(PATIENT, retries=Retries(max_resumes=2))
        async with deployed(1, 4, config) as d:
            for engine in d.decodes[1:]:
                engine.script("break(1)")
            got = await broken(d, "break(1)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert len(resumes(d)) == 2
            assert d.count("requests_total", outcome="broken_stream") == 1

    run(test)


@pytest.mark.parametrize("fault", ["close", "status(500)", "reset", "garbage", "dead(0)"])
def test_engine_that_cannot_go_on_is_followed_by_another(fault: str) -> None:
    async def test() -> None:
        async with deployed(1, 3, PATIENT) as d:
            for engine in d.decodes[1:]:
                engine.script(fault)
            got = await broken(d, "break(2)")
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            assert got[-1] == "[DONE]"
            assert got[-2]["provenance"]["resumed"] == 1
            assert len(resumes(d)) == 3

    run(test)


def test_prefill_engine_goes_on_when_no_decode_engine_is_left() -> None:
    async def test() -> None:
        async with deployed(1, 1, PATIENT) as d:
            got = await broken(d, "break(2)")
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            assert len(d.prefills[0].received) == 2

    run(test)


def test_stream_ends_with_an_error_when_no_engine_is_left() -> None:
    async def test() -> None:
        async with deployed(1, 1, PATIENT) as d:
            d.prefills[0].script("ok, status(500)")
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert d.count("resumes_total", kind="exact", outcome="unavailable") == 1

    run(test)


@pytest.mark.parametrize("way", ["registered", "in_metrics"])
def test_stream_goes_on_only_where_the_same_is_computed(way: str) -> None:
    """Engines of one name have other weights while these are rolled out."""

    async def test() -> None:
        async with deployed(0, 4, PATIENT) as d:
            told = ("weights=a block=16", "weights=b block=16", "weights=b", "weights=a block=32")
            await getattr(Fingerprints(d, *told), way)()
            got = await broken(d, "break(2)")
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            (resumed,) = resumes(d)
            assert resumed in d.decodes[3].received
            assert resumed.params["resume"]["made_by"] == "weights=a"

    run(test)


def test_stream_ends_if_all_others_compute_something_else() -> None:
    async def test() -> None:
        async with deployed(0, 3, PATIENT) as d:
            await Fingerprints(d, "weights=a", "weights=b", "weights=c").registered()
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert not resumes(d)
            assert d.count("resumes_total", kind="exact", outcome="unavailable") == 1

    run(test)


def test_engine_of_other_weights_that_comes_while_a_stream_waits_for_room_is_not_asked() -> None:
    async def test() -> None:
        config = replace(PATIENT, queueing=Queueing(max_requests=1), policy="least-loaded")
        async with deployed(0, 3, config, token_s=0.02) as d:
            await Fingerprints(d, "weights=a", "weights=a", "weights=b").registered()
            registry, late = d.router.registry, d.decodes[2]
            spec = next(i.spec for i in registry if i.spec.url == late.url)
            registry.remove(spec.instance_id, "it is started later")
            other = asyncio.ensure_future(d.post(**{**GREEDY, "max_tokens": 40}))
            await until(lambda: any(e.num_in_progress for e in d.decodes))
            next(e for e in d.decodes if not e.num_in_progress).script("break(2)")
            breaking = asyncio.ensure_future(d.post(**GREEDY))
            await until(lambda: d.router.metrics.num_queued() == 1)
            registry.put(spec)
            got = events((await breaking)[2])
            assert (await other)[0] == 200
            assert not late.received
            (resumed,) = resumes(d)
            assert text(got) == text(uninterrupted(resumed))

    run(test)


def test_what_an_engine_tells_once_it_has_begun_counts_as_well() -> None:
    """As of an adapter whose files it has read for this stream."""

    async def test() -> None:
        async with deployed(0, 3, PATIENT, token_s=0.02) as d:
            await Fingerprints(d, "weights=a", "weights=a", "weights=a").registered()
            registry, (first, *others) = d.router.registry, d.decodes
            specs = {i.spec.url: i.spec for i in registry}
            for engine, digest in zip(others, ("d2", "d1"), strict=True):
                registry.put(msgspec.structs.replace(specs[engine.url], adapters={"tiny": digest}))
            first.script("break(20)")
            asking = asyncio.ensure_future(d.post(**{**GREEDY, "max_tokens": 30}))
            await until(lambda: any(one.response for one in d.router.moves.running))
            registry.put(msgspec.structs.replace(specs[first.url], adapters={"tiny": "d1"}))
            assert (await asking)[0] == 200
            (resumed,) = resumes(d)
            assert resumed in others[1].received
            assert resumed.params["resume"]["made_by"] == "weights=a adapter=d1"

    run(test)


def test_stream_goes_on_as_it_began_though_its_engine_is_another_one_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client reads so slowly that an engine with other weights is up at the same URL before it
    has all that the first one sent."""

    async def test() -> None:
        reads, write = asyncio.Event(), EventStream.write

        async def written(events: EventStream, data: bytes) -> None:
            await reads.wait()
            await write(events, data)

        monkeypatch.setattr(EventStream, "write", written)
        async with deployed(0, 3, PATIENT) as d:
            told = Fingerprints(d, "weights=a", "weights=b", "weights=a")
            await told.in_metrics()
            first = d.decodes[0]
            first.script("break(2)")
            asking = asyncio.ensure_future(d.post(**GREEDY))
            await until(lambda: len(first.received) == 1 and not first.num_in_progress)
            await first.stop()
            await first.start()
            first.metrics = first.metrics.replace("weights=a", "weights=b")
            (instance,) = (i for i in d.router.registry if i.spec.url == first.url)
            await until(lambda: instance.fingerprint == "weights=b")
            reads.set()
            got = events((await asking)[2])
            (resumed,) = resumes(d)
            assert resumed in d.decodes[2].received
            assert resumed.params["resume"]["made_by"] == "weights=a"
            assert text(got) == text(uninterrupted(resumed))

    run(test)


def test_stream_of_an_engine_that_is_back_with_other_weights_goes_on_with_these() -> None:
    """Also if it began before the engine told of them."""

    async def test() -> None:
        async with deployed(0, 3, PATIENT, token_s=0.02) as d:
            await Fingerprints(d, "weights=a", "weights=b", "weights=a").in_metrics()
            first, second, _ = d.decodes
            (instance,) = (i for i in d.router.registry if i.spec.url == first.url)
            await first.stop()
            await until(lambda: not instance.is_available)
            await first.start()
            first.metrics_hang = True
            first.metrics = first.metrics.replace("weights=a", "weights=b")
            await until(lambda: instance.is_available)
            first.script("break(60)")
            asking = asyncio.ensure_future(d.post(**{**GREEDY, "max_tokens": 80}))
            await until(lambda: bool(first.received))
            first.metrics_hang = False
            await until(lambda: instance.fingerprint == "weights=b")
            got = events((await asking)[2])
            (resumed,) = resumes(d)
            assert resumed in second.received
            assert resumed.params["resume"]["made_by"] == "weights=b"
            assert text(got) == text(uninterrupted(resumed))

    run(test)


def made_by_series(part: str, value: str, adapter: str = "", engine: int = 0) -> str:
    labels = f'adapter="{adapter}",engine="{engine}",part="{part}",value="{value}"'
    return f"vllm:pd_tokens_made_by{{{labels}}} 1.0\n"


@pytest.mark.parametrize("way", ["registered", "in_metrics"])
def test_all_that_makes_tokens_is_told_with_them(way: str) -> None:
    async def test() -> None:
        async with deployed(0, 2, PATIENT) as d:
            await getattr(Fingerprints(d, "weights=a", "weights=a"), way)()
            told = TokensMadeBy(
                {"processors": "none"}, "GuidanceBackend,x=1", {"tiny": "d1", "other": "d2"}
            )
            for engine in d.decodes:
                (instance,) = (i for i in d.router.registry if i.spec.url == engine.url)
                if way == "registered":
                    fields = {name: getattr(told, name) for name in told.__struct_fields__}
                    d.router.registry.put(msgspec.structs.replace(instance.spec, **fields))
                else:
                    engine.metrics += made_by_series("processors", "none")
                    engine.metrics += made_by_series("grammars", told.grammars)
                    for name, digest in told.adapters.items():
                        engine.metrics += made_by_series("adapter", digest, name)
                    await until(lambda i=instance: i.tokens_made_by == told)
            await broken(d, "break(2)")
            (resumed,) = resumes(d)
            expected = "weights=a processors=none adapter=d1 grammars=GuidanceBackend,x=1"
            assert resumed.params["resume"]["made_by"] == expected

    run(test)


def test_engines_that_sample_otherwise_by_their_metrics_are_not_asked() -> None:
    async def test() -> None:
        async with deployed(0, 3, PATIENT) as d:
            for engine, value in zip(d.decodes, ("none", "d1", "d2"), strict=True):
                engine.metrics = made_by_series("processors", value)
            await until(lambda: all(i.tokens_made_by.sampling for i in d.router.registry))
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert not resumes(d)

    run(test)


@pytest.mark.parametrize(
    ("options", "sampling", "draws", "kind"),
    [
        (PATIENT, SEEDED, ("v1", "v2", "v2"), ""),
        (PATIENT, SEEDED, ("v1", "v2", "v1"), "exact"),
        (ANY, SEEDED, ("v1", "v2", "v1"), "exact"),
        (ANY, SEEDED, ("v1", "v2", "v2"), "sampled"),
        (ANY, {"temperature": 0.7}, ("v1", "v2", "v2"), "sampled"),
        (PATIENT, {}, ("v1", "v2", "v2"), "exact"),
    ],
)
def test_what_a_seed_gives_goes_on_where_it_gives_the_same(
    options: RouterConfig, sampling: dict[str, Any], draws: tuple[str, ...], kind: str
) -> None:
    """Elsewhere only if it may be other tokens and there is no such engine."""

    async def test() -> None:
        async with deployed(0, 3, options) as d:
            for engine, value in zip(d.decodes, draws, strict=True):
                engine.metrics = made_by_series("draws", value)
            await until(lambda: all(i.tokens_made_by.sampling for i in d.router.registry))
            got = await broken(d, "break(2)", **sampling)
            if not kind:
                assert got[-1]["error"]["type"] == "broken_stream"
                assert not resumes(d)
                return
            assert got[-2]["provenance"]["kind"] == kind
            (resumed,) = resumes(d)
            if sampling and "v1" in draws[1:]:
                assert resumed in d.decodes[2].received

    run(test)


def test_of_several_engines_in_one_page_what_all_say_is_known() -> None:
    series = [
        made_by_series("processors", "none") + made_by_series("processors", "none", engine=1),
        made_by_series("parsing", "a") + made_by_series("parsing", "b", engine=1),
        made_by_series("adapter", "d1", "tiny", 1) + made_by_series("adapter", 'a\\"b', "odd"),
        made_by_series("grammars", "former").replace(" 1.0", " 0.0"),
    ]
    page = "".join(series).encode()
    assert parse_makers(page) == TokensMadeBy({"processors": "none"}, "", {"tiny": "d1"})
    alone = {"processors": "none", "parsing": "a"}
    assert parse_makers(page, 0) == TokensMadeBy(alone)


@pytest.mark.parametrize("refusal", ["status(400)", "dead(0)", "refused(0)"])
def test_stream_that_all_engines_refuse_ends(
    refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine of ours says so as an error in its stream; it is not its fault."""

    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.decodes[1].script(refusal)
            d.prefills[0].script(f"ok, {refusal}")
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert d.count("resumes_total", kind="exact", outcome="refused") == 2
            assert sum(i.num_failures for i in d.router.registry) == 1

    run(test)
    refused = [text for text in caplog.messages if "refuses to go on" in text]
    assert len(refused) == 2 * (refusal == "status(400)")
    assert all(re.match(r"request \w+: 127.0.0.1:\d+ refuses", text) for text in refused)


def test_seeded_stream_that_no_engine_can_go_on_with_exactly_is_sampled_by_option() -> None:
    """By the engine that refused to, if there is no other."""

    async def test() -> None:
        async with deployed(1, 2, ANY) as d:
            d.decodes[1].script("dead(0)")
            got = await broken(d, "break(2)", temperature=0.7, seed=3)
            kinds = [r.params["resume"]["only_exact"] for r in d.decodes[1].received]
            assert kinds == [True, False]
            assert got[-2]["provenance"]["kind"] == "sampled"

    run(test)


def test_greedy_stream_stays_exact_when_an_engine_fails_before_it_goes_on() -> None:
    async def test() -> None:
        async with deployed(1, 3, ANY) as d:
            d.decodes[1].script("dead(0)")
            d.decodes[2].script("dead(0)")
            got = await broken(d, "break(2)")
            assert all(r.params["resume"]["only_exact"] for r in resumes(d))
            assert got[-2]["provenance"]["kind"] == "exact"

    run(test)


def test_engine_that_begins_with_other_tokens_is_not_believed() -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.prefills[0].differs = d.decodes[1].differs = True
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            whole = text(uninterrupted(d.decodes[0].received[0]))
            assert whole.startswith(text(got[:-1]))
            assert d.count("resumes_total", kind="exact", outcome="differs") == 2

    run(test)


def test_stream_of_an_engine_that_answers_no_probes_goes_on() -> None:
    """As of a host without power: the connection stays, and nothing comes."""

    async def test() -> None:
        config = replace(PATIENT, timeouts=replace(PATIENT.timeouts, idle_s=60))
        async with deployed(1, 2, config) as d:
            d.decodes[0].health_hangs = True
            got = await broken(d, "stall(2)")
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1

    run(test)


def test_engine_that_goes_on_may_be_silent_as_its_client_asked() -> None:
    async def test() -> None:
        config = replace(PATIENT, timeouts=replace(PATIENT.timeouts, idle_s=0.1, answer_s=20))
        async with deployed(1, 2, config, token_s=0.3) as d:
            got = await broken(d, "break(2)", stream_interval=200, max_tokens=5)
            assert text(got) == text(uninterrupted(d.decodes[0].received[0]))
            assert d.count("resumes_total", kind="exact", outcome="ok") == 1

    run(test)


def test_engine_that_tells_of_errors_within_streams_is_not_taken_out() -> None:
    """A request may be what brings them about."""

    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            for engine in d.decodes:
                engine.script(", ".join(["dead(1)"] * 12))
            for _ in range(3):
                await d.post(**GREEDY)
            assert all(i.is_available for i in d.router.registry)

    run(test)


def test_wait_for_another_engine_ends() -> None:
    async def test() -> None:
        async with deployed(1, 2, FAST) as d:
            d.decodes[1].script("hang")
            got = await broken(d, "break(2)")
            assert got[-1]["error"]["type"] == "broken_stream"
            assert d.count("resumes_total", kind="exact", outcome="timeout") == 1
            await until(lambda: d.decodes[1].num_given_up == 1)

    run(test)


@pytest.mark.parametrize("moment", ["asking", "replayed"])
def test_client_that_leaves_meanwhile_leaves_nothing(moment: str) -> None:
    async def test() -> None:
        async with deployed(1, 2, PATIENT) as d:
            d.decodes[0].script("break(2)")
            d.decodes[1].script("hang" if moment == "asking" else "stall(2)")
            leaving = asyncio.ensure_future(d.post(**GREEDY))
            await until(lambda: d.decodes[1].num_in_progress == 1)
            leaving.cancel()
            await until(lambda: d.decodes[1].num_given_up == 1)
            await until(lambda: all(i.num_admitted == 0 for i in d.router.registry))
            await until(lambda: d.count("requests_total", outcome="disconnected") == 1)
            assert d.count("resumes_total", kind="exact", outcome="disconnected") == 1

    run(test)


def test_resumed_stream_waits_for_room_and_gives_it_back() -> None:
    async def test() -> None:
        config = replace(PATIENT, queueing=Queueing(max_requests=1))
        async with deployed(1, 2, config) as d:
            for engine in d.decodes:
                engine.script("delay(0.2)")
            other = asyncio.ensure_future(d.post(headers={"x-session-id": "b"}, prompt="b"))
            await until(lambda: sum(e.num_in_progress for e in d.decodes) == 1)
            busy = next(e for e in d.decodes if e.num_in_progress)
            free = next(e for e in d.decodes if e is not busy)
            free.script_nothing()
            free.script("break(2)")
            _, _, body = await d.post(**GREEDY)
            assert text(events(body)) == text(uninterrupted(free.received[-1]))
            assert (await other)[0] == 200
            assert all(i.num_admitted == 0 for i in d.router.registry)

    run(test)


def test_all_streams_of_an_engine_that_is_killed_go_on() -> None:
    async def test() -> None:
        config = replace(PATIENT, policy="least-loaded", retries=Retries(budget_burst=0))
        async with deployed(1, 2, config, token_s=0.02) as d:
            posts = [
                asyncio.ensure_future(d.post(**{**GREEDY, "max_tokens": 20}, prompt=f"{i}"))
                for i in range(64)
            ]
            await until(lambda: d.decodes[0].num_in_progress >= 24)
            await until(lambda: d.router.metrics.num_waiting == 0)
            await d.decodes[0].stop()
            for i, answered in enumerate(await asyncio.gather(*posts)):
                got = events(answered[2])
                sent = {"model": "tiny", "prompt": f"{i}", **GREEDY, "max_tokens": 20}
                asked = Received("POST", "/v1/completions", {}, json.dumps(sent).encode())
                assert text(got) == text(uninterrupted(asked))
            assert d.count("requests_total", outcome="ok") == 64
            assert d.count("resumes_total", kind="exact", outcome="ok") >= 24

    run(test)

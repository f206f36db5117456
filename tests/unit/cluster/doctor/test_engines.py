# SPDX-License-Identifier: Apache-2.0
"""Checks of engines that run, each against engines that are wrong in one thing."""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web

from tests.unit.cluster.doctor.scripted_engine import FINGERPRINT, ScriptedEngine, with_engines
from vllm_ascend_pd.cluster.doctor import engines, examine
from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
from vllm_ascend_pd.cluster.doctor.findings import Check, Finding, Verdict, fail, ok
from vllm_ascend_pd.registration import Role

MakeCheck = Callable[[Web, list[Engine]], Check]
LARGE = FINGERPRINT.replace("weights=aa", "weights=bb")


def run(make: MakeCheck, p: ScriptedEngine, d: ScriptedEngine | None = None) -> Sequence[Finding]:
    async def use(web: Web, known: list[Engine]) -> Sequence[Finding]:
        return await make(web, known).run()

    consumer = d if d is not None else ScriptedEngine("kv_consumer")
    return with_engines([("prefill", p), ("decode", consumer)], use)


def failed(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.FAIL]


def in_list(url: str) -> dict[str, Any]:
    """Of a router's engines."""
    return {
        "instance_id": "p0",
        "url": url,
        "role": "prefill",
        "state": "ready",
        "healthy": True,
        "source": "registered",
        "models": ["m"],
        "num_active": 0,
    }


def reachable(_: Web, known: list[Engine]) -> Check:
    return engines.Reachable(known)


def in_engine(_: Web, known: list[Engine]) -> Check:
    return engines.InEngine(known)


def fitting(_: Web, known: list[Engine]) -> Check:
    return engines.Fitting(known)


def clock(web: Web, known: list[Engine]) -> Check:
    return engines.ClockSkew(web, known, num_probes=2)


@pytest.mark.parametrize("check", [reachable, in_engine, fitting, clock])
def test_engines_that_are_well(check: MakeCheck) -> None:
    findings = run(check, ScriptedEngine())
    assert findings
    assert {finding.verdict for finding in findings} == {Verdict.OK}


def test_an_engine_that_is_not_healthy() -> None:
    first, second = failed(run(reachable, ScriptedEngine(healthy=False)))
    assert first.found.startswith("prefill-0: 503")
    assert first.fix.startswith("curl -i http://127.0.0.1:")
    assert second.found == "no prefill engine answers"


def test_an_engine_that_is_not_there() -> None:
    async def use(web: Web, _: list[Engine]) -> list[Engine]:
        gone = Engine("http://127.0.0.1:1", "decode", "gone")
        await engines.ask(web, gone)
        return [gone]

    [gone] = with_engines([], use)
    assert "127.0.0.1:1" in gone.error


class Together(ScriptedEngine):
    """It answers when so many ask at the same time."""

    num_missing = 0

    async def _health(self, request: web.Request) -> web.Response:
        await self._all()
        return await super()._health(request)

    async def _metrics(self, request: web.Request) -> web.Response:
        await self._all()
        return await super()._metrics(request)

    async def _all(self) -> None:
        if self.num_missing:
            self.num_missing -= 1
            while self.num_missing:
                await asyncio.sleep(0.001)


async def ask_all(web: Web, known: list[Engine]) -> None:
    await engines.ask_all(web, known)
    assert {engine.error for engine in known} == {""}


async def compare_clocks(web: Web, known: list[Engine]) -> None:
    findings = await engines.ClockSkew(web, known, num_probes=1).run()
    assert {finding.verdict for finding in findings} == {Verdict.OK}


async def look_at_pools(web: Web, known: list[Engine]) -> None:
    assert len(await engines.Pool(web, known).run()) == len(known)


@pytest.mark.parametrize("look", [ask_all, compare_clocks, look_at_pools])
def test_no_engine_is_asked_only_when_others_have_answered(
    look: Callable[[Web, list[Engine]], Awaitable[None]],
) -> None:
    one = Together(pool={'put_blocks_total{outcome="ok"}': 1})

    async def use(web: Web, known: list[Engine]) -> None:
        one.num_missing = engines.AT_ONCE
        named = [Engine(known[0].url, "both", f"e{i}") for i in range(engines.AT_ONCE + 5)]
        await asyncio.wait_for(look(web, named), 10)

    with_engines([("both", one)], use)


def test_different_models() -> None:
    findings = failed(run(reachable, ScriptedEngine(model="large")))
    assert [finding.found for finding in findings] == [
        "no decode engine serves large",
        "no prefill engine serves tiny",
    ]
    assert all("--served-model-name" in finding.fix for finding in findings)


def of_two_models(make: MakeCheck, *decoders: ScriptedEngine) -> Sequence[Finding]:
    """Prefill engines of both."""

    async def use(web: Web, known: list[Engine]) -> Sequence[Finding]:
        return await make(web, known).run()

    producers: list[tuple[Role, ScriptedEngine]] = [
        ("prefill", ScriptedEngine()),
        ("prefill", ScriptedEngine(model="large", fingerprint=LARGE)),
    ]
    return with_engines([*producers, *(("decode", d) for d in decoders)], use)


@pytest.mark.parametrize("check", [reachable, fitting])
def test_a_router_may_have_engines_of_two_models(check: MakeCheck) -> None:
    tiny = ScriptedEngine("kv_consumer")
    large = ScriptedEngine("kv_consumer", model="large", fingerprint=LARGE)
    findings = of_two_models(check, tiny, large)
    assert {finding.verdict for finding in findings} == {Verdict.OK}


@pytest.mark.parametrize(
    ("media", "named", "verdicts"),
    [
        ("", "mnt/tiny", []),
        (" media=cc", "models/tiny", [Verdict.OK]),
        (" media=cc", "mnt/tiny", [Verdict.WARN]),
    ],
)
def test_models_that_take_images_need_one_name(
    media: str, named: str, verdicts: list[Verdict]
) -> None:
    """It is in vLLM's hashes of images: engines of one fingerprint take no KV of such prompts."""
    told = FINGERPRINT + media
    consumer = ScriptedEngine("kv_consumer", fingerprint=told, named=named)
    findings = run(fitting, ScriptedEngine(fingerprint=told), consumer)
    assert [f.verdict for f in findings if f.check == "images"] == verdicts
    if verdicts == [Verdict.WARN]:
        assert "was started with --model mnt/tiny" in findings[-1].found


def test_each_model_needs_engines_of_both_roles() -> None:
    [finding] = failed(of_two_models(reachable, ScriptedEngine("kv_consumer")))
    assert finding.found == "no decode engine serves large"


def test_engines_of_one_model_that_do_not_fit_are_told_with_their_model() -> None:
    [finding] = failed(
        of_two_models(
            fitting,
            ScriptedEngine("kv_consumer"),
            ScriptedEngine(
                "kv_consumer", model="large", fingerprint=LARGE.replace("block=128", "block=64")
            ),
        )
    )
    assert finding.check == "KV layout of large"
    assert finding.found == "block: prefill-1 has 128, decode-3 has 64"


def test_an_engine_that_is_not_ours() -> None:
    [finding] = failed(run(in_engine, ScriptedEngine(fingerprint=None)))
    assert finding.found == "prefill-0 does not report vllm:pd_engine_info"
    [alone] = run(fitting, ScriptedEngine(fingerprint=None))
    assert alone.verdict is Verdict.SKIPPED


def embedder() -> ScriptedEngine:
    return ScriptedEngine(model="embedder", fingerprint=None, generates=False)


@pytest.mark.parametrize("check", [reachable, in_engine, fitting, clock])
def test_a_pooling_model_has_no_part_in_p_and_d(check: MakeCheck) -> None:
    async def use(web: Web, known: list[Engine]) -> Sequence[Finding]:
        return await check(web, known).run()

    p, d = ScriptedEngine(), ScriptedEngine("kv_consumer")
    findings = with_engines([("prefill", p), ("decode", d), ("both", embedder())], use)
    assert {finding.verdict for finding in findings} <= {Verdict.OK, Verdict.SKIPPED}
    told = [f.found for f in findings if f.verdict is Verdict.SKIPPED]
    assert told == (["both-2: not applicable: pooling model"] if check is in_engine else [])


def test_a_pooling_model_in_a_role_without_its_pair() -> None:
    found = run(in_engine, ScriptedEngine(), embedder())
    assert [one.verdict for one in found] == [Verdict.OK, Verdict.WARN]
    assert "used for decode" in found[1].found
    assert "role both" in found[1].fix


class RouterInstead(ScriptedEngine):
    """It answers as a router does to who takes it for an engine."""

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text="vllm:pd_router_requests_in_progress 0.0\n")


def test_a_router_in_the_place_of_an_engine() -> None:
    [finding] = failed(run(in_engine, RouterInstead()))
    assert "prefill-0 is a router, not an engine" in finding.found
    assert "URLs of the engines" in finding.fix


def test_an_engine_that_wants_a_key() -> None:
    first, _ = failed(run(reachable, ScriptedEngine(key="secret")))
    assert first.found.startswith("prefill-0: 401")
    assert "--engine-api-key-file" in first.fix


@pytest.mark.parametrize(
    ("router_key", "engine_key", "asked"),
    [("theirs", "own", "--api-key-file"), ("clients", "theirs", "--engine-api-key-file")],
)
def test_router_and_engines_want_a_key_each(router_key: str, engine_key: str, asked: str) -> None:
    """As with ``--api-keys-file`` and ``--engine-api-key-file``."""

    def examined(router: Engine, **keys: str) -> list[Finding]:
        subject = examine.Subject(router=router.url, measure=False, **keys)
        return failed(asyncio.run(examine.examine(subject, lambda finding: None)))

    async def use(web: Web, known: list[Engine]) -> list[list[Finding]]:
        engine, router = known
        at_router.listed = [in_list(engine.url)]
        right = {"api_key": "clients", "engine_api_key": "own"}
        given = {"api_key": router_key, "engine_api_key": engine_key}
        return [await asyncio.to_thread(examined, router, **keys) for keys in (right, given)]

    at_router = ScriptedEngine(key="clients")
    at_engine = ScriptedEngine(key="own")
    right, wrong = with_engines([("prefill", at_engine), ("both", at_router)], use)
    assert "no decode engine answers" in {finding.found for finding in right}
    assert not [finding for finding in right if "401" in finding.found]
    [finding] = [finding for finding in wrong if "401" in finding.found]
    assert f"with {asked}" in finding.fix


def test_a_wrong_role() -> None:
    [finding] = failed(run(in_engine, ScriptedEngine("kv_consumer")))
    assert finding.found == "prefill-0 is used for prefill and its kv_role is kv_consumer"
    assert not failed(run(in_engine, ScriptedEngine("kv_both")))


@pytest.mark.parametrize(
    ("old", "new", "check", "fix"),
    [
        ("hash=sha256", "hash=sha256_cbor", "block hashes", "--prefix-caching-hash-algo"),
        ("seed=default", "seed=1a2b", "block hashes", "PYTHONHASHSEED"),
        ("dtype=float32", "dtype=bfloat16", "KV layout", "--dtype"),
        ("kv_dtype=auto", "kv_dtype=fp8", "KV layout", "--kv-cache-dtype"),
        ("block=128", "block=64", "KV layout", "--block-size"),
        ("layout=LBHNC", "layout=LBNHC", "KV layout", "VLLM_KV_CACHE_LAYOUT"),
        ("page=65536", "page=32768:32768+65536", "KV layout", "the same drafter or none"),
        ("weights=aa", "weights=bb", "model", "same weight files"),
        ("vllm=0.30.0", "vllm=0.29.0", "engine versions", "same vLLM"),
        ("wire=1", "wire=2", "engine versions", "same vllm-ascend-pd"),
        ("layers=4", "layers=8", "other properties", "same options"),
    ],
)
def test_what_does_not_fit_is_named_with_both_values(
    old: str, new: str, check: str, fix: str
) -> None:
    text = f" {FINGERPRINT}".replace(f" {old}", f" {new}").strip()
    findings = failed(run(fitting, ScriptedEngine(fingerprint=text)))
    assert [finding.check for finding in findings] == [check]
    key, _, value = new.partition("=")
    assert (
        f"{key}: prefill-0 has {value}, decode-1 has {old.partition('=')[2]}" in findings[0].found
    )
    assert fix in findings[0].fix


DRAFTING = f"{FINGERPRINT} draft=eagle-aa"


@pytest.mark.parametrize("drafter", ["eagle-aa", "eagle-bb"])
def test_a_decode_engine_without_a_drafter_reads_from_one_with_any(drafter: str) -> None:
    text = f"{FINGERPRINT} draft={drafter}"
    findings = run(fitting, ScriptedEngine(fingerprint=text))
    assert {finding.verdict for finding in findings} == {Verdict.OK}


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
@pytest.mark.parametrize("text", [FINGERPRINT, DRAFTING.replace("aa", "bb")])
def test_a_drafter_needs_prefill_engines_with_it(role: str, text: str) -> None:
    consumer = ScriptedEngine(role, fingerprint=DRAFTING)
    [finding] = failed(run(fitting, ScriptedEngine(fingerprint=text), consumer))
    assert finding.check == "model"
    assert "decode-1 has eagle-aa" in finding.found
    assert "give prefill engines the drafter" in finding.fix


@pytest.mark.parametrize(("offset", "word"), [(60, "ahead"), (-60, "behind")])
def test_a_clock_that_is_off(offset: float, word: str) -> None:
    now = int(time.time())
    dates = [email.utils.formatdate(now + offset + i, usegmt=True) for i in range(3)]
    [finding, _] = run(clock, ScriptedEngine(dates=dates))
    assert finding.verdict is Verdict.WARN
    assert word in finding.found
    assert 56 < abs(finding.values["skew_s"]) < 63
    assert "timedatectl" in finding.fix


def test_a_clock_is_not_behind_because_its_server_is_too_busy_to_look_at_it() -> None:
    date = email.utils.formatdate(time.time() - 60, usegmt=True)
    [finding, _] = run(clock, ScriptedEngine(dates=[date] * 3))
    assert finding.verdict is Verdict.OK


def pool(web: Web, known: list[Engine]) -> Check:
    return engines.Pool(web, known)


def test_no_pool() -> None:
    [finding] = run(pool, ScriptedEngine())
    assert finding.verdict is Verdict.SKIPPED


def test_a_pool_that_works_and_one_that_is_bypassed() -> None:
    stored = {'put_blocks_total{engine="0",model_name="m",outcome="ok"}': 5}
    [finding] = run(pool, ScriptedEngine(pool=stored))
    assert finding.verdict is Verdict.OK
    assert finding.found == "prefill-0: 5 blocks stored, 0 lookups hit"
    trouble = {**stored, 'breaker_opened_total{direction="get"}': 2}
    [finding] = run(pool, ScriptedEngine(pool=trouble))
    assert finding.verdict is Verdict.WARN
    assert finding.found.endswith("hit; since its start: breaker_opened get 2")
    now = {'bypassed{direction="put"}': 1, 'bypassed{direction="get"}': 1}
    [finding] = run(pool, ScriptedEngine(pool={**trouble, **now, 'bypassed{direction="load"}': 0}))
    assert "; bypassed now: get, put; since its start:" in finding.found
    [finding] = run(pool, ScriptedEngine(pool={**stored, "file_errors_total{}": 3}))
    assert finding.verdict is Verdict.WARN
    assert "since its start: file_errors 3" in finding.found


def test_a_router_tells_of_its_engines() -> None:
    listed = [in_list("http://127.0.0.1:1")]

    async def use(web: Web, known: list[Engine]) -> list[Engine]:
        return await engines.discover(web, known[0].url)

    assert with_engines([("both", ScriptedEngine(listed=listed))], use) == [
        Engine("http://127.0.0.1:1", "prefill", "p0")
    ]


def test_a_router_that_is_not_there_is_a_finding() -> None:
    told: list[Finding] = []
    subject = examine.Subject(router="http://127.0.0.1:1", measure=False)
    findings = asyncio.run(examine.examine(subject, told.append))
    assert findings == told
    assert findings[-1].check == "router"
    assert findings[-1].verdict is Verdict.FAIL


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    class Broken:
        name = "broken"

        async def run(self) -> Sequence[Finding]:
            raise KeyError("oops")

    [finding] = asyncio.run(examine._guarded(Broken()))
    assert finding.verdict is Verdict.FAIL
    assert "KeyError" in finding.found


def test_findings_as_json() -> None:
    page = json.loads(examine.to_json([ok("a", "b", n=1), fail("c", "d", "e")]))
    assert page["ok"] is False
    assert page["findings"][0] == {
        "check": "a",
        "verdict": "ok",
        "found": "b",
        "fix": "",
        "values": {"n": 1},
    }


@pytest.mark.parametrize("first", [0, 9])
def test_what_a_rank_says_is_found_among_that_of_its_server(first: int) -> None:
    """Which may have the last ones of a group."""
    page = "".join(
        f'# TYPE vllm:pd_{sample} {kind}\nvllm:pd_{sample}{{engine="{first}",x="a"}} 1\n'
        f'vllm:pd_{sample}{{engine="{first + 1}",x="b"}} 2\n'
        for kind, sample in (("gauge", "engine_info"), ("counter", "pool_puts_total"))
    )
    assert [engines.find_info(page, rank)["x"] for rank in (None, 0, 1)] == ["a", "a", "b"]
    assert engines.count(page, "vllm:pd_pool_", 1) == {"puts b": 2}
    assert engines.count(page, "vllm:pd_pool_") == {"puts a": 1, "puts b": 2}
    assert Engine("http://h:1", "decode", "d-dp1", 1).headers == {"X-data-parallel-rank": "1"}

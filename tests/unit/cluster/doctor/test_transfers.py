# SPDX-License-Identifier: Apache-2.0
"""Requests through P and D and through the router, against engines that are wrong in one thing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cluster.doctor.scripted_engine import PROVENANCE, ScriptedEngine, with_engines
from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict
from vllm_ascend_pd.cluster.doctor.transfers import ThroughRouter, Transfer, make_pairs, make_prompt
from vllm_ascend_pd.registration import Role


def transfer(*engines: tuple[Role, ScriptedEngine]) -> list[Finding]:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        return list(await Transfer(web, known).run())

    return with_engines(list(engines), use)


def through_router(d: ScriptedEngine, router: ScriptedEngine | None = None) -> Finding:
    """The router is the decode engine itself, or another one."""

    async def use(web: Web, known: list[Engine]) -> Finding:
        [finding] = await ThroughRouter(web, known[-1].url, known[:1]).run()
        return finding

    engines: list[tuple[Role, ScriptedEngine]] = [("decode", d)]
    return with_engines(engines + ([("both", router)] if router else []), use)


def test_a_transfer_is_told_with_its_size() -> None:
    p, d = ScriptedEngine(), ScriptedEngine("kv_consumer")
    [finding] = transfer(("prefill", p), ("decode", d))
    assert finding.verdict is Verdict.OK
    assert finding.found == ("prefill-0 to decode-1: 699 of 700 tokens, 1.6 MB in 5 ms (0.32 GB/s)")
    assert p.bodies[0]["kv_transfer_params"] == {"do_remote_decode": True}
    assert d.bodies[0]["kv_transfer_params"]["transfer_id"] == "t"
    assert p.bodies[0]["prompt"] == d.bodies[0]["prompt"]


def test_a_router_is_asked_for_each_model() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        return list(await ThroughRouter(web, known[-1].url, known[:-1]).run())

    decoders = [ScriptedEngine("kv_consumer", model=model) for model in ("tiny", "large")]
    router = ScriptedEngine()
    findings = with_engines([*(("decode", d) for d in decoders), ("both", router)], use)
    assert [finding.found.split(":")[0] for finding in findings] == ["tiny", "large"]
    assert [body["model"] for body in router.bodies] == ["tiny", "large"]


def test_a_pooling_model_is_sent_no_prompt() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        router = known.pop()
        checks = (Transfer(web, known), ThroughRouter(web, router.url, known))
        return [found for check in checks for found in await check.run()]

    p, d = ScriptedEngine(), ScriptedEngine("kv_consumer", counts_as="loaded")
    embedder = ScriptedEngine(model="embedder", fingerprint=None, generates=False)
    engines: list[tuple[Role, ScriptedEngine]] = [("prefill", p), ("decode", d), ("both", embedder)]
    found = with_engines([*engines, ("both", d)], use)
    assert [(one.check, one.verdict) for one in found] == [
        ("P/D request", Verdict.SKIPPED),
        ("P/D request", Verdict.OK),
        ("router request", Verdict.SKIPPED),
        ("router request", Verdict.OK),
    ]
    assert found[0].found == found[2].found == "both-2: not applicable: pooling model"


def test_every_engine_is_tried() -> None:
    p, d = ScriptedEngine(), ScriptedEngine("kv_consumer")
    findings = transfer(("prefill", p), ("decode", d), ("decode", d), ("decode", d))
    assert [f.found.split(":")[0] for f in findings] == [
        f"prefill-0 to decode-{n}" for n in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("roles", "pairs"),
    [
        ("A", "AA"),
        ("AB", "AB BA"),
        ("ABC", "AB BC CA"),
        ("xA", "xA"),
        ("Az", "Az"),
        ("xAz", "xA Az"),
        ("xzAB", "xz AB Bz"),
        ("ABz", "AB Bz Az"),
        ("xy", ""),
    ],
)
def test_engines_that_do_both_are_tried_with_others(roles: str, pairs: str) -> None:
    """``x`` and ``y`` only prefill, ``z`` only decodes."""
    kinds: dict[str, Role] = {"x": "prefill", "y": "prefill", "z": "decode"}
    made = make_pairs([Engine(name, kinds.get(name, "both"), name) for name in roles])
    assert " ".join(f"{p}{d}" for p, d in made) == pairs


def test_pairs_are_of_one_model() -> None:
    engines = [
        Engine(f"{role}{model}", role, model=model)
        for role, models in (("prefill", "abc"), ("decode", "bad"))
        for model in models
    ]
    made = [(p.url, d.url) for p, d in make_pairs(engines)]
    assert made == [("prefilla", "decodea"), ("prefillb", "decodeb")]


@pytest.mark.parametrize(
    ("p", "d", "found"),
    [
        ({"params": None}, {}, "P returned no kv_transfer_params"),
        ({"params": {"do_remote_prefill": False}}, {}, "P returned no kv_transfer_params"),
        ({}, {"provenance": None}, "D does not say where its KV came from"),
        ({}, {"provenance": {**PROVENANCE, "outcome": "hash_mismatch"}}, "transfer, hash_mismatch"),
        ({}, {"provenance": {**PROVENANCE, "num_peer_tokens": 0}}, "no transfer, loaded"),
    ],
)
def test_a_transfer_that_does_not_happen(p: dict[str, Any], d: dict[str, Any], found: str) -> None:
    [finding] = transfer(
        ("prefill", ScriptedEngine(**p)), ("decode", ScriptedEngine("kv_consumer", **d))
    )
    assert finding.verdict is Verdict.FAIL
    assert found in finding.found
    assert finding.fix


def test_another_answer_is_warned_of() -> None:
    consumer = ScriptedEngine("kv_consumer", text="abcx")
    [finding] = transfer(("prefill", ScriptedEngine()), ("decode", consumer))
    assert finding.verdict is Verdict.WARN
    assert "not the one that P gives" in finding.found


def test_no_pair() -> None:
    [finding] = transfer(("prefill", ScriptedEngine()))
    assert finding.verdict is Verdict.SKIPPED


def test_prompts_fit_and_differ() -> None:
    short = Engine("u", "decode", max_model_len=64)
    assert len(make_prompt(short)) < 64
    long = Engine("u", "decode", max_model_len=4096)
    assert make_prompt(long) != make_prompt(long)


def test_router_that_makes_kv_move() -> None:
    finding = through_router(ScriptedEngine("kv_consumer", counts_as="loaded"))
    assert finding.verdict is Verdict.OK


def test_router_that_makes_nothing_move() -> None:
    finding = through_router(ScriptedEngine("kv_consumer"))
    assert finding.verdict is Verdict.WARN
    assert "no decode engine was asked" in finding.found


def test_router_whose_transfers_fail() -> None:
    finding = through_router(ScriptedEngine("kv_consumer", counts_as="peer_unreachable"))
    assert finding.verdict is Verdict.FAIL
    assert "peer_unreachable" in finding.found
    assert "firewall" in finding.fix


def test_router_that_does_not_answer() -> None:
    async def use(web: Web, known: list[Engine]) -> Finding:
        [finding] = await ThroughRouter(web, "http://127.0.0.1:1", known).run()
        return finding

    finding = with_engines([("decode", ScriptedEngine("kv_consumer"))], use)
    assert finding.verdict is Verdict.FAIL
    assert "curl -i http://127.0.0.1:1/health" in finding.fix


def test_of_a_pair_that_fails_it_is_told_which_of_the_two_fails_with_others_too() -> None:
    broken = ScriptedEngine(params=None)
    engines = [
        ScriptedEngine(),
        broken,
        ScriptedEngine("kv_consumer"),
        ScriptedEngine("kv_consumer"),
    ]
    roles: list[Role] = ["prefill", "prefill", "decode", "decode"]
    good, failed = transfer(*zip(roles, engines, strict=True))
    assert (good.verdict, failed.verdict) == (Verdict.OK, Verdict.FAIL)
    assert failed.found.startswith("prefill-1 to decode-3: ")
    assert failed.found.endswith("; prefill-1 fails with decode-2, decode-3 works with prefill-0")

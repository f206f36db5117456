# SPDX-License-Identifier: Apache-2.0
"""Engines of one model that take other requests, or make other prompts of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.cluster.doctor.scripted_engine import ScriptedEngine, with_engines
from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict
from vllm_ascend_pd.cluster.doctor.requests import SameRequests

BAD = (Verdict.WARN, Verdict.FAIL)


def run(*engines: ScriptedEngine) -> Sequence[Finding]:
    async def use(web: Web, known: list[Engine]) -> Sequence[Finding]:
        return await SameRequests(web, known).run()

    first, *others = engines
    return with_engines([("prefill", first), *(("decode", one) for one in others)], use)


def bad(*engines: ScriptedEngine) -> list[Finding]:
    return [finding for finding in run(*engines) if finding.verdict in BAD]


def test_engines_that_are_alike() -> None:
    findings = run(ScriptedEngine(epoch="a"), ScriptedEngine("kv_consumer", epoch="b"))
    assert {finding.verdict for finding in findings} == {Verdict.OK}


@pytest.mark.parametrize(("asked", "what"), [("prompt", "a text"), ("messages", "a chat")])
@pytest.mark.parametrize("tokens", [[1, 2, 3], None], ids=["others", "none"])
def test_another_tokenizer_or_template(asked: str, what: str, tokens: list[int] | None) -> None:
    other = ScriptedEngine("kv_consumer")
    other.tokens = {**other.tokens, asked: tokens}
    [finding] = bad(ScriptedEngine(), other)
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith(f"of {what} they make different prompts: prefill-0 2 tokens")
    assert "decode-1" in finding.found
    assert "--chat-template" in finding.fix


def test_models_without_a_chat_template_are_no_fault() -> None:
    one, other = ScriptedEngine(), ScriptedEngine("kv_consumer")
    one.tokens = other.tokens = {"prompt": [1, 2], "messages": None}
    findings = run(one, other)
    assert [f.found[:25] for f in findings if f.verdict is Verdict.SKIPPED] == [
        "engines make no tokens (4"
    ]
    assert not bad(one, other)


@pytest.mark.parametrize("max_model_len", [2048, 8192])
def test_other_lengths(max_model_len: int) -> None:
    other = ScriptedEngine("kv_consumer", max_model_len=max_model_len)
    [finding] = bad(ScriptedEngine(), other)
    assert finding.verdict is Verdict.WARN
    assert finding.found.endswith(f"prefill-0 4096, decode-1 {max_model_len}")
    assert "--max-model-len" in finding.fix


def test_an_adapter_of_one_side() -> None:
    [finding] = bad(ScriptedEngine(), ScriptedEngine("kv_consumer", more_models=["sql"]))
    assert finding.verdict is Verdict.WARN
    assert finding.found == "sql is not served by prefill-0"
    assert "--lora-modules" in finding.fix


def test_one_engine_under_two_names() -> None:
    [finding] = bad(ScriptedEngine(epoch="a"), ScriptedEngine("kv_consumer", epoch="a"))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.endswith("are one engine")


def test_models_are_compared_with_their_own() -> None:
    large = {"model": "large", "max_model_len": 64}
    assert not bad(ScriptedEngine(), ScriptedEngine("kv_consumer", **large))


def test_one_engine_alone() -> None:
    [finding] = run(ScriptedEngine())
    assert finding.verdict is Verdict.SKIPPED

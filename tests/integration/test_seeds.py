# SPDX-License-Identifier: Apache-2.0
"""What a seed makes of a prompt does not hang on how the prompt is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, EngineConfig, Fleet, PromptOf

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

SEEDED = {"temperature": 0.9, "seed": 11}
NUM_TOKENS = 600
"""Three chunks of an engine of these tests, and one of an engine that takes more at once."""


@pytest.fixture
def unchunked(fleet: Fleet, base_config: EngineConfig) -> Engine:
    config = replace(base_config, max_num_batched_tokens=2048)
    return fleet.engine(config)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"top_p": 0.9, "top_k": 50}])
def test_chunks_of_a_prompt_draw_no_random_numbers(
    single: SingleEngine, unchunked: Engine, prompt_of: PromptOf, more: dict[str, Any]
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    expected = unchunked.ask(prompt, 12, **SEEDED, **more)
    assert single(prompt, 12, **SEEDED, **more).samples == expected.samples
    assert unchunked.ask(prompt, 12, **{**SEEDED, **more, "seed": 12}).samples != expected.samples


def test_a_seed_beside_other_requests(
    engines: Engines, unchunked: Engine, prompt_of: PromptOf
) -> None:
    """Chunks of one, while others decode with a seed, without one, and greedily."""
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in ("first", "second", "third")}
    samplings = {"first": SEEDED, "second": {}, "third": {**SEEDED, "seed": 12}}
    expected = {name: unchunked.ask(p, 24, **samplings[name]) for name, p in prompts.items()}
    engine = engines.shared("kv_both")
    engine.add("free", prompt_of(40, "free"), 24, temperature=0.9)
    for name, prompt in prompts.items():
        engine.add(name, prompt, 24, **samplings[name])
        engine.step()
    answers = engine.run()
    for name, answer in expected.items():
        assert answers[name].token_ids == answer.token_ids, name


def test_a_seed_and_drafts(fleet: Fleet, base_config: EngineConfig, prompt_of: PromptOf) -> None:
    drafts = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}'
    chunked, unchunked = fleet.engines(
        *(
            replace(base_config, llm=drafts, max_num_batched_tokens=num_tokens)
            for num_tokens in (256, 2048)
        )
    )
    prompt = [*prompt_of(NUM_TOKENS), *prompt_of(40, "again"), *prompt_of(40, "again")]
    expected = unchunked.ask(prompt, 24, **SEEDED)
    assert chunked.ask(prompt, 24, **SEEDED).token_ids == expected.token_ids


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_a_seed_and_drafts_behind_kv_that_is_there(
    engines: Engines,
    fleet: Fleet,
    base_config: EngineConfig,
    prompt_of: PromptOf,
    load_mode: str,
) -> None:
    """Of a peer, and then in the engine's own cache: one token is left to compute."""
    drafts = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}'
    single = fleet.engine(replace(base_config, llm=drafts))
    producer = engines.shared("kv_producer", llm=drafts)
    consumer = engines.shared("kv_consumer", transfer={"load_mode": load_mode}, llm=drafts)
    for part in ("first", "second", "third"):
        prompt = [*prompt_of(BLOCK_SIZE, part), *prompt_of(BLOCK_SIZE, part), *prompt_of(1, part)]
        for num_tokens in (1, 24):
            assert single.reset_prefix_cache()
            expected = single.ask(prompt, num_tokens, **SEEDED)
            answer = consumer.ask(prompt, num_tokens, producer.prefill(prompt), **SEEDED)
            assert answer.token_ids == expected.token_ids
            assert answer.provenance["outcome"] == ("loaded" if num_tokens == 1 else "local")
            assert answer.provenance["num_computed_tokens"] == 1


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("faults", ["fail", "ok,corrupt", "ok*4,fail"])
def test_a_failed_load_draws_no_random_numbers(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, load_mode: str, faults: str
) -> None:
    slots = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}
    producer = engines.shared("kv_producer", faults="ok*", transfer=slots)
    consumer = engines.shared("kv_consumer", transfer={**slots, "load_mode": load_mode})
    prompt = prompt_of(9 * BLOCK_SIZE + 7)
    known = producer.prefill(prompt)
    producer.set_faults(f"{faults},ok*")
    before = consumer.metrics().get("recovered_requests", 0)
    answer = consumer.ask(prompt, 12, known, **SEEDED)
    producer.set_faults("ok*")
    recovered = consumer.metrics().get("recovered_requests", 0) - before
    assert recovered == (load_mode == "step"), "a sample was dropped"
    assert answer.token_ids == single(prompt, 12, **SEEDED).token_ids


def test_a_failed_load_of_the_step_before_draws_no_random_numbers(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Of requests that share what it should have brought, in the step that is under way already."""
    slots = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}
    producer = engines.shared("kv_producer", faults="ok*", transfer=slots)
    consumer = engines.shared(
        "kv_consumer", runs_ahead=True, transfer={**slots, "load_mode": "step"}
    )
    prompt = prompt_of(9 * BLOCK_SIZE + 7)
    known = producer.prefill(prompt)
    producer.set_faults("fail,ok*")
    before = consumer.metrics().get("recovered_requests", 0)
    consumer.add("loads", prompt, 12, known, **SEEDED)
    while consumer.requests()["loads"]["status"] != "RUNNING":
        consumer.step()
    longer = [*prompt, *prompt_of(20, "more")]
    consumer.add("shares", longer, 12, **SEEDED)
    answers = consumer.run()
    producer.set_faults("ok*")
    assert consumer.metrics().get("recovered_requests", 0) == before + 2
    assert answers["loads"].token_ids == single(prompt, 12, **SEEDED).token_ids
    assert answers["shares"].token_ids == single(longer, 12, **SEEDED).token_ids

# SPDX-License-Identifier: Apache-2.0
"""Engines that speculate with n-grams: a step may compute drafts, and take some of them back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import BLOCK_SIZE, Engine, EngineConfig, Fleet, PromptOf
from tests.integration.pairs import CHUNKED, EVERY_LAYER, ORDERS, Pair, run_in_need_of_memory
from tests.integration.pool_steps import POOL, delta, provenance, settle
from tests.integration.test_pool import master  # noqa: F401
from tests.integration.test_preemption import NAMES, NUM_OUTPUT, NUM_TOKENS, SMALL

if TYPE_CHECKING:
    from tests.integration.conftest import Engines
    from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster

pytestmark = pytest.mark.engine

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
LLM = json.dumps({"speculative_config": NGRAM})
Prompt = list[int]


@pytest.fixture(scope="module")
def speculating_single(fleet: Fleet, base_config: EngineConfig) -> Iterator[SingleEngine]:
    with fleet.kept(replace(base_config, llm=LLM)) as engine:
        yield SingleEngine(engine)


@pytest.fixture
def speculating(engines: Engines) -> Engine:
    return engines.shared("kv_consumer", transfer=EVERY_LAYER, llm=LLM)


@pytest.fixture
def phrases(prompt_of: PromptOf) -> PromptOf:
    """Prompts in which a few tokens come again and again."""

    def make(num_tokens: int, part: str = "") -> Prompt:
        phrase = prompt_of(7, part)
        return (phrase * num_tokens)[:num_tokens]

    return make


@contextmanager
def some_drafts_accepted(*engines: Engine) -> Iterator[None]:
    """And some are not: else what follows on either would not have been tried."""
    before = [engine.metrics() for engine in engines]
    yield
    for engine, counted in zip(engines, before, strict=True):
        num_drafts = delta(counted, engine.metrics(), "draft_tokens")
        num_accepted = delta(counted, engine.metrics(), "accepted_tokens")
        assert 0 < num_accepted < num_drafts, engine.name


@pytest.mark.parametrize("producer_speculates", [False, True], ids=["d", "p-and-d"])
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_are_those_of_one_engine(
    engines: Engines,
    speculating: Engine,
    single: SingleEngine,
    speculating_single: SingleEngine,
    prompt_of: PromptOf,
    phrases: PromptOf,
    order: str,
    producer_speculates: bool,
) -> None:
    producer = engines.shared("kv_producer", llm=LLM if producer_speculates else "{}")
    pair = Pair(producer, speculating, prompt_of(5, "where"))
    with some_drafts_accepted(speculating):
        for num_tokens in (3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, CHUNKED):
            prompt = phrases(num_tokens, f"{num_tokens}")
            answer = pair.ask_in(order, prompt, 60)
            assert answer.token_ids == single(prompt, 60).token_ids
            assert answer.token_ids == speculating_single(prompt, 60).token_ids
            assert answer.sources == (0, num_tokens, 0)
            assert answer.provenance["first_token"] == "peer"
            assert answer.outcome == "loaded"


def test_two_workers_draft_the_same(
    engines: Engines,
    producer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    phrases: PromptOf,
) -> None:
    """Each has its own n-grams, and the scheduler hears of one worker's drafts only."""
    llm = json.dumps({"speculative_config": NGRAM, "tensor_parallel_size": 2})
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER, llm=llm)
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    with some_drafts_accepted(consumer):
        prompt = phrases(97, "prefill first")
        answer = consumer.ask(prompt, 60, producer.prefill(prompt))
        assert answer.token_ids == single(prompt, 60).token_ids
        prompt = phrases(CHUNKED, "decode first")
        answer = pair.ask(prompt, max_tokens=60)
        assert answer.token_ids == single(prompt, 60).token_ids
        assert answer.sources == (0, CHUNKED, 0)


OPTIONS = (
    {"repetition_penalty": 1.02, "presence_penalty": 0.01},
    {"frequency_penalty": 0.02},
    {"allowed_token_ids": list(range(300, 320))},
    {"bad_words": [" the", "a"]},
    {"min_tokens": 6, "stop_token_ids": list(range(0, 2000, 3))},
    {"structured_outputs": {"regex": "(abc|abx){20}-[0-9]{4}"}, "ignore_eos": False},
    {"logprobs": 3},
)
"""Each looks at the tokens before, and in a step with drafts those are drafts."""


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_sampling_options(
    engines: Engines,
    speculating: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    phrases: PromptOf,
    options: dict[str, Any],
) -> None:
    producer = engines.shared("kv_producer", llm=LLM)
    pair = Pair(producer, speculating, prompt_of(5, "where"))
    before = speculating.metrics()
    for order in ORDERS:
        prompt = phrases(200, order)
        expected = single(prompt, 50, **options)
        answer = pair.ask_in(order, prompt, 50, **options)
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
        for ours, theirs in zip(answer.logprobs, expected.logprobs, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)
    assert delta(before, speculating.metrics(), "draft_tokens")


def test_many_at_once_greedy_and_not(
    speculating: Engine, producer: Engine, single: SingleEngine, phrases: PromptOf
) -> None:
    """Drafts of all are verified together; those of some with random numbers."""
    prompts = {f"{n}": phrases(n, f"{n}") for n in (33, 64, 97, 300)}
    with some_drafts_accepted(speculating):
        for name, prompt in prompts.items():
            speculating.add(name, prompt, 40, producer.prefill(prompt))
            speculating.add(f"warm {name}", prompt, 40, producer.prefill(prompt), temperature=0.7)
        answers = speculating.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 40).token_ids, name
        assert len(answers[f"warm {name}"].token_ids) == 40


def test_preempted_requests_get_their_tokens(
    engines: Engines, producer: Engine, single: SingleEngine, phrases: PromptOf
) -> None:
    consumer = engines.shared("kv_consumer", llm=LLM, **SMALL)
    prompts = {name: phrases(NUM_TOKENS, name) for name in NAMES}
    with some_drafts_accepted(consumer):
        for name, prompt in prompts.items():
            consumer.add(name, prompt, NUM_OUTPUT, producer.prefill(prompt))
        answers = run_in_need_of_memory(consumer, prompts)
    for name, prompt in prompts.items():
        single.assert_says(answers[name], prompt, NUM_OUTPUT, name)


def test_load_that_fails_beside_drafts(
    engines: Engines, single: SingleEngine, phrases: PromptOf
) -> None:
    """One whose prompt is bad is computed again; the drafts of the other are verified as ever."""
    producer = engines.shared("kv_producer", faults="ok*")
    consumer = engines.shared("kv_consumer", transfer={"load_mode": "step"}, llm=LLM)
    first, second = phrases(NUM_TOKENS, "first"), phrases(NUM_TOKENS, "second")
    with some_drafts_accepted(consumer):
        consumer.add("first", first, 80, producer.prefill(first))
        consumer.step_until("first", "status", "RUNNING")
        for _ in range(5):
            consumer.step()
        producer.set_faults("corrupt,ok*")
        before = consumer.metrics().get("recovered_requests", 0)
        consumer.add("second", second, 40, producer.prefill(second))
        answers = consumer.run()
        assert consumer.metrics()["recovered_requests"] == before + 1
    assert answers["first"].token_ids == single(first, 80).token_ids
    assert answers["second"].token_ids == single(second, 40).token_ids


def test_request_given_up_with_drafts_under_way(
    speculating: Engine, producer: Engine, single: SingleEngine, phrases: PromptOf
) -> None:
    """What it leaves in the prefix cache holds accepted tokens only. No leak: see ``engines``."""
    given_up, kept = phrases(NUM_TOKENS, "given up"), phrases(NUM_TOKENS, "kept")
    with some_drafts_accepted(speculating):
        for name, prompt in (("given up", given_up), ("kept", kept)):
            speculating.add(name, prompt, 80, producer.prefill(prompt))
        speculating.step_until("given up", "status", "RUNNING")
        tokens: list[int] = []
        while len(tokens) < 2 * BLOCK_SIZE:
            tokens = speculating.step().get("given up", [tokens])[0]
        speculating.abort_in_step("given up")
        assert speculating.run()["kept"].token_ids == single(kept, 80).token_ids
    assert tokens == single(given_up, 80).token_ids[: len(tokens)]
    again = speculating.ask(given_up + tokens, 24, {"return_provenance": True})
    assert again.token_ids == single(given_up + tokens, 24).token_ids


def test_pool_gets_accepted_tokens_only(
    engines: Engines,
    single: SingleEngine,
    phrases: PromptOf,
    master: EmbeddedMaster,  # noqa: F811
) -> None:
    """The consumer stores what it decodes; an engine that does not speculate goes on from there."""
    pool = {**POOL, "master": master.address}
    producer = engines.shared("kv_producer", pool=pool)
    consumer = engines.shared("kv_consumer", llm=LLM, pool=pool)
    prompt = phrases(NUM_TOKENS)
    with some_drafts_accepted(consumer):
        answer = consumer.ask(prompt, 90, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 90).token_ids
    settle(producer)
    settle(consumer)
    assert producer.reset_prefix_cache()
    longer = prompt + answer.token_ids
    again = producer.ask(longer, 24, {"return_provenance": True})
    assert again.token_ids == single(longer, 24).token_ids
    num_stored = (len(longer) - 1) // BLOCK_SIZE * BLOCK_SIZE
    sources = provenance(again)
    assert sources["dram"] + sources["remote"] == num_stored

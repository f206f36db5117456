# SPDX-License-Identifier: Apache-2.0
"""Models and options of vLLM, each through P and D in both orders, against one engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engines import Answer, EngineConfig, EngineError, Fleet, PromptOf
from tests.integration.pairs import EVERY_LAYER, ORDERS, Pair, expect_recovery_and_preemptions

pytestmark = pytest.mark.engine

NUM_TOKENS = 300
"""More than an engine of these tests computes in one step."""

needs_fp8 = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM keeps KV in fp8 only on CPUs with AVX-512",
)


class Three:
    """One engine, and a producer and a consumer like it."""

    def __init__(
        self,
        fleet: Fleet,
        config: EngineConfig,
        prompt: list[int],
        transfer: dict[str, Any],
        small: dict[str, Any],
    ) -> None:
        """``transfer`` are the producer's options, ``small`` the consumer's."""
        producer = replace(config, role="kv_producer").with_transfer(**transfer)
        consumer = replace(config, role="kv_consumer", **small).with_transfer(**EVERY_LAYER)
        configs = (config, producer, consumer)
        self.single, self.producer, self.consumer = fleet.engines(*configs)
        self.pair = Pair(self.producer, self.consumer, prompt)

    def assert_right(self, answer: Answer, prompt: list[int]) -> None:
        self.single.assert_says(answer.token_ids, prompt)

    def assert_equal(
        self,
        prompt: list[int],
        other: list[int],
        prefill: dict[str, Any] | None = None,
        first_token: str = "peer",
        **sampling: Any,
    ) -> list[Answer]:
        """Both orders; what the consumer answered. ``prefill`` is how the producer samples."""
        answers = []
        for order, asked in zip(ORDERS, (prompt, other), strict=True):
            expected = self.single.ask(asked, 24, **sampling)
            answer = self.pair.ask_in(order, asked, 24, prefill, **sampling)
            assert answer.samples == expected.samples, order
            num_computed = int(first_token == "here")
            assert answer.sources == (0, len(asked) - num_computed, num_computed), order
            assert answer.provenance["first_token"] == first_token
            answers.append(answer)
        return answers


@pytest.fixture
def three(fleet: Fleet, base_config: EngineConfig, prompt_of: PromptOf) -> Callable[..., Three]:
    def make(
        llm: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        small: dict[str, Any] | None = None,
        **options: Any,
    ) -> Three:
        config = replace(base_config, llm=json.dumps(llm or {}), **options)
        return Three(fleet, config, prompt_of(5, "where"), transfer or {}, small or {})

    return make


def test_one_kv_head(three: Callable[..., Three], models: Callable, prompt_of: PromptOf) -> None:
    engines = three(model=models("mqa"))
    answers = engines.assert_equal(prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b"))
    # A model that says the same whatever it reads would prove nothing.
    assert answers[0].token_ids != answers[1].token_ids


@pytest.mark.parametrize(("architecture", "num_blocks"), [("sliding", 51), ("chunks", 55)])
def test_sliding_windows_beside_full_attention(
    three: Callable[..., Three],
    models: Callable,
    prompt_of: PromptOf,
    architecture: str,
    num_blocks: int,
) -> None:
    """Each kind of layer in groups of its own, on all engines."""
    small = {"num_blocks": num_blocks, "max_model_len": 640}
    engines = three(model=models(architecture), faults="ok*", small=small)
    answers = engines.assert_equal(prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b"))
    assert answers[0].token_ids != answers[1].token_ids
    expect_recovery_and_preemptions(
        engines.producer, engines.consumer, engines.assert_right, prompt_of
    )


def test_windows_of_other_sizes_beside_a_pool_are_in_the_group_of_all(
    three: Callable[..., Three], models: Callable, prompt_of: PromptOf
) -> None:
    """With one group alone; in groups of their own they have larger blocks."""
    small = {"pool": json.dumps({"tiers": ["dram"], "dram_size": "64MiB"})}
    options = {"disable_hybrid_kv_cache_manager": True}
    engines = three(options, model=models("sizes"), small=small)
    answers = engines.assert_equal(prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b"))
    assert answers[0].token_ids != answers[1].token_ids


def test_mla(three: Callable[..., Three], models: Callable, prompt_of: PromptOf) -> None:
    """The single engine caches nothing and computes every prompt in one piece."""
    engines = three(model=models("mla"))
    first, second = prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b")
    answers = engines.assert_equal(first, second)
    assert answers[0].token_ids != answers[1].token_ids
    # All but the last blocks are cached on both sides now.
    longer = [*first[:200], *prompt_of(130, "c")]
    expected = engines.single.ask(longer, 24)
    answer = engines.consumer.ask(longer, 24, engines.producer.prefill(longer))
    assert answer.token_ids == expected.token_ids
    assert answer.sources == (192, 138, 0)


@pytest.mark.parametrize("script", ["fail", "ok,corrupt", "ok,ok,fail"])
def test_mla_goes_on_from_what_came(
    three: Callable[..., Three], models: Callable, prompt_of: PromptOf, script: str
) -> None:
    engines = three(model=models("mla"), faults="ok*")
    prompt = prompt_of(NUM_TOKENS, script)
    known = engines.producer.prefill(prompt)
    engines.producer.set_faults(script)
    answer = engines.consumer.ask(prompt, 24, known)
    engines.producer.set_faults("ok*")
    assert answer.token_ids == engines.single.ask(prompt, 24).token_ids


@pytest.mark.parametrize(
    ("architecture", "llm"),
    [
        pytest.param("mqa", {"kv_cache_dtype": "fp8"}, id="fp8", marks=needs_fp8),
        pytest.param("mqa", {}, id="mqa"),
        pytest.param("sliding", {}, id="sliding"),
        pytest.param("mla", {}, id="mla"),
        pytest.param("tied", {}, id="tied"),
    ],
)
def test_pages_of_every_kind_by_mooncake(
    three: Callable[..., Three],
    models: Callable,
    prompt_of: PromptOf,
    architecture: str,
    llm: dict[str, Any],
) -> None:
    """The other tests take what ``auto`` does on one host: shared memory."""
    dtype = {"dtype": "bfloat16"} if llm else {}
    engines = three(llm, {"transport": "mooncake"}, model=models(architecture), **dtype)
    for answer in engines.assert_equal(prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b")):
        assert answer.provenance["transport"] == "mooncake"


def test_prefix_caching_off_is_refused_by_name(fleet: Fleet, base_config: EngineConfig) -> None:
    llm = json.dumps({"enable_prefix_caching": False})
    with pytest.raises(EngineError, match="prefix caching is off"):
        fleet.start(replace(base_config, role="kv_both", llm=llm))


@pytest.mark.parametrize(
    ("sampling", "prefill", "first_token"),
    [
        ({"logprobs": 3}, {}, "here"),
        ({"stop_token_ids": list(range(0, 2000, 7)), "ignore_eos": False}, {}, "peer"),
        ({"repetition_penalty": 1.3, "presence_penalty": 0.5}, {}, "here"),
        ({"repetition_penalty": 1.3, "presence_penalty": 0.5}, None, "peer"),
        ({"frequency_penalty": 1.9}, None, "peer"),
        ({"logit_bias": {5: 40.0, 9: 30.0}}, {}, "here"),
        ({"logit_bias": {5: 40.0, 9: 30.0}}, None, "peer"),
        ({"min_tokens": 6, "stop_token_ids": list(range(0, 2000, 2))}, {}, "here"),
        (
            {"min_tokens": 6, "stop_token_ids": list(range(0, 2000, 2))},
            {"min_tokens": 1, "stop_token_ids": list(range(0, 2000, 2))},
            "peer",
        ),
        ({"bad_words": [" the", "a"]}, None, "peer"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else str(value),
)
def test_sampling_options(
    three: Callable[..., Three],
    prompt_of: PromptOf,
    sampling: dict[str, Any],
    prefill: dict[str, Any] | None,
    first_token: str,
) -> None:
    """The producer is sent the same options (``None``) or others."""
    engines = three()
    prompts = prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b")
    prefill = sampling if prefill is None else prefill
    engines.assert_equal(*prompts, prefill, first_token, **sampling)


def test_seeded_sampling(three: Callable[..., Three], prompt_of: PromptOf) -> None:
    engines = three()
    sampling = {"temperature": 0.9, "seed": 11}
    prompts = prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b")
    engines.assert_equal(*prompts, sampling, first_token="here", **sampling)


def test_prompt_logprobs_compute_the_prompt(
    three: Callable[..., Three], prompt_of: PromptOf
) -> None:
    engines = three()
    prompt = prompt_of(NUM_TOKENS)
    expected = engines.single.ask(prompt, 8, prompt_logprobs=2)
    answer = engines.pair.ask(prompt, max_tokens=8, prompt_logprobs=2)
    assert answer.token_ids == expected.token_ids
    assert answer.num_prompt_logprobs == expected.num_prompt_logprobs
    assert answer.outcome == "not_needed"


def test_two_producers_and_two_consumers(
    fleet: Fleet, base_config: EngineConfig, prompt_of: PromptOf
) -> None:
    """Every pair of them, at the same time."""
    producer, consumer = (
        replace(base_config, role=f"kv_{role}") for role in ("producer", "consumer")
    )
    single, *others = fleet.engines(
        base_config,
        *(producer.with_transfer(lease_s=lease) for lease in (28.0, 27.0)),
        *(consumer.with_transfer(**EVERY_LAYER, lease_s=lease) for lease in (28.0, 27.0)),
    )
    producers, consumers = others[:2], others[2:]
    pairs = [
        Pair(producer, consumer, prompt_of(5, f"where {i} {j}"))
        for i, producer in enumerate(producers)
        for j, consumer in enumerate(consumers)
    ]
    prompts = {
        (pair, order): prompt_of(NUM_TOKENS, f"{order} {i}")
        for i, pair in enumerate(pairs)
        for order in ("late", "both")
    }
    late = {pair: pair.producer.prefill(prompts[pair, "late"]) for pair in pairs}
    for i, pair in enumerate(pairs):
        pair.consumer.add(f"late {i}", prompts[pair, "late"], 16, late[pair])
        transfer_id = pair.new_id()
        pair.add_decode(f"both {i}", prompts[pair, "both"], transfer_id)
        pair.add_prefill(f"both {i}", prompts[pair, "both"], transfer_id)
    for engine in (*consumers, *producers):
        engine.start_run()
    answers = {engine: engine.join_run() for engine in (*producers, *consumers)}
    for i, pair in enumerate(pairs):
        for order in ("late", "both"):
            answer = answers[pair.consumer][f"{order} {i}"]
            assert answer.token_ids == single.ask(prompts[pair, order], 16).token_ids
            assert answer.outcome == "loaded"

# SPDX-License-Identifier: Apache-2.0
"""A prompt is computed in one engine, its answer in another: same tokens, nothing moved twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

BLOCK_BYTES = 64 * 1024
"""Of all layers of the test model."""
CHUNKED = 700
"""More tokens than an engine of these tests computes in one step."""


def moved(metrics: dict[str, float]) -> float:
    """Bytes loaded, by whatever transport."""
    return sum(value for name, value in metrics.items() if name.startswith("load_bytes/"))


@pytest.mark.parametrize(
    "num_tokens",
    [2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, CHUNKED],
)
def test_consumer_computes_nothing_of_the_prompt(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, num_tokens, 0)


def test_engines_whose_worker_is_no_process_of_its_own(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", executor="uni")
    consumer = engines.shared("kv_consumer", executor="uni")
    prompt = prompt_of(CHUNKED)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, CHUNKED, 0)


@pytest.mark.parametrize("transport", ["shared_memory", "mooncake"])
def test_every_transport_moves_the_same(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, transport: str
) -> None:
    producer = engines.shared("kv_producer", transfer={"transport": transport})
    consumer = engines.shared("kv_consumer")
    prompt = prompt_of(CHUNKED)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, CHUNKED, 0)
    assert answer.provenance["transport"] == transport


def test_peers_without_a_common_transport_compute_for_themselves(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", transfer={"transport": "shared_memory"})
    consumer = engines.shared("kv_consumer", transfer={"transport": "mooncake"})
    prompt = prompt_of(CHUNKED)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "transfer_failed"
    assert "no transport reaches the peer" in producer.log()


def test_prompt_of_one_token_needs_no_peer(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(1)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "not_needed"


def test_concurrent_requests_each_get_their_own_kv(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompts = {f"r{n}": prompt_of(n, f"{n}") for n in (5, 40, 64, 97, 130, 300)}
    for name, prompt in prompts.items():
        producer.add(name, prompt, 1, {"do_remote_decode": True})
    prefills = producer.run()
    for name, prompt in prompts.items():
        params = {**prefills[name].kv_transfer_params, "return_provenance": True}
        consumer.add(name, prompt, 16, params)
    answers = consumer.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 16).token_ids, name
        assert answers[name].sources == (0, len(prompt), 0), name


def test_prefix_shared_in_one_step_is_loaded_once(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(4 * BLOCK_SIZE, "shared")
    prompts = {name: shared + prompt_of(10, name) for name in ("a", "b")}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 16, producer.prefill(prompt))
    for name in prompts:
        consumer.wait_for(name, "session", "READY")
    before = consumer.metrics()
    answers = consumer.run()
    assert {name: a.token_ids for name, a in answers.items()} == {
        name: single(prompt, 16).token_ids for name, prompt in prompts.items()
    }
    # The four shared blocks, and the tail block of each.
    assert moved(consumer.metrics()) - moved(before) == 6 * BLOCK_BYTES


def test_blocks_held_already_are_not_moved_again(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prefix = prompt_of(3 * BLOCK_SIZE, "prefix")
    consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(2 * BLOCK_SIZE + 6, "second")
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (3 * BLOCK_SIZE, 2 * BLOCK_SIZE + 6, 0)
    assert answer.provenance["num_peer_bytes"] == 3 * BLOCK_BYTES


def test_of_a_prompt_seen_before_only_the_tail_is_moved(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(3 * BLOCK_SIZE + 6)
    consumer.ask(prompt, 16, producer.prefill(prompt))
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (3 * BLOCK_SIZE, 6, 0)
    assert answer.provenance["num_peer_bytes"] == BLOCK_BYTES


def test_hole_before_cached_blocks_is_filled(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(5 * BLOCK_SIZE + 6)
    consumer.add("first", prompt, 4)
    consumer.step()
    hole = consumer.block_ids("first")[2]
    consumer.run()
    consumer.evict_blocks([hole])
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (4 * BLOCK_SIZE, BLOCK_SIZE + 6, 0)


@pytest.mark.parametrize("num_samples_of_prefill", [1, 3])
def test_several_samples_of_one_prompt(
    producer: Engine,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    num_samples_of_prefill: int,
) -> None:
    prompt = prompt_of(3 * BLOCK_SIZE + 6)
    sampling = {"temperature": 1.0, "seed": 7}
    params = producer.prefill(prompt, n=num_samples_of_prefill, **sampling)
    answer = consumer.ask(prompt, 12, params, n=3, **sampling)
    expected = single(prompt, 12, n=3, **sampling)
    assert answer.samples == expected.samples
    assert len({tuple(sample) for sample in answer.samples}) == 3


def test_sampling_with_a_seed(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 9)
    sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 11}
    answer = consumer.ask(prompt, 24, producer.prefill(prompt), **sampling)
    assert answer.token_ids == single(prompt, 24, **sampling).token_ids
    assert answer.token_ids != single(prompt, 24).token_ids


def test_prompt_logprobs_make_the_consumer_compute_the_prompt(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 9)
    answer = consumer.ask(prompt, 8, producer.prefill(prompt), prompt_logprobs=1)
    assert answer.token_ids == single(prompt, 8).token_ids
    assert answer.num_prompt_logprobs == len(prompt)
    assert answer.outcome == "not_needed"


@pytest.mark.parametrize(
    ("num_tokens", "sampling", "salt"),
    [(1, {}, None), (73, {"prompt_logprobs": 1}, None), (73, {}, "another")],
    ids=["not needed", "not usable", "refused"],
)
def test_provenance_adds_up_when_the_peer_is_not_used(
    producer: Engine,
    consumer: Engine,
    prompt_of: PromptOf,
    num_tokens: int,
    sampling: dict[str, Any],
    salt: str | None,
) -> None:
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 2, producer.prefill(prompt), cache_salt=salt, **sampling)
    assert answer.sources == (0, 0, num_tokens)


def test_stop_string_ends_the_answer(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 9)
    text = single(prompt, 16).text
    stop = text[len(text) // 2 :][:4]
    answer = consumer.ask(prompt, 16, producer.prefill(prompt), stop=[stop])
    expected = single(prompt, 16, stop=[stop])
    assert answer.finish_reason == "stop"
    assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)


def test_prefill_whose_first_token_stops_is_still_handed_over(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 9)
    expected = single(prompt, 16).token_ids
    params = producer.prefill(prompt, stop_token_ids=expected[:1])
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == expected
    assert answer.sources == (0, len(prompt), 0)


def test_two_engines_that_do_both_serve_each_other(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    left = engines.shared("kv_both")
    right = engines.shared("kv_both", max_num_batched_tokens=512)
    for source, target in ((left, right), (right, left)):
        prompt = prompt_of(3 * BLOCK_SIZE + 7, source.name)
        answer = target.ask(prompt, 16, source.prefill(prompt))
        assert answer.token_ids == single(prompt, 16).token_ids
        assert answer.sources == (0, len(prompt), 0)


def test_engine_serves_itself(engines: Engines, single: SingleEngine, prompt_of: PromptOf) -> None:
    engine = engines.shared("kv_both")
    prompt = prompt_of(3 * BLOCK_SIZE + 7)
    answer = engine.ask(prompt, 16, engine.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (3 * BLOCK_SIZE, 7, 0)


@pytest.mark.parametrize("num_tokens", [20, 3 * BLOCK_SIZE + 7])
def test_kv_under_another_cache_salt_is_refused(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    params = producer.prefill(prompt, cache_salt="tenant a")
    answer = consumer.ask(prompt, 16, params, cache_salt="tenant b")
    assert answer.token_ids == single(prompt, 16, cache_salt="tenant b").token_ids
    assert answer.outcome == "hash_mismatch"


@pytest.mark.parametrize("num_tokens", [20, 3 * BLOCK_SIZE + 7])
def test_kv_under_the_same_cache_salt_is_used(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    params = producer.prefill(prompt, cache_salt="tenant a")
    answer = consumer.ask(prompt, 16, params, cache_salt="tenant a")
    assert answer.token_ids == single(prompt, 16, cache_salt="tenant a").token_ids
    assert answer.sources == (0, num_tokens, 0)

# SPDX-License-Identifier: Apache-2.0
"""Both requests are sent at once: the consumer waits while the producer computes and pushes."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, PromptOf, assert_no_leak
from tests.integration.pairs import CHUNKED, EVERY_LAYER, Pair

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]


@pytest.fixture
def pair(engines: Engines, prompt_of: PromptOf) -> Pair:
    return Pair(
        engines.shared("kv_producer"),
        engines.shared("kv_consumer", transfer=EVERY_LAYER),
        prompt_of(5, "where"),
    )


@pytest.mark.parametrize(
    "num_tokens",
    [BLOCK_SIZE + 1, BLOCK_SIZE + 2, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 5, 256, 257, CHUNKED],
)
def test_consumer_computes_nothing_of_the_prompt(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, num_tokens, 0)
    assert answer.outcome == "loaded"


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE])
def test_prompt_without_a_full_block_is_not_waited_for(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    # Loaded, if the producer was done when it was asked.
    assert answer.outcome in ("not_needed", "loaded")


@pytest.mark.parametrize("mode", ["auto", "step", "prompt"])
def test_every_push_mode_moves_the_same(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, mode: str
) -> None:
    consumer = engines.shared("kv_consumer", transfer={"push_mode": mode})
    pair = Pair(engines.shared("kv_producer"), consumer, prompt_of(5, "where"))
    prompt = prompt_of(CHUNKED)
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, CHUNKED, 0)


def test_blocks_come_before_the_prompt_is_computed(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    pair.consumer.step_until("both", "loads", 1)
    pair.producer.step()
    # The producer computes 256 tokens in a step.
    pair.consumer.wait_count("worker_loaded_bytes", 256 // BLOCK_SIZE * 64 * 1024)
    answers = pair.run()
    assert answers["both"].token_ids == single(prompt, 16).token_ids


def test_many_at_once_each_get_their_own_kv(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompts = {f"r{n}": prompt_of(n, f"{n}") for n in (5, 40, 64, 97, 130, 300, 400)}
    ids = {name: pair.new_id() for name in prompts}
    for name, prompt in prompts.items():
        pair.add_decode(name, prompt, ids[name])
    for name in reversed(prompts):
        pair.add_prefill(name, prompts[name], ids[name])
    answers = pair.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 16).token_ids, name


def test_what_the_consumer_has_is_not_sent(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prefix = prompt_of(3 * BLOCK_SIZE, "prefix")
    pair.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(2 * BLOCK_SIZE + 6, "second")
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (3 * BLOCK_SIZE, 2 * BLOCK_SIZE + 6, 0)


def test_what_the_producer_has_comes_first(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(CHUNKED)
    pair.producer.ask(prompt, 1)
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, CHUNKED, 0)


def test_consumer_that_comes_after_the_prompt_loads_it_as_ever(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.producer.run()
    pair.add_decode("both", prompt, transfer_id)
    answer = pair.consumer.run()["both"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, CHUNKED, 0)


def test_two_samples_share_one_transfer(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(200)
    options = {"n": 2, "temperature": 0.8, "seed": 7}
    answer = pair.ask(prompt, **options)
    assert answer.samples == single(prompt, 16, **options).samples


def test_sample_that_is_computed_later_does_not_take_the_place_of_what_is_kept(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Each sample takes a step, and the blocks of the second one are used again."""
    num_tokens = 4 * BLOCK_SIZE
    small = {"max_num_batched_tokens": num_tokens, "num_blocks": 33, "max_model_len": 512}
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER)
    pair = Pair(engines.shared("kv_producer", **small), consumer, prompt_of(5, "where"))
    prompt = prompt_of(num_tokens)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id, n=2, temperature=0.8)
    pair.producer.run()
    for number in range(4):
        pair.producer.ask(prompt_of(300, f"other {number}"), 4)
    pair.add_decode("both", prompt, transfer_id)
    answer = pair.consumer.run()["both"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, num_tokens - 1, 1)


# What goes wrong.


def test_request_that_never_reaches_the_producer(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    consumer = engines.shared("kv_consumer")
    producer = engines.shared("kv_producer", transfer={"arrival_timeout_s": 0.3})
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    prompt = prompt_of(100)
    pair.add_decode("alone", prompt, pair.new_id())
    answer = pair.consumer.run()["alone"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "not_arrived"


def test_other_prompt_under_the_same_transfer_id(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    ours, theirs = prompt_of(100, "ours"), prompt_of(100, "theirs")
    transfer_id = pair.new_id()
    pair.add_decode("both", ours, transfer_id)
    pair.add_prefill("both", theirs, transfer_id)
    pair.consumer.start_run()
    known = pair.producer.run()["both"].kv_transfer_params
    answer = pair.consumer.join_run()["both"]
    assert answer.token_ids == single(ours, 16).token_ids
    assert answer.outcome == "hash_mismatch"
    pair.consumer.ask(theirs, 1, known)


def test_transfer_id_in_use_is_refused(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    first, second = prompt_of(300, "first"), prompt_of(300, "second")
    transfer_id = pair.new_id()
    pair.add_prefill("first", first, transfer_id)
    pair.add_prefill("second", second, transfer_id)
    pair.add_decode("first", first, transfer_id)
    answer = pair.run()["first"]
    assert answer.token_ids == single(first, 16).token_ids
    assert answer.outcome == "loaded"


def test_prompt_that_was_given_back_while_it_queued_is_not_computed(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Else a queue that is longer than consumers wait consists of such prompts."""
    producer = engines.shared("kv_producer")
    consumer = engines.shared("kv_consumer", transfer={"prefill_timeout_s": 0.3})
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    busy, prompt = prompt_of(CHUNKED, "busy"), prompt_of(300)
    transfer_id = pair.new_id()
    producer.add("busy", busy, 1)
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    answer = consumer.run()["both"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "deadline"
    producer.wait_count("leases", 0)
    answers = producer.run()
    assert answers["busy"].token_ids == single(busy, 1).token_ids
    assert answers["both"].token_ids == []
    assert answers["both"].kv_transfer_params["supports_concurrent"]
    again = pair.ask(prompt)
    assert again.token_ids == single(prompt, 16).token_ids


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_prefill_aborted(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf, num_steps: int
) -> None:
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    pair.consumer.step_until("both", "loads", 1)
    for _ in range(num_steps):
        pair.producer.step()
    pair.producer.abort("both")
    answer = pair.run()["both"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "lease_expired"


@pytest.mark.parametrize("num_steps", [0, 1])
def test_decode_aborted(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf, num_steps: int
) -> None:
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    pair.consumer.step_until("both", "loads", 1)
    for _ in range(num_steps):
        pair.producer.step()
    pair.consumer.abort("both")
    pair.consumer.run()
    pair.producer.run()
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids


def test_decode_aborted_before_the_prefill_arrives(
    pair: Pair, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(100)
    pair.add_decode("both", prompt, pair.new_id())
    pair.consumer.step()
    pair.consumer.abort("both")
    pair.consumer.run()
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_producer_dies_while_it_computes(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, number: signal.Signals
) -> None:
    producer = engines.own("kv_producer")
    consumer = engines.shared("kv_consumer", transfer={**EVERY_LAYER, "peer_timeout_s": 2.0})
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    before = consumer.counts()
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    consumer.step_until("both", "loads", 1)
    producer.step()
    producer.signal(number)
    answer = consumer.run()["both"]
    engines.kill(producer)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "peer_unreachable"
    assert_no_leak(consumer, before)


def test_consumer_dies_while_the_prompt_is_computed(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", transfer={"lease_s": 4.0})
    consumer = engines.own("kv_consumer", transfer=EVERY_LAYER)
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    before = producer.counts()
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    consumer.step_until("both", "loads", 1)
    producer.step()
    engines.kill(consumer)
    producer.run()
    assert_no_leak(producer, before)


@pytest.mark.parametrize("faults", ["corrupt", "ok*2,corrupt", "short", "drop", "fail"])
@pytest.mark.parametrize("transport", ["shared_memory", "mooncake"])
def test_layer_that_arrives_wrong(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, faults: str, transport: str
) -> None:
    producer = engines.shared("kv_producer", faults="ok*", transfer={"transport": transport})
    producer.set_faults("ok*")
    # Small slots, so that there is a third write however much is computed when it is asked for.
    small = {**EVERY_LAYER, "staging_slot_bytes": 256 << 10}
    consumer = engines.shared("kv_consumer", transfer=small)
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    producer.set_faults(faults)
    prompt = prompt_of(CHUNKED)
    answer = pair.ask(prompt)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome in ("checksum", "transfer_failed")


def test_preempted_prefill(engines: Engines, single: SingleEngine, prompt_of: PromptOf) -> None:
    """Two prompts do not fit into the producer: one is preempted, its consumer computes it."""
    producer = engines.shared("kv_producer", num_blocks=33, max_model_len=1024)
    consumer = engines.shared("kv_consumer", transfer=EVERY_LAYER)
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    prompts = {name: prompt_of(600, name) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        transfer_id = pair.new_id()
        pair.add_decode(name, prompt, transfer_id)
        pair.add_prefill(name, prompt, transfer_id)
    answers = pair.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 16).token_ids, name


def test_ring_of_engines_that_do_both(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """What a middle engine loads it may not pass on before the load has ended well."""
    first = engines.shared("kv_both", transfer=EVERY_LAYER)
    second = engines.shared("kv_both", transfer={**EVERY_LAYER, "lease_s": 29.0})
    prompt = prompt_of(CHUNKED)
    there = Pair(first, second, prompt_of(5, "there"))
    back = Pair(second, first, prompt_of(5, "back"))
    assert there.ask(prompt).token_ids == single(prompt, 16).token_ids
    longer = prompt + prompt_of(200, "more")
    answer = back.ask(longer)
    assert answer.token_ids == single(longer, 16).token_ids

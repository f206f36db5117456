# SPDX-License-Identifier: Apache-2.0
"""A load beside the steps: its request waits in ``WAITING_FOR_KV``, the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

NUM_TOKENS = 4 * BLOCK_SIZE + 9
PARK = {"load_mode": "park", "peer_timeout_s": 20}
"""A piece may be on its way for longer than any of these tests makes it."""
SLOW = "delay(1000)"
"""A write that takes about a second: its owner looks at it every millisecond."""


@pytest.fixture
def consumer(engines: Engines) -> Engine:
    return engines.shared("kv_consumer", transfer=PARK)


@pytest.fixture
def producer(engines: Engines) -> Engine:
    """One whose writes can be scripted."""
    engine = engines.shared("kv_producer", faults="ok*")
    engine.set_faults("ok*")
    return engine


def add_parked(producer: Engine, consumer: Engine, prompt: list[int], faults: str) -> None:
    """Queue the request ``parked``; the writes of its load go as scripted."""
    params = producer.prefill(prompt)
    producer.set_faults(faults)
    consumer.add("parked", prompt, 16, params)


def start_parked(producer: Engine, consumer: Engine, prompt: list[int], faults: str) -> None:
    """Like ``add_parked``, until it waits for its load; for writes slow enough to be met."""
    add_parked(producer, consumer, prompt, faults)
    consumer.step_until("parked", "loads", 1)


def test_parked_request_gets_the_tokens_of_a_single_engine(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_others_decode_while_a_request_is_parked(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    other, prompt = prompt_of(40, "other"), prompt_of(NUM_TOKENS, "parked")
    consumer.add("other", other, 200)
    consumer.step_until("other", "status", "RUNNING")
    start_parked(producer, consumer, prompt, SLOW)
    num_steps_of_other = 0
    while consumer.requests()["parked"]["status"] == "WAITING_FOR_KV" and num_steps_of_other < 5:
        num_steps_of_other += "other" in consumer.step()
    assert num_steps_of_other == 5
    answers = consumer.run()
    assert answers["parked"].token_ids == single(prompt, 16).token_ids
    single.assert_says(answers["other"], other, 200)


def test_parked_load_is_used_not_recomputed(
    producer: Engine, consumer: Engine, prompt_of: PromptOf
) -> None:
    start_parked(producer, consumer, prompt_of(NUM_TOKENS), SLOW)
    answer = consumer.run()["parked"]
    assert (answer.outcome, answer.sources) == ("loaded", (0, NUM_TOKENS, 0))


def test_request_aborted_while_parked_gives_its_blocks_back(
    producer: Engine, consumer: Engine, prompt_of: PromptOf
) -> None:
    before = consumer.counts()["free_blocks"]
    start_parked(producer, consumer, prompt_of(NUM_TOKENS), SLOW)
    assert consumer.counts()["free_blocks"] == before - 5
    consumer.abort("parked")
    consumer.run()
    assert consumer.counts()["free_blocks"] == before


def test_request_aborted_while_parked_spoils_no_later_request(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    start_parked(producer, consumer, prompt, SLOW)
    consumer.abort("parked")
    answer = consumer.ask(prompt, 16)
    assert answer.token_ids == single(prompt, 16).token_ids


@pytest.mark.parametrize(
    ("script", "cause"), [("fail", "transfer_failed"), ("corrupt", "checksum")]
)
def test_failed_parked_load_is_recomputed(
    producer: Engine,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    script: str,
    cause: str,
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    add_parked(producer, consumer, prompt, script)
    answer = consumer.run()["parked"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == cause


def test_provenance_adds_up_after_a_failed_parked_load(
    producer: Engine, consumer: Engine, prompt_of: PromptOf
) -> None:
    add_parked(producer, consumer, prompt_of(NUM_TOKENS), "fail")
    assert consumer.run()["parked"].sources == (0, 0, NUM_TOKENS)


def test_parked_load_whose_second_piece_fails_is_recomputed(
    producer: Engine, engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    pieces = {"staging_slot_bytes": 64 * 1024, "staging_slots": 16}
    consumer = engines.shared("kv_consumer", transfer={**PARK, **pieces})
    prompt = prompt_of(NUM_TOKENS)
    add_parked(producer, consumer, prompt, "ok,fail")
    answer = consumer.run()["parked"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "transfer_failed"


def test_parked_load_ends_at_its_deadline(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    consumer = engines.shared("kv_consumer", transfer={**PARK, "load_timeout_s": 0.5})
    producer = engines.own("kv_producer", faults="ok*")
    prompt = prompt_of(NUM_TOKENS)
    start_parked(producer, consumer, prompt, "never")
    answer = consumer.run()["parked"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "deadline"
    engines.kill(producer)  # its slot is busy for as long as the write is


def test_requests_parked_for_one_prefix_both_get_it(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(4 * BLOCK_SIZE, "shared")
    prompts = {name: shared + prompt_of(9, name) for name in ("a", "b")}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 16, producer.prefill(prompt))
    producer.set_faults(f"{SLOW}*2,ok*")
    answers = consumer.run()
    for name, prompt in prompts.items():
        assert answers[name].token_ids == single(prompt, 16).token_ids, name
        assert answers[name].sources[2] == 0, name


def test_heartbeats_keep_the_lease_of_a_long_load(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    lease = {"lease_s": 2.0}
    producer = engines.shared("kv_producer", transfer=lease, faults="ok*")
    consumer = engines.shared("kv_consumer", transfer={**PARK, **lease})
    prompt = prompt_of(NUM_TOKENS)
    before = producer.metrics()
    start_parked(producer, consumer, prompt, "delay(5000)")
    answer = consumer.run()["parked"]
    assert answer.provenance["transfer_ms"] > 4000
    assert (answer.outcome, answer.token_ids) == ("loaded", single(prompt, 16).token_ids)
    expired = "leases_closed/expired"
    assert producer.metrics().get(expired, 0) == before.get(expired, 0)

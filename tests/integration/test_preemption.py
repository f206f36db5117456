# SPDX-License-Identifier: Apache-2.0
"""Memory so short that requests are preempted while they use a peer's KV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.engines import BLOCK_SIZE, Answer, Engine, PromptOf
from tests.integration.pairs import run_in_need_of_memory

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

SMALL = {"num_blocks": 17, "max_model_len": 384}
"""16 blocks: three requests of four blocks, each of which grows by two."""
NUM_TOKENS = 3 * BLOCK_SIZE + 20
NUM_OUTPUT = 3 * BLOCK_SIZE
NAMES = ("a", "b", "c")


def decode_all(
    producer: Engine,
    consumer: Engine,
    prompts: dict[str, list[int]],
    num_output: int,
    **sampling: Any,
) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        consumer.add(name, prompt, num_output, producer.prefill(prompt), **sampling)
    answers = run_in_need_of_memory(consumer, prompts)
    return {name: answer.token_ids for name, answer in answers.items()}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}], ids=["", "seed"])
@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_requests_preempted_on_the_consumer_get_their_tokens(
    engines: Engines,
    producer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    load_mode: str,
    sampling: dict[str, Any],
) -> None:
    consumer = engines.shared("kv_consumer", transfer={"load_mode": load_mode}, **SMALL)
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in NAMES}
    answers = decode_all(producer, consumer, prompts, NUM_OUTPUT, **sampling)
    expected = single.beside((prompt, NUM_OUTPUT, sampling) for prompt in prompts.values())
    assert [answers[name] for name in prompts] == [answer.token_ids for answer in expected]


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_more_kv_on_its_way_than_memory_holds(
    engines: Engines, producer: Engine, single: SingleEngine, prompt_of: PromptOf, load_mode: str
) -> None:
    consumer = engines.shared("kv_consumer", transfer={"load_mode": load_mode}, **SMALL)
    prompts = {f"{n}": prompt_of(7 * BLOCK_SIZE + 20, f"{n}") for n in range(5)}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 16, producer.prefill(prompt))
    for name in prompts:
        consumer.wait_for(name, "session", "READY")
    answers = {name: answer.token_ids for name, answer in consumer.run(120).items()}
    assert answers == {name: single(p, 16).token_ids for name, p in prompts.items()}


def test_the_least_urgent_request_gives_way(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    llm = json.dumps({"scheduling_policy": "priority"})
    producer = engines.shared("kv_producer", llm=llm)
    consumer = engines.shared("kv_consumer", llm=llm, **SMALL)
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in NAMES}
    for priority, (name, prompt) in zip((2, 1, 0), prompts.items(), strict=True):
        known = producer.prefill(prompt, priority=priority)
        consumer.add(name, prompt, NUM_OUTPUT, known, priority=priority)
    answers = dict[str, Answer]()
    while len(answers) < len(NAMES):
        answers |= consumer.drive(1)
    assert list(answers)[-1] == "a", "it came first"
    for name, prompt in prompts.items():
        single.assert_says(answers[name], prompt, NUM_OUTPUT)
        assert answers[name].kv_transfer_params["provenance"]["outcome"] == "loaded"


def test_failed_loads_and_preemptions_together(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    slots = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}
    producer = engines.shared("kv_producer", faults="ok*", transfer=slots)
    consumer = engines.shared("kv_consumer", transfer=slots, **SMALL)
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in NAMES}
    for name, prompt in prompts.items():
        consumer.add(name, prompt, NUM_OUTPUT, producer.prefill(prompt))
    producer.set_faults("ok*3,corrupt,ok*5,fail,ok*")
    before = consumer.metrics()
    answers = consumer.run(120)
    now = consumer.metrics()
    for name, prompt in prompts.items():
        single.assert_says(answers[name], prompt, NUM_OUTPUT, name)
    assert now["recovered_requests"] > before.get("recovered_requests", 0)


def test_prefills_preempted_on_the_producer_are_handed_over(
    engines: Engines, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", transfer={"unopened_share": 1.0}, **SMALL)
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in NAMES}
    before = producer.metrics()["preemptions"]
    for name, prompt in prompts.items():
        # More than one token, so that the requests grow until one has to go.
        producer.add(name, prompt, NUM_OUTPUT, {"do_remote_decode": True})
    prefills = producer.run(120)
    assert producer.metrics()["preemptions"] > before
    for name, prompt in prompts.items():
        answer = consumer.ask(prompt, 16, prefills[name].kv_transfer_params)
        assert answer.token_ids == single(prompt, 16).token_ids


def test_producer_full_of_leases_serves_again_when_they_end(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    transfer = {"lease_s": 2.0, "unopened_share": 1.0}
    producer = engines.shared("kv_producer", transfer=transfer, **SMALL)
    for index in range(4):
        producer.prefill(prompt_of(NUM_TOKENS, f"{index}"))
    assert producer.counts()["free_blocks"] == 0
    prompt = prompt_of(NUM_TOKENS, "late")
    assert producer.ask(prompt, 8).token_ids == single(prompt, 8).token_ids


def test_engines_that_wait_for_each_others_memory_go_on(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Each keeps a prompt of 10 of its 16 blocks for the other, and has no room for the other's."""
    transfer = {"admission_timeout_s": 1.0, "lease_s": 20.0}
    pair = [
        engines.shared("kv_both", transfer={**transfer, "peer_timeout_s": timeout}, **SMALL)
        for timeout in (2.0, 2.1)
    ]
    prompts = [prompt_of(10 * BLOCK_SIZE, f"{number}") for number in range(2)]
    params = [engine.prefill(prompt) for engine, prompt in zip(pair, prompts, strict=True)]
    for engine, prompt, known in zip(reversed(pair), prompts, params, strict=True):
        engine.add("waits", prompt, 16, known)
        engine.wait_for("waits", "session", "READY")
    for engine in pair:
        engine.start_run()
    answers = [engine.join_run()["waits"] for engine in reversed(pair)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == single(prompt, 16).token_ids
    assert "deadline" in [answer.outcome for answer in answers]

# SPDX-License-Identifier: Apache-2.0
"""A request that is given up, at any stage and on either side, leaves nothing behind.

What it may have left is looked for in every test of this folder, when the test ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf, assert_no_leak

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = [pytest.mark.engine, pytest.mark.worker_process]

NUM_TOKENS = 4 * BLOCK_SIZE + 9
SHORT_LEASE = {"lease_s": 2.0}


def abort_while_opening(consumer: Engine) -> None:
    consumer.abort("given-up")


def abort_while_ready(consumer: Engine) -> None:
    consumer.wait_for("given-up", "session", "READY")
    consumer.abort("given-up")


def abort_while_loading(consumer: Engine) -> None:
    consumer.wait_for("given-up", "session", "READY")
    consumer.abort_in_step("given-up")


def abort_after_the_load(consumer: Engine) -> None:
    consumer.step_until("given-up", "num_output_tokens", 1)
    consumer.abort("given-up")


def abort_while_decoding(consumer: Engine) -> None:
    consumer.step_until("given-up", "num_output_tokens", 5)
    consumer.abort("given-up")


@pytest.mark.parametrize(
    "abort",
    [
        abort_while_opening,
        abort_while_ready,
        abort_while_loading,
        abort_after_the_load,
        abort_while_decoding,
    ],
)
def test_abort_on_the_consumer_gives_everything_back(
    producer: Engine,
    consumer: Engine,
    single: SingleEngine,
    prompt_of: PromptOf,
    abort: Callable[[Engine], None],
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    before = consumer.counts(), producer.counts()
    consumer.add("given-up", prompt, 50, producer.prefill(prompt))
    abort(consumer)
    consumer.run()
    assert_no_leak(consumer, before[0])
    assert_no_leak(producer, before[1])
    assert consumer.ask(prompt, 16).token_ids == single(prompt, 16).token_ids


def test_abort_on_the_consumer_leaves_the_rest_of_the_batch_alone(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    shared = prompt_of(4 * BLOCK_SIZE, "shared")
    given_up, kept = shared + prompt_of(9, "given-up"), shared + prompt_of(9, "kept")
    consumer.add("given-up", given_up, 50, producer.prefill(given_up))
    consumer.add("kept", kept, 16, producer.prefill(kept))
    consumer.wait_for("kept", "session", "READY")
    abort_while_loading(consumer)
    assert consumer.run()["kept"].token_ids == single(kept, 16).token_ids


def test_abort_before_the_prefill_grants_nothing(producer: Engine, prompt_of: PromptOf) -> None:
    before = producer.metrics().get("leases_granted", 0)
    producer.add("given-up", prompt_of(NUM_TOKENS), 1, {"do_remote_decode": True})
    producer.abort("given-up")
    producer.run()
    assert producer.metrics().get("leases_granted", 0) == before


def test_abort_between_chunks_of_the_prefill_grants_nothing(
    producer: Engine, prompt_of: PromptOf
) -> None:
    before = producer.metrics().get("leases_granted", 0)
    producer.add("given-up", prompt_of(700), 1, {"do_remote_decode": True})
    producer.step()
    assert producer.requests()["given-up"]["num_computed_tokens"] == 256
    producer.abort("given-up")
    producer.run()
    assert producer.metrics().get("leases_granted", 0) == before


def test_abort_in_the_step_that_completes_the_prefill_revokes_the_lease(
    producer: Engine, prompt_of: PromptOf
) -> None:
    before = producer.metrics().get("leases_closed/revoked", 0)
    producer.add("given-up", prompt_of(NUM_TOKENS), 1, {"do_remote_decode": True})
    producer.abort_in_step("given-up")
    producer.run()
    assert producer.metrics()["leases_closed/revoked"] == before + 1


def test_lease_of_a_client_that_never_comes_expires(engines: Engines, prompt_of: PromptOf) -> None:
    producer = engines.shared("kv_producer", transfer=SHORT_LEASE)
    before = producer.counts()
    producer.prefill(prompt_of(NUM_TOKENS))
    held = producer.counts()
    assert (held["leases"], held["pinned_blocks"]) == (1, 5)
    assert_no_leak(producer, before)
    assert producer.metrics()["leases_closed/expired"] >= 1


def test_lease_of_a_consumer_killed_while_it_loads_expires(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", transfer=SHORT_LEASE, faults="ok*")
    park = {"load_mode": "park", "peer_timeout_s": 20}
    killed = engines.own("kv_consumer", transfer={**SHORT_LEASE, **park})
    before, closed = producer.counts(), producer.metrics()
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    producer.set_faults("delay(4000)")  # longer than the lease
    killed.add("loading", prompt, 16, params)
    killed.step_until("loading", "loads", 1)
    assert producer.counts()["pinned_blocks"] == 5
    engines.kill(killed)
    assert_no_leak(producer, before)
    expired = "leases_closed/expired"
    assert producer.metrics()[expired] == closed.get(expired, 0) + 1

    producer.set_faults("ok*")
    other = engines.shared("kv_consumer")
    answer = other.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "loaded"


def test_leases_nobody_opened_do_not_hold_more_than_their_share(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Half of the 32 blocks: two prompts of seven."""
    producer = engines.shared("kv_producer", num_blocks=33, max_model_len=512)
    consumer = engines.shared("kv_consumer")
    before, metrics = producer.counts(), producer.metrics()
    prompts = [prompt_of(200, f"{number}") for number in range(5)]
    params = [producer.prefill(prompt) for prompt in prompts]
    assert producer.counts()["free_blocks"] == before["free_blocks"] - 14
    displaced = "leases_closed/displaced"
    assert producer.metrics()[displaced] == metrics.get(displaced, 0) + 3
    assert "give way" in producer.log()
    outcomes = []
    for prompt, known in zip(reversed(prompts), reversed(params), strict=True):
        answer = consumer.ask(prompt, 8, known)
        assert answer.token_ids == single(prompt, 8).token_ids
        outcomes.append(answer.outcome)
    assert outcomes == 2 * ["loaded"] + 3 * ["lease_expired"]


def test_prompt_that_nobody_comes_for_is_given_back(producer: Engine, prompt_of: PromptOf) -> None:
    before = producer.counts()
    params = producer.prefill(prompt_of(NUM_TOKENS))
    assert producer.counts()["pinned_blocks"] == 5
    producer.ask([0], 1, {"release_transfer_id": params["transfer_id"]})
    assert_no_leak(producer, before)


def test_leased_blocks_are_not_reused_by_others(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", num_blocks=33, max_model_len=512)
    consumer = engines.shared("kv_consumer")
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    for index in range(4):
        producer.ask(prompt_of(400, f"{index}"), 2)
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "loaded"

# SPDX-License-Identifier: Apache-2.0
"""``reset_prefix_cache`` on either side: nothing computed before it is used after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

NUM_TOKENS = 4 * BLOCK_SIZE + 9


def test_reset_of_the_producer_gives_up_its_leases(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    assert producer.reset_prefix_cache()
    assert producer.counts()["leases"] == 0
    answer = consumer.ask(prompt, 16, params)
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "lease_expired"


def test_blocks_reused_after_a_reset_of_the_producer_are_not_served(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", num_blocks=17, max_model_len=480)
    consumer = engines.shared("kv_consumer")
    prompt = prompt_of(NUM_TOKENS)
    consumer.add("r", prompt, 16, producer.prefill(prompt))
    consumer.wait_for("r", "session", "READY")
    assert producer.reset_prefix_cache()
    producer.ask(prompt_of(470, "overwrites all blocks"), 2)
    answer = consumer.run()["r"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.outcome == "lease_expired"


def test_reset_of_the_consumer_makes_it_load_again(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    consumer.ask(prompt, 16, producer.prefill(prompt))
    assert consumer.reset_prefix_cache()
    answer = consumer.ask(prompt, 16, producer.prefill(prompt))
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_reset_of_the_consumer_between_the_peers_answer_and_the_load(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    consumer.add("r", prompt, 16, producer.prefill(prompt))
    consumer.wait_for("r", "session", "READY")
    assert consumer.reset_prefix_cache()
    answer = consumer.run()["r"]
    assert answer.token_ids == single(prompt, 16).token_ids
    assert answer.sources == (0, NUM_TOKENS, 0)


def test_reset_while_the_consumer_decodes_is_refused_and_harmless(
    producer: Engine, consumer: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    consumer.add("r", prompt, 40, producer.prefill(prompt))
    consumer.step_until("r", "num_output_tokens", 3)
    assert not consumer.reset_prefix_cache()
    assert consumer.run()["r"].token_ids == single(prompt, 40).token_ids


def test_reset_while_a_load_is_parked_is_refused_and_harmless(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    producer = engines.shared("kv_producer", faults="ok*")
    consumer = engines.shared("kv_consumer", transfer={"load_mode": "park", "peer_timeout_s": 20})
    prompt = prompt_of(NUM_TOKENS)
    params = producer.prefill(prompt)
    producer.set_faults("delay(1000),ok*")
    consumer.add("r", prompt, 16, params)
    consumer.step_until("r", "loads", 1)
    assert not consumer.reset_prefix_cache()
    assert consumer.run()["r"].token_ids == single(prompt, 16).token_ids

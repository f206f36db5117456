# SPDX-License-Identifier: Apache-2.0
"""A consumer with ``load`` auto computes what it would have to wait longer for."""

from __future__ import annotations

import pytest

from tests.schedulers.harness import BLOCK_SIZE, Engine, Engines, prompt_of
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.types import Cause


@pytest.fixture
def weighing(engines: Engines) -> Engine:
    """A consumer that computes a prompt where that is sooner."""
    return engines.make("kv_consumer", load="auto")


def measure(consumer: Engine, load_ms: float) -> None:
    """It computes a token in 1 ms, and loads a block in ``load_ms``."""
    peers = consumer.scheduler.pd.part(Consumer)
    for _ in range(100):
        peers.known.speed.note(consumer.scheduler.pd.common.bytes_per_block(), load_ms)
        peers.prefill.note(1, 1.0)


def test_prompt_is_computed_where_that_is_sooner(producer: Engine, weighing: Engine) -> None:
    measure(weighing, 1.1 * BLOCK_SIZE)
    params = {**producer.prefill("p", prompt_of(100)), "return_provenance": True}
    weighing.add("c", prompt_of(100), params)
    steps = weighing.run_to_end()
    assert not any(step.loads for step in steps)
    weighing.expect_tokens("c", 1)
    provenance = (weighing.params["c"] or {})["provenance"]
    assert provenance["outcome"] == Cause.NOT_NEEDED.value
    assert provenance["num_computed_tokens"] == 100


def test_prompt_is_loaded_where_that_is_sooner(producer: Engine, weighing: Engine) -> None:
    measure(weighing, 0.9 * BLOCK_SIZE)
    params = producer.prefill("p", prompt_of(100))
    request = weighing.add("c", prompt_of(100), params)
    (load,) = weighing.schedule_until_admitted(request).loads
    assert load.blocks[0].indices == tuple(range(7))
    weighing.run_to_end()
    weighing.expect_tokens("c", 1)


def test_part_is_loaded_for_what_it_makes_usable(producer: Engine, weighing: Engine) -> None:
    """Blocks 2 to 5 are cached here, and the last one would take longer than to compute it."""
    weighing.warm("w", prompt_of(96))
    weighing.evict(weighing.requests["w"], 1)
    measure(weighing, 1.1 * BLOCK_SIZE)
    params = producer.prefill("p", prompt_of(130))
    request = weighing.add("c", prompt_of(130), params)
    (load,) = weighing.schedule_until_admitted(request).loads
    assert load.blocks[0].indices == (1,)
    weighing.run_to_end()
    weighing.expect_tokens("c", 1)

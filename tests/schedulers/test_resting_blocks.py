# SPDX-License-Identifier: Apache-2.0
"""Direct placement in the real schedulers: blocks that a peer may still write into are nobody's."""

from __future__ import annotations

import pytest

from tests.schedulers.harness import Engine, Engines, Step, prompt_of
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause

NUM_TOKENS = 100
NUM_BLOCKS = 17
"""Of which 16 can be used: the prompt's 7, held ones 6, and a margin."""


@pytest.fixture
def consumer(engines: Engines) -> Engine:
    """Of an engine with ``protocol`` ascend, as far as the scheduler is concerned."""
    return engines.make("kv_consumer", num_blocks=NUM_BLOCKS, protocol="ascend")


@pytest.fixture
def producer(engines: Engines) -> Engine:
    return engines.make("kv_producer", protocol="ascend")


def park(producer: Engine, consumer: Engine) -> LoadSpec:
    params = producer.prefill("p", prompt_of(NUM_TOKENS))
    consumer.add("c", prompt_of(NUM_TOKENS), {**params, "return_provenance": True}, max_tokens=4)
    consumer.run(lambda: bool(consumer.worker.parked))
    (load,) = consumer.worker.parked.values()
    return load


def rest(producer: Engine, consumer: Engine, cause: Cause) -> LoadSpec:
    """A load fails while its peer may still be writing."""
    load = park(producer, consumer)
    consumer.worker.end_parked(load.load_id, cause.value, num_resting=1)
    return load


def test_loads_are_always_parked(producer: Engine, consumer: Engine) -> None:
    """Also with ``load_mode`` step: in a step, requests would hold the blocks already."""
    load = park(producer, consumer)
    assert not load.in_step
    consumer.worker.end_parked(load.load_id)
    steps = consumer.run_to_end()
    consumer.expect_tokens("c", 4)
    assert [load for step in steps for load in step.loads] == []


def test_request_goes_on_at_once_without_the_resting_blocks(
    producer: Engine,
    consumer: Engine,
) -> None:
    load = rest(producer, consumer, Cause.TRANSFER_FAILED)
    consumer.run(lambda: len(consumer.tokens["c"]) >= 2)
    assert not set(load.block_ids) & set(consumer.scheduler.kv_cache_manager.get_block_ids("c")[0])
    consumer.worker.spoil(load)
    consumer.run(lambda: len(consumer.tokens["c"]) == 4)
    consumer.expect_tokens("c", 4)
    assert consumer.params["c"]["provenance"]["outcome"] == Cause.TRANSFER_FAILED.value
    consumer.worker.rested = [load.load_id]
    consumer.run_to_end()


def test_resting_blocks_are_in_nobodys_table_and_in_no_cache(
    producer: Engine,
    consumer: Engine,
) -> None:
    """With memory for one more prompt only, and a peer that writes late."""
    load = rest(producer, consumer, Cause.DEADLINE)
    consumer.run(lambda: bool(consumer.tokens["c"]))
    consumer.run(lambda: "c" in consumer.params)
    consumer.add("d", prompt_of(NUM_TOKENS, 5000), max_tokens=4)
    consumer.run(lambda: bool(consumer.tokens["d"]))
    consumer.worker.spoil(load)
    consumer.run(lambda: len(consumer.tokens["d"]) == 4)
    consumer.expect_tokens("d", 4)
    for block_id in load.block_ids:
        assert consumer.pool.blocks[block_id].block_hash is None
        assert consumer.pool.blocks[block_id].ref_cnt == 1
    consumer.worker.rested = [load.load_id]
    consumer.run_to_end()


def test_engine_steps_on_until_its_blocks_have_rested(
    producer: Engine,
    consumer: Engine,
) -> None:
    load = rest(producer, consumer, Cause.PEER_UNREACHABLE)
    consumer.run(lambda: "c" in consumer.params)
    assert consumer.scheduler.has_requests()
    assert consumer.counts()["loads"] == 1
    num_free = consumer.counts()["free_blocks"]
    assert num_free == consumer.counts_at_start["free_blocks"] - len(load.block_ids)
    consumer.worker.rested = [load.load_id]
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


def test_request_that_was_aborted_leaves_its_blocks_at_rest(
    producer: Engine,
    consumer: Engine,
) -> None:
    load = park(producer, consumer)
    consumer.abort("c")
    consumer.worker.end_parked(load.load_id, Cause.CANCELLED.value, num_resting=1)
    consumer.step()
    consumer.step()
    num_free = consumer.counts()["free_blocks"]
    assert num_free == consumer.counts_at_start["free_blocks"] - len(load.block_ids)
    consumer.worker.rested = [load.load_id]
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


def loads_in_step(steps: list[Step]) -> list[LoadSpec]:
    return [load for step in steps for load in step.loads if load.in_step]


def test_load_waits_for_memory_instead_of_going_into_a_step(
    producer: Engine,
    consumer: Engine,
) -> None:
    """A request would hold the blocks then, and who writes into them late would hit it."""
    params = producer.prefill("p", prompt_of(NUM_TOKENS))
    consumer.add("other", prompt_of(150, start=1), max_tokens=6)
    consumer.run(lambda: len(consumer.tokens["other"]) > 0)
    consumer.add("c", prompt_of(NUM_TOKENS), params, max_tokens=4)
    consumer.wait_for_answer()
    steps = consumer.run(lambda: bool(consumer.worker.parked))
    assert loads_in_step(steps) == []
    assert len(consumer.tokens["other"]) == 6
    (load,) = consumer.worker.parked.values()
    consumer.worker.end_parked(load.load_id)
    assert loads_in_step(consumer.run_to_end()) == []
    consumer.expect_tokens("c", 4)


def test_what_was_evicted_after_its_load_is_computed(
    producer: Engine,
    consumer: Engine,
) -> None:
    load = park(producer, consumer)
    request = consumer.scheduler.requests["c"]
    consumer.worker.end_parked(load.load_id)
    consumer.step()
    consumer.evict(request, 4)
    assert loads_in_step(consumer.run_to_end()) == []
    consumer.expect_tokens("c", 4)


def test_tail_that_gave_its_memory_back_is_computed(
    producer: Engine,
    consumer: Engine,
) -> None:
    load = park(producer, consumer)
    assert load.blocks[0].has_tail
    consumer.worker.end_parked(load.load_id)
    consumer.step()
    consumer.scheduler.pd.common.parking.drop_tails()
    assert loads_in_step(consumer.run_to_end()) == []
    consumer.expect_tokens("c", 4)


def test_engines_that_disagree_how_late_a_write_may_come_load_nothing(
    engines: Engines,
    producer: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One would use blocks again into which the other may still write."""
    monkeypatch.setenv("ASCEND_TRANSFER_TIMEOUT", "33064")
    consumer = engines.make("kv_consumer", num_blocks=NUM_BLOCKS, protocol="ascend")
    params = producer.prefill("p", prompt_of(NUM_TOKENS))
    consumer.add("c", prompt_of(NUM_TOKENS), {**params, "return_provenance": True}, max_tokens=2)
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)
    assert consumer.params["c"]["provenance"]["outcome"] == Cause.INCOMPATIBLE.value

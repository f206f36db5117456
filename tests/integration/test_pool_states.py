# SPDX-License-Identifier: Apache-2.0
"""A pool beside layers that keep a state, against one engine.

prompt   [b0][b1][b2][b3][b4][b5][b6][b7][b8][b9 . .
states                               [s7]    [s9]      where a step of 8 blocks stops
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import (
    BLOCK_SIZE,
    Answer,
    EngineConfig,
    Fleet,
    PromptOf,
)
from tests.integration.pool_steps import delta, provenance, settle, store
from tests.integration.pooled import ASK, Pooled
from tests.integration.test_states import LONG, NUM_STATES, PAGE_BYTES, SHORT, assert_likeliest
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.pool.values import HEADER_BYTES

pytestmark = pytest.mark.engine

VALUE_BYTES = HEADER_BYTES + PAGE_BYTES
STEP = 8
"""Blocks that a step computes at most."""
FULL = LONG // BLOCK_SIZE


def stops(num_tokens: int) -> list[int]:
    """Behind so many blocks there is a state, once a prompt has been computed from its start."""
    num_blocks = num_tokens // BLOCK_SIZE
    return sorted({*range(STEP, num_blocks, STEP), num_blocks} - {0})


class PooledStates(Pooled):
    def assert_right(self, answer: Answer, prompt: list[int]) -> None:
        assert_likeliest(self.single, prompt, answer.token_ids)


@pytest.fixture
def pooled(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[PooledStates]:
    config = replace(base_config, model=models("gdn"), dtype="bfloat16")
    yield from PooledStates.for_fixture(fleet, config)


LENGTHS = [SHORT, BLOCK_SIZE + 1, STEP * BLOCK_SIZE, LONG, 600]


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_what_is_needed_to_go_on_is_loaded_and_all_is_stored(
    pooled: PooledStates, prompt_of: PromptOf, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    for num_tokens in LENGTHS:
        prompt = prompt_of(num_tokens, str(num_tokens))
        before = engine.metrics()
        store(engine, prompt)
        stored = delta(before, engine.metrics(), "pool_put_bytes")
        num_states = NUM_STATES * len(stops(num_tokens))
        assert stored == (num_tokens // BLOCK_SIZE + num_states) * VALUE_BYTES
        answer = pooled.ask(engine, prompt)
        # vLLM computes the last token in any case, on the state before it.
        num_hit = max((n for n in stops(num_tokens) if n * BLOCK_SIZE < num_tokens), default=0)
        assert provenance(answer).get("dram", 0) == num_hit * BLOCK_SIZE
        assert sum(provenance(answer).values()) == num_tokens
        num_values = num_hit + NUM_STATES if num_hit else 0
        assert answer.provenance["num_pool_bytes"] == num_values * VALUE_BYTES
        settle(engine)
        assert engine.reset_prefix_cache()


def test_a_shorter_hit_ends_where_there_is_a_state(
    pooled: PooledStates, prompt_of: PromptOf
) -> None:
    """A prompt has 17 blocks in common with a stored one, and states are behind 8, 16 and 18."""
    store(pooled.engine, prompt_of(600))
    prompt = prompt_of(600)[: 17 * BLOCK_SIZE] + prompt_of(100, "else")
    answer = pooled.ask(pooled.engine, prompt)
    hit = 2 * STEP * BLOCK_SIZE
    assert provenance(answer) == {"dram": hit, "computed": len(prompt) - hit}
    assert answer.provenance["num_pool_bytes"] == (2 * STEP + NUM_STATES) * VALUE_BYTES


def test_a_shared_prefix_without_a_state_is_no_hit_until_one_has_stopped_there(
    pooled: PooledStates, prompt_of: PromptOf
) -> None:
    """As in vLLM's own cache, also where only the pool knows what is shared."""
    stem, engine = prompt_of(5 * BLOCK_SIZE, "stem"), pooled.engine
    for part, num_hit in ("a", 0), ("b", 0), ("c", 5 * BLOCK_SIZE):
        prompt = stem + prompt_of(4 * BLOCK_SIZE + 9, part)
        answer = store(engine, prompt, 24, kv=ASK)
        pooled.assert_right(answer, prompt)
        assert provenance(answer).get("dram", 0) == num_hit


def test_only_what_is_missing_comes_from_the_pool(
    pooled: PooledStates, prompt_of: PromptOf
) -> None:
    engine, prompt = pooled.engine, prompt_of(LONG)
    store(engine, prompt)
    engine.ask(prompt[: STEP * BLOCK_SIZE + 1])
    answer = pooled.ask(engine, prompt)
    local = STEP * BLOCK_SIZE
    assert provenance(answer) == {
        "local": local,
        "dram": FULL * BLOCK_SIZE - local,
        "computed": LONG - FULL * BLOCK_SIZE,
    }
    assert answer.provenance["num_pool_bytes"] == (FULL - STEP + NUM_STATES) * VALUE_BYTES


@pytest.mark.parametrize("group", range(1 + NUM_STATES))
def test_a_block_that_is_missing_in_one_group_is_filled(
    pooled: PooledStates, prompt_of: PromptOf, group: int
) -> None:
    engine, prompt = pooled.engine, prompt_of(LONG)
    engine.add("first", prompt, 2)
    engine.step_until("first", "num_output_tokens", 1)
    block = engine.block_ids("first", group)[FULL - 1]
    engine.run()
    settle(engine)
    engine.evict_blocks([block])
    answer = pooled.ask(engine, prompt)
    assert provenance(answer)["computed"] == LONG - FULL * BLOCK_SIZE
    assert answer.provenance["num_pool_bytes"] == VALUE_BYTES


def test_decoded_blocks_are_hits_of_the_next_turn(
    pooled: PooledStates, prompt_of: PromptOf
) -> None:
    """A state is stored before the answer that goes on behind it is."""
    prompt = prompt_of(LONG)
    first = store(pooled.engine, prompt, 4 * BLOCK_SIZE)
    pooled.go_on(prompt, first, (1, 2 * BLOCK_SIZE, 4 * BLOCK_SIZE - 1), prompt_of)


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("script", ["fail*", "ok,corrupt", "ok*8,missing", "ok*10,short"])
def test_failed_load_goes_on_from_the_last_whole_boundary(
    pooled: PooledStates, prompt_of: PromptOf, script: str, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    local, other = STEP * BLOCK_SIZE, prompt_of(70, "other")
    origin = pooled.fail_loads(engine, prompt_of(600), local, script, other)
    assert origin == {"local": local, "computed": 600 - local}


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_preemption(pooled: PooledStates, prompt_of: PromptOf, runs_ahead: bool) -> None:
    engine = pooled.other(num_blocks=50, max_model_len=640, runs_ahead=runs_ahead)
    assert pooled.preempt(engine, [prompt_of(190, name) for name in "abcd"], 80) > 0


def test_an_engine_that_runs_ahead(pooled: PooledStates, prompt_of: PromptOf) -> None:
    lengths = (LONG, 12 * BLOCK_SIZE + 1, 600)
    origins = pooled.run_ahead([prompt_of(length, str(length)) for length in lengths])
    for length, origin in zip(lengths, origins, strict=True):
        num_hit = length // BLOCK_SIZE * BLOCK_SIZE
        assert origin == {"dram": num_hit, "computed": length - num_hit}


def test_on_eviction_what_left_memory_is_a_hit(pooled: PooledStates, prompt_of: PromptOf) -> None:
    engine = pooled.other({"save": "eviction"}, num_blocks=60, max_model_len=640)
    origins = pooled.fill(engine, [prompt_of(LONG, str(i)) for i in range(8)], 2 * BLOCK_SIZE)
    assert any(origin.get("dram", 0) >= STEP * BLOCK_SIZE for origin in origins), origins


def test_engines_share_states(pooled: PooledStates, prompt_of: PromptOf) -> None:
    """What a producer has stored, and what a consumer decodes, is a hit at any other engine."""
    master = EmbeddedMaster()
    try:
        shared = {"master": master.address}
        producer = pooled.other(shared, role="kv_producer")
        consumer = pooled.other(shared, role="kv_consumer")
        prompt = prompt_of(LONG)
        params = producer.prefill(prompt)
        settle(producer)
        hit = FULL * BLOCK_SIZE
        alone = pooled.ask(consumer, prompt)
        assert provenance(alone) == {"remote": hit, "computed": LONG - hit}
        settle(consumer)
        assert consumer.reset_prefix_cache()
        first = pooled.ask(consumer, prompt, 3 * BLOCK_SIZE, params)
        assert provenance(first) == {"peer": LONG}
        turn = prompt + first.token_ids + prompt_of(5, "turn")
        stored = (LONG + 3 * BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
        pooled.take_turn(producer, consumer, turn, stored)
    finally:
        pooled.fleet.retire(producer, consumer)
        master.stop()


def test_a_pool_on_one_side_is_no_hindrance(pooled: PooledStates, prompt_of: PromptOf) -> None:
    other = pooled.fleet.engine(replace(pooled.config, role="kv_both"))
    for number, (producer, consumer) in enumerate([(pooled.engine, other), (other, pooled.engine)]):
        prompt = prompt_of(LONG, str(number))
        store(pooled.engine, prompt[: STEP * BLOCK_SIZE + 1])
        answer = consumer.ask(prompt, 24, producer.prefill(prompt))
        pooled.assert_right(answer, prompt)
        assert answer.sources == (0, LONG, 0)


def test_states_of_mamba2_on_two_workers(
    pooled: PooledStates, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    config = replace(pooled.config, model=models("mamba2"))
    mamba2 = PooledStates(pooled.fleet, config, pooled.fleet.engine(config), pooled.engine)
    engine = mamba2.other(llm=json.dumps({"tensor_parallel_size": 2}))
    prompt = prompt_of(LONG)
    store(engine, prompt)
    answer = engine.ask(prompt, 24, ASK)
    mamba2.assert_right(answer, prompt)
    hit = FULL * BLOCK_SIZE
    assert provenance(answer) == {"dram": hit, "computed": LONG - hit}
    settle(engine)


def test_layers_that_are_not_numbered_as_they_run(
    pooled: PooledStates, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """Zamba2, of which blocks are packed while their step computes."""
    zamba2 = PooledStates.of(pooled.fleet, replace(pooled.config, model=models("zamba2")))
    for number in range(2):
        prompt = prompt_of(LONG, str(number))
        store(zamba2.engine, prompt)
        answer = zamba2.ask(zamba2.engine, prompt)
        hit = FULL * BLOCK_SIZE
        assert provenance(answer) == {"dram": hit, "computed": LONG - hit}
    settle(zamba2.engine)

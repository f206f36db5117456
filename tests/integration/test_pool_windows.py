# SPDX-License-Identifier: Apache-2.0
"""A pool beside sliding windows and chunked local attention, each kind of layer in KV cache groups
of its own, against one engine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import delta, provenance, settle, store
from tests.integration.pooled import Pooled
from tests.integration.test_windows import LONG, NUM_WINDOWS, PAGE_BYTES, SHORT, WINDOW
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.pool.values import HEADER_BYTES

pytestmark = pytest.mark.engine

NUM_GROUPS = 1 + NUM_WINDOWS
"""Full attention is the last one."""
VALUE_BYTES = HEADER_BYTES + PAGE_BYTES
NUM_TOKENS = 9 * BLOCK_SIZE + 9
FULL = 9 * BLOCK_SIZE


def first_of_window(end: int) -> int:
    """The block in which the window of the token at ``end`` begins."""
    return max(0, end - WINDOW + 1) // BLOCK_SIZE


def num_loaded_bytes(num_tokens: int) -> int:
    """Of a prompt of which nothing is here."""
    num_blocks = num_tokens // BLOCK_SIZE
    # vLLM computes the last token in any case.
    end = num_tokens - 1 if num_tokens % BLOCK_SIZE == 0 else num_blocks * BLOCK_SIZE
    return (num_blocks + NUM_WINDOWS * (num_blocks - first_of_window(end))) * VALUE_BYTES


@pytest.fixture
def pooled(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[Pooled]:
    """With windows."""
    yield from Pooled.for_fixture(fleet, replace(base_config, model=models("windows")))


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize(
    "num_tokens",
    [SHORT, WINDOW, WINDOW + 1, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, LONG, 12 * BLOCK_SIZE, 600],
)
def test_what_is_needed_to_go_on_is_loaded_and_all_is_stored(
    pooled: Pooled, prompt_of: PromptOf, num_tokens: int, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    prompt = prompt_of(num_tokens)
    before = engine.metrics()
    store(engine, prompt)
    stored = delta(before, engine.metrics(), "pool_put_bytes")
    num_blocks = num_tokens // BLOCK_SIZE
    assert stored == NUM_GROUPS * num_blocks * VALUE_BYTES
    answer = pooled.ask(engine, prompt)
    num_hit = min(num_blocks * BLOCK_SIZE, num_tokens - 1)
    assert provenance(answer) == {"dram": num_hit, "computed": num_tokens - num_hit}
    assert answer.provenance["num_pool_bytes"] == num_loaded_bytes(num_tokens)
    settle(engine)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_chunked_local_attention(
    fleet: Fleet,
    base_config: EngineConfig,
    models: Callable[[str], str],
    prompt_of: PromptOf,
    load_mode: str,
) -> None:
    pooled = Pooled.of(fleet, replace(base_config, model=models("chunks")))
    engine = pooled.other(transfer={"load_mode": load_mode})
    for num_tokens in (SHORT, 2 * BLOCK_SIZE + 5, 3 * BLOCK_SIZE + 5, 12 * BLOCK_SIZE, 300, 600):
        prompt = prompt_of(num_tokens)
        store(engine, prompt)
        answer = pooled.ask(engine, prompt)
        num_hit = min(num_tokens // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1)
        assert provenance(answer) == {"dram": num_hit, "computed": num_tokens - num_hit}
        settle(engine)
        assert engine.reset_prefix_cache()


def test_a_shorter_hit_has_a_window_of_its_own(pooled: Pooled, prompt_of: PromptOf) -> None:
    first, second = prompt_of(NUM_TOKENS, "first"), prompt_of(NUM_TOKENS, "second")
    store(pooled.engine, first)
    prompt = first[: 5 * BLOCK_SIZE] + second
    answer = pooled.ask(pooled.engine, prompt)
    assert provenance(answer) == {"dram": 5 * BLOCK_SIZE, "computed": NUM_TOKENS}


def test_only_what_is_missing_comes_from_the_pool(pooled: Pooled, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(pooled.engine, prompt)
    pooled.engine.ask(prompt[: 6 * BLOCK_SIZE + 1])
    answer = pooled.ask(pooled.engine, prompt)
    local = 6 * BLOCK_SIZE
    assert provenance(answer) == {"local": local, "dram": FULL - local, "computed": 9}
    num_blocks = 3 + NUM_WINDOWS * (9 - first_of_window(FULL))
    assert answer.provenance["num_pool_bytes"] == num_blocks * VALUE_BYTES


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_block_that_is_missing_in_one_group_is_filled(
    pooled: Pooled, prompt_of: PromptOf, group: int
) -> None:
    engine, prompt = pooled.engine, prompt_of(NUM_TOKENS)
    engine.add("first", prompt, 2)
    engine.step_until("first", "num_output_tokens", 1)
    blocks = engine.block_ids("first", group)
    engine.run()
    settle(engine)
    engine.evict_blocks([blocks[8]])
    answer = pooled.ask(engine, prompt)
    local = FULL - BLOCK_SIZE
    assert provenance(answer) == {"local": local, "dram": BLOCK_SIZE, "computed": 9}
    assert answer.provenance["num_pool_bytes"] == VALUE_BYTES


def test_decoded_blocks_are_hits_of_the_next_turn(pooled: Pooled, prompt_of: PromptOf) -> None:
    """Also those that the request has given up since."""
    prompt = prompt_of(NUM_TOKENS)
    first = store(pooled.engine, prompt, 6 * BLOCK_SIZE)
    pooled.go_on(prompt, first, (1, 3 * BLOCK_SIZE, 6 * BLOCK_SIZE - 1), prompt_of)


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize(
    "script", ["fail*", "ok,corrupt", "ok*4,missing", "ok*8,corrupt", "ok*11,short"]
)
def test_failed_load_goes_on_from_what_is_whole(
    pooled: Pooled, prompt_of: PromptOf, script: str, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    local, other = 2 * BLOCK_SIZE, prompt_of(70, "other")
    origin = pooled.fail_loads(engine, prompt_of(NUM_TOKENS), local, script, other)
    assert origin.get("computed", 0) > 9


@pytest.mark.parametrize("save", ["write_through", "eviction"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_preemption(pooled: Pooled, prompt_of: PromptOf, save: str, runs_ahead: bool) -> None:
    small = {"num_blocks": 61, "max_model_len": 512, "max_num_batched_tokens": 128}
    engine = pooled.other({"save": save}, **small, runs_ahead=runs_ahead)
    num_loads = pooled.preempt(engine, [prompt_of(190, name) for name in "abcd"], 200)
    if save == "write_through":
        assert num_loads > 0


def test_a_request_holds_as_many_blocks_as_in_one_engine(
    pooled: Pooled, prompt_of: PromptOf
) -> None:
    """Once what it has filled is packed, computed or loaded."""
    prompt = prompt_of(LONG)
    store(pooled.engine, prompt)
    held = []
    for engine in (pooled.single, pooled.engine):
        free = engine.counts()["free_blocks"]
        engine.add("r", prompt, 40)
        engine.step_until("r", "num_output_tokens", 30)
        deadline = time.monotonic() + 60
        while engine.counts().get("pool_pins"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        held.append(free - engine.counts()["free_blocks"])
        engine.run()
    assert held[0] == held[1] < NUM_GROUPS * -(-LONG // BLOCK_SIZE)


def test_an_engine_that_runs_ahead(pooled: Pooled, prompt_of: PromptOf) -> None:
    lengths = (LONG, 12 * BLOCK_SIZE, 600)
    origins = pooled.run_ahead([prompt_of(length, str(length)) for length in lengths])
    for length, origin in zip(lengths, origins, strict=True):
        num_hit = min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1)
        assert origin == {"dram": num_hit, "computed": length - num_hit}


def test_on_eviction_what_left_memory_is_a_hit(pooled: Pooled, prompt_of: PromptOf) -> None:
    engine = pooled.other({"save": "eviction"}, num_blocks=100, max_model_len=512)
    prompts = [prompt_of(NUM_TOKENS, str(i)) for i in range(8)]
    origins = pooled.fill(engine, prompts, 3 * BLOCK_SIZE)
    assert any(origin.get("dram", 0) >= BLOCK_SIZE for origin in origins), origins


def test_producer_stores_and_consumer_stores_what_it_decodes(
    pooled: Pooled, prompt_of: PromptOf
) -> None:
    master = EmbeddedMaster()
    try:
        shared = {"master": master.address}
        producer = pooled.other(shared, role="kv_producer")
        consumer = pooled.other(shared, role="kv_consumer")
        prompt = prompt_of(NUM_TOKENS)
        first = pooled.ask(consumer, prompt, 3 * BLOCK_SIZE, producer.prefill(prompt))
        assert provenance(first) == {"peer": NUM_TOKENS}
        turn = prompt + first.token_ids + prompt_of(5, "turn")
        settle(consumer)
        assert consumer.reset_prefix_cache()
        stored = (NUM_TOKENS + 3 * BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
        second = pooled.take_turn(producer, consumer, turn, stored)
        assert provenance(second) == {"peer": len(turn)}
    finally:
        pooled.fleet.retire(producer, consumer)
        master.stop()


def test_what_is_loaded_is_decided_by_what_it_takes(pooled: Pooled, prompt_of: PromptOf) -> None:
    engine = pooled.other({"load": "auto"})
    for name in "abc":
        prompt = prompt_of(600, name)
        store(engine, prompt)
        answer = pooled.ask(engine, prompt)
        assert provenance(answer) in (
            {"dram": 18 * BLOCK_SIZE, "computed": 600 - 18 * BLOCK_SIZE},
            {"computed": 600},
        )
        settle(engine)
        assert engine.reset_prefix_cache()


def test_two_workers(pooled: Pooled, prompt_of: PromptOf) -> None:
    engine = pooled.other(executor="mp", llm=json.dumps({"tensor_parallel_size": 2}))
    for num_tokens in (NUM_TOKENS, 12 * BLOCK_SIZE):
        prompt = prompt_of(num_tokens)
        store(engine, prompt)
        answer = pooled.ask(engine, prompt)
        assert provenance(answer)["dram"] == min(
            num_tokens // BLOCK_SIZE * BLOCK_SIZE, num_tokens - 1
        )
        settle(engine)

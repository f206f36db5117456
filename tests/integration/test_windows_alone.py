# SPDX-License-Identifier: Apache-2.0
"""Sliding windows in all layers (Mistral 7B v0.1, Phi-3-mini-4k), against one engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf
from tests.integration.pairs import ORDERS, Pair, Three, abort_early_and_late
from tests.integration.pool_steps import delta, provenance, settle, store
from tests.integration.pooled import Pooled
from tests.integration.test_moves import expect_broken_answers_to_go_on, num_bytes_of_move
from tests.integration.test_pool_windows import VALUE_BYTES, first_of_window
from tests.integration.test_speculation import LLM as DRAFTS
from tests.integration.test_windows import (
    CHUNKED,
    FAULTY,
    LENGTHS,
    LONG,
    PAGE_BYTES,
    SHORT,
    WINDOW,
    num_window_blocks,
)

pytestmark = pytest.mark.engine

NUM_LAYERS = 3
"""In one KV cache group."""


@pytest.fixture
def windows(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[Three]:
    config = replace(base_config, model=models("windows alone"))
    yield from Three.of(fleet, config, FAULTY)


@pytest.fixture
def pair(windows: Three, prompt_of: PromptOf) -> Pair:
    return Pair(windows.producer, windows.consumer, prompt_of(5, "where"))


@pytest.fixture
def pooled(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[Pooled]:
    yield from Pooled.for_fixture(fleet, replace(base_config, model=models("windows alone")))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_only_the_window_moves(
    windows: Three, pair: Pair, prompt_of: PromptOf, num_tokens: int, order: str
) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask_in(order, prompt, 24)
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)
    num_bytes = NUM_LAYERS * num_window_blocks(num_tokens) * PAGE_BYTES
    assert answer.provenance["num_peer_bytes"] == num_bytes


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("num_tokens", [SHORT, LONG, 4 * BLOCK_SIZE, 10 * BLOCK_SIZE - 1])
def test_where_the_consumer_samples_the_first_token(
    windows: Three, prompt_of: PromptOf, load_mode: str, num_tokens: int
) -> None:
    consumer = windows.other("kv_consumer", {"load_mode": load_mode, "first_token": "compute"})
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 24, windows.producer.prefill(prompt))
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens - 1, 1)


def test_what_the_consumer_has_is_not_sent(windows: Three, pair: Pair, prompt_of: PromptOf) -> None:
    prefix = prompt_of(6 * BLOCK_SIZE)
    windows.consumer.ask(prefix + prompt_of(4, "first"), 1)
    prompt = prefix + prompt_of(2 * BLOCK_SIZE, "second")
    answer = pair.ask_in("prefill first", prompt, 24)
    windows.assert_right(answer, prompt)
    assert answer.sources == (len(prefix), 2 * BLOCK_SIZE, 0)
    assert answer.provenance["num_peer_bytes"] == NUM_LAYERS * 2 * PAGE_BYTES


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("script", ["fail", "ok,corrupt"])
def test_failed_load(
    windows: Three, pair: Pair, prompt_of: PromptOf, script: str, order: str
) -> None:
    prompt = prompt_of(LONG)
    answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, 0, LONG)


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


@pytest.mark.parametrize("num_tokens", [SHORT, LONG])
def test_request_moves_while_it_runs(windows: Three, prompt_of: PromptOf, num_tokens: int) -> None:
    num_computed, copied = num_bytes_of_move(windows, prompt_of(num_tokens), 3)
    num_slid = (num_computed - num_tokens) // BLOCK_SIZE + 1
    least = NUM_LAYERS * num_window_blocks(num_computed) * PAGE_BYTES
    assert least <= copied <= least + NUM_LAYERS * num_slid * PAGE_BYTES


def test_broken_answer_goes_on_and_request_with_drafts_moves(
    windows: Three, prompt_of: PromptOf
) -> None:
    expect_broken_answers_to_go_on(windows, prompt_of(LONG))
    num_bytes_of_move(windows, (prompt_of(7) * 50)[:LONG], 1, llm=DRAFTS)


def test_without_the_hybrid_manager_windows_are_kept_alike(
    windows: Three, prompt_of: PromptOf
) -> None:
    llm = json.dumps({"disable_hybrid_kv_cache_manager": True})
    consumer = windows.other("kv_consumer", llm=llm)
    prompt = prompt_of(LONG)
    answer = consumer.ask(prompt, 24, windows.producer.prefill(prompt))
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, LONG, 0)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_a_hit_of_the_pool_needs_its_window_only(
    pooled: Pooled, prompt_of: PromptOf, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    for num_tokens in (SHORT, WINDOW + 1, LONG, 12 * BLOCK_SIZE, CHUNKED):
        prompt = prompt_of(num_tokens, str(num_tokens))
        before = engine.metrics()
        store(engine, prompt)
        stored = delta(before, engine.metrics(), "pool_put_bytes")
        num_blocks = num_tokens // BLOCK_SIZE
        value_bytes = VALUE_BYTES + (NUM_LAYERS - 1) * PAGE_BYTES
        assert stored == num_blocks * value_bytes
        answer = pooled.ask(engine, prompt)
        num_hit = min(num_blocks * BLOCK_SIZE, num_tokens - 1)
        assert provenance(answer) == {"dram": num_hit, "computed": num_tokens - num_hit}
        num_loaded = num_blocks - first_of_window(num_hit)
        assert answer.provenance["num_pool_bytes"] == num_loaded * value_bytes
        settle(engine)
        assert engine.reset_prefix_cache()


def test_a_shorter_hit_has_a_window_of_its_own(pooled: Pooled, prompt_of: PromptOf) -> None:
    first, second = prompt_of(9 * BLOCK_SIZE + 9, "first"), prompt_of(100, "second")
    store(pooled.engine, first)
    answer = pooled.ask(pooled.engine, first[: 5 * BLOCK_SIZE] + second)
    assert provenance(answer) == {"dram": 5 * BLOCK_SIZE, "computed": 100}


def test_an_engine_that_runs_ahead_stores_all(pooled: Pooled, prompt_of: PromptOf) -> None:
    engine = pooled.other(runs_ahead=True)
    prompt = prompt_of(LONG)
    store(engine, prompt)
    num_hit = LONG // BLOCK_SIZE * BLOCK_SIZE
    assert provenance(pooled.ask(engine, prompt)) == {"dram": num_hit, "computed": LONG - num_hit}
    settle(engine)

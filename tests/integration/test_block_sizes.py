# SPDX-License-Identifier: Apache-2.0
"""KV cache groups whose blocks have different numbers of tokens, against one engine: windows whose
heads are half as large as those of full attention (Gemma 4) have blocks twice as long.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf, assert_no_leak
from tests.integration.pairs import (
    ORDERS,
    Pair,
    Three,
    abort_early_and_late,
    run_in_need_of_memory,
)
from tests.integration.test_moves import expect_broken_answers_to_go_on, num_bytes_of_move

pytestmark = pytest.mark.engine

UNIT = 2 * BLOCK_SIZE
WINDOW, NUM_WINDOWS = 64, 3
PAGE_BYTES = 2 * BLOCK_SIZE * 2 * 64 * 4
CHUNKED = 600
"""More tokens than an engine of these tests computes in two steps."""
SHORT, LONG = 40, 300
FAULTY = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}


def num_bytes(num_tokens: int) -> int:
    """What of a prompt moves."""
    num_of_window = -(-num_tokens // UNIT) - max(0, num_tokens - WINDOW + 1) // UNIT
    return (-(-num_tokens // BLOCK_SIZE) + NUM_WINDOWS * num_of_window) * PAGE_BYTES


@pytest.fixture
def sizes(fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]) -> Iterator[Three]:
    config = replace(base_config, model=models("sizes"))
    yield from Three.of(fleet, config, FAULTY)


@pytest.fixture
def pair(sizes: Three, prompt_of: PromptOf) -> Pair:
    return Pair(sizes.producer, sizes.consumer, prompt_of(5, "where"))


LENGTHS = [SHORT, UNIT, UNIT + 1, 3 * BLOCK_SIZE + 1, 5 * UNIT, 5 * UNIT - 1, LONG, CHUNKED]


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_only_what_is_needed_to_go_on_moves(
    sizes: Three, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    answer = sizes.consumer.ask(prompt, 70, sizes.producer.prefill(prompt))
    sizes.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)
    assert answer.provenance["num_peer_bytes"] == num_bytes(num_tokens)


@pytest.mark.parametrize("num_tokens", [UNIT + 1, 3 * BLOCK_SIZE + 1, 5 * UNIT, LONG, CHUNKED])
def test_decode_first(sizes: Three, pair: Pair, prompt_of: PromptOf, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask(prompt, max_tokens=24)
    sizes.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)
    assert answer.provenance["num_peer_bytes"] == num_bytes(num_tokens)


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("num_tokens", [LONG, 4 * UNIT, 5 * UNIT - 1])
def test_where_the_consumer_samples_the_first_token(
    sizes: Three, prompt_of: PromptOf, load_mode: str, num_tokens: int
) -> None:
    consumer = sizes.other("kv_consumer", {"load_mode": load_mode, "first_token": "compute"})
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 24, sizes.producer.prefill(prompt))
    sizes.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens - 1, 1)


def test_what_the_consumer_has_is_not_sent(sizes: Three, pair: Pair, prompt_of: PromptOf) -> None:
    """Of a prefix that ends within a unit, whole units are there."""
    prefix = prompt_of(5 * UNIT + BLOCK_SIZE, "prefix")
    sizes.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(4 * BLOCK_SIZE + 6, "second")
    answer = pair.ask(prompt)
    sizes.assert_right(answer, prompt)
    assert answer.sources == (5 * UNIT, 5 * BLOCK_SIZE + 6, 0)
    again = pair.ask(prompt)
    sizes.assert_right(again, prompt)
    assert again.sources[0] == 7 * UNIT


@pytest.mark.parametrize(
    ("order", "script"), [*itertools.product(ORDERS, ["fail", "ok,corrupt", "ok*4,fail"])]
)
def test_failed_load_goes_on_from_what_is_whole(
    sizes: Three, pair: Pair, prompt_of: PromptOf, script: str, order: str
) -> None:
    prefix = prompt_of(5 * BLOCK_SIZE, "prefix")
    sizes.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(6 * BLOCK_SIZE + 6, "second")
    answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
    sizes.assert_right(answer, prompt)
    local, peer, computed = answer.sources
    assert answer.outcome != "loaded"
    assert (peer, computed) == (0, len(prompt) - local)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_preemption(sizes: Three, prompt_of: PromptOf, load_mode: str) -> None:
    small = {"num_blocks": 60, "max_model_len": 640}
    consumer = sizes.other("kv_consumer", {"load_mode": load_mode}, **small)
    prompts = {name: prompt_of(190, name) for name in "abcd"}
    before = consumer.counts()
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 200, sizes.producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    for name, prompt in prompts.items():
        sizes.assert_right(answers[name], prompt)
    assert_no_leak(consumer, before)


def test_prompt_within_a_unit_is_not_waited_for(
    sizes: Three, pair: Pair, prompt_of: PromptOf
) -> None:
    prompt = prompt_of(UNIT)
    answer = pair.ask(prompt, max_tokens=24)
    sizes.assert_right(answer, prompt)
    # Loaded, if the producer was done when it was asked.
    assert answer.outcome in ("not_needed", "loaded")


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


@pytest.mark.parametrize(
    ("num_tokens", "cut", "runs_ahead"),
    [(SHORT, 1, False), (UNIT, 5, True), (LONG, 3, True), (LONG, 21, False)],
)
def test_request_moves_while_it_runs(
    sizes: Three, prompt_of: PromptOf, num_tokens: int, cut: int, runs_ahead: bool
) -> None:
    num_bytes_of_move(sizes, prompt_of(num_tokens), cut, runs_ahead=runs_ahead)


def test_answer_that_broke_off_goes_on_from_its_tokens(sizes: Three, prompt_of: PromptOf) -> None:
    expect_broken_answers_to_go_on(sizes, prompt_of(LONG))

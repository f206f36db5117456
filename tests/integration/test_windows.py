# SPDX-License-Identifier: Apache-2.0
"""Sliding windows beside full attention, in KV cache groups of their own, against one engine."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf, assert_no_leak
from tests.integration.pairs import (
    ORDERS,
    Pair,
    Three,
    abort_early_and_late,
    expect_recovery_and_preemptions,
    run_in_need_of_memory,
)
from tests.integration.pool_steps import POOL, settle
from tests.integration.test_moves import expect_broken_answers_to_go_on, num_bytes_of_move
from tests.integration.test_speculation import LLM as DRAFTS
from tests.integration.test_states import assert_likeliest

pytestmark = pytest.mark.engine

WINDOW, NUM_WINDOWS = 64, 3
"""Of the model, beside one layer that attends to everything."""
PAGE_BYTES = 2 * BLOCK_SIZE * 2 * 32 * 4
CHUNKED = 600
"""More tokens than an engine of these tests computes in two steps."""
SHORT, LONG = 40, 300
"""Prompts within a window, and of several."""
FAULTY = {"staging_slot_bytes": 64 * 1024, "staging_slots": 256}


def num_window_blocks(num_tokens: int) -> int:
    """Those that a request of so many computed tokens goes on with, in each group of windows."""
    return -(-num_tokens // BLOCK_SIZE) - max(0, num_tokens - WINDOW + 1) // BLOCK_SIZE


def num_bytes(num_tokens: int) -> int:
    """What of a prompt moves."""
    num_blocks = -(-num_tokens // BLOCK_SIZE) + NUM_WINDOWS * num_window_blocks(num_tokens)
    return num_blocks * PAGE_BYTES


@pytest.fixture
def windows(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[Three]:
    config = replace(base_config, model=models("windows"))
    yield from Three.of(fleet, config, FAULTY)


@pytest.fixture
def pair(windows: Three, prompt_of: PromptOf) -> Pair:
    return Pair(windows.producer, windows.consumer, prompt_of(5, "where"))


LENGTHS = [SHORT, WINDOW, WINDOW + 1, 4 * BLOCK_SIZE, 4 * BLOCK_SIZE + 1, LONG, CHUNKED]


@pytest.mark.parametrize("num_tokens", [*LENGTHS, 8 * BLOCK_SIZE - 1])
def test_only_what_is_needed_to_go_on_moves(
    windows: Three, prompt_of: PromptOf, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    answer = windows.consumer.ask(prompt, 24, windows.producer.prefill(prompt))
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)
    assert answer.provenance["num_peer_bytes"] == num_bytes(num_tokens)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_decode_first(windows: Three, pair: Pair, prompt_of: PromptOf, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    answer = pair.ask(prompt, max_tokens=24)
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens, 0)
    assert answer.provenance["num_peer_bytes"] == num_bytes(num_tokens)


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("num_tokens", [LONG, 4 * BLOCK_SIZE, 10 * BLOCK_SIZE - 1])
def test_where_the_consumer_samples_the_first_token(
    windows: Three, prompt_of: PromptOf, load_mode: str, num_tokens: int
) -> None:
    consumer = windows.other("kv_consumer", {"load_mode": load_mode, "first_token": "compute"})
    prompt = prompt_of(num_tokens)
    answer = consumer.ask(prompt, 24, windows.producer.prefill(prompt))
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, num_tokens - 1, 1)


def test_a_request_holds_as_many_blocks_as_in_one_engine(
    windows: Three, prompt_of: PromptOf
) -> None:
    """While it decodes, and what its prompt holds for a consumer that has not come."""
    prompt = prompt_of(LONG)
    held = []
    known = windows.producer.prefill(prompt)
    for engine, params in ((windows.single, None), (windows.consumer, known)):
        free = engine.counts()["free_blocks"]
        engine.add("r", prompt, 40, params)
        engine.step_until("r", "num_output_tokens", 30)
        held.append(free - engine.counts()["free_blocks"])
        engine.run()
    num_tokens = LONG + 30
    assert held[0] == held[1] == -(-num_tokens // BLOCK_SIZE) + 3 * num_window_blocks(num_tokens)
    prompt = prompt_of(LONG, "pinned")
    known = windows.producer.prefill(prompt)
    pinned = windows.producer.counts()["pinned_blocks"]
    assert pinned <= -(-LONG // BLOCK_SIZE) + 3 * num_window_blocks(LONG)
    windows.consumer.ask(prompt, 1, known)


def test_what_the_consumer_has_is_not_sent(windows: Three, pair: Pair, prompt_of: PromptOf) -> None:
    """A prefix is there in all groups, then a longer one, of which it has all but the window."""
    prefix = prompt_of(5 * BLOCK_SIZE, "prefix")
    windows.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(4 * BLOCK_SIZE + 6, "second")
    answer = pair.ask(prompt)
    windows.assert_right(answer, prompt)
    assert answer.sources == (5 * BLOCK_SIZE, 4 * BLOCK_SIZE + 6, 0)
    again = pair.ask(prompt)
    windows.assert_right(again, prompt)
    assert again.sources[0] == 9 * BLOCK_SIZE


def test_a_prompt_of_which_only_the_window_is_missing(windows: Three, prompt_of: PromptOf) -> None:
    """The consumer has gone on with it, and given the prompt's window up since."""
    prompt = prompt_of(LONG)
    windows.consumer.ask(prompt, 200, windows.producer.prefill(prompt))
    fill = prompt_of(1500, "fill")
    windows.consumer.ask(fill, 1)  # evicts what is least recently used
    answer = windows.consumer.ask(prompt, 24, windows.producer.prefill(prompt))
    windows.assert_right(answer, prompt)


@pytest.mark.parametrize(
    ("order", "script"),
    [
        *itertools.product(ORDERS, ["fail", "ok,corrupt", "ok*4,fail"]),
        ("prefill first", "ok*8,corrupt"),
    ],
)
def test_failed_load_goes_on_from_what_is_whole(
    windows: Three, pair: Pair, prompt_of: PromptOf, script: str, order: str
) -> None:
    """It has nine pieces, and five at least where the consumer comes first."""
    prefix = prompt_of(5 * BLOCK_SIZE, "prefix")
    windows.consumer.ask(prefix + prompt_of(4, "first"), 4)
    prompt = prefix + prompt_of(6 * BLOCK_SIZE + 6, "second")
    answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
    windows.assert_right(answer, prompt)
    local, peer, computed = answer.sources
    assert answer.outcome != "loaded"
    assert (peer, computed) == (0, len(prompt) - local)


def test_requests_that_share_what_fails(windows: Three, prompt_of: PromptOf) -> None:
    prompt = prompt_of(LONG)
    known = windows.producer.prefill(prompt)
    windows.producer.set_faults("ok*3,corrupt,ok*")
    for name in ("a", "b"):
        windows.consumer.add(name, prompt, 24, known)
    windows.consumer.add("other", prompt_of(70, "other"), 24)
    answers = windows.consumer.run()
    for name in ("a", "b"):
        windows.assert_right(answers[name], prompt)
    windows.assert_right(answers["other"], prompt_of(70, "other"))


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_preemption(windows: Three, prompt_of: PromptOf, load_mode: str) -> None:
    small = {"num_blocks": 75, "max_model_len": 640}
    consumer = windows.other("kv_consumer", {"load_mode": load_mode}, **small)
    prompts = {name: prompt_of(190, name) for name in "abcd"}
    before = consumer.counts()
    for name, prompt in prompts.items():
        consumer.add(name, prompt, 200, windows.producer.prefill(prompt))
    answers = run_in_need_of_memory(consumer, prompts)
    for name, prompt in prompts.items():
        windows.assert_right(answers[name], prompt)
    assert_no_leak(consumer, before)


def test_producer_that_goes_on_keeps_what_it_has_promised(
    windows: Three, prompt_of: PromptOf
) -> None:
    """It gives the prompt's window up itself while it decodes."""
    prompt = prompt_of(LONG)
    windows.producer.add("long", prompt, 200, {"do_remote_decode": True})
    known = windows.producer.run()["long"].kv_transfer_params
    answer = windows.consumer.ask(prompt, 24, {**known, "return_provenance": True})
    windows.assert_right(answer, prompt)
    assert answer.sources == (0, LONG, 0)


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


def test_engines_that_group_layers_otherwise_exchange_nothing(
    windows: Three, prompt_of: PromptOf
) -> None:
    llm = json.dumps({"disable_hybrid_kv_cache_manager": True})
    consumer = windows.other("kv_consumer", llm=llm)
    prompt = prompt_of(LONG)
    known = windows.producer.prefill(prompt)
    answer = consumer.ask(prompt, 24, known)
    windows.assert_right(answer, prompt)
    assert answer.outcome == "incompatible"
    consumer.wait_log("reach=window-64,window-64,window-64,all")
    windows.consumer.ask(prompt, 1, known)


def test_a_pool_on_one_side_is_no_hindrance(windows: Three, prompt_of: PromptOf) -> None:
    engine = windows.other("kv_both", pool=json.dumps(POOL))
    for number, (producer, consumer) in enumerate(
        [(engine, windows.consumer), (windows.producer, engine)]
    ):
        prompt = prompt_of(LONG, str(number))
        answer = consumer.ask(prompt, 24, producer.prefill(prompt))
        windows.assert_right(answer, prompt)
        assert answer.sources == (0, LONG, 0)
    settle(engine)


@pytest.mark.parametrize(
    ("num_tokens", "cut", "runs_ahead"),
    [(SHORT, 1, False), (WINDOW, 5, True), (LONG, 3, True), (LONG, 20, False), (LONG, 21, False)],
)
def test_request_moves_while_it_runs(
    windows: Three, prompt_of: PromptOf, num_tokens: int, cut: int, runs_ahead: bool
) -> None:
    """Of windows as much is copied as slides by meanwhile, and no more."""
    prompt = prompt_of(num_tokens)
    num_computed, copied = num_bytes_of_move(windows, prompt, cut, runs_ahead=runs_ahead)
    num_slid = (num_computed - num_tokens) // BLOCK_SIZE + 1
    least = num_bytes(num_computed)
    assert least <= copied <= least + NUM_WINDOWS * num_slid * PAGE_BYTES


@pytest.mark.parametrize("script", ["fail", "ok*3,corrupt,ok*2,fail", "ok*9,corrupt"])
def test_request_moves_after_all_where_loads_have_failed(
    windows: Three, prompt_of: PromptOf, script: str
) -> None:
    num_bytes_of_move(windows, prompt_of(LONG), 3, f"{script},ok*")


def test_answer_that_broke_off_goes_on_from_its_tokens(windows: Three, prompt_of: PromptOf) -> None:
    expect_broken_answers_to_go_on(windows, prompt_of(LONG))


def test_request_with_chunked_local_attention_moves(
    windows: Three, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    config = replace(windows.config, model=models("chunks"))
    chunks = replace(windows, config=config, single=windows.fleet.engine(config))
    num_bytes_of_move(chunks, prompt_of(LONG), 5)


def test_attention_sinks(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str], prompt_of: PromptOf
) -> None:
    """gpt-oss, which vLLM runs in bfloat16 only."""
    config = replace(base_config, model=models("sinks"), dtype="bfloat16")
    single, producer, consumer = fleet.engines(
        config,
        replace(config, role="kv_producer", faults="ok*"),
        replace(config, role="kv_consumer", num_blocks=41, max_model_len=640),
    )
    pair = Pair(producer, consumer, prompt_of(5, "where"))
    for num_tokens in (SHORT, 4 * BLOCK_SIZE, LONG, CHUNKED):
        prompt = prompt_of(num_tokens, str(num_tokens))
        if num_tokens in (SHORT, LONG):
            answer = pair.consumer.ask(prompt, 40, pair.producer.prefill(prompt))
        else:
            answer = pair.ask(prompt, max_tokens=40)
        assert_likeliest(single, prompt, answer.token_ids)
        assert answer.sources == (0, num_tokens, 0)
    expect_recovery_and_preemptions(
        producer,
        consumer,
        lambda answer, prompt: assert_likeliest(single, prompt, answer.token_ids),
        prompt_of,
    )


def test_request_with_drafts_moves(windows: Three, prompt_of: PromptOf) -> None:
    num_bytes_of_move(windows, (prompt_of(7) * 50)[:LONG], 1, llm=DRAFTS)

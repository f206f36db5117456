# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V3.2's sparse attention, whose indexer keeps pages of another size beside the KV. On a
CPU it is ours (``sparse_attention``): first one engine of it, then P/D, a pool and moves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf
from tests.integration.pairs import (
    CHUNKED,
    ORDERS,
    Pair,
    Three,
    abort_early_and_late,
    expect_recovery_and_preemptions,
)
from tests.integration.pool_steps import POOL, provenance, settle, store
from tests.integration.test_moves import expect_broken_answers_to_go_on, num_bytes_of_move

pytestmark = pytest.mark.engine

NUM_TOKENS = 3 * BLOCK_SIZE + 4
NUM_LAYERS, HEAD_BYTES = 3, 132
BLOCK_BYTES = NUM_LAYERS * BLOCK_SIZE * (4 * HEAD_BYTES + HEAD_BYTES)
"""What all layers and their indexers have of a block."""
FAULTY = {"staging_slot_bytes": 64 * 1024, "staging_slots": 64}


@pytest.fixture
def config(base_config: EngineConfig, models: Callable[[str], str]) -> EngineConfig:
    return replace(base_config, model=models("sparse"))


def test_a_prompt_is_computed_alike_in_pieces_and_beside_others(
    fleet: Fleet, config: EngineConfig, prompt_of: PromptOf
) -> None:
    whole, pieces = fleet.engines(config, replace(config, max_num_batched_tokens=BLOCK_SIZE))
    prompt = prompt_of(NUM_TOKENS)
    expected = whole.ask(prompt, 24)
    assert pieces.ask(prompt, 24).token_ids == expected.token_ids
    for engine in (whole, pieces):
        engine.add("asked", prompt, 24, cache_salt="nothing of it is cached")
        others = {f"other {i}": prompt_of(20 + 30 * i, f"other {i}") for i in range(4)}
        for name, other in others.items():
            engine.add(name, other, 24)
        answers = engine.run()
        assert answers["asked"].token_ids == expected.token_ids
        for name, other in others.items():
            assert answers[name].token_ids == whole.ask(other, 24, cache_salt=name).token_ids


def test_a_prefix_comes_from_the_prefix_cache(
    fleet: Fleet, config: EngineConfig, prompt_of: PromptOf
) -> None:
    whole, pieces = fleet.engines(config, replace(config, max_num_batched_tokens=BLOCK_SIZE))
    prompt = prompt_of(NUM_TOKENS)
    pieces.ask(prompt[: 3 * BLOCK_SIZE], 1)
    pieces.add("asked", prompt, 24)
    # The first step has the first token: all but the last four tokens are cached.
    assert len(pieces.step()["asked"][0]) == 1
    assert pieces.run()["asked"].token_ids == whole.ask(prompt, 24).token_ids


def test_what_the_indexer_leaves_out_matters(
    fleet: Fleet, config: EngineConfig, prompt_of: PromptOf, tmp_path: Path
) -> None:
    dense = shutil.copytree(config.model, tmp_path / "dense")
    options = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**options, "index_topk": 2048}))
    sparse, other = fleet.engines(config, replace(config, model=str(dense)))
    prompt = prompt_of(NUM_TOKENS)
    assert sparse.ask(prompt, 24).token_ids != other.ask(prompt, 24).token_ids


@pytest.fixture
def three(fleet: Fleet, config: EngineConfig) -> Iterator[Three]:
    yield from Three.of(fleet, config, FAULTY)


@pytest.fixture
def pair(three: Three, prompt_of: PromptOf) -> Pair:
    return Pair(three.producer, three.consumer, prompt_of(5, "where"))


@pytest.mark.parametrize("num_tokens", [3 * BLOCK_SIZE, NUM_TOKENS, CHUNKED])
def test_both_orders(three: Three, pair: Pair, prompt_of: PromptOf, num_tokens: int) -> None:
    for order in ORDERS:
        prompt = prompt_of(num_tokens, order)
        answer = pair.ask_in(order, prompt, 24)
        three.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens, 0), order
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        assert answer.provenance["num_peer_bytes"] == num_blocks * BLOCK_BYTES, order


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_where_the_consumer_samples_the_first_token(
    three: Three, prompt_of: PromptOf, load_mode: str, runs_ahead: bool
) -> None:
    """In a step its indexers read what comes before any hook of their layers."""
    transfer = {"load_mode": load_mode, "first_token": "compute"}
    consumer = three.other("kv_consumer", transfer, runs_ahead=runs_ahead)
    for num_tokens in (3 * BLOCK_SIZE, NUM_TOKENS, CHUNKED):
        prompt = prompt_of(num_tokens, str(num_tokens))
        answer = consumer.ask(prompt, 24, three.producer.prefill(prompt))
        three.assert_right(answer, prompt)
        assert answer.sources == (0, num_tokens - 1, 1)


@pytest.mark.parametrize("script", ["fail", "ok,corrupt", "ok*5,fail", "ok*7,corrupt"])
def test_failed_load_goes_on_from_what_is_whole(
    three: Three, pair: Pair, prompt_of: PromptOf, script: str
) -> None:
    """It has eight pieces at least: more where layers come one by one."""
    for order in ORDERS:
        prompt = prompt_of(6 * BLOCK_SIZE + 6, order)
        answer = pair.ask_in(order, prompt, 24, script=f"{script},ok*")
        three.assert_right(answer, prompt)
        assert (answer.outcome != "loaded", answer.sources) == (True, (0, 0, len(prompt))), order
        three.producer.set_faults("ok*")


def test_recovery_and_preemptions(three: Three, prompt_of: PromptOf) -> None:
    consumer = three.other("kv_consumer", num_blocks=24, max_model_len=640)
    expect_recovery_and_preemptions(three.producer, consumer, three.assert_right, prompt_of)


def test_abort(pair: Pair, prompt_of: PromptOf) -> None:
    abort_early_and_late(pair, prompt_of)


@pytest.mark.parametrize("load_mode", ["step", "park"])
def test_pool(three: Three, prompt_of: PromptOf, load_mode: str) -> None:
    pool = json.dumps(POOL)
    engine = three.other("kv_both", {"load_mode": load_mode}, pool=pool)
    prompt = prompt_of(NUM_TOKENS)
    three.assert_right(store(engine, prompt, 24), prompt)
    answer = engine.ask(prompt, 24, {"return_provenance": True})
    three.assert_right(answer, prompt)
    assert provenance(answer) == {"dram": 3 * BLOCK_SIZE, "computed": 4}
    settle(engine)


@pytest.mark.parametrize(("cut", "runs_ahead"), [(3, False), (20, True)])
def test_request_moves_while_it_runs(
    three: Three, prompt_of: PromptOf, cut: int, runs_ahead: bool
) -> None:
    prompt = prompt_of(NUM_TOKENS)
    num_computed, copied = num_bytes_of_move(three, prompt, cut, runs_ahead=runs_ahead)
    assert copied == -(-num_computed // BLOCK_SIZE) * BLOCK_BYTES


def test_answer_that_broke_off_goes_on_from_its_tokens(three: Three, prompt_of: PromptOf) -> None:
    expect_broken_answers_to_go_on(three, prompt_of(NUM_TOKENS))


def test_workers_share_what_they_all_hold(three: Three, prompt_of: PromptOf) -> None:
    """A producer of one worker, and a consumer of two."""
    llm = json.dumps({"tensor_parallel_size": 2})
    consumer = three.other("kv_consumer", executor="mp", llm=llm)
    prompt = prompt_of(NUM_TOKENS)
    answer = consumer.ask(prompt, 24, three.producer.prefill(prompt))
    three.assert_right(answer, prompt)
    assert answer.sources == (0, NUM_TOKENS, 0)

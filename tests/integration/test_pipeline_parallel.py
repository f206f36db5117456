# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers whose layers are divided among pipeline stages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import vllm

from tests.integration.engines import BLOCK_SIZE, Engine, PromptOf
from tests.integration.pairs import (
    CHUNKED,
    EVERY_LAYER,
    Pair,
    expect_abort_of_a_load,
    expect_recovery,
    expect_tokens_of_one_worker,
)
from tests.integration.pool_steps import POOL, provenance, store
from tests.integration.test_moves import NUM_OUTPUT, move, outcome_of, two
from tests.integration.test_preemption import NAMES, NUM_TOKENS, SMALL, decode_all
from tests.integration.test_seeds import SEEDED

if TYPE_CHECKING:
    from tests.integration.conftest import Engines, SingleEngine

pytestmark = pytest.mark.engine

ONE = "{}"
TWO = json.dumps({"pipeline_parallel_size": 2})
THREE = json.dumps({"pipeline_parallel_size": 3})
"""Of one, two and one layers."""
TWO_OF_TWO = json.dumps({"pipeline_parallel_size": 2, "tensor_parallel_size": 2})

runs_ahead = pytest.mark.skipif(
    not vllm.__version__.startswith("0.30."), reason="this vLLM refuses it with Model Runner V1"
)


def pair_of(
    engines: Engines,
    llms: tuple[str, str],
    prompt: list[int],
    faults: str = "",
    runs_ahead: bool = False,
    **transfer: Any,
) -> Pair:
    options: dict[str, Any] = {"faults": faults, "runs_ahead": runs_ahead}
    producer = engines.shared("kv_producer", llm=llms[0], **options)
    options = {"runs_ahead": runs_ahead, "transfer": transfer or EVERY_LAYER}
    return Pair(producer, engines.shared("kv_consumer", llm=llms[1], **options), prompt)


@pytest.mark.parametrize(
    "llms",
    [(TWO, ONE), (ONE, TWO), (TWO, TWO), (TWO, THREE), (TWO_OF_TWO, ONE)],
    ids=["2-1", "1-2", "2-2", "2-3", "2x2-1"],
)
def test_tokens_are_those_of_one_worker(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, llms: tuple[str, str]
) -> None:
    pair = pair_of(engines, llms, prompt_of(5, "where"))
    expect_tokens_of_one_worker(pair, single, prompt_of)


@pytest.mark.parametrize("mode", ["step", "park"])
def test_many_at_once(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, mode: str
) -> None:
    """Several steps are under way at a time on both sides."""
    pair = pair_of(engines, (TWO, TWO), prompt_of(5, "where"), load_mode=mode)
    prompts = {f"r{n}": prompt_of(n, f"{n}") for n in (5, 64, 97, 300, 400)}
    for first in ("prefill", "decode"):
        for name, prompt in prompts.items():
            prompt[0] += 1
            if first == "prefill":
                params = pair.producer.prefill(prompt)
                pair.consumer.add(name, prompt, 16, params)
            else:
                transfer_id = pair.new_id()
                pair.add_decode(name, prompt, transfer_id)
                pair.add_prefill(name, prompt, transfer_id)
        answers = pair.run()
        for name, prompt in prompts.items():
            assert answers[name].token_ids == single(prompt, 16).token_ids, (first, name)


@runs_ahead
@pytest.mark.parametrize("first_token", ["auto", "compute"])
@pytest.mark.parametrize("mode", ["step", "park"])
def test_stages_of_engines_that_run_ahead(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, mode: str, first_token: str
) -> None:
    """Also after loads that fail, of which such an engine hears a step later, when it counts on a
    token that is dropped: the request's first one where P's is not taken."""
    pair = pair_of(
        engines,
        (TWO, TWO),
        prompt_of(5, "where"),
        faults="ok*",
        runs_ahead=True,
        load_mode=mode,
        first_token=first_token,
    )
    prompts = {f"r{n}": prompt_of(n, f"{n}") for n in (64, 97, 300)}
    for script in ("ok*", "fail", "ok,corrupt"):
        for names in (["r97"], list(prompts)):
            for name in names:
                prompts[name][0] += 1
                params = pair.producer.prefill(prompts[name])
                pair.producer.set_faults(script if name == "r97" else "ok*")
                pair.consumer.add(name, prompts[name], 16, params)
            answers = pair.run()
            for name in names:
                expected = single(prompts[name], 16).token_ids
                assert answers[name].token_ids == expected, (script, name)
    pair.producer.set_faults("ok*")


@runs_ahead
def test_a_failed_load_draws_no_random_numbers(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """With three stages, two steps more have drawn by then."""
    pair = pair_of(
        engines,
        (ONE, THREE),
        prompt_of(5, "where"),
        faults="ok*",
        runs_ahead=True,
        load_mode="step",
    )
    for script in ("fail", "ok,corrupt"):
        prompt = prompt_of(300, script)
        params = pair.producer.prefill(prompt)
        pair.producer.set_faults(f"{script},ok*")
        before = pair.consumer.metrics().get("recovered_requests", 0)
        answer = pair.consumer.ask(prompt, 12, params, **SEEDED)
        pair.producer.set_faults("ok*")
        assert pair.consumer.metrics()["recovered_requests"] == before + 1, "a sample was dropped"
        assert answer.token_ids == single(prompt, 12, **SEEDED).token_ids, script


def test_a_stage_serves_its_layers_before_the_prompt_is_computed(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    pair = pair_of(engines, (TWO, ONE), prompt_of(5, "where"))
    prompt = prompt_of(CHUNKED)
    transfer_id = pair.new_id()
    pair.add_prefill("both", prompt, transfer_id)
    pair.add_decode("both", prompt, transfer_id)
    pair.consumer.step_until("both", "loads", 1)
    pair.producer.step()
    # The producer computes 256 tokens in a step, of which it has not heard the end yet.
    pair.consumer.wait_count("worker_loaded_bytes", 256 // BLOCK_SIZE * 64 * 1024)
    assert pair.run()["both"].token_ids == single(prompt, 16).token_ids


@pytest.mark.parametrize("llms", [(TWO, ONE), (ONE, TWO)], ids=["2-1", "1-2"])
@pytest.mark.parametrize("mode", ["step", "park"])
def test_a_load_that_fails_in_one_stage_is_recovered_from(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, llms: tuple[str, str], mode: str
) -> None:
    pair = pair_of(engines, llms, prompt_of(5, "where"), faults="ok*", load_mode=mode)
    for stage in (0, 1) if llms[0] == TWO else (0,):
        for script in ("corrupt", "fail", "ok,corrupt"):
            prompt = prompt_of(300, f"{script} in {stage}")
            expect_recovery(pair, single, prompt, script, stage)


@pytest.mark.parametrize("mode", ["step", "park"])
def test_requests_preempted_on_the_consumer_get_their_tokens(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, mode: str
) -> None:
    producer = engines.shared("kv_producer", llm=TWO)
    consumer = engines.shared("kv_consumer", llm=TWO, transfer={"load_mode": mode}, **SMALL)
    num_output = 3 * BLOCK_SIZE
    prompts = {name: prompt_of(NUM_TOKENS, name) for name in NAMES}
    answers = decode_all(producer, consumer, prompts, num_output)
    expected = single.beside((prompt, num_output, {}) for prompt in prompts.values())
    assert [answers[name] for name in prompts] == [answer.token_ids for answer in expected]


def test_a_load_is_aborted_in_every_stage(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    pair = pair_of(engines, (TWO, TWO), prompt_of(5, "where"))
    expect_abort_of_a_load(pair, single, prompt_of)


@pytest.fixture(params=[TWO, TWO_OF_TWO], ids=["2", "2x2"])
def pooled(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    return engines.shared("kv_both", llm=request.param, pool=POOL, pool_faults="get:ok*")


def test_every_stage_stores_and_loads_its_layers(
    pooled: Engine, single: SingleEngine, prompt_of: PromptOf
) -> None:
    num_full = 6 * BLOCK_SIZE
    for part in range(5):  # more busy workers than cores: a lookup may come late
        prompt = prompt_of(num_full + 9, f"{part}")
        store(pooled, prompt)
        answer = pooled.ask(prompt, 8, {"return_provenance": True})
        assert answer.token_ids == single(prompt).token_ids
        if provenance(answer) == {"dram": num_full, "computed": 9}:
            return
    raise AssertionError(provenance(answer))


def test_a_block_that_one_stage_has_lost_is_computed(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    engine = engines.shared("kv_both", llm=TWO, pool=POOL, pool_faults="get:ok*")
    for stage in (0, 1):
        prompt = prompt_of(6 * BLOCK_SIZE + 9, f"{stage}")
        store(engine, prompt)
        engine.set_pool_faults("get:fail", stage)
        assert engine.ask(prompt, 8).token_ids == single(prompt).token_ids
        engine.set_pool_faults("")


def test_request_moves_while_it_runs(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    source, target = two(engines, llm=TWO)
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    source.add("r", prompt, NUM_OUTPUT)
    source.step_until("r", "num_output_tokens", 27)
    left, right = move(source, target, prompt)
    assert outcome_of(right) == {"outcome": "exact"}
    single.assert_says(right, prompt, NUM_OUTPUT)
    assert left.kv_transfer_params == {"moved": True}

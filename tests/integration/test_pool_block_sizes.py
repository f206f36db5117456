# SPDX-License-Identifier: Apache-2.0
"""A pool beside KV cache groups whose blocks have different numbers of tokens (Gemma 4), against
one engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet, PromptOf
from tests.integration.pool_steps import POOL, provenance, settle, store
from tests.integration.pooled import Pooled
from tests.integration.test_block_sizes import CHUNKED, LONG, NUM_WINDOWS, PAGE_BYTES, UNIT, WINDOW
from vllm_ascend_pd.pool.values import HEADER_BYTES

pytestmark = pytest.mark.engine

VALUE_BYTES = HEADER_BYTES + PAGE_BYTES
NUM_TOKENS = 5 * UNIT + BLOCK_SIZE + 9
FULL = 5 * UNIT


def num_hit_tokens(num_tokens: int) -> int:
    """vLLM computes the last token in any case."""
    return min(num_tokens // UNIT * UNIT, num_tokens - 1)


def num_loaded_bytes(num_tokens: int) -> int:
    """Of a prompt of which nothing is here."""
    num_units = num_tokens // UNIT
    first = max(0, num_hit_tokens(num_tokens) - WINDOW + 1) // UNIT
    return (2 * num_units + NUM_WINDOWS * (num_units - first)) * VALUE_BYTES


@pytest.fixture
def pooled(
    fleet: Fleet, base_config: EngineConfig, models: Callable[[str], str]
) -> Iterator[Pooled]:
    yield from Pooled.for_fixture(fleet, replace(base_config, model=models("sizes")))


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize(
    "num_tokens", [UNIT, UNIT + 1, 3 * BLOCK_SIZE + 1, 5 * UNIT, NUM_TOKENS, LONG, CHUNKED]
)
def test_whole_units_are_hits(
    pooled: Pooled, prompt_of: PromptOf, num_tokens: int, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    prompt = prompt_of(num_tokens)
    store(engine, prompt)
    answer = pooled.ask(engine, prompt)
    num_hit = num_hit_tokens(num_tokens)
    assert provenance(answer) == {"dram": num_hit, "computed": num_tokens - num_hit}
    assert answer.provenance["num_pool_bytes"] == num_loaded_bytes(num_tokens)
    settle(engine)


def test_prompt_within_a_unit_is_computed(pooled: Pooled, prompt_of: PromptOf) -> None:
    prompt = prompt_of(UNIT - 1)
    store(pooled.engine, prompt)
    assert provenance(pooled.ask(pooled.engine, prompt)) == {"computed": UNIT - 1}


def test_only_what_is_missing_comes_from_the_pool(pooled: Pooled, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    store(pooled.engine, prompt)
    pooled.engine.ask(prompt[: 3 * UNIT + BLOCK_SIZE + 1])
    answer = pooled.ask(pooled.engine, prompt)
    assert provenance(answer) == {
        "local": 3 * UNIT,
        "dram": FULL - 3 * UNIT,
        "computed": NUM_TOKENS - FULL,
    }


def test_decoded_blocks_are_hits_of_the_next_turn(pooled: Pooled, prompt_of: PromptOf) -> None:
    prompt = prompt_of(NUM_TOKENS)
    first = store(pooled.engine, prompt, 3 * UNIT)
    turn = prompt + first.token_ids[: 2 * UNIT] + prompt_of(5, "turn")
    answer = pooled.ask(pooled.engine, turn)
    num_hit = (NUM_TOKENS + 2 * UNIT) // UNIT * UNIT
    assert provenance(answer) == {"dram": num_hit, "computed": len(turn) - num_hit}


@pytest.mark.parametrize("load_mode", ["step", "park"])
@pytest.mark.parametrize("script", ["fail*", "ok,corrupt", "ok*4,missing", "ok*10,corrupt"])
def test_failed_load_goes_on_from_what_is_whole(
    pooled: Pooled, prompt_of: PromptOf, script: str, load_mode: str
) -> None:
    engine = pooled.other(transfer={"load_mode": load_mode})
    other = prompt_of(70, "other")
    origin = pooled.fail_loads(engine, prompt_of(NUM_TOKENS), UNIT, script, other)
    assert origin.get("computed", 0) > NUM_TOKENS - FULL


@pytest.mark.parametrize("save", ["write_through", "eviction"])
def test_preemption(pooled: Pooled, prompt_of: PromptOf, save: str) -> None:
    small = {"num_blocks": 61, "max_model_len": 512, "max_num_batched_tokens": 128}
    engine = pooled.other({"save": save}, **small)
    num_loads = pooled.preempt(engine, [prompt_of(190, name) for name in "abcd"], 200)
    if save == "write_through":
        assert num_loads > 0


def test_blocks_in_files_outlive_their_engine(
    pooled: Pooled, prompt_of: PromptOf, tmp_path: Path
) -> None:
    ssd = {"path": str(tmp_path / "kv"), "size": "256MiB"}
    pool = json.dumps({**POOL, "tiers": ["dram", "fs"], "ssd": ssd})
    config = replace(pooled.engine.config, pool=pool)
    prompt = prompt_of(NUM_TOKENS)
    for place in ("dram", "ssd"):
        engine = pooled.fleet.start(config)
        if place == "dram":
            store(engine, prompt)
        answer = pooled.ask(engine, prompt)
        assert provenance(answer) == {place: FULL, "computed": NUM_TOKENS - FULL}
        settle(engine)
        pooled.fleet.kill(engine)

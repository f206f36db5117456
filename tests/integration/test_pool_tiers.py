# SPDX-License-Identifier: Apache-2.0
"""A pool of this process's memory and of plain files, in real engines on hosts without Mooncake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.conftest import SingleEngine
from tests.integration.engines import BLOCK_SIZE, EngineConfig, EngineError, Fleet, PromptOf
from tests.integration.pool_steps import POOL, delta, provenance, settle, store

if TYPE_CHECKING:
    from tests.integration.conftest import Engines

pytestmark = pytest.mark.engine

FULL = 6 * BLOCK_SIZE
NUM_TOKENS = FULL + 9
ASK = {"return_provenance": True}


WITHOUT_MOONCAKE: dict[str, Any] = {
    "without": "mooncake",
    "transfer": {"transport": "shared_memory"},
}


def test_blocks_in_files_outlive_their_engine(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf, tmp_path: Path
) -> None:
    ssd = {"path": str(tmp_path / "kv"), "size": "256MiB"}
    options = {**WITHOUT_MOONCAKE, "pool": {**POOL, "tiers": ["dram", "fs"], "ssd": ssd}}
    first = engines.own("kv_both", **options)
    prompt = prompt_of(NUM_TOKENS)
    expected = single(prompt).token_ids
    store(first, prompt)
    answer = first.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"dram": FULL, "computed": 9}
    settle(first)
    engines.kill(first)

    second = engines.own("kv_both", **options)
    answer = second.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"ssd": FULL, "computed": 9}
    settle(second)
    assert second.reset_prefix_cache()
    # What came from a file is in memory now.
    answer = second.ask(prompt, 8, ASK)
    assert answer.token_ids == expected
    assert provenance(answer) == {"dram": FULL, "computed": 9}


def test_files_that_cannot_be_written_are_counted_where_memory_has_their_blocks(
    engines: Engines, prompt_of: PromptOf, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    ssd = {"path": str(folder), "size": "256MiB"}
    pool = {**POOL, "tiers": ["dram", "fs"], "ssd": ssd}
    engine = engines.own("kv_both", **WITHOUT_MOONCAKE, pool=pool)
    store(engine, prompt_of(NUM_TOKENS, "well"))
    assert "pool_file_errors" not in engine.metrics()
    [values] = [path for path in folder.iterdir() if path.is_dir()]
    values.rename(tmp_path / "gone")
    values.touch()
    before = engine.metrics()
    store(engine, prompt_of(NUM_TOKENS, "badly"))
    assert delta(before, engine.metrics(), "pool_put_blocks/ok") == NUM_TOKENS // BLOCK_SIZE
    assert engine.metrics()["pool_file_errors"] > 0


def test_an_engine_that_needs_mooncake_says_so(engines: Engines) -> None:
    with pytest.raises(EngineError, match=r"ImportError: .*Mooncake"):
        engines.own("kv_both", without="mooncake", pool=POOL)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_mla_pages_come_from_memory(
    engines: Engines,
    fleet: Fleet,
    base_config: EngineConfig,
    models: Callable[[str], str],
    prompt_of: PromptOf,
    num_workers: int,
) -> None:
    """Of two workers each has all of a block, for MLA has one head of KV."""
    model = models("mla")
    single = SingleEngine(fleet.engine(replace(base_config, model=model)))
    llm = json.dumps({"tensor_parallel_size": num_workers})
    pool = {**POOL, "tiers": ["dram"]}
    engine = engines.own("kv_both", **WITHOUT_MOONCAKE, model=model, llm=llm, pool=pool)
    first, second = prompt_of(NUM_TOKENS, "a"), prompt_of(NUM_TOKENS, "b")
    for prompt in (first, second):
        assert store(engine, prompt, 8).token_ids == single(prompt).token_ids
    for prompt in (first, second):
        answer = engine.ask(prompt, 8, ASK)
        assert answer.token_ids == single(prompt).token_ids
        assert provenance(answer) == {"dram": FULL, "computed": 9}
    assert single(first).token_ids != single(second).token_ids
    settle(engine)


def test_tenant_that_has_its_share_pushes_out_its_own_blocks(
    engines: Engines, single: SingleEngine, prompt_of: PromptOf
) -> None:
    """Three times the pool's room of one tenant's prompts, under salts of its own users."""
    pool = {**POOL, "tiers": ["dram"], "dram_size": "16MiB", "tenant_share": 0.25}
    engine = engines.own("kv_both", **WITHOUT_MOONCAKE, pool=pool)
    others = {salt: prompt_of(NUM_TOKENS, str(salt)) for salt in ("small|", None)}
    for salt, prompt in others.items():
        store(engine, prompt, 8, cache_salt=salt)
    before, prompts = engine.metrics(), []
    while delta(before, engine.metrics(), "pool_put_bytes") < 3 << 24:
        prompts.append(prompt_of(16 * BLOCK_SIZE + 9, str(len(prompts))))
        store(engine, prompts[-1], cache_salt=f"large|{len(prompts) % 3}")
    assert delta(before, engine.metrics(), "pool_over_share_blocks") > 0
    for salt, prompt in others.items():
        answer = engine.ask(prompt, 8, ASK, cache_salt=salt)
        assert answer.token_ids == single(prompt).token_ids
        assert provenance(answer) == {"dram": FULL, "computed": 9}
    last = engine.ask(prompts[-1], 8, ASK, cache_salt=f"large|{len(prompts) % 3}")
    assert provenance(last) == {"dram": 16 * BLOCK_SIZE, "computed": 9}
    first = engine.ask(prompts[0], 8, ASK, cache_salt="large|1")
    assert provenance(first) == {"computed": len(prompts[0])}
    settle(engine)

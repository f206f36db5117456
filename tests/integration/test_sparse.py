# SPDX-License-Identifier: Apache-2.0
"""Sparse attention on a CPU, which is ours (``sparse_attention``): one engine, no transfers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.engines import BLOCK_SIZE, EngineConfig, Fleet

pytestmark = pytest.mark.engine

NUM_TOKENS = 3 * BLOCK_SIZE + 4


@pytest.fixture
def config(base_config: EngineConfig, models: Callable[[str], str]) -> EngineConfig:
    return replace(base_config, executor="uni", model=models("sparse"))


def test_a_prompt_is_computed_alike_in_pieces_and_beside_others(
    fleet: Fleet, config: EngineConfig, prompt_of: Callable[..., list[int]]
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
    fleet: Fleet, config: EngineConfig, prompt_of: Callable[..., list[int]]
) -> None:
    whole, pieces = fleet.engines(config, replace(config, max_num_batched_tokens=BLOCK_SIZE))
    prompt = prompt_of(NUM_TOKENS)
    pieces.ask(prompt[: 3 * BLOCK_SIZE], 1)
    pieces.add("asked", prompt, 24)
    # The first step has the first token: all but the last four tokens are cached.
    assert len(pieces.step()["asked"][0]) == 1
    assert pieces.run()["asked"].token_ids == whole.ask(prompt, 24).token_ids


def test_what_the_indexer_leaves_out_matters(
    fleet: Fleet, config: EngineConfig, prompt_of: Callable[..., list[int]], tmp_path: Path
) -> None:
    dense = shutil.copytree(config.model, tmp_path / "dense")
    options = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({**options, "index_topk": 2048}))
    sparse, other = fleet.engines(config, replace(config, model=str(dense)))
    prompt = prompt_of(NUM_TOKENS)
    assert sparse.ask(prompt, 24).token_ids != other.ask(prompt, 24).token_ids

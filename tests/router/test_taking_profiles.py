# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd profile`` in front of scripted engines."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from tests.router.harness import FAST, deployed, run
from vllm_ascend_pd import registration
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.planner.measure import (
    MOST_STEPS,
    NUM_STEPS,
    Access,
    EngineLimits,
    Grid,
    take_profile,
)
from vllm_ascend_pd.router.config import Timeouts

CACHE = 'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0\n'
GRID = Grid(
    num_tokens=(8, 32),
    batches=(1, 2, 8),
    contexts=(8, 16),
    most_tokens=64,
    rounds=1,
    token_ids=(300, 400),
)
NEVER_SKIPS = replace(FAST, skip="never", timeouts=Timeouts())
"""A connection rests for longer than its client keeps it, as those of a router do."""


async def taken(url: str, grid: Grid = GRID) -> Any:
    said: list[str] = []
    return await take_profile(Access(url), grid, EngineLimits(2048, 8), said.append), said


@pytest.mark.parametrize("both_busy", [False, True])
def test_every_point_that_fits_is_measured(both_busy: bool) -> None:
    async def test() -> None:
        engine = {"metrics": CACHE, "token_s": 0.002}
        async with deployed(1, 1, NEVER_SKIPS, **engine) as d:
            profile, said = await taken(d.url, replace(GRID, both_busy=both_busy))
            assert {(p.num_tokens, p.batch) for p in profile.prefill} == set(
                product((8, 32), (1, 2))
            )
            middle = NUM_STEPS // 2
            assert {(p.context_tokens - middle, p.batch) for p in profile.decode} == {
                *product((8, 16), (1, 2)),
                (8, 8),  # 8 requests of 16 tokens are more than 64
            }
            assert [p.num_tokens for p in profile.handover] == [8, 32]
            assert (profile.prefill_kv_tokens, profile.decode_kv_tokens) == (1600, 1600)
            assert (profile.max_num_batched_tokens, profile.max_num_seqs) == (2048, 8)
            assert min(p.seconds for p in profile.decode) > 0.001
            assert len(said) == 1 + 4 + 2 + 1 + 5 + (1 + 2 if both_busy else 0)
            assert profile.prefill_beside == ()  # for so many streams there is no room
            assert profile.block_size == 16
            assert 0 < profile.decode_alone <= 1
            prompts = [tuple(r.json["prompt"]) for r in d.prefills[0].received]
            assert len(set(prompts)) == len(prompts)  # no cache can have any of them
            assert all(300 <= token < 400 for prompt in prompts for token in prompt)

    run(test)


def test_engines_that_do_both_are_measured_as_what_they_are_used_for() -> None:
    async def test() -> None:
        async with deployed(0, 2, NEVER_SKIPS, metrics=CACHE, token_s=0.002) as d:
            for spec in [one.spec for one in d.router.registry]:
                d.router.registry.put(msgspec.structs.replace(spec, role="both"))
            first, second = (engine.url for engine in d.decodes)
            grid = replace(GRID, num_tokens=(8,), batches=(1,), contexts=(8,))
            _, said = await taken(d.url, grid)
            assert f"P {first}, D {second}" in said[0]
            name = f"127.0.0.1:{d.decodes[0].port}"
            order = {"role": "decode"}
            async with d.http.put(f"{d.url}{registration.PATH}/{name}/role", json=order) as answer:
                assert answer.status == 204
            _, said = await taken(d.url, grid)
            assert f"P {second}, D {first}" in said[0]

    run(test)


def test_prompts_are_as_long_as_the_engines_take() -> None:
    """By default the longest prompt is as long as --max-model-len of many an engine."""

    async def test() -> None:
        engine = {"metrics": CACHE, "token_s": 0.0002, "max_model_len": 600}
        grid = replace(GRID, num_tokens=(8, 600), contexts=(8, 600), batches=(1,))
        async with deployed(1, 1, NEVER_SKIPS, **engine) as d:
            profile, said = await taken(d.url, grid)
            assert [p.num_tokens for p in profile.prefill] == [8, 598]
            assert max(p.context_tokens for p in profile.decode) < 600 - MOST_STEPS + NUM_STEPS
            assert any("598 tokens at most" in line for line in said)
            received = [r for e in (*d.prefills, *d.decodes) for r in e.received]
            assert max(len(r.json["prompt"]) + r.json["max_tokens"] for r in received) <= 600

    run(test)


@pytest.mark.parametrize(
    ("num_decodes", "engine", "message"),
    [
        (0, {"metrics": CACHE}, "has no decode engine that is ready"),
        (1, {"metrics": "other 1.0\n", "token_s": 0.002}, "has no vllm:cache_config_info"),
        (1, {"metrics": CACHE + CACHE.replace('"0"', '"1"')}, "is 2 data parallel ranks"),
        (1, {"metrics": CACHE, "max_tokens": 16}, ": 400: "),
        (1, {"metrics": CACHE, "max_model_len": 500}, "--max-model-len is 500; .* need 512"),
    ],
)
def test_what_cannot_be_measured_is_an_error_that_says_where(
    num_decodes: int, engine: dict[str, Any], message: str
) -> None:
    async def test() -> None:
        async with deployed(1, num_decodes, NEVER_SKIPS, **engine) as d:
            with pytest.raises(ConfigError, match=message):
                await taken(d.url, replace(GRID, num_tokens=(8, 32)))
            with pytest.raises(ConfigError, match="is no vllm-pd router"):
                await taken(d.prefills[0].url)

    run(test)

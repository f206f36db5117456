# SPDX-License-Identifier: Apache-2.0
"""KV cache groups as vLLM keeps them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from vllm_ascend_pd.engine.vllm_api.groups import kv_groups
from vllm_ascend_pd.kv.span import KVGroup

BLOCK_SIZE = 16
_STATE = MambaSpec(
    block_size=BLOCK_SIZE,
    shapes=((3, 8), (4, 8, 8)),
    dtypes=(torch.bfloat16, torch.float32),
    mamba_cache_mode="align",
)
_SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def group_of(spec: Any) -> KVGroup:
    config: Any = SimpleNamespace(
        kv_cache_tensors=[], kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[])]
    )
    (group,) = kv_groups(config)
    return group


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (FullAttentionManager, FullAttentionSpec(**_SHAPE)),
        # As vLLM has it where it keeps one group.
        (FullAttentionManager, FullAttentionSpec(**_SHAPE, sliding_window=40)),
        (SlidingWindowManager, SlidingWindowSpec(**_SHAPE, sliding_window=1)),
        (SlidingWindowManager, SlidingWindowSpec(**_SHAPE, sliding_window=40)),
        (SlidingWindowManager, SlidingWindowSpec(**_SHAPE, sliding_window=64)),
        (
            ChunkedLocalAttentionManager,
            ChunkedLocalAttentionSpec(**_SHAPE, attention_chunk_size=48),
        ),
        (MambaManager, _STATE),
    ],
)
def test_blocks_are_needed_until_vllm_gives_them_up(kind: Any, spec: Any) -> None:
    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=BLOCK_SIZE)
    manager = kind(
        spec,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK_SIZE,
    )
    group = group_of(spec)
    assert group.keeps_all == (kind is FullAttentionManager)
    for end in range(1, 200):
        assert group.first_needed(end) == manager.get_num_skipped_tokens(end) // BLOCK_SIZE


def test_states_of_other_shapes_or_types_are_told_apart() -> None:
    assert group_of(_STATE).state == "mamba2-3x8-bfloat16-4x8x8-float32"
    others = [
        replace(_STATE, shapes=((3, 8), (2, 8, 16))),
        replace(_STATE, dtypes=(torch.bfloat16, torch.bfloat16)),
        replace(_STATE, mamba_type=MambaAttentionBackendEnum.GDN_ATTN),
    ]
    assert group_of(_STATE).state not in {group_of(other).state for other in others}


@pytest.mark.parametrize(
    ("end", "first"), [(1, 0), (16, 0), (17, 0), (31, 0), (32, 1), (33, 1), (48, 2), (50, 2)]
)
def test_states_at_the_last_two_stops_are_kept(end: int, first: int) -> None:
    """vLLM computes a prompt up to its last boundary of blocks, and then the rest, if there is."""
    assert group_of(_STATE).first_kept(end) == first


@pytest.mark.parametrize(
    ("end", "indices"),
    [(15, {0}), (16, {0}), (17, {1}), (31, {1}), (32, {0, 1}), (33, {0, 2}), (50, {1, 3})],
)
def test_with_a_drafter_that_lookups_give_a_block_up_for_it_is_the_boundary_before(
    end: int, indices: set[int]
) -> None:
    group = replace(group_of(_STATE), stops_early=True)
    assert {index for index in range(5) if group.is_kept(index, end)} == indices

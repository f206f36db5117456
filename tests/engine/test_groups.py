# SPDX-License-Identifier: Apache-2.0
"""KV cache groups as vLLM keeps them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

from vllm_ascend_pd.engine.vllm_api.groups import kv_groups

BLOCK_SIZE = 16
_SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


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
    config: Any = SimpleNamespace(
        kv_cache_tensors=[], kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[])]
    )
    (group,) = kv_groups(config)
    assert group.keeps_all == (kind is FullAttentionManager)
    for end in range(200):
        assert group.first_needed(end) == manager.get_num_skipped_tokens(end) // BLOCK_SIZE

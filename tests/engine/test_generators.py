# SPDX-License-Identifier: Apache-2.0
"""The generator of a request that another engine has begun stands where it stood there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from vllm_ascend_pd.engine.vllm_api.generators import draw_rows

NUM_LOGITS = 50


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize("use_fp64_gumbel", [False, True])
@pytest.mark.parametrize("num_known", [1, 5])
def test_next_token_is_sampled_with_the_same_numbers(num_known: int, use_fp64_gumbel: bool) -> None:
    """Also where the first engine sampled it beside others."""
    sampler = Sampler(use_fp64_gumbel=use_fp64_gumbel)
    sample = sampler.topk_topp_sampler
    rows = torch.randn(num_known + 20, NUM_LOGITS, generator=torch.Generator().manual_seed(1))
    there, here = seeded(), seeded()
    batches = [torch.stack((row, row)) for row in rows]
    expected = [int(sample(batch, {1: there}, None, None)[0][1]) for batch in batches]
    runner = SimpleNamespace(sampler=sampler, input_batch=SimpleNamespace(vocab_size=NUM_LOGITS))
    draw_rows(runner, here, num_known)
    after = [
        int(sample(row[None].clone(), {0: here}, None, None)[0][0]) for row in rows[num_known:]
    ]
    assert after == expected[num_known:]
    assert len(set(after)) > 3

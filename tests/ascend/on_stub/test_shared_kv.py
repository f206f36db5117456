# SPDX-License-Identifier: Apache-2.0
"""A layer that reads the KV of another one runs on a producer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm_ascend.attention.attention_v1 import (
    AscendAttentionBackendImpl,
    AscendC8AttentionBackendImpl,
    AscendMetadata,
)


@pytest.mark.parametrize("is_producer", [True, False])
@pytest.mark.parametrize(
    "write",
    [
        AscendAttentionBackendImpl.reshape_and_cache,
        AscendC8AttentionBackendImpl._reshape_and_cache,
    ],
)
def test_it_writes_nothing(write, is_producer: bool) -> None:
    caches = torch.zeros(2), torch.zeros(2)
    impl = SimpleNamespace(
        key_cache=caches[0],
        value_cache=caches[1],
        kv_sharing_target_layer_name="model.layers.1.attn",
        is_kv_producer=is_producer,
    )
    query, key, value, output = (torch.ones(2) * n for n in range(4))
    written = write(impl, query, key, value, caches, AscendMetadata(), output)
    assert [tensor.tolist() for tensor in written] == [[n, n] for n in (0.0, 1.0, 2.0, 3.0)]
    assert not any(cache.any() for cache in caches)

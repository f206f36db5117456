# SPDX-License-Identifier: Apache-2.0
"""What vLLM hashes beside a block's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Request


def extra_keys(request: Request, start: int, stop: int) -> tuple[Any, ...] | None:
    """Of the tokens ``[start, stop)``: salt, LoRA, images, embeddings.

    Touches:
        vllm/v1/core/kv_cache_utils.py:generate_block_hash_extra_keys
    """
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
    return keys


def event_extra_keys(request: Request, start: int, stop: int) -> list[tuple[Any, ...] | None]:
    """The same as KV events have it: from 0.31 on hashes tag each key with its kind, events do not.

    Touches:
        vllm/v1/core/kv_cache_utils.py:to_event_extra_keys
            | vllm/v1/core/kv_cache_utils.py:generate_block_hash_extra_keys
    """
    keys = [extra_keys(request, start, stop)]
    if (untag := getattr(kv_cache_utils, "to_event_extra_keys", None)) is not None:
        return untag(keys)
    return keys

# SPDX-License-Identifier: Apache-2.0
"""What vLLM hashes beside a block's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.vllm_api.types import BlockHash, Request


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


def use_hasher(
    request: Request, hasher: Callable[[Request], list[BlockHash]], salt: str | None
) -> None:
    """For its blocks from now on, with this salt."""
    request._block_hasher = hasher
    request.cache_salt = salt


def salt_of_client(request: Request) -> str | None:
    """The salt that it came with, also when another one has been put in its place."""
    ours: Any = request
    if not hasattr(request, "pd_salt"):
        ours.pd_salt = request.cache_salt
    salt: str | None = ours.pd_salt
    return salt


def salt_anew(request: Request, salt: str | None) -> None:
    """Hash it with another salt."""
    request.cache_salt = salt
    hash_anew(request)


def hash_anew(request: Request) -> None:
    """All its full blocks."""
    request.block_hashes.clear()
    request.update_block_hashes()

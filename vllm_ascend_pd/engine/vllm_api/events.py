# SPDX-License-Identifier: Apache-2.0
"""KV events, of blocks that others than the engine's own prefix cache have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from vllm_ascend_pd.engine.vllm_api.blocks import hash_of
from vllm_ascend_pd.engine.vllm_api.hashes import event_extra_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_ascend_pd.engine.vllm_api.types import BlockPool, BlockStored, Request
    from vllm_ascend_pd.kv.span import KVGroup


def stored(request: Request, index: int, group: KVGroup) -> BlockStored:
    """Of block ``index`` of ``request``, without its medium."""
    start, end = index * group.block_size, (index + 1) * group.block_size
    lora = request.lora_request
    return kv_events.BlockStored(
        block_hashes=[maybe_convert_block_hash(hash_of(request, index, group))],
        parent_block_hash=(
            maybe_convert_block_hash(hash_of(request, index - 1, group)) if index else None
        ),
        token_ids=request.all_token_ids[start:end],
        block_size=group.block_size,
        lora_id=lora.lora_int_id if lora else None,
        medium=None,
        lora_name=lora.lora_name if lora else None,
        extra_keys=event_extra_keys(request, start, end),
        group_idx=group.id,
    )


def endpoint_of_rank(endpoint: str, rank: int) -> str:
    """Where the data parallel rank publishes that is given this ``endpoint``.

    Touches:
        vllm/distributed/kv_events.py:ZmqEventPublisher.offset_endpoint_port
    """
    return str(kv_events.ZmqEventPublisher.offset_endpoint_port(endpoint, rank))


def tell_stored(pool: BlockPool, event: BlockStored, medium: str) -> None:
    event.medium = medium
    pool.kv_event_queue.append(event)


def tell_removed(
    pool: BlockPool, block_hashes: Iterable[bytes], medium: str, group: KVGroup
) -> None:
    """Touches: vllm/distributed/kv_events.py:BlockRemoved"""
    event = kv_events.BlockRemoved(
        block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in block_hashes],
        medium=medium,
        group_idx=group.id,
    )
    pool.kv_event_queue.append(event)

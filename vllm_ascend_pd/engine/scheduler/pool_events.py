# SPDX-License-Identifier: Apache-2.0
"""KV events of the pool, published with those of the engine's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

MEDIUM = "POOL"
"""``medium`` of these events; those of the prefix cache have the device's."""


class PoolEvents:
    """Says what this engine has stored in the pool, and what it has found gone. Scheduler thread.

    The pool evicts without telling, so a block that nobody asks for may be gone without an event.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def make_stored(self, request: Request, index: int) -> BlockStored | None:
        """For block ``index`` of ``request``; ``None`` when nobody listens."""
        if not self._pool.enable_kv_cache_events:
            return None
        hashes = request.block_hashes
        start = index * self._block_size
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(hashes[index])],
            parent_block_hash=maybe_convert_block_hash(hashes[index - 1]) if index else None,
            token_ids=request.all_token_ids[start : start + self._block_size],
            block_size=self._block_size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
            group_idx=0,
        )

    def publish(self, event: BlockStored) -> None:
        self._pool.kv_event_queue.append(event)

    def publish_removed(self, block_hash: bytes) -> None:
        if self._pool.enable_kv_cache_events:
            self._pool.kv_event_queue.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(block_hash)],
                    medium=MEDIUM,
                    group_idx=0,
                )
            )

# SPDX-License-Identifier: Apache-2.0
"""Blocks that may be stored: those that are known good, and which the engine is about to evict.

    free queue:  [b7][b2][b9][b4] ... [b5]        the engine takes new blocks from the front
                 |<-- horizon -->|                 as many as a step may take: to be stored now

Only blocks that are known good count: the engine hashes blocks before they are computed, and the
free queue also holds phantoms, whose KV has never been there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.blocks import free_to_front, next_to_evict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.engine.vllm_api.types import (
        BlockHashWithGroupId,
        BlockPool,
        BlockStored,
        KVCacheBlock,
    )


@dataclass(slots=True)
class GoodBlock:
    """A block whose KV is right. It holds what ``block_hash`` says while that is the very object
    that the block was cached with, see ``phantom.Phantom``.
    """

    block: KVCacheBlock
    block_hash: BlockHashWithGroupId
    event: BlockStored | None
    tenant: str = ""

    def is_current(self) -> bool:
        return self.block.block_hash is self.block_hash


class Evictions:
    """Scheduler thread."""

    def __init__(self, pool: BlockPool, horizon: int) -> None:
        self._blocks = pool
        self._horizon = horizon
        self._good: dict[int, GoodBlock] = {}

    def is_good(self, block: KVCacheBlock) -> bool:
        known = self._good.get(block.block_id)
        return known is not None and known.is_current()

    def note_good(self, good: GoodBlock) -> GoodBlock | None:
        """A full block has been computed or loaded, and nothing went wrong; what the same memory
        held before, and has been evicted.
        """
        before = self._good.get(good.block.block_id)
        self._good[good.block.block_id] = good
        return before

    def next_ones(self) -> Iterator[GoodBlock]:
        """Good blocks at the front of the free queue, the next one to be evicted first. The queue
        must not change meanwhile.
        """
        for block in next_to_evict(self._blocks, self._horizon):
            if block.block_hash is not None and self.is_good(block):
                yield self._good[block.block_id]

    def give_back(self, blocks: list[KVCacheBlock]) -> None:
        """Unpin blocks that have been stored: those that nobody has come to use are still the next
        ones to be evicted.
        """
        free_to_front(self._blocks, blocks)

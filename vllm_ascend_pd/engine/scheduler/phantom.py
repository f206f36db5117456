# SPDX-License-Identifier: Apache-2.0
"""Blocks that are in the prefix cache before their KV is.

A phantom block is hashed and has reference count zero, like any cached block that nobody uses: the
engine's own lookup finds it, every request may share it, and it is evicted when memory is short.
Its KV is loaded in the step in which the first request commits to it. "Cached" has that meaning
in the engine anyway: ``allocate_slots`` hashes blocks before they are computed.

    publish()   hits  [h0][h1]   missing [m2]  cached [h3]   missing [m4]
                                   │                           │
                  get_new_blocks, cache_full_blocks, free_blocks: found by the next lookup
    claim()     a request commits to h0..m4  ->  m2 and m4 are loaded in this step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.blocks import cached_block, enter_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import (
        BlockHashWithGroupId,
        BlockPool,
        KVCacheBlock,
        Request,
    )
    from vllm_ascend_pd.kv.span import KVGroup


@dataclass(slots=True, eq=False)
class Phantom:
    """A published block that waits for its load. Not changed after it is made.

    ``block_hash`` is the very object that the block was cached with. The block pool makes a new
    one each time it caches a block, so identity tells whether the block still holds what it held:
    it does not once it was evicted, even if the same tokens were cached in it again.
    """

    block: KVCacheBlock
    block_hash: BlockHashWithGroupId | None
    source: BlockSource
    index: int

    def is_current(self) -> bool:
        return self.block_hash is not None and self.block.block_hash is self.block_hash


class PhantomBlocks:
    """The published blocks of one group whose loads have not been started (scheduler thread)."""

    def __init__(self, block_pool: BlockPool, group: KVGroup) -> None:
        self._pool = block_pool
        self._group = group
        self._phantoms: dict[int, Phantom] = {}

    def __len__(self) -> int:
        return len(self._phantoms)

    def num_leading_hits(self, request: Request, stop: int) -> int:
        """How many of the first ``stop`` blocks are cached, counted up to the first that is not."""
        for index in range(stop):
            if cached_block(self._pool, request.block_hashes[index], self._group) is None:
                return index
        return stop

    def find_missing(self, request: Request, source: BlockSource) -> list[int]:
        """Indices of what ``source`` has and is not cached here, up to the first block that is
        neither.
        """
        missing: list[int] = []
        for index in range(min(source.num_blocks, self._group.tail_index(request.num_tokens))):
            if cached_block(self._pool, request.block_hashes[index], self._group) is None:
                if not source.has_block(index):
                    break
                missing.append(index)
        return missing

    def publish(
        self, request: Request, hits: Sequence[KVCacheBlock], source: BlockSource
    ) -> list[KVCacheBlock]:
        """Publish what ``source`` has after ``hits`` and is not cached; the request's hits then.

        That is what a second lookup would return: with one full-attention group the hits are the
        leading cached blocks. An engine with an EAGLE or MTP drafter takes one less, to compute
        the last one anew; behind it ``source`` goes on, so it counts here. No reference is kept:
        if the request is not scheduled now, nothing has to be undone.
        """
        end = self._group.tail_index(request.num_tokens)
        last = min(source.num_blocks, end)
        if last <= len(hits):
            return list(hits)
        table: list[KVCacheBlock | None] = list(hits)
        missing: list[int] = []
        for index in range(len(hits), end):
            block = cached_block(self._pool, request.block_hashes[index], self._group)
            if block is None:
                if index >= last or source.parked_only or not source.has_block(index):
                    break
                missing.append(index)
            table.append(block)
        # What is there already must survive get_new_blocks, which evicts the least recently used.
        kept = [block for block in table if block is not None]
        self._pool.touch(kept)
        num_free = self._pool.get_num_free_blocks()
        if len(missing) > num_free:
            del table[missing[num_free] :]
            del missing[num_free:]
        new = self._pool.get_new_blocks(len(missing))
        for index, block in zip(missing, new, strict=True):
            table[index] = block
        self._enter(request, table, missing)
        for index, block in zip(missing, new, strict=True):
            self._phantoms[block.block_id] = Phantom(block, block.block_hash, source, index)
        self._pool.free_blocks(reversed(new))
        self._pool.free_blocks(reversed(kept))
        return [block for block in table if block is not None]

    def cache(
        self, request: Request, indices: Sequence[int], blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Enter ``blocks`` into the prefix cache as the request's ``indices`` (ascending)."""
        table: list[KVCacheBlock | None] = [None] * (indices[-1] + 1)
        for index, block in zip(indices, blocks, strict=True):
            table[index] = block
        self._enter(request, table, indices)

    def _enter(
        self, request: Request, table: list[KVCacheBlock | None], indices: Sequence[int]
    ) -> None:
        for start, stop in _runs(indices):
            enter_blocks(self._pool, request, table, start, stop, self._group)

    def claim(self, blocks: Iterable[KVCacheBlock]) -> list[Phantom]:
        """Take the phantoms among ``blocks``, to which a request has just committed."""
        if not self._phantoms:
            return []
        taken = [
            phantom
            for block in blocks
            if (phantom := self._phantoms.pop(block.block_id, None)) is not None
        ]
        return [phantom for phantom in taken if phantom.is_current()]

    def withdraw(self, source: BlockSource) -> None:
        """Evict what ``source`` can no longer provide."""
        gone = [i for i, phantom in self._phantoms.items() if phantom.source is source]
        phantoms = [self._phantoms.pop(block_id) for block_id in gone]
        self._pool.evict_blocks({p.block.block_id for p in phantoms if p.is_current()})

    def withdraw_all(self) -> None:
        """Evict every phantom: the prefix cache is about to be reset."""
        phantoms, self._phantoms = self._phantoms, {}
        self._pool.evict_blocks({i for i, phantom in phantoms.items() if phantom.is_current()})


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """``[2, 3, 7]`` -> ``[(2, 4), (7, 8)]``."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs

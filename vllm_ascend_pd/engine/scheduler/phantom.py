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

With several KV cache groups the hits end where every group has what a request needs to go on:

    all tokens  hits  [h0][m1][m2][m3]
    windows           [  ][  ][m2][m3]    the window of the token behind the hits begins in m2
    states            [  ][  ][  ][m3]    with a tail behind them, that of the tail instead

They end behind a unit, see ``kv.span``: what is counted here are units, unless blocks are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, cast

from vllm_ascend_pd.engine.vllm_api.blocks import cached_block, cached_blocks, enter_blocks
from vllm_ascend_pd.kv.span import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import (
        BlockHashWithGroupId,
        BlockPool,
        KVCacheBlock,
        Request,
    )
    from vllm_ascend_pd.kv.span import KVGroup

    Table = list[KVCacheBlock | None]
    """Of one group; ``None`` where a block is missing, the null block where none is needed."""


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
    place: Wanted

    def is_current(self) -> bool:
        return self.block_hash is not None and self.block.block_hash is self.block_hash


class PhantomBlocks:
    """The published blocks whose loads have not been started (scheduler thread)."""

    def __init__(self, block_pool: BlockPool, groups: Sequence[KVGroup]) -> None:
        self._blocks = block_pool
        self._groups = groups
        self._unit_size = groups[0].unit_size
        self._per_unit = [group.blocks_per_unit for group in groups]
        self._has_sizes = max(self._per_unit) > 1
        self._phantoms: dict[int, Phantom] = {}

    def __len__(self) -> int:
        return len(self._phantoms)

    def __contains__(self, block: KVCacheBlock) -> bool:
        phantom = self._phantoms.get(block.block_id)
        return phantom is not None and phantom.is_current()

    def _cached(self, request: Request, index: int, group: KVGroup) -> KVCacheBlock | None:
        return cached_block(self._blocks, request, index, group)

    def num_units(self, hits: Sequence[Sequence[KVCacheBlock | None]]) -> int:
        """Of hits, by group."""
        return len(hits[0]) // self._groups[0].blocks_per_unit

    def num_with(self, request: Request, unit: int) -> int:
        """How many of the units before this one come with it: where no group keeps all, windows
        have left behind what is not here.
        """
        if not unit or any(group.keeps_all for group in self._groups):
            return 0
        ends = ((unit * group.blocks_per_unit - 1, group) for group in self._groups)
        return 0 if any(self._cached(request, *end) for end in ends) else unit

    def num_leading_hits(self, request: Request, stop: int) -> int:
        """How many of the first ``stop`` are cached, counted up to the first that is not."""
        nothing: list[Sequence[KVCacheBlock]] = [[] for _ in self._groups]
        tables = self._reach(request, nothing, stop, 0, False, lambda i, group: False)
        return self.num_units(tables)

    def find_missing(
        self, request: Request, source: BlockSource, tail_follows: bool = False
    ) -> list[Wanted]:
        """What ``source`` has and is not cached here, up to the first block that is neither.
        ``tail_follows``, if it has none yet.
        """
        return self._missing(self._with_source(request, source, tail_follows))

    def num_hits(self, request: Request, source: BlockSource) -> int:
        """How many are cached here or can be had there, up to the first that is neither."""
        return self.num_units(self._with_source(request, source, False))

    def num_shared(self, request: Request, source: BlockSource) -> int:
        """How many leading ones another prompt has in common with this one, as far as groups tell
        that keep all of them: here or there. Of an engine with states, whose blocks are units.
        """
        groups = [group for group in self._groups if group.keeps_all]
        stop = self._groups[0].tail_unit(request.num_tokens)
        for index in range(stop):
            for group in groups:
                if not (self._cached(request, index, group) or source.has_block(index, group.id)):
                    return index
        return stop

    def _with_source(
        self, request: Request, source: BlockSource, tail_follows: bool
    ) -> list[Table]:
        stop = self._stop(request, source)
        nothing: list[Sequence[KVCacheBlock]] = [[] for _ in self._groups]
        has_tail = tail_follows or source.has_tail(stop)
        return self._reach(
            request, nothing, stop, source.num_tail_tokens, has_tail, source.has_block
        )

    def _stop(self, request: Request, source: BlockSource) -> int:
        """No hit is behind so many."""
        return int(min(self._groups[0].tail_unit(request.num_tokens), source.max_blocks))

    def _reach(
        self,
        request: Request,
        hits: Sequence[Sequence[KVCacheBlock]],
        stop: int,
        num_tail_tokens: int,
        has_tail: bool,
        has_block: Callable[[int, int], bool],
    ) -> list[Table]:
        """``hits`` by group, and what follows up to ``stop`` that is cached or can be had: as far
        as all groups go. With all of the units the request has ``num_tail_tokens`` more,
        and if it ``has_tail`` may come to them: then it needs the state behind the tail only, but
        that at the last boundary is had for those who share the blocks.
        """
        start, whole = self.num_units(hits), stop
        tables: list[Table] = [list(blocks) for blocks in hits]
        for group, table in zip(self._groups, tables, strict=True):
            if group.keeps_all:
                each = group.blocks_per_unit
                first, end = start * each, stop * each
                found = cached_blocks(self._blocks, request, first, end, group)
                for index, block in enumerate(found, first):
                    if block is None and not has_block(index, group.id):
                        stop = group.unit_of(index)
                        break
                    table.append(block)
        windows = [group for group in self._groups if not group.keeps_all]
        rest = list(windows)
        while stop > start and rest:
            group = rest.pop()
            end = stop * self._unit_size + (num_tail_tokens if stop == whole else 0)
            num_blocks = stop * group.blocks_per_unit
            first = min(group.first_needed(end), num_blocks)
            if group.state and has_tail and stop == whole:
                last = self._cached(request, stop - 1, group)
                first = stop - (last is not None or has_block(stop - 1, group.id))
            window: Table = []
            for index in range(num_blocks - 1, first - 1, -1):
                block = self._cached(request, index, group)
                if block is None and not has_block(index, group.id):
                    # No end behind this one will do.
                    stop, rest = group.unit_of(index), list(windows)
                    break
                window.append(block)
            tables[group.id] = [*[self._blocks.null_block] * first, *reversed(window)]
        if stop <= start:
            return [list(blocks) for blocks in hits]
        return [
            table[: stop * group.blocks_per_unit]
            for group, table in zip(self._groups, tables, strict=True)
        ]

    def publish(
        self,
        request: Request,
        hits: Sequence[Sequence[KVCacheBlock]],
        source: BlockSource,
        num_tail_tokens: int,
    ) -> tuple[Sequence[KVCacheBlock], ...]:
        """Publish what ``source`` has after ``hits`` and is not cached; the request's hits then, by
        group. With all of the units it is scheduled on ``num_tail_tokens`` more.

        That is what a second lookup would return: the leading cached blocks, and where a group
        needs the last ones only, these. An engine with an EAGLE or MTP drafter takes one less, to
        compute the last one anew; behind it ``source`` goes on, so it counts here. No reference is
        kept: if the request is not scheduled now, nothing has to be undone.
        """
        stop = self._stop(request, source)
        last = min(source.num_blocks, stop)
        num_free = self._blocks.get_num_free_blocks()
        num_hits = self.num_units(hits)
        if last <= num_hits or source.is_cut_short(num_hits, num_free):
            return tuple(hits)

        def has_block(index: int, group: int) -> bool:
            is_before = index // self._per_unit[group] < last
            return is_before and not source.parked_only and source.has_block(index, group)

        whole = stop
        while True:
            tail = num_tail_tokens if stop == whole else 0
            tables = self._reach(request, hits, stop, tail, tail > 0, has_block)
            missing = self._missing(tables)
            if not missing:  # so in each pass for a request that finds no memory
                return tuple(cast("list[KVCacheBlock]", table) for table in tables)
            # What is there already must survive get_new_blocks, which evicts the least recently
            # used.
            kept = [b for table in tables for b in table if b is not None and not b.is_null]
            self._blocks.touch(kept)
            num_left = self._blocks.get_num_free_blocks()
            if len(missing) <= num_left:
                break
            self._blocks.free_blocks(reversed(kept))
            stop = self.unit_of(missing[num_left])  # where windows end there, too, is looked up
            source.cut_short = stop, num_free
        new = self._blocks.get_new_blocks(len(missing))
        for place, block in zip(missing, new, strict=True):
            tables[place.group][place.block_index] = block
        for group in self._groups:
            indices = [index for index, group_id in missing if group_id == group.id]
            self._enter(request, tables[group.id], indices, group)
        for place, block in zip(missing, new, strict=True):
            self._phantoms[block.block_id] = Phantom(block, block.block_hash, source, place)
        self._blocks.free_blocks(reversed(new))
        self._blocks.free_blocks(reversed(kept))
        return tuple(cast("list[KVCacheBlock]", table) for table in tables)  # nothing is missing

    def cache(
        self, request: Request, places: Sequence[Wanted], blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Enter ``blocks`` into the prefix cache as the request's of these indices (ascending)."""
        for group in self._groups:
            mine = {
                place.block_index: block
                for place, block in zip(places, blocks, strict=True)
                if place.group == group.id
            }
            table = [mine.get(index) for index in range(max(mine, default=-1) + 1)]
            self._enter(request, table, list(mine), group)

    def _enter(
        self, request: Request, table: Table, indices: Sequence[int], group: KVGroup
    ) -> None:
        for start, stop in _runs(indices):
            enter_blocks(self._blocks, request, table, start, stop, group)

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
        self._blocks.evict_blocks({p.block.block_id for p in phantoms if p.is_current()})

    def withdraw_all(self) -> None:
        """Evict every phantom: the prefix cache is about to be reset."""
        phantoms, self._phantoms = self._phantoms, {}
        self._blocks.evict_blocks({i for i, phantom in phantoms.items() if phantom.is_current()})

    def unit_of(self, place: Wanted) -> int:
        return place.block_index // self._per_unit[place.group]

    def _missing(self, tables: Sequence[Table]) -> list[Wanted]:
        """In the order of their units, and of their indices."""
        missing = [
            Wanted(index, group)
            for group, table in enumerate(tables)
            for index, block in enumerate(table)
            if block is None
        ]
        if len(tables) > 1:
            missing.sort(key=(lambda x: (self.unit_of(x), x)) if self._has_sizes else None)
        return missing


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """``[2, 3, 7]`` -> ``[(2, 4), (7, 8)]``."""
    if indices and indices[-1] - indices[0] == len(indices) - 1:
        return [(indices[0], indices[-1] + 1)]
    runs = (list(run) for _, run in groupby(enumerate(indices), lambda one: one[1] - one[0]))
    return [(run[0][1], run[-1][1] + 1) for run in runs]

# SPDX-License-Identifier: Apache-2.0
"""Loads beside the steps: they fill blocks that are held for them, and so do not hold up a batch.

park ──► held blocks, and one for the tail ──► end: cached blocks, and the tail is kept
                                                    │ admission
                                               take_tail: it takes the place of the block that
                                                    was allocated for it
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.loads import TailBlock
from vllm_ascend_pd.engine.scheduler.sources import BlockSource, SourceEvent
from vllm_ascend_pd.engine.vllm_api.blocks import cached_blocks
from vllm_ascend_pd.engine.vllm_api.groups import block_table
from vllm_ascend_pd.kv.span import Wanted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm_ascend_pd.engine.scheduler.loads import LoadRecord, Loads
    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, KVCacheManager
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import KVGroup


logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1.0
"""After which a source that has found no memory is looked at whole again: others may have brought
in some of its blocks."""
_FREE_SHARE = 10
"""One block in so many stays free: running requests grow into the free blocks, and a load that
waits must not starve them."""


class Parking:
    """Scheduler thread."""

    def __init__(
        self,
        manager: KVCacheManager,
        groups: Sequence[KVGroup],
        phantoms: PhantomBlocks,
        loads: Loads,
    ) -> None:
        self._manager = manager
        self._blocks = manager.block_pool
        self._groups = groups
        self._unit_size = groups[0].unit_size
        self._phantoms = phantoms
        self._loads = loads
        self.is_suspended = False
        """The KV caches are not there: the engine sleeps."""
        self.tails: dict[BlockSource, list[tuple[Wanted, KVCacheBlock]]] = {}
        """Tail blocks, and their places, that parked loads have filled; the requests' own from
        admission on.
        """

    def park(self, source: BlockSource, missing: Sequence[Wanted]) -> bool:
        """Load the missing blocks, and the tail if all others are there then, beside the steps, if
        memory allows.
        """
        if self.is_suspended:
            return False
        request = source.request
        num_full = self._groups[0].tail_unit(request.num_tokens)
        num_kept = self._phantoms.unit_of(missing[-1]) + 1 if missing else num_full
        kept = [
            block
            for group in self._groups
            for block in cached_blocks(
                self._blocks,
                request,
                group.first_needed(num_kept * self._unit_size),
                num_kept * group.blocks_per_unit,
                group,
            )
            if block is not None
        ]
        self._blocks.touch(kept)
        tails = []
        if source.has_tail(num_full):
            tails = self._tail_places(source, num_full, source.max_tail_tokens)
        num_blocks = len(missing) + len(tails)
        enough = self._has_room(num_blocks)
        source.num_short = 0 if enough else num_blocks
        source.look_again_at = time.monotonic() + _LOOK_AGAIN_S
        if enough:
            blocks = self._blocks.get_new_blocks(len(missing))
            own = zip(tails, self._blocks.get_new_blocks(len(tails)), strict=True)
            self._loads.park(source, missing, blocks, _tails(source, own))
            source.advance(SourceEvent.PARK)
        self._blocks.free_blocks(reversed(kept))
        return enough

    def is_short_for(self, source: BlockSource) -> bool:
        """Whether what it found too little memory for has none still, as can be told at once."""
        return (
            source.num_short > 0
            and not self._has_room(source.num_short)
            and time.monotonic() < source.look_again_at
        )

    def _has_room(self, num_blocks: int) -> bool:
        margin = self._blocks.num_gpu_blocks // _FREE_SHARE
        return self._blocks.get_num_free_blocks() - num_blocks >= margin

    def end(self, record: LoadRecord, result: LoadResult) -> None:
        """Held blocks become cached ones, or go back unused."""
        source, request = record.source, record.parked_for
        assert request is not None
        wanted = not request.is_finished() and not source.is_stale
        loaded = record.loaded(result)
        if loaded and wanted:
            self._phantoms.cache(request, *loaded)
            if not result.cause or all(group.keeps_all for group in self._groups):
                # Of windows and states only those of the load's end are there: no end before it is
                # whole by them.
                units = set(map(self._phantoms.unit_of, loaded[0]))
                num_units = len(units) + self._phantoms.num_with(request, min(units))
                source.num_parked_tokens = num_units * self._unit_size
        held = list(record.held)
        if record.tails and not result.cause and wanted:
            self.tails[source] = [(tail.place, tail.block) for tail in record.tails]
        else:
            held += [tail.block for tail in record.tails]
        if result.num_resting:
            logger.warning("%d blocks rest: a peer may still write into them", len(held))
            self._loads.rest(result, held)
        else:
            self._blocks.free_blocks(reversed(held))
        self.cache_full_tail(source)

    def take_tail(self, source: BlockSource, num_hits: int) -> int:
        """How many tokens of its tail the request is admitted with.

        A tail that is loaded already takes the place of what was just allocated for it, but for
        what windows have left behind; else this step loads it into that. A request that reads no
        prefix cache computes it.
        """
        request = source.request
        num_full = self._groups[0].tail_unit(request.num_tokens)
        is_read = not request.skip_reading_prefix_cache
        offers = is_read and source.offers and num_hits == num_full
        num_tail = self.num_tail_tokens(source) if offers else 0
        if num_tail:
            tables = [block_table(self._manager, request, group) for group in self._groups]
            if source in self.tails:
                unused = []
                for place, tail in self.tails[source]:
                    table = tables[place.group]
                    own = table[place.block_index]
                    if not own.is_null:
                        table[place.block_index] = tail
                    unused.append((place, tail if own.is_null else own))
                self.tails[source] = unused
            else:
                places = self._tail_places(source, num_full, num_tail)
                blocks = ((place, tables[place.group][place.block_index]) for place in places)
                self._loads.claim(request, source, [], _tails(source, blocks))
        self.drop_tail(source)
        return num_tail

    def num_tail_tokens(self, source: BlockSource) -> int:
        """With how many tokens of its tail the request may be admitted."""
        return source.num_tail_tokens if source in self.tails or not source.parked_only else 0

    def cache_full_tail(self, source: BlockSource) -> None:
        """Once it has the first token, a tail block that is full is a block like the others."""
        if source in self.tails and source.is_tail_cacheable:
            places, blocks = zip(*self.tails[source], strict=True)
            self._phantoms.cache(source.request, places, blocks)
            source.num_parked_tokens += self._unit_size
            self.drop_tail(source)

    def drop_tail(self, source: BlockSource) -> None:
        self._blocks.free_blocks(block for _, block in self.tails.pop(source, ()))

    def _tail_places(self, source: BlockSource, num_full: int, num_tokens: int) -> list[Wanted]:
        """Blocks of so many tokens of the tail, as far as who goes on behind them needs those."""
        start = num_full * self._unit_size
        return [
            Wanted(index, group.id)
            for group in self._groups
            for index in range(
                max(
                    num_full * group.blocks_per_unit,
                    group.first_needed(start + source.num_tail_tokens),
                ),
                group.tail_index(start + num_tokens) + 1,
            )
        ]

    def drop_tails(self) -> None:
        for source in list(self.tails):
            self.drop_tail(source)

    def leave(self, source: BlockSource) -> None:
        """Nothing that it has is wanted any more, or its request has ended."""
        self.drop_tail(source)
        if source.parked:
            self._loads.cancel(source.request)

    def relieve(self, is_stuck: bool) -> None:
        """Where memory is short, or no request can be scheduled, what waits does not hold any: a
        tail is loaded again when its request is admitted.
        """
        if is_stuck or not self._has_room(0):
            self.drop_tails()


def _tails(source: BlockSource, blocks: Iterable[tuple[Wanted, KVCacheBlock]]) -> list[TailBlock]:
    request = source.request
    return [TailBlock(request, request.num_preemptions, place, block) for place, block in blocks]

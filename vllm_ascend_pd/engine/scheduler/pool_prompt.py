# SPDX-License-Identifier: Apache-2.0
"""What the pool has of one request's prompt, from its lookup to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.sources import BlockSource, SourceEvent
from vllm_ascend_pd.pool.messages import PoolLoadSpec
from vllm_ascend_pd.types import Cause, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.scheduler.pool_source import PoolSource
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.kv.cost import Plan
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
    from vllm_ascend_pd.metrics import Provenance
    from vllm_ascend_pd.types import LoadId


_EXPECTED_OUTCOMES = ("", Cause.CANCELLED.value)


class PoolPrompt(BlockSource):
    """What the pool has of one request's blocks."""

    def __init__(
        self,
        request: Request,
        start: int,
        source: PoolSource,
        provenance: Provenance | None = None,
        had_peer: bool = False,
    ) -> None:
        """Blocks before ``start`` were in the prefix cache at arrival and were not asked for.
        ``had_peer``: ``provenance`` is that of its session with a peer, which the consumer counts.
        """
        super().__init__(request, provenance)
        self.start = start
        self.had_peer = had_peer
        self.loaded: set[int] = set()
        """Blocks that loads have brought in."""
        self._pool = source
        self._places: bytes = b""
        self._num_blocks = 0
        self._num_tail_tokens = 0

    # What it has.

    def found(self, places: bytes) -> None:
        """``places[i]`` is that of block ``start + i``."""
        self._places = places
        self._num_blocks = self.start + len(places.rstrip(b"\0"))
        group = self._pool.group
        if self.has_block(group.tail_index(self.request.num_tokens)):
            self._num_tail_tokens = group.block_size - 1
        self.advance(SourceEvent.FOUND)

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_tail_tokens(self) -> int:
        """All but the last token of a prompt of full blocks: vLLM computes that one, and would
        compute its whole block."""
        return self._num_tail_tokens

    def has_tail(self, index: int) -> bool:
        return self._num_tail_tokens > 0 and self.has_block(index)

    def has_block(self, index: int, group: int = 0) -> bool:
        return self.place_of(index) is not Place.NOWHERE

    def place_of(self, index: int) -> Place:
        if not self.start <= index < self._num_blocks:
            return Place.NOWHERE
        return Place(self._places[index - self.start])

    def load_ms(self, place: Wanted) -> float:
        return self._pool.load_ms(self.place_of(place.block_index))

    @property
    def compute_ms(self) -> float:
        return self._pool.compute_ms

    # What becomes of it.

    def holds_back(self) -> bool:
        return super().holds_back() and not (self.pending and self._pool.has_answer(self))

    def use(self, plan: Plan, num_offered: int) -> None:
        if self.plan is None:
            self._pool.decided(self, plan, num_offered)
        self.plan = plan
        if plan.num_blocks < num_offered:
            self._num_blocks, self._num_tail_tokens = plan.num_blocks, 0

    def give_up(self, cause: Cause) -> None:
        self.advance(SourceEvent.GIVE_UP)

    def forsake(self) -> None:
        super().forsake()
        self.give_up(Cause.INCOMPATIBLE)

    # Loads and admission.

    def make_load(
        self,
        load_id: LoadId,
        blocks: tuple[LoadBlocks, ...],
        in_step: bool,
    ) -> PoolLoadSpec:
        (part,) = blocks
        name, transfer = self._pool.names.name, self._pool.transfer
        hashes = tuple(name(self.request.block_hashes[i]) for i in part.indices)
        timeout_s = transfer.step_load_timeout_s if in_step else transfer.load_timeout_s
        return PoolLoadSpec(
            load_id, hashes, part.block_ids, in_step, timeout_s, part.has_tail, part.group
        )

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        super().load_ended(result, places, was_parked)
        indices = {block_id: place.block_index for block_id, place in places.items()}
        origin = self.provenance
        origin.num_pool_bytes += result.num_bytes
        origin.transfer_ms += result.elapsed_ms
        if result.failed or not result.cause:
            self.loaded.update(i for b, i in indices.items() if b not in result.failed)
        self._pool.load_ended(result, [self.place_of(i) for i in indices.values()])
        if result.cause in _EXPECTED_OUTCOMES:
            return
        origin.outcome = result.cause
        for block_id in result.failed:
            if (index := indices.get(block_id)) is not None:
                self._pool.failed_to_load(bytes(self.request.block_hashes[index]))
        lost = {i for b, i in indices.items() if not result.failed or b in result.failed}
        self.provenance.take_back(min(lost, default=0) * self._pool.group.block_size)

    def count_computed(self, admitted: bool) -> bool:
        """Whether the request has been admitted. Nobody says so when nothing of its prompt was to
        be had: then all of it is computed.
        """
        if admitted and not self._is_counted:
            self._is_counted = True
            self.provenance.num_computed_tokens = self.provenance.num_prompt_tokens
        return self._is_counted

    def follow(self, is_counted: bool) -> None:
        """It continues an earlier one of the request, whose tokens have been counted or not."""
        self._is_counted = is_counted

    def count(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        origin = self.provenance
        num_prompt = origin.num_prompt_tokens
        # What a failed peer brought in before lies in the prefix cache, and stays the peer's.
        num_peer = min(origin.num_peer_tokens, num_local)
        origin.num_peer_tokens = num_peer
        num_local = min(num_local, num_prompt)
        num_pool = min(num_external, num_prompt - num_local)
        origin.num_local_tokens = num_local - num_peer
        origin.num_computed_tokens = num_prompt - num_local - num_pool
        self._attribute(num_pool, self.loaded.union(indices))

    def _attribute(self, num_pool: int, indices: set[int]) -> None:
        """Split the pool's tokens by tier, as the lookup saw it. ``indices`` are the blocks that it
        has brought in, or is about to.
        """
        if not num_pool and not indices:
            return
        origin = self.provenance
        group = self._pool.group
        by_place = dict.fromkeys(Place.all(), 0)
        tail = group.tail_index(self.end)
        for index in indices:
            num_tokens = group.block_size - (index == tail)
            by_place[self.place_of(index) or Place.DRAM] += num_tokens
        # Some may have been evicted since; what is not known to be elsewhere was in DRAM.
        excess = sum(by_place.values()) - num_pool
        for place, num_tokens in by_place.items():
            back = min(excess, num_tokens)
            by_place[place] -= back
            excess -= back
        origin.pool_tokens = {place.label: count for place, count in by_place.items()}
        if num_pool:
            origin.outcome = origin.outcome or "loaded"

# SPDX-License-Identifier: Apache-2.0
"""What the pool has of one request's prompt, from its lookup to its end."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_pd.engine.scheduler.sources import BlockSource, SourceState
from vllm_ascend_pd.engine.vllm_api.blocks import hashes_of
from vllm_ascend_pd.engine.vllm_api.requests import is_for_consumer
from vllm_ascend_pd.pool.messages import PoolBlocks, PoolLoadSpec
from vllm_ascend_pd.types import Cause, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.engine.scheduler.pool_source import PoolSource
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.kv.cost import LoadPlan
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
    from vllm_ascend_pd.metrics import Provenance
    from vllm_ascend_pd.types import LoadId


_NEAR = 512
"""So many blocks before the end of what there is, windows of shorter hits are looked for."""
_EXPECTED_OUTCOMES = ("", Cause.CANCELLED.value)


class Asked(NamedTuple):
    """What a lookup asks for: blocks of a request, by index, in one KV cache group."""

    group: int
    indices: Sequence[int]


def num_asked(asked: Sequence[Asked]) -> int:
    return sum(len(each.indices) for each in asked)


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
        """Units before ``start`` were in the prefix cache at arrival and were not asked for.
        ``had_peer``: ``provenance`` is that of its session with a peer, which the consumer counts.
        """
        super().__init__(request, provenance)
        self.start = start
        self.had_peer = had_peer
        if is_for_consumer(request):
            # Its consumer goes on from where it would stop, or behind its end.
            stops = (group.last_stop(self.end) for group in source.groups if group.stops_early)
            self.max_blocks = 1 + min(stops, default=self.end)
        self.asked_at = 0.0
        """By the source's clock."""
        self.again: PoolPrompt | None = None
        """What a second lookup finds, made as the request waits; it may take this one's place."""
        self.loaded: set[int] = set()
        """Units that loads have brought in, or parts of them."""
        self._pool = source
        self._places: list[dict[int, Place]] = [{} for _ in source.groups]
        """By group and index: of what has been asked for."""
        self._hopes = False
        """Whether what has not been asked for counts as being there."""
        self._num_lookups = 0

    # What it has.

    def learn(self, asked: Sequence[Asked], places: bytes) -> None:
        """A lookup is over, in whose order ``places`` are."""
        self._num_lookups += 1
        at = 0
        for group, indices in asked:
            own = places[at : at + len(indices)]
            self._places[group].update(zip(indices, Place.of(own), strict=True))
            if num_there := len(own.rstrip(b"\0")):
                unit = self._pool.groups[group].unit_of(indices[num_there - 1])
                self._num_blocks = max(self._num_blocks, unit + 1)
            at += len(indices)

    def unknown(self, phantoms: PhantomBlocks) -> list[Asked]:
        """What has to be asked for before it can be said where the hits end: of windows those
        before the end of what the other groups have, also if they are here, for a request may wait;
        and if some of them are missing, those of ends that are not far before it.
        """
        groups, size = self._pool.groups, self._pool.size
        if self._num_lookups > 2 or all(group.keeps_all or group.state for group in groups):
            return []
        self._hopes = True
        stop = phantoms.num_hits(self.request, self)
        end = min(stop, self._num_blocks) * size.unit_size
        stop += bool(self.num_tail_tokens and stop == size.tail_unit(self.request.num_tokens))
        self._hopes = False
        stops = [stop * group.blocks_per_unit for group in groups]
        unknown = self._unknown(
            [range(group.first_needed(end), at) for group, at in zip(groups, stops, strict=True)]
        )
        if unknown and self._num_lookups > 1:
            stops = [self._num_blocks * group.blocks_per_unit for group in groups]
            return self._unknown([range(at - _NEAR, at) for at in stops])
        return unknown

    def _unknown(self, indices: Sequence[range]) -> list[Asked]:
        """Of these blocks, by group."""
        asked = [
            Asked(group.id, [i for i in own if group.unit_of(i) >= self.start and i not in known])
            for group, own, known in zip(self._pool.groups, indices, self._places, strict=True)
        ]
        return [each for each in asked if each.indices]

    @property
    def found_nothing(self) -> bool:
        """Whether there is nothing; else it may not be known."""
        return self._num_lookups > 0 and not self._num_blocks

    @property
    def num_tail_tokens(self) -> int:
        """All but the last token of a prompt of full units: vLLM computes that one, and would
        compute its whole unit."""
        last = self.request.num_tokens - 1
        tail = self._pool.size.tail_unit(self.request.num_tokens)
        has_all = all(
            self.has_block(index, group.id)
            for group in self._pool.groups
            for index in group.blocks_of(tail, tail + 1)
            if index >= group.first_needed(last)
        )
        return self._pool.size.unit_size - 1 if has_all and not self._is_cut else 0

    def has_tail(self, index: int) -> bool:
        return self.num_tail_tokens > 0 and self._has_unit(index)

    def _has_unit(self, index: int) -> bool:
        """Whether it has been asked for, and nothing behind it is all that there is."""
        return self.start <= index < self._num_blocks

    def has_block(self, index: int, group: int = 0) -> bool:
        if not self._has_unit(self._pool.groups[group].unit_of(index)):
            return False
        return self._places[group].get(index, self._hopes) > 0

    def place_of(self, index: int, group: int = 0) -> Place:
        return self._places[group][index] if self.has_block(index, group) else Place.NOWHERE

    def load_ms(self, places: Sequence[Wanted]) -> list[float]:
        load_ms = cache(self._pool.load_ms)
        return [load_ms(self.place_of(*place), place.group) for place in places]

    @property
    def compute_ms(self) -> float:
        return self._pool.compute_ms

    # What becomes of it.

    def load_beside_steps(self) -> None:
        """Or not at all, if memory is short."""
        self.parked_only = self.always_parks = True
        self.place_until = 0.0

    @property
    def may_load(self) -> bool:
        """Whether something of it is loaded, or is about to be."""
        return self.num_loads > 0 or self.state is SourceState.READY

    def holds_back(self) -> bool:
        return super().holds_back() and not (self.pending and self._pool.has_answer(self))

    def use(self, plan: LoadPlan, num_offered: int) -> None:
        if self.plan is None:
            self._pool.decided(self, plan, num_offered)
        super().use(plan, num_offered)

    def forsake(self) -> None:
        super().forsake()
        self.again = None

    # Loads and admission.

    def make_load(
        self,
        load_id: LoadId,
        blocks: tuple[LoadBlocks, ...],
        in_step: bool,
    ) -> PoolLoadSpec:
        name, transfer = self._pool.names.name, self._pool.transfer
        parts = []
        for part in blocks:
            hashes = hashes_of(self.request, part.indices, self._pool.groups[part.group])
            parts.append(PoolBlocks(tuple(map(name, hashes)), part.block_ids, part.group))
        timeout_s = transfer.step_load_timeout_s if in_step else transfer.load_timeout_s
        has_tail = any(part.has_tail for part in blocks)
        return PoolLoadSpec(load_id, tuple(parts), in_step, timeout_s, has_tail)

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        super().load_ended(result, places, was_parked)
        origin = self.provenance
        origin.num_pool_bytes += result.num_bytes
        origin.transfer_ms += result.elapsed_ms
        if result.failed or not result.cause:
            self.loaded.update(
                self._unit_of(place) for b, place in places.items() if b not in result.failed
            )
        where = [self.place_of(*place) for place in places.values()]
        self._pool.load_ended(result, where, was_parked)
        if result.cause in _EXPECTED_OUTCOMES:
            return
        origin.outcome = result.cause
        for block_id in result.failed:
            if block_id in places:
                self._pool.failed_to_load(self.request, places[block_id])
        failed = result.failed or places.keys()
        lost = {self._unit_of(place) for b, place in places.items() if b in failed}
        kept = min(lost, default=0)
        if not all(group.keeps_all for group in self._pool.groups):
            # Of windows only those of the load's end have come: no end before it is whole.
            kept = min(kept, self.start)
        self.provenance.take_back(kept * self._pool.size.unit_size)

    def _unit_of(self, place: Wanted) -> int:
        return self._pool.groups[place.group].unit_of(place.block_index)

    def count_computed(self, admitted: bool) -> bool:
        """Whether the request has been admitted. Nobody says so when nothing of its prompt was to
        be had: then all of it is computed. Where it had a peer somebody does, and until then what
        was counted of that peer holds.
        """
        if admitted and not self._is_counted and not self.had_peer:
            self._is_counted = True
            self.provenance.num_computed_tokens = self.provenance.num_prompt_tokens
        return self._is_counted

    def follow(self, is_counted: bool) -> None:
        """It continues an earlier one of the request, whose tokens have been counted or not."""
        self._is_counted = is_counted

    def take_over(self, previous: PoolPrompt) -> None:
        """It takes the place of ``previous``, whose parked loads have ended."""
        self.plan = previous.plan
        self.loaded = previous.loaded
        self.num_parked_tokens = previous.num_parked_tokens

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
        """Split the pool's tokens by tier, as the lookup saw it. ``indices`` are the units that it
        has brought in, or is about to.
        """
        if not num_pool and not indices:
            return
        origin = self.provenance
        size = self._pool.size
        by_place = dict.fromkeys(Place.all(), 0)
        tail = size.tail_unit(self.end)
        for index in indices:
            num_tokens = size.unit_size - (index == tail)
            places = [self.place_of(*block) for block in self._pool.blocks_of(index, index + 1)]
            by_place[max(places) or Place.DRAM] += num_tokens
        # Some may have been evicted since; what is not known to be elsewhere was in DRAM.
        excess = sum(by_place.values()) - num_pool
        # What windows have left behind came with the rest.
        by_place[max(by_place, key=by_place.__getitem__)] -= min(excess, 0)
        for place, num_tokens in by_place.items():
            back = min(max(excess, 0), num_tokens)
            by_place[place] -= back
            excess -= back
        origin.pool_tokens = {place.label: count for place, count in by_place.items()}
        if num_pool:
            origin.outcome = origin.outcome or "loaded"

# SPDX-License-Identifier: Apache-2.0
"""Loads between the step that carries them and the report that ends them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain, count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm_ascend_pd.engine.scheduler.phantom import Phantom
from vllm_ascend_pd.kv.load import merge_results
from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
from vllm_ascend_pd.types import LoadId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, Request
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.pool.messages import PoolLoadSpec
    from vllm_ascend_pd.transfer.load import LoadSpec


@dataclass(frozen=True, slots=True, eq=False)
class TailBlock:
    """A block of one group for the rest of a prompt that a load fills. It is the request's own,
    while that has not been preempted, or one that is held for it.
    """

    request: Request
    num_preemptions: int
    place: Wanted
    block: KVCacheBlock

    def is_current(self) -> bool:
        return not self.request.is_finished() and (
            self.request.num_preemptions == self.num_preemptions
        )


@dataclass(slots=True, eq=False)
class LoadRecord:
    """One load: in-step ones fill cached blocks, perhaps a tail; parked ones fill held blocks."""

    load_id: LoadId
    source: BlockSource
    filled: dict[int, Wanted] = field(default_factory=dict)
    """By block id: the full blocks that it fills."""
    tails: Sequence[TailBlock] = ()
    """Of each group, in order, or none."""
    phantoms: list[Phantom] = field(default_factory=list)
    users: dict[Request, set[int]] = field(default_factory=dict)
    """Requests whose tokens are computed on these blocks: on which, as far as that is noted."""
    computed_on: dict[int, tuple[Phantom, frozenset[int]]] = field(default_factory=dict)
    """Blocks that users have computed, by block id, and on which; some are not cached."""
    parked_for: Request | None = None
    held: Sequence[KVCacheBlock] = ()
    """Of a parked load: the full blocks."""
    contents: Sequence[tuple[bytes, int]] = ()
    """Of a parked load: what these will hold, by hash and group."""
    has_ended: bool = False

    def places(self) -> dict[int, Wanted]:
        """As ``filled``, with the tails as the last ones."""
        return self.filled | {tail.block.block_id: tail.place for tail in self.tails}

    def spec(self) -> LoadSpec | PoolLoadSpec:
        places = self.places()
        return self.source.make_load(
            self.load_id,
            tuple(
                LoadBlocks(
                    group,
                    tuple(place.block_index for place in places.values() if place.group == group),
                    tuple(i for i, place in places.items() if place.group == group),
                    has_tail=any(tail.place.group == group for tail in self.tails),
                )
                for group in sorted({place.group for place in places.values()})
            ),
            in_step=self.parked_for is None,
        )

    def loaded(self, result: LoadResult) -> tuple[list[Wanted], list[KVCacheBlock]] | None:
        """Of a parked load that has ended: places and blocks that it has filled."""
        if result.cause and not result.failed:
            return None
        blocks = [block for block in self.held if block.block_id not in result.failed]
        return ([self.filled[b.block_id] for b in blocks], blocks) if blocks else None

    def may_spoil(self, block_ids: Set[int]) -> bool:
        """Whether it fills one of these blocks, or one that such a block is computed on."""
        return (
            # A tail that is full with what is computed is a block that others of its pass share.
            any(tail.block.block_id in block_ids for tail in self.tails)
            or not self.filled.keys().isdisjoint(block_ids)
            or not self.computed_on.keys().isdisjoint(block_ids)
        )

    def is_coming_for(self, source: BlockSource) -> bool:
        """Of a parked load: whether it is worth waiting for. One that waits for its prompt to be
        computed is so only where ``source`` waits for its own.
        """
        return self.source.is_complete or not source.is_complete

    def bad_block_ids(self, failed: Sequence[int]) -> set[int]:
        """If it failed: the blocks that still hold what it should have filled, or what was
        computed on it, also by a request that has been preempted or has ended meanwhile.

        ``failed`` are the blocks that have not been filled, if that is known.
        """
        loaded = [p for p in self.phantoms if not failed or p.block.block_id in failed]
        loaded_and_computed = [*loaded, *(phantom for phantom, _ in self._computed_on(failed))]
        bad = {p.block.block_id for p in loaded_and_computed if p.is_current()}
        for tail in self.tails if self.parked_for is None else ():
            if tail.is_current() and (not failed or tail.block.block_id in failed):
                bad.add(tail.block.block_id)
        return bad

    def spoiled_block_ids(self, failed: Sequence[int]) -> set[int]:
        """If it failed: the blocks with what nobody may meet, whoever they belonged to. None of
        them has a new owner yet: what a step uses is not given away before its report.
        """
        filled = set(self.places())
        computed = {phantom.block.block_id for phantom, _ in self._computed_on(failed)}
        return (filled.intersection(failed) if failed else filled) | computed

    def spoiled_users(self, failed: Sequence[int]) -> list[Request]:
        """If it failed: who has computed on what it should have filled."""
        return [user for user, on in self.users.items() if _is_spoiled(on, failed)]

    def _computed_on(self, failed: Sequence[int]) -> list[tuple[Phantom, frozenset[int]]]:
        return [known for known in self.computed_on.values() if _is_spoiled(known[1], failed)]


def _is_spoiled(on: Set[int], failed: Sequence[int]) -> bool:
    """Whether what was computed on these blocks of a load is wrong, as it did not fill those."""
    return not failed or not on.isdisjoint(failed)


class Loads:
    """Scheduler thread. ``take_new`` goes out with a step, ``end`` comes back with its output."""

    def __init__(self, num_workers: int = 1, groups: Sequence[KVGroup] = ()) -> None:
        """``groups`` say where blocks are not of one size."""
        self._num_workers = num_workers
        self._groups = {group.id: group for group in groups}
        self._reported: dict[LoadId, list[LoadResult]] = {}
        self._ids = count(1)
        self._by_source: dict[int, LoadRecord] = {}
        self.new: list[LoadRecord] = []
        """The next step takes them along."""
        self.running: dict[LoadId, LoadRecord] = {}
        self._coming: dict[tuple[bytes, int], list[LoadRecord]] = {}
        """Parked loads under way, by what they bring in."""
        self._begins: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._tables: dict[Request, _Tables] = {}
        """Of users in this pass, in which each of them gets blocks once at most."""
        self._cancels: list[LoadId] = []
        self._resting: dict[LoadId, list[KVCacheBlock]] = {}
        self._num_resting: Counter[LoadId] = Counter()
        """Workers in whose blocks a peer may still write; below 0 if they were done before the
        others had ended.
        """

    def __len__(self) -> int:
        return len(self.running) + len(self.new) + len(self._resting)

    @property
    def need_steps(self) -> bool:
        """Whether steps go out although there may be nothing to compute: their reports tell of the
        end of parked loads, and of ended ones whose blocks cannot be used yet.
        """
        records = chain(self.new, self.running.values())
        return bool(self._resting) or any(record.parked_for is not None for record in records)

    def rest(self, result: LoadResult, blocks: list[KVCacheBlock]) -> None:
        """Keep these blocks: a peer may still write into them."""
        self._num_resting[result.load_id] += result.num_resting
        self._resting[result.load_id] = blocks

    def note_rested(self, load_ids: Sequence[LoadId]) -> None:
        """One worker for each has nothing more to fear."""
        self._num_resting.subtract(load_ids)

    def take_rested(self) -> list[KVCacheBlock]:
        """Blocks that nobody writes into any more."""
        over = [i for i in self._resting if self._num_resting[i] <= 0]
        for load_id in over:
            del self._num_resting[load_id]
        return [block for load_id in over for block in self._resting.pop(load_id)]

    def claim(
        self,
        request: Request,
        source: BlockSource,
        phantoms: Sequence[Phantom],
        tails: Sequence[TailBlock] = (),
    ) -> None:
        """This step loads these blocks, because ``request`` has committed to them."""
        record = self._by_source.get(id(source))
        if record is None:
            record = LoadRecord(LoadId(next(self._ids)), source)
            self._by_source[id(source)] = record
            self.new.append(record)
            source.load_started()
        record.phantoms.extend(phantoms)
        record.tails = tails or record.tails
        record.users.setdefault(request, set())
        for phantom in phantoms:
            record.filled[phantom.block.block_id] = phantom.place

    def park(
        self,
        source: BlockSource,
        places: Sequence[Wanted],
        blocks: Sequence[KVCacheBlock],
        tails: Sequence[TailBlock] = (),
    ) -> None:
        """Load these held blocks, and perhaps the prompt's tail, beside the steps."""
        filled = {block.block_id: place for block, place in zip(blocks, places, strict=True)}
        record = LoadRecord(
            LoadId(next(self._ids)),
            source,
            filled,
            tails,
            parked_for=source.request,
            held=blocks,
            contents=[self._content(source.request, place) for place in places],
        )
        self.new.append(record)
        for content in record.contents:
            self._coming.setdefault(content, []).append(record)
        source.load_started()

    def awaits_parked(self, source: BlockSource, places: Sequence[Wanted]) -> bool:
        """Whether a parked load is bringing in one of these blocks of the request of ``source``,
        which then ``still_awaits`` it.
        """
        source.awaited_load = None
        if self._coming:
            for place in places:
                for record in self._coming.get(self._content(source.request, place), ()):
                    if record.is_coming_for(source):
                        source.awaited_load = record
                        return True
        return False

    def _content(self, request: Request, place: Wanted) -> tuple[bytes, int]:
        """What the block there holds."""
        index, group = place
        if group in self._groups:
            index = self._groups[group].last_hash(index)
        return request.block_hashes[index], group

    def still_awaits(self, source: BlockSource) -> bool:
        """Whether the load that it was last found to wait for has not ended: what many requests
        ask in each pass, without a look at their blocks.
        """
        record = source.awaited_load
        return record is not None and not record.has_ended and record.is_coming_for(source)

    def note_begin(self, request: Request, num_units: int) -> None:
        """So many of its units were there when it was admitted, or are loaded."""
        self._begins[request] = num_units

    def begin_of(self, request: Request) -> int:
        """The index of the first unit that it computes itself, or a part of it."""
        return self._begins.get(request, 0)

    def note_user(self, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        """``request`` shares blocks; those of a load that has not ended make it a user, and so do
        those that another one computes on them.
        """
        block_ids = {block.block_id for block in blocks}
        for record in self.in_steps():
            if request not in record.users and record.may_spoil(block_ids):
                record.users[request] = set()

    def in_steps(self) -> list[LoadRecord]:
        """Loads that are not parked, and whose end is not known yet."""
        return [r for r in (*self.new, *self.running.values()) if r.parked_for is None]

    def may_spoil(self, block: KVCacheBlock, user: Request) -> bool:
        """Whether a load in a step has yet to fill it, or what it is computed on: one that ``user``
        does not use itself.
        """
        block_ids = {block.block_id}
        records = self.in_steps()
        return any(record.may_spoil(block_ids) for record in records if user not in record.users)

    def is_under(self, request: Request) -> bool:
        """Whether ``request`` is computed on KV of a load whose end is not known yet."""
        return any(request in record.users for record in self.in_steps())

    def note_computed(
        self, get_tables: Callable[[Request], Sequence[Sequence[KVCacheBlock]]]
    ) -> None:
        """Remember what this step computes on top of loads whose end is not known yet, in whatever
        group: a layer reads what those before it have made of the KV of other groups.
        """
        for record in self.in_steps():
            filled = record.places().keys()
            for user, on in record.users.items():
                blocks, tables = get_tables(user), self._tables.get(user)
                if tables is None or tables.num_blocks != sum(map(len, blocks)):
                    tables = self._tables[user] = self._make_tables(user, blocks)
                on |= filled & tables.block_ids
                for block_id in record.computed_on.keys() & tables.shared_ids:
                    on |= record.computed_on[block_id][1]
                if not on:
                    continue
                known = frozenset(on)
                for place, block in tables.computed:
                    phantom = Phantom(block, block.block_hash, record.source, place)
                    record.computed_on[block.block_id] = phantom, known

    def _make_tables(self, user: Request, tables: Sequence[Sequence[KVCacheBlock]]) -> _Tables:
        begin, groups = self.begin_of(user), self._groups
        each = [groups[i].blocks_per_unit if groups else 1 for i in range(len(tables))]
        return _Tables(tables, [begin * num_blocks for num_blocks in each])

    def cancel(self, request: Request) -> None:
        """Give up the parked load of this request; its blocks come back when it has ended."""
        for record in [*self.new, *self.running.values()]:
            if record.parked_for is request:
                self._cancels.append(record.load_id)

    def take_new(self) -> tuple[LoadSpec | PoolLoadSpec, ...]:
        """The loads that the worker starts in this step."""
        self._tables.clear()
        if not self.new:
            return ()
        new, self.new = self.new, []
        self._by_source.clear()
        self.running.update((record.load_id, record) for record in new)
        return tuple(record.spec() for record in new)

    def take_cancels(self) -> tuple[LoadId, ...]:
        """Loads that the worker gives up in this step."""
        if not self._cancels:
            return ()
        new = {record.load_id for record in self.new}
        cancels = tuple(i for i in self._cancels if i in self.running)
        self._cancels = [i for i in self._cancels if i in new]
        return cancels

    def fold(self, result: LoadResult) -> LoadResult | None:
        """One worker's result; that of the load once every worker has reported it.

        When one has failed, the others give the load up: blocks go back only when nobody writes.
        """
        reported = self._reported.setdefault(result.load_id, [])
        reported.append(result)
        if len(reported) < self._num_workers:
            if result.cause:
                self._cancels.append(result.load_id)
            return None
        return merge_results(self._reported.pop(result.load_id))

    def end(self, load_id: LoadId) -> LoadRecord:
        record = self.running.pop(load_id)
        record.has_ended = True
        for content in record.contents:
            records = self._coming[content]
            records.remove(record)
            if not records:
                del self._coming[content]
        return record


class _Tables:
    """A user's blocks, of all groups."""

    def __init__(self, tables: Sequence[Sequence[KVCacheBlock]], begins: Sequence[int]) -> None:
        """``begins``: the index in each of the first block that it computes."""
        self.num_blocks = sum(map(len, tables))
        self.block_ids = {block.block_id for table in tables for block in table}
        self.shared_ids = {
            block.block_id
            for table, begin in zip(tables, begins, strict=True)
            for block in table[:begin]
        }
        self.computed = [
            (Wanted(index, group), table[index])
            for group, (table, begin) in enumerate(zip(tables, begins, strict=True))
            for index in range(begin, len(table))
            if not table[index].is_null
        ]

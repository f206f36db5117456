# SPDX-License-Identifier: Apache-2.0
"""A span: a piece of a sequence, and its blocks in each KV cache group. Pure.

    tokens      start                                   end
    blocks of 16  [  h0  ][  h1  ][  h2  ][  tail . . . .|
    blocks of 32  [      h0      ][        tail . . . . .|

A span begins at a boundary of blocks in every group. Its last block, the *tail*, holds its last
token: it is mostly not full, and then it has no hash. A prompt is the span [0, n); the span of a
request that runs ends later and later.

Layers that look back a little only give blocks up as a request goes on; ``NO_BLOCK`` stands where
they were. To go on behind a span takes all blocks of some groups and the last ones of others:

    all tokens    [b7][b4][b9][b2][tail
    windows       [  ][  ][  ][b5][tail
    states        [  ][  ][  ][b8][tail    each holds the state behind its last token

Where groups have blocks of several sizes, as many tokens as the blocks of all of them end behind
are a *unit*: at its end a prefix that is cached may end. Of most engines a unit is a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_BLOCK = -1
"""Stands among block ids where a request has given a block up, as vLLM's null block does."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV of the same tokens is in the same blocks; fixed for an engine.

    ``id`` is the group's place among those of the engine. ``block_size`` is in tokens;
    ``page_bytes`` is what one worker has of a block in one of ``layers``, in which a layer with a
    larger page is several times; ``sizes`` are those of pages in memory, where there are several.
    A token attends to the last ``window`` ones, itself included, or to those of its own ``chunk``,
    if there is one. Of a group with a ``state``, which says of what kind it is, a block holds what
    its layers make of all tokens before its end, and nothing of the tokens themselves. An engine
    that ``stops_early`` does so at the last boundary of blocks but one of a prompt, and not at the
    last. A unit has ``blocks_per_unit``, and each of them the hash of its end, which is one of
    ``hashes_per_block``.
    """

    id: int
    block_size: int
    page_bytes: int
    layers: tuple[str, ...]
    window: int = 0
    chunk: int = 0
    state: str = ""
    stops_early: bool = False
    sizes: tuple[int, ...] = ()
    blocks_per_unit: int = 1
    hashes_per_block: int = 1

    @property
    def unit_size(self) -> int:
        """In tokens; the same in all groups."""
        return self.block_size * self.blocks_per_unit

    def unit_of(self, index: int) -> int:
        """The index of the unit that this block is in."""
        return index // self.blocks_per_unit

    def blocks_of(self, start: int, stop: int) -> range:
        """The indices of the blocks of these units."""
        return range(start * self.blocks_per_unit, stop * self.blocks_per_unit)

    @property
    def hashes_per_unit(self) -> int:
        """Of those of a request; the same in all groups."""
        return self.hashes_per_block * self.blocks_per_unit

    def last_hash(self, index: int) -> int:
        """The index of this block's hash among those of a request."""
        return (index + 1) * self.hashes_per_block - 1

    @property
    def cuts_pages(self) -> bool:
        """Whether some layers count as several."""
        return any(size > self.page_bytes for size in self.sizes)

    @property
    def bytes_per_block(self) -> int:
        """Of one worker's share, in all layers."""
        return self.page_bytes * len(self.layers)

    def tail_index(self, end: int) -> int:
        """The tail's index, for a span that ends at ``end``: so many full blocks are before it."""
        return (end - 1) // self.block_size

    def tail_unit(self, end: int) -> int:
        """The same in units, which are those of all groups."""
        return (end - 1) // self.unit_size

    @property
    def keeps_all(self) -> bool:
        """Whether a request that goes on reads all of its blocks."""
        return not (self.window or self.chunk or self.state)

    def first_needed(self, end: int) -> int:
        """The index of the first block that the token at ``end``, or a later one, attends to."""
        first = 0
        if self.window:
            first = max(0, end - self.window + 1)
        elif self.chunk:
            first = end - end % self.chunk
        elif self.state:
            first = max(0, end - 1)
        return first // self.block_size

    def first_kept(self, end: int) -> int:
        """The index of the first block of a span [0, ``end``) that whoever has computed it still
        has then: what its last token attends to.

        Of states those at the last boundary before it and behind it; a span that ends at a
        boundary may have been computed without a stop at the one before.
        """
        if self.state:
            return max(0, self.last_stop(end))
        return self.first_needed(end - 1)

    def last_stop(self, end: int) -> int:
        """The index of the block with the state at the last boundary; negative if there is none."""
        return end // self.block_size - 1 - self.stops_early

    def is_kept(self, index: int, end: int) -> bool:
        """Whether whoever has computed the span [0, ``end``) still has this block of it then."""
        if self.state:
            return index in (self.last_stop(end), self.tail_index(end))
        return self.keeps_all or index >= self.first_kept(end)


def has_states(groups: Sequence[KVGroup]) -> bool:
    """Whether some layers keep a state."""
    return any(group.state for group in groups)


class Wanted(NamedTuple):
    """A full block of a sequence that is to be loaded: its index, and its group's id."""

    block_index: int
    group: int = 0


class GroupBlocks(NamedTuple):
    """One group's blocks of a span, in order. ``hashes`` are those of full units, each of which is
    one of all tokens before its end; either may be shorter than the span, and be continued later.
    """

    block_size: int
    block_ids: tuple[int, ...] = ()
    hashes: tuple[bytes, ...] = ()

    @property
    def first(self) -> int:
        """The index of the first block that is left; behind the end if none is."""
        left = (i for i, block_id in enumerate(self.block_ids) if block_id != NO_BLOCK)
        return next(left, len(self.block_ids))


class LoadBlocks(NamedTuple):
    """Some blocks of a span in one group: its blocks ``indices`` go to ``block_ids`` of this
    engine. With ``has_tail`` the last one is the tail, which must be in place before a forward.
    """

    group: int
    indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    has_tail: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sequence; ``groups[i]`` are the blocks of the engine's group ``i``.

    Raises:
        ValueError: ``start`` is within a block, or there are more blocks than tokens for them.
    """

    start: int
    end: int
    groups: tuple[GroupBlocks, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"not a span of tokens: [{self.start}, {self.end})")
        for i, group in enumerate(self.groups):
            if self.start % group.block_size:
                raise ValueError(
                    f"a span must begin with a block: token {self.start} is within one of the"
                    f" {group.block_size} tokens that blocks of group {i} have"
                )
            if len(group.block_ids) > self.num_blocks(i) or len(group.hashes) > self.num_full(i):
                raise ValueError(
                    f"group {i} has {len(group.block_ids)} blocks and {len(group.hashes)} hashes"
                    f" for {self.end - self.start} tokens in blocks of {group.block_size}"
                )

    def num_blocks(self, group: int) -> int:
        """With the tail."""
        return -(-(self.end - self.start) // self.groups[group].block_size)

    def num_full(self, group: int) -> int:
        """Full blocks; the tail is one of them if it is full."""
        return (self.end - self.start) // self.groups[group].block_size

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Of all groups, which take their blocks from one pool."""
        ids = (block_id for group in self.groups for block_id in group.block_ids)
        return tuple(block_id for block_id in ids if block_id != NO_BLOCK)

    @property
    def unit_size(self) -> int:
        """Of all groups together, in tokens."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def unit_start(self) -> int:
        """The first token of the last unit, which is mostly not full: that of its tail."""
        return self.start + max(0, self.end - self.start - 1) // self.unit_size * self.unit_size

    def holding(self, tables: Sequence[Sequence[int]]) -> Span:
        """The same in the blocks of these tables, by group, which may go on behind its end."""
        return replace(
            self,
            groups=tuple(
                group._replace(block_ids=tuple(table[: self.num_blocks(i)]))
                for i, (group, table) in enumerate(zip(self.groups, tables, strict=True))
            ),
        )

    def first_of(self, block_ids: set[int]) -> int:
        """The first token that is in one of these blocks; ``end`` if none is."""
        return min(
            (
                self.start + index * group.block_size
                for group in self.groups
                for index, block_id in enumerate(group.block_ids)
                if block_id in block_ids
            ),
            default=self.end,
        )

    def block_ids_from(self, token: int) -> set[int]:
        """Blocks that hold this token or one after it."""
        return {
            block_id
            for group in self.groups
            for block_id in group.block_ids[max(0, token - self.start) // group.block_size :]
            if block_id != NO_BLOCK
        }

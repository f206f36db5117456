# SPDX-License-Identifier: Apache-2.0
"""Between the scheduler and its workers' pool: lookups, saves, and what became of them.

Lookups and answers go beside the steps, so that a lookup leaves while a step runs. Saves go with
the next step, as loads do, or beside them when none follows (an engine with nothing to do sleeps
while its last blocks are stored) or several are under way at a time.

    scheduler:  Lookup ──► each worker     Save ──► each worker
                       ◄── Found                ◄── Packed   its blocks may be reused
                                                ◄── Saved    how it ended

Blocks may have been packed while their step computed them. The Save after the step says which of
them are good; DropAhead ends what no Save has asked for.

Each worker stores and finds its own share of a block; ``pool.fold`` folds what they say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.types import LoadId


class PoolBlocks(NamedTuple):
    """Of one KV cache group: the value of ``hashes[i]`` goes to ``block_ids[i]``."""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class PoolLoadSpec:
    """Blocks of the pool to load, by KV cache group."""

    load_id: LoadId
    blocks: tuple[PoolBlocks, ...]
    in_step: bool
    timeout_s: float
    has_tail: bool = False
    """Whether the forward writes into some of them, so that they must be in place before."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Of all groups."""
        return tuple(block_id for part in self.blocks for block_id in part.block_ids)


class AheadSpec(msgspec.Struct, frozen=True):
    """Blocks that this step fills and a ``Save`` with this ``ahead_id`` may ask for afterwards, so
    that they can be packed while the step still computes.
    """

    ahead_id: int
    block_ids: tuple[int, ...]
    group: int = 0


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """Where are these blocks? ``groups`` are their KV cache groups, a byte each. Not answered when
    nobody has come to it ``before`` (monotonic s).
    """

    lookup_id: int
    hashes: bytes
    hash_bytes: int
    groups: bytes
    before: float


class Found(msgspec.Struct, tag=True, frozen=True):
    """``places[i]`` is a ``types.Place``."""

    lookup_id: int
    places: bytes
    healthy: bool


class Save(msgspec.Struct, tag=True, frozen=True):
    """Store these blocks. They are computed, and stay as they are until ``Packed``.

    With an ``ahead_id`` they are some of those that a step announced under it (``AheadSpec``), and
    have stayed as that step left them.
    """

    save_id: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    ahead_id: int = 0
    group: int = 0
    tenants: tuple[str, ...] = ()
    """Of each block, where tenants have shares of the pool."""


class DropAhead(msgspec.Struct, tag=True, frozen=True):
    """No further ``Save`` names what was announced up to this one."""

    last_ahead_id: int


class DropSaves(msgspec.Struct, tag=True, frozen=True):
    """Give up the saves up to this one that are not under way."""

    last_save_id: int


class Packed(msgspec.Struct, tag=True, frozen=True):
    """The blocks of this save are not read any more. Comes before ``Saved``."""

    save_id: int


class Saved(msgspec.Struct, tag=True, frozen=True):
    """``statuses[i]`` is the value of a ``pool.tier.Status``, or ``dropped``."""

    save_id: int
    statuses: tuple[str, ...]
    num_bytes: int
    elapsed_ms: float
    num_over_share: int = 0
    """Values that tiers have evicted since the last one because their tenant had its share."""
    num_file_errors: int = 0
    """Files that could not be written or read since the last one."""


DROPPED = "dropped"

Message: TypeAlias = Lookup | Found | Save | DropAhead | DropSaves | Packed | Saved


def join_hashes(hashes: Sequence[bytes]) -> tuple[bytes, int]:
    """One byte string, and the size of each hash."""
    return b"".join(hashes), len(hashes[0])


def split_hashes(joined: bytes, hash_bytes: int) -> list[bytes]:
    return [joined[i : i + hash_bytes] for i in range(0, len(joined), hash_bytes)]

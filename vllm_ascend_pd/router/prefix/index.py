# SPDX-License-Identifier: Apache-2.0
"""The blocks that one engine holds, named by hashes of our own over their tokens.

Engines hash with seeds and algorithms that the router does not know. So each block that an event
names is hashed again, over its tokens and the block before it:

    own(block) = blake2b(own(block before it) + its token ids)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from enum import Enum
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.types import GENERATION_SALT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""What ``chain`` can hash."""
MAX_BLOCKS = 1 << 20
"""Of one engine; about 250 MiB. More are not remembered, and the index says so."""
ROOT = b""


class IndexState(str, Enum):
    """How far an index can be believed."""

    EXACT = "exact"
    """It knows every block since the cache was empty."""
    DEGRADED = "degraded"
    """What it knows is there, but there may be more."""
    FALLBACK = "fallback"
    """No event has come: nothing is known."""


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """Fields of vLLM's event that are read here."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(gt=0)]
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct, array_like=True):
    """One message of the publisher."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class _Stamp(msgspec.Struct, array_like=True):
    """The first field of an ``EventBatch``."""

    ts: float


_decoder: msgspec.msgpack.Decoder[EventBatch] = msgspec.msgpack.Decoder(EventBatch)
_stamp_decoder: msgspec.msgpack.Decoder[_Stamp] = msgspec.msgpack.Decoder(_Stamp)


def chain(token_ids: Sequence[int], block_size: int, start: bytes = ROOT) -> Iterator[bytes]:
    """Our hashes of the full blocks of these tokens, in order."""
    tokens = array("q", token_ids)
    for at in range(0, len(tokens) - block_size + 1, block_size):
        block = start + tokens[at : at + block_size].tobytes()
        start = hashlib.blake2b(block, digest_size=16).digest()
        yield start


_KEEPS_ALL = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
"""Kinds of layers (vLLM's ``KVCacheSpecKind``) that need all of a prefix, so that their blocks tell
of it. Windows and states give most of theirs up while a request runs: a hit needs the last only.
"""


class Holders:
    """Which engines have a block, so that a prompt is looked up once for all of them."""

    def __init__(self) -> None:
        self._slots: dict[bytes, int] = {}
        """Who has a block: a bit for each slot."""
        self._bits: list[int] = [1]
        """By slot: of most blocks one engine's alone, and so one object for all of them."""
        self._num_slots = 1
        """The first one is nobody's, and holds nothing."""
        self._free: list[int] = []
        self._block_sizes: Counter[int] = Counter()

    def take_slot(self) -> int:
        if self._free:
            return heappop(self._free)
        self._bits.append(1 << self._num_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def free_slot(self, slot: int) -> None:
        heappush(self._free, slot)

    def change_block_size(self, old: int | None, new: int | None) -> None:
        """Of one slot."""
        if old is not None:
            self._block_sizes[old] -= 1
        if new is not None:
            self._block_sizes[new] += 1
        self._block_sizes = +self._block_sizes

    def add(self, own: bytes, slot: int) -> bool:
        """Whether it was new there."""
        slots = self._slots.get(own, 0)
        self._slots[own] = slots | self._bits[slot] if slots else self._bits[slot]
        return not slots >> slot & 1

    def remove(self, own: bytes, slot: int) -> None:
        if left := self._slots.get(own, 0) & ~(1 << slot):
            self._slots[own] = left
        else:
            self._slots.pop(own, None)

    def num_hit_tokens(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """By slot: of the longest prefix that is known there."""
        import numpy as np

        num_tokens = np.zeros(self._num_slots, np.int64)
        for block_size in self._block_sizes:
            num_blocks, holding = 0, (1 << self._num_slots) - 1
            for own in chain(token_ids, block_size):
                still = holding & self._slots.get(own, 0)
                if still != holding:
                    self._put(num_tokens, holding ^ still, num_blocks * block_size)
                    holding = still
                if not holding:
                    break
                num_blocks += 1
            self._put(num_tokens, holding, num_blocks * block_size)
        return num_tokens

    def _put(self, num_tokens: npt.NDArray[np.int64], slots: int, found: int) -> None:
        if found and slots:
            import numpy as np

            raw = np.frombuffer(slots.to_bytes(self._num_slots // 8 + 1, "little"), np.uint8)
            bits = np.unpackbits(raw, count=self._num_slots, bitorder="little")
            num_tokens[bits.view(np.bool_)] = found


class PrefixIndex:
    """Of one engine, by one of its KV cache groups. Event loop thread."""

    def __init__(self, holders: Holders, max_blocks: int = MAX_BLOCKS) -> None:
        self.holders = holders
        self.slot = holders.take_slot()
        self._max_blocks = max_blocks
        self._own: dict[bytes | int, bytes] = {}
        """By the engine's hash."""
        self._num_twins: Counter[bytes | int] = Counter()
        """Beside the first: blocks of one hash, as of requests that came together. Each of them is
        stored and removed by an event of its own."""
        self._num_more: dict[bytes, int] = {}
        """An engine may have several hashes of one prefix: how many beside the first."""
        self._next_seq: int | None = None
        self._last_ts = 0.0
        """When the engine made the last message."""
        self.state = IndexState.FALLBACK
        self.block_size: int | None = None
        self._generation: list[Any] = []
        """Of the weights that the blocks are of, as the first block of a prompt says."""
        self._group = 0
        self._keeps_all = False
        """Whether ``_group`` does; until one is known that does, it is the first."""
        self.is_closed = False
        """Then its slot is another engine's."""

    def __len__(self) -> int:
        return len(self._own)

    def close(self) -> None:
        """Its engine is gone; what comes from it now is nobody's."""
        if self.is_closed:
            return
        self.is_closed = True
        self.forget(IndexState.FALLBACK)
        self.holders.free_slot(self.slot)

    def first_missing(self, seq: int, payload: bytes) -> int | None:
        """The number of the first message that should have come before this one, if any has not."""
        expected = self._next_seq or 0
        if seq > expected:
            return expected
        return 0 if 0 < seq < expected and self._is_newer(payload) else None

    def receive(self, seq: int, payload: bytes) -> None:
        """The next message. After a gap, what was removed meanwhile is not known: start anew. So
        when the engine has started again and begun to count from 0.
        """
        if self.is_closed:
            return
        if self._next_seq is not None and seq != self._next_seq and seq > 0:
            if seq < self._next_seq and not self._is_newer(payload):
                return  # a replay of what came already
            self.forget(IndexState.DEGRADED)
        elif self._next_seq is None or seq == 0:
            self.forget(IndexState.EXACT if seq == 0 else IndexState.DEGRADED)
        self._next_seq = seq + 1
        try:
            batch = _decoder.decode(payload)
        except UNREADABLE:
            self.forget(IndexState.DEGRADED)
            return
        self._last_ts = batch.ts
        for event in batch.events:
            self._apply(event)

    def _is_newer(self, payload: bytes) -> bool:
        """Whether the engine has made it after all that came before."""
        try:
            return _stamp_decoder.decode(payload).ts > self._last_ts
        except UNREADABLE:
            return False

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.forget(IndexState.EXACT)
        elif event.medium not in (None, "GPU"):
            return
        elif isinstance(event, BlockStored):
            if not self._keeps_all and event.kv_cache_spec_kind in _KEEPS_ALL:
                self._follow(event.group_idx or 0)
            if (event.group_idx or 0) == self._group:
                self._store(event)
        elif (event.group_idx or 0) == self._group:
            for block_hash in event.block_hashes:
                self._remove(block_hash)

    def _follow(self, group: int) -> None:
        if group != self._group:
            self.forget(self.state)
        self._group, self._keeps_all = group, True

    def _store(self, event: BlockStored) -> None:
        salted = any(key for key in event.extra_keys or () if not _is_generation(key))
        if event.lora_name or salted:
            return  # only a request with the same adapter, salt or image would hit
        parent = event.parent_block_hash
        start = ROOT if parent is None else self._own.get(parent)
        if start is None or len(event.token_ids) < event.block_size * len(event.block_hashes):
            return  # its beginning came before we listened, or is salted
        if event.block_size != self.block_size:
            if self.block_size is not None and event.block_size < self.block_size:
                return  # a part of a block, which vLLM caches at the end of a prompt
            self._clear()
            self._set_block_size(event.block_size)
            if parent is not None:
                return
        if parent is None:
            self._change_generation(event.extra_keys)
        for block_hash, own in zip(
            event.block_hashes, chain(event.token_ids, event.block_size, start), strict=False
        ):
            if block_hash in self._own:
                self._num_twins[block_hash] += 1
                continue
            if len(self._own) >= self._max_blocks:
                self.state = IndexState.DEGRADED
                return
            self._own[block_hash] = own
            if not self.holders.add(own, self.slot):
                self._num_more[own] = self._num_more.get(own, 0) + 1

    def _change_generation(self, extra_keys: list[Any] | None) -> None:
        """Blocks that are of other weights are not hit any more."""
        generation = list((extra_keys or [None])[0] or ())
        if generation != self._generation:
            self._clear()
            self._generation = generation

    def _remove(self, block_hash: bytes | int) -> None:
        if num_twins := self._num_twins.pop(block_hash, 0):
            if num_twins > 1:
                self._num_twins[block_hash] = num_twins - 1
            return
        own = self._own.pop(block_hash, None)
        if own is None:
            return
        more = self._num_more.pop(own, 0)
        if more > 1:
            self._num_more[own] = more - 1
        elif not more:
            self.holders.remove(own, self.slot)

    def forget(self, state: IndexState) -> None:
        self._clear()
        self._set_block_size(None)
        self._group, self._keeps_all = 0, False
        self.state = state

    def _clear(self) -> None:
        for own in self._own.values():
            self.holders.remove(own, self.slot)
        self._own.clear()
        self._num_twins.clear()
        self._num_more.clear()

    def _set_block_size(self, block_size: int | None) -> None:
        self.holders.change_block_size(self.block_size, block_size)
        self.block_size = block_size


def _is_generation(keys: Any) -> bool:
    """Whether a block says only with which weights it was computed, as all of that engine do."""
    return (
        isinstance(keys, list | tuple)
        and len(keys) == 1
        and isinstance(keys[0], str)
        and keys[0].startswith(GENERATION_SALT)
    )

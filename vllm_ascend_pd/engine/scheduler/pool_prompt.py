# SPDX-License-Identifier: Apache-2.0
"""What the pool has of one request's prompt, from its lookup to its end."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from vllm_ascend_pd.metrics import Provenance
from vllm_ascend_pd.pool.messages import PoolLoadSpec
from vllm_ascend_pd.pool.tier import Place

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_ascend_pd.config import TransferConfig
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.pool.keys import PoolNames
    from vllm_ascend_pd.types import LoadId


class PoolState(Enum):
    LOOKING = "looking"
    """The lookup is on its way; the request waits for it."""
    READY = "ready"
    """The pool's blocks count as hits."""
    OVER = "over"
    """Nothing (more) is taken from the pool for this request."""


class PoolEvent(Enum):
    FOUND = "found"
    NOTHING = "nothing"
    """Not found, not answered in time, or the pool is bypassed."""
    LOAD_FAILED = "load failed"
    ADMITTED = "admitted"
    ENDED = "ended"


TRANSITIONS = {
    PoolState.LOOKING: {
        PoolEvent.FOUND: PoolState.READY,
        PoolEvent.NOTHING: PoolState.OVER,
        PoolEvent.ENDED: PoolState.OVER,
    },
    PoolState.READY: {
        PoolEvent.LOAD_FAILED: PoolState.OVER,
        PoolEvent.ADMITTED: PoolState.OVER,
        PoolEvent.ENDED: PoolState.OVER,
    },
    PoolState.OVER: {},
}


class PoolPrompt:
    """What the pool has of one request's blocks; a ``BlockSource``."""

    def __init__(
        self, request: Request, start: int, transfer: TransferConfig, names: PoolNames
    ) -> None:
        self._names = names
        self.request = request
        self.state = PoolState.LOOKING
        self.queued_status = request.status
        """The status to return to when nothing is pending any more."""
        self.start = start
        """Blocks before this one were in the prefix cache at arrival and were not asked for."""
        self.num_blocks = 0
        self.num_tail_tokens = 0
        """All but the last token of a prompt of full blocks: vLLM computes that one, and would
        compute its whole block."""
        self.held_tail: KVCacheBlock | None = None
        self.placed = False
        self.parked = False
        self.is_stale = False
        self.num_parked_tokens = 0
        self.num_loads = 0
        self.loaded: set[int] = set()
        """Blocks that loads have brought in."""
        self.provenance = Provenance(request.num_prompt_tokens)
        self.had_peer = False
        """``provenance`` is that of its session with a peer, which the consumer counts."""
        self.admitted = False
        self._places: bytes = b""
        self._transfer = transfer

    def advance(self, event: PoolEvent) -> bool:
        """Whether the event had an effect."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            return False
        self.state = state
        return True

    @property
    def pending(self) -> bool:
        """Whether the pool has not answered yet."""
        return self.state is PoolState.LOOKING

    @property
    def offers(self) -> bool:
        return self.state is PoolState.READY and not self.parked

    def found(self, places: bytes) -> None:
        """``places[i]`` is that of block ``start + i``."""
        self._places = places
        self.num_blocks = self.start + len(places.rstrip(b"\0"))

    def has_tail(self, index: int) -> bool:
        return self.num_tail_tokens > 0 and self.has_block(index)

    def has_block(self, index: int) -> bool:
        return self.place_of(index) is not Place.NOWHERE

    def place_of(self, index: int) -> Place:
        if not self.start <= index < self.num_blocks:
            return Place.NOWHERE
        return Place(self._places[index - self.start])

    def count_computed(self, admitted: bool) -> bool:
        """Whether the request has been admitted. Nobody says so when nothing of its prompt was to
        be had: then all of it is computed.
        """
        if admitted and not self.admitted:
            self.admitted = True
            self.provenance.num_computed_tokens = self.provenance.num_prompt_tokens
        return self.admitted

    def make_load(
        self,
        load_id: LoadId,
        block_indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        has_tail: bool,
        in_step: bool,
    ) -> PoolLoadSpec:
        hashes = tuple(self._names.name(self.request.block_hashes[i]) for i in block_indices)
        transfer = self._transfer
        timeout_s = transfer.step_load_timeout_s if in_step else transfer.load_timeout_s
        return PoolLoadSpec(load_id, hashes, block_ids, in_step, timeout_s, has_tail)

    def load_started(self) -> None:
        self.num_loads += 1

    def load_ended(self, result: LoadResult) -> None:
        self.num_loads -= 1
        if result.cause:
            self.advance(PoolEvent.LOAD_FAILED)

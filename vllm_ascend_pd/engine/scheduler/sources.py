# SPDX-License-Identifier: Apache-2.0
"""Where blocks of a prompt can be had beside this engine's own prefix cache: the contract.

A source is asked for one request, which waits in ``WAITING_FOR_KV`` for the answer. What it has is
loaded beside the steps (parked) or in the step that admits the request (placed). This file owns
every change of a source's state:

    ASKED ──found──► READY ──place─────────────────────► PLACED ──admit──► ADMITTED ──done──► DONE
      │                │ └───park──► PARKED ──parked load ended──┘            │
      │                │               │ └─give up──► LEAVING ─its load ended─┤
      └── nothing ─────┴─── failed, given up ────────────────────────────────┴──► FAILED

    aborted, the request has ended, or wants nothing from its start: from any not final, ABORTED

``ADMITTED`` is done when no load that uses the source is under way. Final are ``DONE``, ``FAILED``
and ``ABORTED``: the request needs nothing more from it. Loads may end later still.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.vllm_api.groups import known_end
from vllm_ascend_pd.engine.vllm_api.status import status_in_queue
from vllm_ascend_pd.metrics import Provenance
from vllm_ascend_pd.states import Transitions
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.scheduler.loads import LoadRecord
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.kv.cost import LoadPlan
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
    from vllm_ascend_pd.pool.messages import PoolLoadSpec
    from vllm_ascend_pd.transfer.load import LoadSpec
    from vllm_ascend_pd.types import LoadId


class SourceState(Enum):
    ASKED = "asked"
    READY = "ready"
    PARKED = "parked"
    PLACED = "placed"
    ADMITTED = "admitted"
    LEAVING = "leaving"
    """Nothing more is wanted of it, but its parked load has not ended yet."""
    DONE = "done"
    FAILED = "failed"
    ABORTED = "aborted"

    @property
    def final(self) -> bool:
        return self in _FINAL


_FINAL = (SourceState.DONE, SourceState.FAILED, SourceState.ABORTED)


class SourceEvent(Enum):
    FOUND = "found"
    NOTHING = "nothing"
    """Refused, not found, or not answered in time."""
    PARK = "park"
    PLACE = "place"
    PARKED_LOAD_ENDED = "parked load ended"
    PARKED_LOAD_FAILED = "parked load failed"
    STEP_LOAD_FAILED = "load in a step failed"
    GIVE_UP = "give up"
    ADMIT = "admit"
    DONE = "done"
    ABORT = "abort"


_S, _E = SourceState, SourceEvent
# The request has ended, or does without: what comes then comes too late.
_OVER = (_E.PARKED_LOAD_ENDED, _E.PARKED_LOAD_FAILED, _E.STEP_LOAD_FAILED, _E.GIVE_UP, _E.ABORT)
_FAILS = {_E.STEP_LOAD_FAILED: _S.FAILED, _E.GIVE_UP: _S.FAILED, _E.ABORT: _S.ABORTED}

TRANSITIONS: Transitions[SourceState, SourceEvent] = Transitions(
    {
        _S.ASKED: {
            _E.FOUND: _S.READY,
            _E.NOTHING: _S.FAILED,
            _E.GIVE_UP: _S.FAILED,
            _E.ABORT: _S.ABORTED,
        },
        _S.READY: {_E.PARK: _S.PARKED, _E.PLACE: _S.PLACED, _E.ADMIT: _S.ADMITTED, **_FAILS},
        _S.PARKED: {
            _E.PARKED_LOAD_ENDED: _S.PLACED,
            _E.PARKED_LOAD_FAILED: _S.FAILED,
            _E.GIVE_UP: _S.LEAVING,
            _E.ABORT: _S.ABORTED,
        },
        _S.LEAVING: {
            _E.PARKED_LOAD_ENDED: _S.FAILED,
            _E.PARKED_LOAD_FAILED: _S.FAILED,
            _E.GIVE_UP: _S.LEAVING,
            _E.ABORT: _S.ABORTED,
        },
        _S.PLACED: {_E.ADMIT: _S.ADMITTED, **_FAILS},
        # A request that was preempted is admitted again, also after its source has failed.
        _S.ADMITTED: {_E.ADMIT: _S.ADMITTED, _E.DONE: _S.DONE, **_FAILS},
        _S.DONE: {_E.ADMIT: _S.DONE, **dict.fromkeys(_OVER, _S.DONE)},
        _S.FAILED: {_E.ADMIT: _S.FAILED, **dict.fromkeys(_OVER, _S.FAILED)},
        _S.ABORTED: {_E.ADMIT: _S.ABORTED, **dict.fromkeys(_OVER, _S.ABORTED)},
    }
)
_WAITING = (SourceState.ASKED, SourceState.PARKED, SourceState.LEAVING)
_OFFERING = (SourceState.READY, SourceState.PLACED)


class BlockSource(ABC):
    """Blocks of one request's span [0, ``end``) that are held elsewhere: by a peer, or by the pool.

    Scheduler thread only. A load of blocks that are gone meanwhile fails; it never gets others.
    ``block index`` counts the span's blocks in a KV cache group; numbers of blocks are those of
    units, see ``kv.span``.
    """

    is_complete = True
    """Whether all of it is there; else only a parked load, which waits for the rest, brings it."""
    always_parks = False
    """Whether its loads are parked if memory allows, however short they are."""
    parked_only = False
    """Whether nothing of it may be loaded in a step, when a request holds the blocks already."""
    place_until = math.inf
    """When it is given up to find memory for what is not complete."""
    num_short = 0
    """Free blocks that a load beside the steps would have needed, where memory was too short."""
    look_again_at = 0.0
    """When it is looked at again even if no more are free."""
    awaited_load: LoadRecord | None = None
    """The load of another request that brings in what this one lacks."""
    lacks_nothing = False
    """Whether all was here when it was looked at before a pass has come to its request."""
    cut_short = (-1, 0)
    """Where memory was too short for more of its blocks: how many there were of the request then,
    and how many were free.
    """
    max_blocks: float = math.inf
    """So many leading blocks count as hits at most, also of those that are cached here."""

    def __init__(self, request: Request, provenance: Provenance | None = None) -> None:
        self.request = request
        self.end = known_end(request)
        self.provenance = provenance or Provenance(self.end)
        self.state = SourceState.ASKED
        self.num_loads = 0
        """Loads under way that use it, also those of other requests that share its blocks."""
        self.num_parked_tokens = 0
        """Tokens that a parked load has brought into the prefix cache, until admission."""
        self.is_stale = False
        """Whether the request is hashed anew: what loads bring in has other hashes."""
        self.plan: LoadPlan | None = None
        """What was decided last."""
        self._num_blocks = 0
        self._is_cut = False
        """Whether fewer are used than there are, and so no tail."""
        self._status_at_arrival = request.status
        self._is_counted = False

    # What it has.

    @property
    def num_blocks(self) -> int:
        """Full blocks from the first that can be had to the last, counted from the start."""
        return self._num_blocks

    @property
    @abstractmethod
    def num_tail_tokens(self) -> int:
        """Tokens that can be had of the span's tail."""

    @property
    def max_tail_tokens(self) -> int:
        """The same, if more tokens are known when the request is admitted."""
        return self.num_tail_tokens

    @abstractmethod
    def has_block(self, index: int, group: int = 0) -> bool:
        """Whether this full block of the prompt can be had in this group."""

    @abstractmethod
    def has_tail(self, index: int) -> bool:
        """Whether the tail can be had once all full blocks before ``index``, its own, are there."""

    @property
    def is_tail_cacheable(self) -> bool:
        """Whether its tail, once loaded, is a block like the others."""
        return False

    @abstractmethod
    def load_ms(self, places: Sequence[Wanted]) -> list[float]:
        """How long loading each of these blocks is expected to take."""

    @property
    def compute_ms(self) -> float:
        """To compute a block instead; 0 where that is not known, or not to be considered."""
        return 0.0

    def is_cut_short(self, num_hits: int, num_free: int) -> bool:
        """Whether there are as many of its blocks as memory has had room for, and it has no more:
        so it is for a request that finds no memory, in each pass.
        """
        num_hits_then, num_free_then = self.cut_short
        return num_hits == num_hits_then and num_free <= num_free_then

    # What becomes of it.

    def advance(self, event: SourceEvent) -> None:
        self.state = TRANSITIONS.after(self.state, event)

    @property
    def pending(self) -> bool:
        """Whether it has not answered yet."""
        return self.state is SourceState.ASKED

    @property
    def parked(self) -> bool:
        """Whether a parked load for its request is under way."""
        return self.state in (SourceState.PARKED, SourceState.LEAVING)

    @property
    def offers(self) -> bool:
        """Whether the lookup of the waiting request may count on this source."""
        return self.state in _OFFERING

    def holds_back(self) -> bool:
        """Whether the request waits for something of it before it is decided how blocks come."""
        return self.state in _WAITING

    def delays(self) -> bool:
        """Whether the request, whose blocks are in place, should wait a little more."""
        return False

    @property
    def queued_status(self) -> Any:
        """The status to return to when nothing is pending any more."""
        return status_in_queue(self.request, self._status_at_arrival)

    @property
    def hands_on(self) -> bool:
        """Whether it failed, so that the next source is to be asked."""
        return self.state is SourceState.FAILED

    def use(self, plan: LoadPlan, num_offered: int) -> None:
        """It is decided how its blocks come, and how many of ``num_offered`` leading ones do."""
        self.plan = plan
        if plan.num_blocks < num_offered:
            self._num_blocks, self._is_cut = plan.num_blocks, True

    def give_up(self, cause: Cause) -> None:
        """The request goes on without what this source has."""
        self.advance(_E.GIVE_UP)

    def forsake(self) -> None:
        """What it has is not what would be computed here any more."""
        self.is_stale = True
        self.give_up(Cause.INCOMPATIBLE)

    # Loads and admission.

    @abstractmethod
    def make_load(
        self,
        load_id: LoadId,
        blocks: tuple[LoadBlocks, ...],
        in_step: bool,
    ) -> LoadSpec | PoolLoadSpec:
        """What the worker needs for ``blocks``, by group; not ``in_step`` if ``parked_only``."""

    def load_started(self) -> None:
        """A load that uses this source is about to be sent to the worker."""
        self.num_loads += 1

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        """One has ended: ``result.cause`` is empty when it succeeded. ``places`` are those of the
        blocks that it should have filled, by block id.
        """
        self.num_loads -= 1
        if was_parked:
            failed = bool(result.cause)
            self.advance(_E.PARKED_LOAD_FAILED if failed else _E.PARKED_LOAD_ENDED)
        elif result.cause:
            self.advance(_E.STEP_LOAD_FAILED)
        self._end_if_done()

    def admit(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        """The request is scheduled on so many tokens of this engine's cache and of this source; its
        step loads the blocks ``indices``.
        """
        self.advance(_E.ADMIT)
        if not self._is_counted:
            self._is_counted = True
            self.count(num_local, num_external, indices)
        self.num_parked_tokens = 0
        self._end_if_done()

    def _end_if_done(self) -> None:
        """With nothing on its way, what the request was admitted with was all."""
        if self.state is SourceState.ADMITTED and not self.num_loads:
            self.advance(_E.DONE)

    @abstractmethod
    def count(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        """Into ``provenance``, at the first admission."""

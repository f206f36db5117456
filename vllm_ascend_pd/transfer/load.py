# SPDX-License-Identifier: Apache-2.0
"""What one load from a peer is: asked for by the scheduler, run by `receive`, ended once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.kv.load import LoadResult

if TYPE_CHECKING:
    from collections import deque

    from numpy.typing import NDArray

    from vllm_ascend_pd.backends.block_copy import PageLayout
    from vllm_ascend_pd.backends.page_ring import RingPlacer
    from vllm_ascend_pd.backends.staging import Slot
    from vllm_ascend_pd.transfer.plan import Piece
    from vllm_ascend_pd.transfer.shares import Share
    from vllm_ascend_pd.types import Endpoint, LoadId
    from vllm_ascend_pd.wire import Progress, Ticket, Worker


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Blocks of one lease to load, scheduler to worker.

    ``block_indices[i]`` of the producer's lease goes to ``block_ids[i]`` of this engine. With
    ``has_tail`` the last one is a tail block, which must be in place before the forward.
    An ``in_step`` load ends within the step that carries it.

    ``peers`` are the producer's workers, by tensor-parallel rank; a worker loads from those that
    hold its pages.

    A load with ``num_awaited`` set begins while the producer still computes the prompt, and ends
    when it has everything and that many of the producer's blocks are computed.
    """

    load_id: LoadId
    peers: tuple[Worker, ...]
    transfer_id: str
    epoch: str
    block_indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    has_tail: bool
    in_step: bool
    timeout_s: float
    num_awaited: int | None = None


@dataclass(slots=True, eq=False)
class Load:
    """What one load takes from one worker of the producer.

    A load from several ends as a whole: when one fails so do the ``others``.

    ``lock`` guards ``ended`` and the scatter into live pages: once ``ended`` is set, by any
    thread, not one byte more is written for this load.
    """

    spec: LoadSpec
    peer: Endpoint
    ticket: Ticket
    theirs: Share
    layout: PageLayout
    """Of this load's part of this worker's pages."""
    pieces: deque[Piece]
    pieces_of_layer: list[int]
    tail_pieces: int
    num_pieces: int
    started: float
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: LoadResult | None = None
    others: list[Load] = field(default_factory=list)
    num_bytes: int = 0
    transport: str = ""
    num_planned: list[int] = field(default_factory=list)
    """Of an awaited load: how many leading blocks of each layer have been asked for."""
    is_complete: bool = True
    """Whether all pieces are known; an awaited load learns of them bit by bit."""
    watched_at: float = 0.0
    progress: Progress | None = None
    """What the producer said last; an answer that says the same again prolongs nothing."""
    num_unsettled: int = 0
    """Pieces that the producer writes right into the pages, and may still be writing. Under the
    lock, as what is asked for after the end would be written into somebody else's blocks."""

    def has_layer(self, layer: int) -> bool:
        """Whether every piece of it has landed."""
        return not self.pieces_of_layer[layer]

    def has_tails(self) -> bool:
        """Whether every tail block has landed."""
        return not self.tail_pieces

    def end(self, cause: str) -> bool:
        """Final, once; waits for a scatter that is under way (a memcpy)."""
        with self.lock:
            if self.ended is not None:
                return False
            elapsed_ms = (time.monotonic() - self.started) * 1000
            self.ended = LoadResult(
                self.spec.load_id,
                cause,
                self.num_bytes,
                elapsed_ms,
                transport=self.transport,
                was_awaited=self.spec.num_awaited is not None,
                num_resting=int(self.num_unsettled > 0),
            )
            return True


@dataclass(slots=True)
class InFlight:
    load: Load
    piece: Piece
    slot: Slot
    seed: int
    sent_at: float
    is_live: bool
    placer: RingPlacer | None = None
    """Of the ring that its slot is, if the producer uses it."""
    is_ring_full: bool = False
    """Said by the producer, which says it again only after there was room."""

    def pages(self) -> tuple[PageLayout, NDArray[np.int64]]:
        """Where it goes."""
        load, piece = self.load, self.piece
        layers = load.layout.for_layers(piece.first_layer, piece.first_layer + piece.num_layers)
        return layers, np.array(load.spec.block_ids[piece.start : piece.stop], dtype=np.int64)

    def num_bytes(self) -> int:
        return self.piece.num_bytes(self.load.layout.page_bytes)

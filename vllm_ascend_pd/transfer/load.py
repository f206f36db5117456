# SPDX-License-Identifier: Apache-2.0
"""What one load from a peer is: asked for by the scheduler, run by `receive`, ended once."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.kv.load import Load, LoadResult
from vllm_ascend_pd.transfer.pieces import Piece, plan_pieces, plan_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.backends.block_copy import GroupPages, Ids, PageLayout
    from vllm_ascend_pd.backends.page_ring import RingPlacer
    from vllm_ascend_pd.backends.staging import Slot
    from vllm_ascend_pd.kv.span import LoadBlocks
    from vllm_ascend_pd.transfer.shares import PageSource
    from vllm_ascend_pd.types import Endpoint, LoadId
    from vllm_ascend_pd.wire import Progress, Ticket, Worker


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Blocks of one lease to load, by KV cache group, scheduler to worker.

    An ``in_step`` load ends within the step that carries it.

    ``peers`` are the producer's workers, by rank; a worker loads from those that hold its pages.

    A load with ``num_awaited`` set begins while the producer still computes the span, and ends
    when it has everything and that many of the producer's tokens are computed.
    """

    load_id: LoadId
    peers: tuple[Worker, ...]
    transfer_id: str
    epoch: str
    blocks: tuple[LoadBlocks, ...]
    in_step: bool
    timeout_s: float
    num_awaited: int | None = None

    @property
    def block_ids(self) -> tuple[int, ...]:
        """Of all groups."""
        return tuple(block_id for part in self.blocks for block_id in part.block_ids)


@dataclass(slots=True, eq=False, kw_only=True)
class PeerLoad(Load):
    """What one load takes from one worker of the producer in one group; loader's thread, but for
    what ``kv.load.Load`` says.
    """

    spec: LoadSpec
    blocks: LoadBlocks
    source: PageSource
    pages: GroupPages
    """Of the layers that come from there; ``first_layer`` is the first among this worker's."""
    first_layer: int
    peer: Endpoint
    ticket: Ticket
    layout: PageLayout
    """Of this load's part of this worker's pages."""
    pieces: deque[Piece] = field(default_factory=deque)
    """Not asked for yet."""
    pieces_of_layer: list[int] = field(default_factory=list)
    """Known and not landed; so are the next two."""
    tail_pieces: int = 0
    num_pieces: int = 0
    transport: str = ""
    num_planned: list[int] = field(default_factory=list)
    """Of an awaited load: how many leading blocks of each layer have been asked for."""
    is_complete: bool = True
    """Whether all pieces are known; an awaited load learns of them bit by bit."""
    watched_at: float = 0.0
    """When its producer was asked last, for that or for a sign of life."""
    unanswered_at: float = 0.0
    """When it was asked first of those times after which nothing has come."""
    furthest: tuple[int, int] = (0, 0)
    """How far the producer has ever said to be; who says less, or the same again, prolongs nothing.
    """
    num_unsettled: int = 0
    """Pieces that the producer writes right into the pages, and may still be writing. Under the
    lock, as what is asked for after the end would be written into somebody else's blocks."""

    @classmethod
    def of(
        cls,
        spec: LoadSpec,
        blocks: LoadBlocks,
        source: PageSource,
        pages: GroupPages,
        piece_bytes: int,
        clock: Callable[[], float],
    ) -> PeerLoad:
        """``pages`` are this worker's of the group."""
        peer = spec.peers[source.rank]
        first_layer = 0
        if source.layers is not None:
            first_layer = pages.num_among(source.layers.first)
            pages = pages.between(*source.layers)
        load = cls(
            load_id=spec.load_id,
            in_step=spec.in_step,
            timeout_s=spec.timeout_s,
            clock=clock,
            spec=spec,
            blocks=blocks,
            source=source,
            pages=pages,
            first_layer=first_layer,
            peer=peer.endpoint,
            ticket=peer.ticket,
            layout=pages.layout.share(source.ours.index, source.ours.count),
        )
        num_layers = len(pages.layers)
        load.pieces_of_layer = [0] * num_layers
        if spec.num_awaited is not None:
            load.num_planned = [0] * num_layers
            load.is_complete = False
        else:
            load.watched_at = load.started  # a sign of life in time is all that is wanted
            has_tail = blocks.has_tail and spec.in_step
            page_bytes = load.layout.page_bytes
            num_blocks = len(blocks.block_ids)
            load._plan(plan_pieces(num_layers, num_blocks, has_tail, page_bytes, piece_bytes))
        return load

    def __str__(self) -> str:
        return f"load {self.load_id} of transfer {self.spec.transfer_id} from {self.peer}"

    def _plan(self, pieces: list[Piece]) -> None:
        self.pieces += pieces
        self._count(pieces, 1)

    def note_landed(self, piece: Piece) -> None:
        """It is in its pages, and verified."""
        self._count([piece], -1)

    def _count(self, pieces: list[Piece], change: int) -> None:
        for piece in pieces:
            self.num_pieces += change
            self.tail_pieces += change * piece.tail
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                self.pieces_of_layer[layer] += change

    @property
    def is_done(self) -> bool:
        """Whether all of it has landed."""
        return self.is_complete and not self.num_pieces

    def has_layer(self, layer: int) -> bool:
        index = self.pages.num_among(layer)
        is_here = index < len(self.pages.layers) and self.pages.layers[index] == layer
        return not is_here or not self.pieces_of_layer[index]

    def has_tails(self) -> bool:
        return not self.tail_pieces

    def plan_ready(self, progress: Progress, piece_bytes: int, min_bytes: float) -> None:
        """The producer computes the span: plan what is ready and worth a piece, or the rest at
        the end.
        """
        spec, indices = self.spec, self.blocks.indices
        assert spec.num_awaited is not None
        first = self.source.layers.first if self.source.layers is not None else 0
        num_layers_done = self.pages.num_among(progress.num_layers_done - self.source.skip + first)
        far = (
            sum(min(num, spec.num_awaited) for num in (progress.num_ready, progress.num_coming)),
            num_layers_done,
        )
        if far > self.furthest and (progress.num_ready or num_layers_done):
            # It computes: from here on the term runs anew with every sign of that.
            self.furthest = far
            self.deadline = max(self.deadline, self.clock() + spec.timeout_s)
        is_last = progress.num_ready >= spec.num_awaited
        num_ready, num_coming = (
            # At the end all of them: what the producer does not have it refuses.
            bisect_left(indices, num_tokens // self.pages.block_size)
            if num_tokens < spec.num_awaited
            else len(indices)
            for num_tokens in (progress.num_ready, progress.num_coming)
        )
        ready = [
            max(planned, num_coming if layer < num_layers_done else num_ready)
            for layer, planned in enumerate(self.num_planned)
        ]
        page_bytes = self.layout.page_bytes
        num_new = sum(ready) - sum(self.num_planned)
        if is_last or num_new * page_bytes >= min_bytes:
            self._plan(plan_ready(self.num_planned, ready, piece_bytes // page_bytes))
            self.num_planned = ready
            self.is_complete = is_last

    def result(self, cause: str, elapsed_ms: float) -> LoadResult:
        return LoadResult(
            self.load_id,
            cause,
            self.num_bytes,
            elapsed_ms,
            transport=self.transport,
            was_awaited=self.spec.num_awaited is not None,
            num_resting=int(self.num_unsettled > 0),
        )


@dataclass(slots=True)
class InFlight:
    load: PeerLoad
    piece: Piece
    slot: Slot
    seed: int
    sent_at: float
    is_live: bool
    placer: RingPlacer | None = None
    """Of the ring that its slot is, if the producer uses it."""
    is_ring_full: bool = False
    """Said by the producer, which says it again only after there was room."""

    def pages(self) -> tuple[PageLayout, Ids]:
        """Where it goes."""
        load, piece = self.load, self.piece
        layers = load.layout.for_layers(piece.first_layer, piece.first_layer + piece.num_layers)
        return layers, np.array(load.blocks.block_ids[piece.start : piece.stop], dtype=np.int64)

    def num_bytes(self) -> int:
        return self.piece.num_bytes(self.load.layout.page_bytes)

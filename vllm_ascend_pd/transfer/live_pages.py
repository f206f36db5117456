# SPDX-License-Identifier: Apache-2.0
"""Pages of a consumer that producers write into themselves, and when that is over."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.direct_placement import page_runs
from vllm_ascend_pd.backends.transfer_engine import TransferEngine
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import LivePages

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.backends.block_copy import WorkerPages
    from vllm_ascend_pd.transfer.load import InFlight, PeerLoad
    from vllm_ascend_pd.transfer.pieces import Piece
    from vllm_ascend_pd.types import Endpoint, LoadId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectPlacement:
    """Parked loads are written by their producers right into this worker's pages."""

    verify: bool = False
    """Read them back and compare checksums, through host memory."""
    rest_s: float = field(default_factory=lambda: TransferEngine.LATE_WRITE_S)
    """How long pages rest into which a write failed, or whose producer is gone."""


class LivePageWrites:
    """Which pages are open to producers. The loader's thread; `take_rested` from the main one.

    A load may end while a write goes on. Then its blocks rest until the producer has answered for
    each write, or is gone for so long.
    """

    def __init__(self, pages: WorkerPages, rest_s: float, clock: Callable[[], float]) -> None:
        self._copier = pages.copier
        self._runs = [page_runs(group.layout) for group in pages.groups]
        self._rest_s = rest_s
        self._clock = clock
        # Writes that nobody waits for any more: by fetch until they are answered, or until a time,
        # of peers that are gone.
        self._given_up: dict[int, InFlight] = {}
        self._resting: list[tuple[float, PeerLoad]] = []
        self._rested: deque[LoadId] = deque()

    def open(self, load: PeerLoad, piece: Piece) -> LivePages | None:
        """Where a producer may write, from now on; ``None`` when the load has ended meanwhile.

        Waits for what the engine has launched on these blocks in their former life.
        """
        block_ids = load.blocks.block_ids[piece.start : piece.stop]
        self._copier.settle(np.array(block_ids, dtype=np.int64))
        with load.lock:
            if load.ended is not None:
                return None
            load.num_unsettled += 1
        runs = self._runs[load.blocks.group][load.first_layer + piece.first_layer :]
        layers = runs[: piece.num_layers]
        return LivePages(block_ids, layers)

    def give_up(self, fetch_id: int, flight: InFlight) -> None:
        """Nobody waits for this answer any more, but the write may still come."""
        self._given_up[fetch_id] = flight

    def on_late_answer(self, peer: Endpoint, fetch_id: int, cause: str) -> None:
        """Of a write that was given up, if it was, and is this peer's."""
        late = self._given_up.get(fetch_id)
        if late is not None and late.load.peer == peer:
            del self._given_up[fetch_id]
            self.settle_answered(late.load, cause)

    def settle_answered(self, load: PeerLoad, cause: str) -> None:
        """A write that failed is over, by what the transport declares; it rests all the same."""
        if cause == Cause.TRANSFER_FAILED.value:
            self._resting.append((self._clock() + self._rest_s, load))
        else:
            self.settle(load)

    def settle(self, load: PeerLoad) -> None:
        """One write is over; after the last one the blocks may be used again."""
        with load.lock:
            load.num_unsettled -= 1
            ended = load.ended
            is_over = ended is not None and ended.num_resting and not load.num_unsettled
        if is_over:
            logger.info(
                "nothing writes into the blocks of load %d any more: %.1f s after its end",
                load.spec.load_id,
                self._clock() - load.started - ended.elapsed_ms / 1000 if ended else 0,
            )
            self._rested.append(load.spec.load_id)

    def on_lost(self, peer: Endpoint) -> None:
        """It will answer nothing any more."""
        until = self._clock() + self._rest_s
        for fetch_id, flight in list(self._given_up.items()):
            if flight.load.peer == peer:
                del self._given_up[fetch_id]
                self._resting.append((until, flight.load))

    def awaited_peers(self) -> set[Endpoint]:
        """Those that still have to answer for a write that was given up."""
        return {flight.load.peer for flight in self._given_up.values()}

    def wake(self, now: float) -> float | None:
        """Settle what has rested long enough; when the next one has."""
        over = [load for until, load in self._resting if until <= now]
        if over:
            self._resting = [entry for entry in self._resting if entry[0] > now]
            for load in over:
                self.settle(load)
        return min((until for until, _ in self._resting), default=None)

    @property
    def has_rested(self) -> bool:
        """Whether ``take_rested`` has something to say."""
        return bool(self._rested)

    def take_rested(self) -> list[LoadId]:
        """The loads in whose blocks nothing is written any more, since the last call."""
        return [self._rested.popleft() for _ in range(len(self._rested))]

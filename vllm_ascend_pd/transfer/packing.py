# SPDX-License-Identifier: Apache-2.0
"""The producer's ends of rings: packs pages while their consumers place them."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.page_ring import SupportsRing
from vllm_ascend_pd.backends.transfer_engine import SupportsWindow, TransferStatus
from vllm_ascend_pd.transfer.tickets import lease_of
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import Fetched, Packing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_ascend_pd.backends.block_copy import BlockCopier, Ids, PageLayout, Region
    from vllm_ascend_pd.backends.page_ring import RingPacker
    from vllm_ascend_pd.backends.transports import Route
    from vllm_ascend_pd.transfer.grants import Grants
    from vllm_ascend_pd.wire import Fetch

logger = logging.getLogger(__name__)

_PATIENCE_S = 300e-6
"""Of a packer, asleep, for a consumer that places meanwhile; nobody else is served so long."""


@dataclass(slots=True)
class _Piece:
    """On its way through a ring in the memory of a consumer."""

    identity: bytes
    fetch: Fetch
    route: Route
    engine: SupportsWindow
    window: Region
    packer: RingPacker
    deadline: float
    was_told: bool = False
    """The consumer, that the ring is full, since it last made room."""

    def is_mapped(self) -> bool:
        """Whether the ring is still where it was."""
        address, num_bytes = self.fetch.address, self.fetch.ring_bytes
        return self.engine.window(self.route.session, address, num_bytes) == self.window


class RingPackers:
    """The pieces that are being packed into rings. The data server's thread."""

    def __init__(
        self,
        copier: BlockCopier,
        grants: Grants,
        timeout_s: float,
        reply: Callable[[bytes, Fetched | Packing], None],
        attempt: Callable[[Callable[[], bool], Callable[[], bool]], bool],
    ) -> None:
        """``attempt``: that of the reactor."""
        self._attempt = attempt
        self._copier = copier
        self._grants = grants
        self._timeout_s = timeout_s
        self._reply = reply
        self._pieces: list[_Piece] = []

    def __len__(self) -> int:
        return len(self._pieces)

    def identities(self) -> Iterator[bytes]:
        """The consumer of each piece."""
        return (piece.identity for piece in self._pieces)

    def start(
        self, identity: bytes, fetch: Fetch, route: Route, layers: PageLayout, block_ids: Ids
    ) -> bool:
        """Pack a piece as far as there is room; ``False`` when either side cannot."""
        copier, engine = self._copier, route.engine
        if not isinstance(copier, SupportsRing) or not isinstance(engine, SupportsWindow):
            return False
        if fetch.ring_bytes <= 0 or not fetch.seed:
            return False
        window = engine.window(route.session, fetch.address, fetch.ring_bytes)
        if window is None or not copier.fits_ring(window):
            return False
        packer = copier.pack_ring(layers, block_ids, window, fetch.seed)
        deadline = time.monotonic() + self._timeout_s
        piece = _Piece(identity, fetch, route, engine, window, packer, deadline)
        self._pieces.append(piece)
        self._go_on(piece, _PATIENCE_S)
        return True

    def go_on(self, may_wait: bool) -> bool:
        """Pack where consumers have made room; whether any had."""
        progress = False
        for piece in list(self._pieces):
            progress |= self._go_on(piece, _PATIENCE_S if may_wait else 0.0)
        return progress

    def _go_on(self, piece: _Piece, patience_s: float) -> bool:
        return self._attempt(partial(self._pack, piece, patience_s), partial(self._fail, piece))

    def _fail(self, piece: _Piece) -> bool:
        """It raised, perhaps in the middle of its end."""
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._answer(piece, Cause.TRANSFER_FAILED.value, 0)
        return True

    def _pack(self, piece: _Piece, patience_s: float) -> bool:
        """As far as there is room; whether there was any."""
        if not piece.is_mapped():
            self._end(piece, Cause.TRANSFER_FAILED.value)
            return False
        num_bytes_left = piece.packer.num_bytes_left
        status = piece.packer.run(patience_s)
        progress = piece.packer.num_bytes_left < num_bytes_left
        piece.was_told &= not progress
        if status is TransferStatus.FAILED:
            self._end(piece, Cause.TRANSFER_FAILED.value)
        elif status is TransferStatus.DONE:
            self._end(piece, "")
        elif time.monotonic() >= piece.deadline:
            self._end(piece, Cause.DEADLINE.value)
        elif not piece.was_told:
            piece.was_told = True
            self._reply(piece.identity, Packing(piece.fetch.fetch_id))
        return progress

    def _end(self, piece: _Piece, cause: str) -> None:
        """Answer. What was packed counts if its pages are still those of the lease."""
        if not cause:
            if lease_of(piece.fetch) in self._grants:
                piece.packer.confirm()
            else:
                cause = Cause.LEASE_EXPIRED.value
        checksum = piece.packer.checksum
        self._pieces.remove(piece)
        self._answer(piece, cause, checksum)

    def _answer(self, piece: _Piece, cause: str, checksum: int) -> None:
        if cause:
            logger.warning("a piece for a peer ended with %s", cause)
        fetch_id = piece.fetch.fetch_id
        self._reply(piece.identity, Fetched(fetch_id, checksum, cause, piece.route.name, True))

# SPDX-License-Identifier: Apache-2.0
"""The consumer's ends of rings: places pages while their producers pack them."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.page_ring import SupportsRing
from vllm_ascend_pd.backends.transports import SHARED_MEMORY

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from vllm_ascend_pd.backends.block_copy import BlockCopier
    from vllm_ascend_pd.backends.page_ring import RingPlacer
    from vllm_ascend_pd.transfer.load import InFlight, PeerLoad
    from vllm_ascend_pd.types import Endpoint

PIECE_BYTES = 32 << 20
"""Of one piece through a ring: about 2 ms."""
_FOLLOW_S = 2e-3
"""So long after a producer was asked, or has packed something, its ring is looked at all the time.
One that goes on later says ``Packing``."""
_PATIENCE_S = 1e-3
_LINGER_S = 100e-6


class Rings:
    """The loader's thread, but for `takes`."""

    def __init__(
        self,
        sessions: Mapping[str, str],
        copier: BlockCopier,
        in_flight: Mapping[int, InFlight],
        attempt: Callable[[Callable[[], None], Callable[[], None]], None],
        fail: Callable[[PeerLoad], None],
    ) -> None:
        """``in_flight`` is the loader's, in the order in which pieces were asked for; so are
        ``attempt``, and ``fail`` for the load of a piece that raised.
        """
        self._attempt = attempt
        self._fail = fail
        self._copier = copier if isinstance(copier, SupportsRing) else None
        self._is_mapped = SHARED_MEMORY in sessions
        self._in_flight = in_flight
        # Producers that have used a ring, and until when the next one is looked at all the time.
        self._until: dict[Endpoint, float] = {}

    def takes(self, peer: Endpoint) -> bool:
        """Whether what is asked of this producer will come through a ring. Any thread."""
        return peer in self._until

    def offer(self, flight: InFlight) -> RingPlacer | None:
        """Make the slot of a piece a ring, before its producer is asked."""
        slot = flight.slot
        if self._copier is None or not self._is_mapped or flight.is_live:
            return None
        if not self._copier.fits_ring(slot.region):
            return None
        if flight.load.peer in self._until:
            self._look(flight.load.peer)
        return self._copier.place_ring(*flight.pages(), slot.region, flight.seed)

    def on_packing(self, peer: Endpoint, fetch_id: int) -> None:
        """It waits until there is room."""
        self._look(peer)
        flight = self._in_flight.get(fetch_id)
        if flight is not None and flight.load.peer == peer:
            flight.is_ring_full = True

    def _look(self, peer: Endpoint) -> None:
        """It packs, or is about to."""
        self._until[peer] = time.monotonic() + _FOLLOW_S

    def note_answer(self, peer: Endpoint, by_ring: bool) -> None:
        """A piece has come, one way or the other."""
        if by_ring:
            self._until.setdefault(peer, 0.0)
        else:
            self.forget(peer)

    def forget(self, peer: Endpoint) -> None:
        self._until.pop(peer, None)

    def follow(self) -> tuple[list[int], bool]:
        """Place what producers pack at this moment, of each the first piece that is not done.

        Returns the fetches whose pieces are placed and confirmed, and whether to come back at once.
        """
        confirmed: list[int] = []
        is_busy = False
        for peer, until in self._until.items():
            for fetch_id, flight in self._in_flight.items():
                if flight.load.peer != peer or flight.placer is None:
                    continue
                if not flight.placer.num_bytes_left or flight.load.ended is not None:
                    continue
                if time.monotonic() < until or flight.is_ring_full:
                    is_busy = True
                    self._attempt(
                        partial(self._follow, fetch_id, flight, flight.placer, confirmed),
                        partial(self._fail, flight.load),
                    )
                break
        return confirmed, is_busy

    def _follow(
        self, fetch_id: int, flight: InFlight, placer: RingPlacer, confirmed: list[int]
    ) -> None:
        if placer.wait(_PATIENCE_S / len(self._until)):
            flight.is_ring_full = False
            if _place(flight, placer):
                confirmed.append(fetch_id)
            self._look(flight.load.peer)

    def end(self, load: PeerLoad) -> None:
        """Nothing more of it is placed, so nothing more shall be packed."""
        end_rings([flight for flight in self._in_flight.values() if flight.load is load])


def _place(flight: InFlight, placer: RingPlacer) -> bool:
    """As far as it goes; whether all of it is placed, and confirmed by the producer."""
    with flight.load.lock:
        if flight.load.ended is not None or not placer.run(_LINGER_S):
            return False
    return placer.is_confirmed(_LINGER_S)


def end_rings(flights: Collection[InFlight]) -> None:
    """Their producers write at most the chunk that they are writing."""
    for flight in flights:
        if flight.placer is not None:
            flight.placer.end()

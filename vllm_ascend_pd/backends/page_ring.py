# SPDX-License-Identifier: Apache-2.0
"""Pages from one process to another through a small ring of memory that both map.

    producer's pages          a staging slot of the consumer          consumer's pages
    gather + checksum  ──►  | key, counts | chunk 0 | ... | chunk 7 |  ──►  scatter + checksum
                                 num_packed ──►   ◄── num_placed
                                 answer     ──►        (the checksum, after all was packed)

Both ends copy at the same time, a chunk of 256 KiB each, so the bytes on their way stay in the
cache of the processor and no copy goes through memory twice. Each end is one native loop that
spins a little and then sleeps on the other's count: no message, no GIL. A piece of any size goes
through one ring.

The consumer writes ``key`` before it asks, and takes it away when it gives up. The producer looks
at it before and after each chunk: one that was stopped, and goes on when the ring has become
something else, writes at most the chunk that it was writing. What it spoils is found by the
checksum, seeded with the key, which the producer tells in its answer. Counts are never an address:
a wrong one only makes checksums differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vllm_ascend_pd.backends.transfer_engine import TransferStatus

if TYPE_CHECKING:
    from vllm_ascend_pd import _C
    from vllm_ascend_pd.backends.block_copy import Ids, PageLayout, Region

_STATUS = {
    "DONE": TransferStatus.DONE,
    "WAITING": TransferStatus.RUNNING,
    "ENDED": TransferStatus.FAILED,
}


class RingPacker:
    """The producer's end. One thread at a time."""

    def __init__(self, native: _C.RingPacker) -> None:
        self._native = native

    def run(self, patience_s: float) -> TransferStatus:
        """Packs until all is packed: DONE. RUNNING when there was no room for ``patience_s``,
        FAILED when the consumer has given up. The caller keeps the ring mapped meanwhile.
        """
        return _STATUS[self._native.run(_microseconds(patience_s)).name]

    def confirm(self) -> None:
        """What was packed counts, once done; the consumer can see it before any message comes."""
        self._native.confirm()

    @property
    def num_bytes_left(self) -> int:
        return self._native.num_bytes_left

    @property
    def checksum(self) -> int:
        """Of all that was packed, once done."""
        return self._native.checksum


class RingPlacer:
    """The consumer's end. One thread at a time."""

    def __init__(self, native: _C.RingPlacer) -> None:
        self._native = native

    def wait(self, patience_s: float) -> bool:
        """Until there is something to place or nothing is left; ``False`` after ``patience_s``.
        Touches no page.
        """
        return self._native.wait(_microseconds(patience_s))

    def run(self, patience_s: float) -> bool:
        """Places what is there, and what comes within ``patience_s`` after it. Whether that was
        all.
        """
        return self._native.run(_microseconds(patience_s))

    def is_confirmed(self, patience_s: float) -> bool:
        """Whether all is placed and the producer has confirmed just that, within ``patience_s``."""
        return self._native.is_confirmed(_microseconds(patience_s))

    def end(self) -> None:
        """The ring is for something else now."""
        self._native.end()

    @property
    def num_bytes_left(self) -> int:
        return self._native.num_bytes_left

    @property
    def checksum(self) -> int:
        """Of all that was placed, once that was all."""
        return self._native.checksum


@runtime_checkable
class SupportsRing(Protocol):
    """A copier that packs into rings and places from them. ``key`` is not 0."""

    def fits_ring(self, memory: Region) -> bool:
        """Whether it is large enough and aligned."""
        ...

    def pack_ring(
        self, layout: PageLayout, block_ids: Ids, ring: Region, key: int
    ) -> RingPacker: ...

    def place_ring(
        self, layout: PageLayout, block_ids: Ids, ring: Region, key: int
    ) -> RingPlacer: ...


def _microseconds(seconds: float) -> int:
    return int(seconds * 1e6)

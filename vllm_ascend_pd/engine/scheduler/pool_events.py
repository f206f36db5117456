# SPDX-License-Identifier: Apache-2.0
"""KV events of the pool's tiers, published with those of the engine's own prefix cache, whose
medium is the device's; theirs is that of the ``Place``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.events import removed, stored
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import BlockPool, BlockStored, Request
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.pool.known_keys import KnownKeys


class PoolEvents:
    """Keeps what the pool is believed to have, and publishes how that changes. Scheduler thread.

    The pool moves and evicts without telling, so a block that nobody asks for may be gone, or on
    disk, without an event.
    """

    def __init__(
        self,
        pool: BlockPool,
        known: KnownKeys,
        group: KVGroup,
        stores_to: Place = Place.DRAM,
    ) -> None:
        self._stores_to = stores_to
        self._pool = pool
        self._known = known
        self._group = group

    def make_stored(self, request: Request, index: int) -> BlockStored | None:
        """For block ``index`` of ``request``, without its medium; ``None`` when nobody listens."""
        if not self._pool.enable_kv_cache_events:
            return None
        return stored(request, index, self._group)

    def found(self, request: Request, index: int, place: Place) -> None:
        """A lookup has found block ``index`` there."""
        block_hash = bytes(request.block_hashes[index])
        before = self._known.note(block_hash, place)
        if before.medium != place.medium:
            self._publish(block_hash, before, place, self.make_stored(request, index))

    def is_recent(self, block_hash: bytes, age_s: float) -> bool:
        """Whether it was found or stored not longer ago than that."""
        return self._known.is_recent(block_hash, age_s)

    def stored(self, block_hash: bytes, event: BlockStored | None) -> None:
        """It has just been put there; ``event`` is from ``make_stored``."""
        before = self._known.note(block_hash, self._stores_to)
        if event is not None and before.medium != self._stores_to.medium:
            self._publish(block_hash, before, self._stores_to, event)

    def gone(self, block_hash: bytes) -> None:
        before = self._known.note(block_hash, Place.NOWHERE)
        self._publish(block_hash, before, Place.NOWHERE, None)

    def all_gone(self) -> None:
        """The pool is down, or was: nothing that it had can be counted on."""
        by_medium: dict[str, list[bytes]] = {}
        for block_hash, place in self._known.clear().items():
            by_medium.setdefault(place.medium, []).append(block_hash)
        if self._pool.enable_kv_cache_events:
            for medium, hashes in by_medium.items():
                self._remove(hashes, medium)

    def _publish(
        self, block_hash: bytes, before: Place, after: Place, event: BlockStored | None
    ) -> None:
        """Of several tiers, the one that it would be loaded from is told. First where it is now, so
        that it is never nowhere in between.
        """
        if not self._pool.enable_kv_cache_events:
            return
        if after is not Place.NOWHERE and event is not None:
            event.medium = after.medium
            self._pool.kv_event_queue.append(event)
        if before is not Place.NOWHERE:
            self._remove([block_hash], before.medium)

    def _remove(self, hashes: list[bytes], medium: str) -> None:
        self._pool.kv_event_queue.append(removed(hashes, medium, self._group))

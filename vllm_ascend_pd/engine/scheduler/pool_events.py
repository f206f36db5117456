# SPDX-License-Identifier: Apache-2.0
"""KV events of the pool's tiers, published with those of the engine's own prefix cache, whose
medium is the device's; theirs is that of the ``Place``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.blocks import block_keys, hashes_of, split_key
from vllm_ascend_pd.engine.vllm_api.events import stored, tell_removed, tell_stored
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        groups: Sequence[KVGroup],
        stores_to: Place = Place.DRAM,
    ) -> None:
        self._stores_to = stores_to
        self._blocks = pool
        self._known = known
        self.is_recent = known.is_recent
        """Of a key: whether it was found or stored not longer ago than that."""
        self._groups = groups

    def make_stored(self, request: Request, index: int, group: int) -> BlockStored | None:
        """Of block ``index`` of ``request``, without its medium; ``None`` when nobody listens."""
        if not self._blocks.enable_kv_cache_events:
            return None
        return stored(request, index, self._groups[group])

    def found(
        self, request: Request, indices: Sequence[int], group: int, places: Sequence[Place]
    ) -> None:
        """A lookup has found these blocks of ``request`` there."""
        keys = block_keys(hashes_of(request, indices, self._groups[group]), group)
        for index, key, place in zip(indices, keys, places, strict=True):
            before = self._known.note(key, place)
            if before.medium != place.medium:
                self._publish(key, before, place, self.make_stored(request, index, group))

    def stored(self, key: bytes, event: BlockStored | None) -> None:
        """It has just been put there; ``event`` is from ``make_stored``."""
        before = self._known.note(key, self._stores_to)
        if event is not None and before.medium != self._stores_to.medium:
            self._publish(key, before, self._stores_to, event)

    def gone(self, key: bytes) -> None:
        before = self._known.note(key, Place.NOWHERE)
        self._publish(key, before, Place.NOWHERE, None)

    def all_gone(self) -> None:
        """The pool is down, or was: nothing that it had can be counted on."""
        known = self._known.clear()
        if self._blocks.enable_kv_cache_events:
            hashes: dict[tuple[str, int], list[bytes]] = {}
            for key, place in known.items():
                block_hash, group = split_key(key)
                hashes.setdefault((place.medium, group), []).append(block_hash)
            for (medium, group), gone in hashes.items():
                self._remove(gone, medium, group)

    def _publish(self, key: bytes, before: Place, after: Place, event: BlockStored | None) -> None:
        """Of several tiers, the one that it would be loaded from is told. First where it is now, so
        that it is never nowhere in between.
        """
        if not self._blocks.enable_kv_cache_events:
            return
        if after is not Place.NOWHERE and event is not None:
            tell_stored(self._blocks, event, after.medium)
        if before is not Place.NOWHERE:
            block_hash, group = split_key(key)
            self._remove([block_hash], before.medium, group)

    def _remove(self, hashes: list[bytes], medium: str, group: int) -> None:
        tell_removed(self._blocks, hashes, medium, self._groups[group])

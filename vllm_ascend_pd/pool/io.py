# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the pool: what loads, what saves, and what looks keys up.

link thread ──lookups──► lookup thread ──► tier
            ──saves────► `pool.saver`
main thread ──layers───► `pool.packed_slot`
            ──loads────► `pool.loader`
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.socket_folder import SocketFolder
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.loader import PoolLoader
from vllm_ascend_pd.pool.messages import (
    DropAhead,
    DropSaves,
    Found,
    Lookup,
    Message,
    Save,
    split_hashes,
)
from vllm_ascend_pd.pool.saver import Replica, Saver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.backends.staging import StagingPool
    from vllm_ascend_pd.pool.tier import Tier
    from vllm_ascend_pd.pool.values import BlockValues

logger = logging.getLogger(__name__)

_LOOKUP_BATCH_BYTES = 512 * 32
"""Lookups of so many hashes together are asked for at once, if they wait."""


@dataclass(frozen=True, slots=True)
class PoolSlots:
    """Staging memory; each slot holds some values. Without ``ahead`` nothing is packed ahead."""

    read: StagingPool
    write: StagingPool
    ahead: StagingPool | None = None


class PoolIO:
    """Main thread: ``loader``, and what is packed ``ahead``. All else comes over the link and runs
    on threads of its own. ``values`` are by KV cache group.
    """

    def __init__(
        self,
        tier: Tier,
        values: Sequence[BlockValues],
        slots: PoolSlots,
        num_readers: int,
        replica: Replica = Replica(),  # noqa: B008 - frozen
    ) -> None:
        self.tier = tier
        self.values = values
        self.blocks_per_batch = min(slots.read.slot_bytes // each.num_bytes for each in values)
        """At most so many blocks are in one save."""
        self._lookups: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._folder = SocketFolder()
        self.address = str(self._folder.path / "pool")
        self._link = PoolLink("pd-pool-link", self.handle)
        self._link.listen(self.address)
        self.loader = PoolLoader(tier, values, slots.read, num_readers)
        self._saver = Saver(tier, values, slots.write, slots.ahead, replica, self._link.send)
        self.ahead = self._saver.ahead
        self._thread = threading.Thread(
            target=self._run_lookups, name="pd-pool-lookup", daemon=True
        )

    def start(self) -> None:
        for part in (self._link, self._thread, self.loader, self._saver):
            part.start()

    def stop(self) -> None:
        """Threads that a call on the tier holds are left behind."""
        self._link.stop()
        self._lookups.put(None)
        self._saver.stop()
        self.loader.stop()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._folder.remove()

    def close(self) -> None:
        """After ``stop``, and after the staging memory has been closed."""
        self.tier.close()

    def handle(self, message: Message) -> None:
        """On the link's thread, that of whoever sends it in this process, or the main thread, when
        a step brings it.
        """
        if isinstance(message, Lookup):
            self._lookups.put(message)
        elif isinstance(message, Save):
            self._saver.save(message)
        elif isinstance(message, DropAhead):
            self.ahead.drop(message.last_ahead_id)
        elif isinstance(message, DropSaves):
            self._saver.drop(message.last_save_id)

    def _run_lookups(self) -> None:
        while lookups := self._next_lookups():
            now = time.monotonic()
            lookups = [lookup for lookup in lookups if now < lookup.before]
            keys = [
                self.values[group].key(block_hash)
                for lookup in lookups
                for group, block_hash in zip(
                    lookup.groups, split_hashes(lookup.hashes, lookup.hash_bytes), strict=True
                )
            ]
            if not keys:
                continue
            try:
                places = bytes(self.tier.lookup(keys))
                healthy = self.tier.is_healthy()
            except Exception:
                logger.exception("a lookup in the pool failed")
                places, healthy = bytes(len(keys)), False
            for lookup in lookups:
                num_keys = len(lookup.hashes) // lookup.hash_bytes
                self._link.send(Found(lookup.lookup_id, places[:num_keys], healthy))
                places = places[num_keys:]

    def _next_lookups(self) -> list[Lookup]:
        """The next one and, to ask the tier once for all of them, those that wait behind it;
        empty at the end.
        """
        lookup = self._lookups.get()
        lookups: list[Lookup] = []
        num_bytes = 0
        while lookup is not None:
            lookups.append(lookup)
            num_bytes += len(lookup.hashes)
            if num_bytes >= _LOOKUP_BATCH_BYTES or self._lookups.empty():
                return lookups
            lookup = self._lookups.get()
        self._lookups.put(None)
        return lookups

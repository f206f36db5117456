# SPDX-License-Identifier: Apache-2.0
"""Registered staging memory: KV is packed here, sent from here, and received here.

    base                                             base + num_slots * stride
     |  slot 0            |  slot 1            | ... |
     |<-- slot_bytes -->|  |<-- slot_bytes -->|
     |<----- stride ----->|                       stride = slot_bytes rounded up to a page

Peers can reach only this memory, never live KV pages.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.shared_memory import SharedMapping
from vllm_ascend_pd.errors import BackendError

logger = logging.getLogger(__name__)

# Mappings of pools that were closed while somebody might still write to them. Unmapping those would
# turn a late write into a crash, so they live as long as the process.
_abandoned: list[HostMemory] = []


class Slot:
    """One piece of staging memory, held by whoever acquired it: a context manager, at whose end it
    goes back to its pool, once. Its holder may hand it on, with the duty to leave it.
    """

    __slots__ = ("_generation", "_pool", "_quarantine_s", "addr", "index", "num_bytes")

    def __init__(self, pool: StagingPool, index: int, generation: int, addr: int) -> None:
        """``generation`` tells two holders of the same memory apart: a stale one is refused."""
        self._pool = pool
        self._generation = generation
        self._quarantine_s = 0.0
        self.index = index
        self.addr = addr
        self.num_bytes = pool.slot_bytes

    @property
    def region(self) -> Region:
        """The slot as an argument of `BlockCopier`."""
        return Region(self.addr, self.num_bytes)

    def quarantine(self, seconds: float) -> None:
        """Late bytes may still land in it: from its end on it is used by nobody for so long."""
        self._quarantine_s = seconds

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool._take_back(self.index, self._generation, self._quarantine_s)


class MemoryRegistry(Protocol):
    """Who must know of the memory that others read and write: a transfer engine, a store."""

    def register(self, addr: int, num_bytes: int) -> None: ...
    def unregister(self, addr: int) -> None: ...


class Unregistered(MemoryRegistry):
    """Of memory that no other process reaches."""

    def register(self, addr: int, num_bytes: int) -> None: ...
    def unregister(self, addr: int) -> None: ...


class HostMemory(Protocol):
    """``num_bytes`` at ``addr``, which is page aligned, until it is closed."""

    addr: int

    def close(self) -> None: ...


class StagingPool:
    """A fixed number of equal slots in one piece of memory that is registered once.

    Thread safe and non-blocking; nothing is copied, mapped or registered under the lock.
    """

    def __init__(
        self,
        engine: MemoryRegistry,
        num_slots: int,
        slot_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        alignment: int = mmap.PAGESIZE,
        memory: Callable[[int], HostMemory] = SharedMapping,
    ) -> None:
        """`clock` returns seconds; `memory` makes so many bytes of it.

        What is registered begins and ends at a multiple of `alignment`, itself one of a page.
        """
        if num_slots < 1 or slot_bytes < 1:
            raise ValueError(f"need num_slots, slot_bytes >= 1, got {num_slots}, {slot_bytes}")
        self._engine = engine
        self._clock = clock
        self.slot_bytes = slot_bytes
        self._stride = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_slots = num_slots
        self._num_bytes = -(-num_slots * self._stride // alignment) * alignment
        # One page is what a mapping is aligned to anyway.
        self._map = memory(self._num_bytes + alignment - mmap.PAGESIZE)
        self._base = -(-self._map.addr // alignment) * alignment
        try:
            engine.register(self._base, self._num_bytes)
        except BaseException:
            self._map.close()
            raise
        # All fields below are read and written by any thread, under the lock.
        self._lock = threading.Lock()
        self._closed = False
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: the warmest slot is taken first
        self._generations = [0] * num_slots  # odd while the slot is held
        self._quarantined: dict[int, float] = {}  # slot index -> end of the quarantine

    @property
    def region(self) -> Region:
        """The whole registered range."""
        return Region(self._base, self.num_slots * self._stride)

    @property
    def num_free(self) -> int:
        """Slots that `acquire` could hand out now."""
        with self._lock:
            self._end_quarantines()
            return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that somebody works on; those that rest are neither held nor free."""
        with self._lock:
            return self.num_slots - len(self._free) - len(self._quarantined)

    def acquire(self) -> Slot | None:
        """Takes a free slot, or returns None when all are held or in quarantine."""
        with self._lock:
            if self._closed:
                raise BackendError("the staging pool is closed")
            self._end_quarantines()
            if not self._free:
                return None
            index = self._free.pop()
            self._generations[index] += 1
            generation = self._generations[index]
        addr = self._base + index * self._stride
        return Slot(self, index, generation, addr)

    def _take_back(self, index: int, generation: int, quarantine_s: float) -> None:
        with self._lock:
            if self._generations[index] != generation:
                raise ValueError(f"slot {index} is not held (generation {generation})")
            self._generations[index] += 1
            if quarantine_s:
                self._quarantined[index] = self._clock() + quarantine_s
            else:
                self._free.append(index)

    def close(self) -> None:
        """Unregisters and unmaps; idempotent.

        Memory in which a holder or a late write may still move bytes is closed to peers but stays
        mapped until the process ends.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end_quarantines()
            num_busy = self.num_slots - len(self._free)
        self._engine.unregister(self._base)
        if num_busy:
            logger.warning("staging memory stays mapped: %d slots may still be written", num_busy)
            _abandoned.append(self._map)
        else:
            self._map.close()

    def _end_quarantines(self) -> None:
        if not self._quarantined:
            return
        now = self._clock()
        ended = [index for index, until in self._quarantined.items() if until <= now]
        for index in ended:
            del self._quarantined[index]
        self._free.extend(ended)


MakeStaging: TypeAlias = Callable[[MemoryRegistry, int, int], StagingPool]
"""Where it is known which memory a transport reaches: of a registry, slots, and bytes of each."""

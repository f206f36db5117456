# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.pool.room import Room, Shares
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class _Held:
    """All under the lock of its tier."""

    data: np.ndarray
    num_readers: int = 0


class MemoryTier(Tier):
    """The least recently used values are evicted, and new ones written over them: memory that one
    thread gives back to malloc, another one does not get.
    """

    def __init__(
        self,
        capacity_bytes: int,
        place: Place = Place.DRAM,
        shares: Shares | None = None,
    ) -> None:
        self._place = place
        self._lock = threading.Lock()
        self.room = Room(capacity_bytes, shares)
        self._values: dict[str, _Held] = {}
        self._spare: defaultdict[int, list[np.ndarray]] = defaultdict(list)
        """Nobody's memory, by size. With it no more than the capacity is taken."""
        self._spare_bytes = 0
        self._closed = False

    @classmethod
    def open(cls, opening: Opening) -> MemoryTier:
        num_bytes = opening.memory_bytes()
        opening.check_share("pool.dram_size", num_bytes)
        return cls(num_bytes, shares=Shares.of(opening.config))

    @property
    def num_over_share(self) -> int:  # type: ignore[override]
        return self.room.num_over_share

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            places = [self._place if key in self._values else Place.NOWHERE for key in keys]
            for key in reversed(keys):  # a prompt's last blocks are of no use without its first
                self.room.touch(key)
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [self._put(value) for value in values]

    def _put(self, value: Value) -> Status:
        with self._lock:
            if (known := self._known(value)) is not None:
                return known
            for key, *_ in self.room.reserve(value.num_bytes, value.tenant):
                self._spare_memory_of(key)
            data = self._take_spare(value.num_bytes)
        if data is None:
            try:
                data = np.empty(value.num_bytes, np.uint8)
            except MemoryError:
                with self._lock:
                    self.room.release(value.num_bytes, value.tenant)
                return Status.FULL
        ctypes.memmove(data.ctypes.data, value.addr, value.num_bytes)  # without the GIL
        with self._lock:
            if (known := self._known(value)) is not None:
                self.room.release(value.num_bytes, value.tenant)
                return known
            self._values[value.key] = _Held(data)
            self.room.keep(value.key, value.num_bytes, value.tenant)
            return Status.OK

    def _spare_memory_of(self, key: str) -> None:
        """Under the lock: of a value that is forgotten. Who still reads it has its memory."""
        held = self._values.pop(key)
        if not held.num_readers:
            self._spare[held.data.nbytes].append(held.data)
            self._spare_bytes += held.data.nbytes

    def _take_spare(self, num_bytes: int) -> np.ndarray | None:
        """Under the lock, when room is reserved. What would be too much goes back to malloc."""
        taken = self._spare[num_bytes].pop() if self._spare[num_bytes] else None
        if taken is not None:
            self._spare_bytes -= num_bytes
        for size, spare in self._spare.items():
            while spare and self.room.used_bytes + self._spare_bytes > self.room.capacity_bytes:
                spare.pop()
                self._spare_bytes -= size
        return taken

    def _known(self, value: Value) -> Status | None:
        """Under the lock: of a put that need not copy anything."""
        if self._closed:
            return Status.FAILED
        if value.key in self._values:
            return Status.OK
        return None if self.room.fits(value.num_bytes, value.tenant) else Status.FULL

    def get(self, values: Sequence[Value]) -> list[Status]:
        return [self._get(value) for value in values]

    def _get(self, value: Value) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            held = self._values.get(value.key)
            if held is None:
                return Status.MISSING
            if held.data.nbytes != value.num_bytes:
                return Status.DAMAGED
            held.num_readers += 1
        ctypes.memmove(value.addr, held.data.ctypes.data, value.num_bytes)
        with self._lock:
            held.num_readers -= 1
        return Status.OK

    def tenants(self, keys: Sequence[str]) -> list[str]:
        with self._lock:
            return [self.room.tenant(key) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._forget(keys)

    def _forget(self, keys: Sequence[str]) -> None:
        """Under the lock."""
        for key in keys:
            if self.room.pop(key) is not None:
                self._spare_memory_of(key)

    def is_healthy(self) -> bool:
        return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget(list(self._values))
            self._spare.clear()

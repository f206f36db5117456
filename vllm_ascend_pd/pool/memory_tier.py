# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.pool.room import Room, Shares
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, TierStats, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemoryTier(Tier):
    """The least recently used values are evicted."""

    def __init__(
        self,
        capacity_bytes: int,
        place: Place = Place.DRAM,
        shares: Shares | None = None,
    ) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._room = Room(capacity_bytes, shares)
        self._values: dict[str, np.ndarray] = {}
        self._closed = False

    @classmethod
    def open(cls, opening: Opening) -> MemoryTier:
        num_bytes = opening.memory_bytes()
        opening.check_share("pool.dram_size", num_bytes)
        return cls(num_bytes, shares=Shares.of(opening.config))

    @property
    def num_over_share(self) -> int:  # type: ignore[override]
        return self._room.num_over_share

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            places = [self._place if key in self._values else Place.NOWHERE for key in keys]
            for key in reversed(keys):  # a prompt's last blocks are of no use without its first
                self._room.touch(key)
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [self._put(value) for value in values]

    def _put(self, value: Value) -> Status:
        with self._lock:
            if (known := self._known(value)) is not None:
                return known
        data = np.empty(value.num_bytes, np.uint8)
        ctypes.memmove(data.ctypes.data, value.addr, value.num_bytes)  # without the GIL
        with self._lock:
            if (known := self._known(value)) is not None:
                return known
            for key, *_ in self._room.reserve(value.num_bytes, value.tenant):
                del self._values[key]
            self._values[value.key] = data
            self._room.keep(value.key, value.num_bytes, value.tenant)
            return Status.OK

    def _known(self, value: Value) -> Status | None:
        """Under the lock: of a put that need not copy anything."""
        if self._closed:
            return Status.FAILED
        if value.key in self._values:
            return Status.OK
        return None if self._room.fits(value.num_bytes, value.tenant) else Status.FULL

    def get(self, values: Sequence[Value]) -> list[Status]:
        return [self._get(value) for value in values]

    def _get(self, value: Value) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            data = self._values.get(value.key)
        if data is None:
            return Status.MISSING
        if data.nbytes != value.num_bytes:
            return Status.DAMAGED
        ctypes.memmove(value.addr, data.ctypes.data, data.nbytes)
        return Status.OK

    def tenants(self, keys: Sequence[str]) -> list[str]:
        with self._lock:
            return [self._room.tenant(key) for key in keys]

    def remove(self, keys: Sequence[str]) -> None:
        with self._lock:
            self._forget(keys)

    def clear(self) -> int:
        with self._lock:
            num_keys = len(self._values)
            self._forget(list(self._values))
            return num_keys

    def _forget(self, keys: Sequence[str]) -> None:
        """Under the lock."""
        for key in keys:
            if self._room.pop(key) is not None:
                del self._values[key]

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._values), self._room.used_bytes, self._room.capacity_bytes)

    def is_healthy(self) -> bool:
        return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget(list(self._values))

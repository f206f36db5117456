# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.pool.tier import Opening, Status, Tier, TierStats, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemoryTier(Tier):
    """The least recently used values are evicted."""

    def __init__(self, capacity_bytes: int, place: Place = Place.DRAM) -> None:
        self._capacity_bytes = capacity_bytes
        self._place = place
        self._lock = threading.Lock()
        self._values: OrderedDict[str, np.ndarray] = OrderedDict()
        self._used_bytes = 0
        self._closed = False

    @classmethod
    def open(cls, opening: Opening) -> MemoryTier:
        return cls(opening.memory_bytes())

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            places = [self._place if key in self._values else Place.NOWHERE for key in keys]
            for key in reversed(keys):  # a prompt's last blocks are of no use without its first
                if key in self._values:
                    self._values.move_to_end(key)
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
            while self._used_bytes + data.nbytes > self._capacity_bytes:
                _, evicted = self._values.popitem(last=False)
                self._used_bytes -= evicted.nbytes
            self._values[value.key] = data
            self._used_bytes += data.nbytes
            return Status.OK

    def _known(self, value: Value) -> Status | None:
        """Under the lock: of a put that need not copy anything."""
        if self._closed:
            return Status.FAILED
        if value.key in self._values:
            return Status.OK
        return Status.FULL if value.num_bytes > self._capacity_bytes else None

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

    def remove(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                if (data := self._values.pop(key, None)) is not None:
                    self._used_bytes -= data.nbytes

    def clear(self) -> int:
        with self._lock:
            num_keys = len(self._values)
            self._values.clear()
            self._used_bytes = 0
            return num_keys

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._values), self._used_bytes, self._capacity_bytes)

    def is_healthy(self) -> bool:
        return not self._closed

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used_bytes = 0

# SPDX-License-Identifier: Apache-2.0
"""Values in the memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

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
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0
        self._closed = False

    @classmethod
    def open(cls, opening: Opening) -> MemoryTier:
        return cls(opening.memory_bytes())

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            places = [self._place if key in self._values else Place.NOWHERE for key in keys]
            for key in keys:
                if key in self._values:
                    self._values.move_to_end(key)
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [self._put(v.key, ctypes.string_at(v.addr, v.num_bytes)) for v in values]

    def _put(self, key: str, data: bytes) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            if key in self._values:
                return Status.OK
            if len(data) > self._capacity_bytes:
                return Status.FULL
            while self._used_bytes + len(data) > self._capacity_bytes:
                _, evicted = self._values.popitem(last=False)
                self._used_bytes -= len(evicted)
            self._values[key] = data
            self._used_bytes += len(data)
            return Status.OK

    def get(self, values: Sequence[Value]) -> list[Status]:
        return [self._get(value) for value in values]

    def _get(self, value: Value) -> Status:
        with self._lock:
            if self._closed:
                return Status.FAILED
            data = self._values.get(value.key)
        if data is None:
            return Status.MISSING
        if len(data) != value.num_bytes:
            return Status.DAMAGED
        ctypes.memmove(value.addr, data, len(data))
        return Status.OK

    def remove(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._used_bytes -= len(self._values.pop(key, b""))

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

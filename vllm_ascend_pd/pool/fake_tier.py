# SPDX-License-Identifier: Apache-2.0
"""Tiers for tests and drills: one in memory, and scripted faults around any tier."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections import OrderedDict, deque
from enum import Enum
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.tier import Place, Status, Tier, TierStats, Value

if TYPE_CHECKING:
    from collections.abc import Sequence


class MemoryTier(Tier):
    """Values in this process, least recently used ones evicted."""

    def __init__(self, capacity_bytes: int, place: Place = Place.DRAM) -> None:
        self._capacity_bytes = capacity_bytes
        self._place = place
        self._lock = threading.Lock()
        self._values: OrderedDict[str, bytes] = OrderedDict()
        self._used_bytes = 0
        self._closed = False

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


class TierFault(Enum):
    """What happens to one key of one call."""

    OK = "ok"
    FAIL = "fail"
    MISSING = "missing"  # get: the value was evicted; lookup: it is not there
    FULL = "full"  # put
    CORRUPT = "corrupt"  # get: one bit in the middle is wrong
    SHORT = "short"  # get: the value has another size
    DELAY = "delay"  # the call takes delay(ms) longer


_STEP = re.compile(r"(?P<kind>[a-z]+)(\((?P<ms>\d+)\))?(?P<star>\*(?P<count>\d+)?)?")
_CALLS = ("lookup", "put", "get")


class TierScript:
    """Decides the fault of each key by the order of calls. Thread safe.

    ``"get:ok*3,corrupt;put:full*"``: the fourth key that is read has a wrong bit, nothing can be
    stored. ``*n`` repeats, a last ``*`` means for ever; what is not said is ``ok``.
    """

    def __init__(self, text: str = "") -> None:
        self._lock = threading.Lock()
        self._faults: dict[str, deque[tuple[TierFault, int]]] = {}
        self._then: dict[str, tuple[TierFault, int]] = {}
        for part in filter(None, (part.strip() for part in text.split(";"))):
            call, _, steps = part.partition(":")
            if call not in _CALLS:
                raise ConfigError(f"tier script: {call!r} is none of {list(_CALLS)}")
            self._parse(call, steps)

    def _parse(self, call: str, steps: str) -> None:
        faults: deque[tuple[TierFault, int]] = deque()
        kinds = {kind.value: kind for kind in TierFault}
        for step in (step.strip() for step in steps.split(",")):
            match = _STEP.fullmatch(step)
            if match is None or match["kind"] not in kinds:
                raise ConfigError(f"tier script: {step!r} is none of {sorted(kinds)}")
            fault = kinds[match["kind"]], int(match["ms"] or 0)
            if match["star"] == "*":
                self._then[call] = fault
            else:
                faults.extend([fault] * int(match["count"] or 1))
        self._faults[call] = faults

    def next(self, call: str) -> tuple[TierFault, int]:
        with self._lock:
            if faults := self._faults.get(call):
                return faults.popleft()
            return self._then.get(call, (TierFault.OK, 0))


class FaultyTier(Tier):
    """Wraps any tier, also one between real processes, and spoils calls by script."""

    def __init__(self, inner: Tier, script: TierScript | None = None) -> None:
        self._inner = inner
        self.script = script if script is not None else TierScript()

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        places = self._inner.lookup(keys)
        for i in range(len(places)):
            if self._next("lookup") in (TierFault.FAIL, TierFault.MISSING):
                places[i] = Place.NOWHERE
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        statuses = []
        for value in values:
            fault = self._next("put")
            if fault is TierFault.FULL:
                statuses.append(Status.FULL)
            elif fault is TierFault.FAIL:
                statuses.append(Status.FAILED)
            else:
                statuses += self._inner.put([value])
        return statuses

    def get(self, values: Sequence[Value]) -> list[Status]:
        statuses = []
        for value in values:
            fault = self._next("get")
            if fault is TierFault.FAIL:
                statuses.append(Status.FAILED)
            elif fault is TierFault.MISSING:
                statuses.append(Status.MISSING)
            elif fault is TierFault.SHORT:
                statuses.append(Status.DAMAGED)
            else:
                (status,) = self._inner.get([value])
                if fault is TierFault.CORRUPT and status is Status.OK:
                    spoiled = ctypes.c_uint8.from_address(value.addr + value.num_bytes // 2)
                    spoiled.value ^= 1
                statuses.append(status)
        return statuses

    def _next(self, call: str) -> TierFault:
        fault, delay_ms = self.script.next(call)
        if delay_ms:
            time.sleep(delay_ms / 1000)
        return fault

    def remove(self, keys: Sequence[str]) -> None:
        self._inner.remove(keys)

    def clear(self) -> int:
        return self._inner.clear()

    def stats(self) -> TierStats:
        return self._inner.stats()

    def is_healthy(self) -> bool:
        return self._inner.is_healthy()

    def close(self) -> None:
        self._inner.close()

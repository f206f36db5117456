# SPDX-License-Identifier: Apache-2.0
"""For tests and drills: scripted faults around any tier."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.fault_script import parse_steps
from vllm_ascend_pd.errors import BackendError, ConfigError
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence


class TierFault(Enum):
    """What happens to one key of one call."""

    OK = "ok"
    FAIL = "fail"
    MISSING = "missing"  # get: the value was evicted; lookup: it is not there
    FULL = "full"  # put
    CORRUPT = "corrupt"  # get: one bit in the middle is wrong
    SHORT = "short"  # get: the value has another size
    RAISE = "raise"  # the call raises, which a tier must not
    DELAY = "delay"  # the call takes delay(ms) longer


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
            faults, then = parse_steps("tier script", steps, TierFault)
            self._faults[call] = deque(faults)
            if then is not None:
                self._then[call] = then

    def next(self, call: str) -> tuple[TierFault, int]:
        with self._lock:
            if faults := self._faults.get(call):
                return faults.popleft()
            return self._then.get(call, (TierFault.OK, 0))


class FaultyTier(Tier):
    """Wraps any tier, also one between real processes, and spoils calls by script."""

    def __init__(self, inner: Tier, script: TierScript | None = None) -> None:
        self.inner = inner
        self.script = script if script is not None else TierScript()

    @classmethod
    def open(cls, opening: Opening) -> FaultyTier:
        raise ConfigError("this is no tier of its own")

    def register(self, addr: int, num_bytes: int) -> None:
        self.inner.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        self.inner.unregister(addr)

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        places = self.inner.lookup(keys)
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
                statuses += self.inner.put([value])
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
                (status,) = self.inner.get([value])
                if fault is TierFault.CORRUPT and status is Status.OK:
                    spoiled = ctypes.c_uint8.from_address(value.addr + value.num_bytes // 2)
                    spoiled.value ^= 1
                statuses.append(status)
        return statuses

    def _next(self, call: str) -> TierFault:
        fault, delay_ms = self.script.next(call)
        if delay_ms:
            time.sleep(delay_ms / 1000)
        if fault is TierFault.RAISE:
            raise BackendError(f"scripted: {call} raises")
        return fault

    def remove(self, keys: Sequence[str]) -> None:
        self.inner.remove(keys)

    def is_healthy(self) -> bool:
        return self.inner.is_healthy()

    def close(self) -> None:
        self.inner.close()

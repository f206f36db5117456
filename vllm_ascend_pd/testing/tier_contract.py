# SPDX-License-Identifier: Apache-2.0
"""The contract of `pool.tier.Tier` as a suite for pytest: derive from ``TierContract``, and define
a fixture ``subject``.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import random
import time
from abc import ABC, abstractmethod

from vllm_ascend_pd.pool.tier import Status, Tier, Value
from vllm_ascend_pd.types import Place

SIZE = 64 << 10
MIB = 1 << 20
numbers = itertools.count()


class Buffers:
    """Memory that a tier reads and writes."""

    def __init__(self, num_bytes: int = 8 * MIB) -> None:
        self.memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def value(self, key: str, slot: int, data: bytes = b"", size: int = SIZE) -> Value:
        start = slot * SIZE
        if data:
            self.memory[start : start + len(data)] = data
        return Value(key, self.addr + start, size)

    def read(self, slot: int, size: int = SIZE) -> bytes:
        return self.memory[slot * SIZE : slot * SIZE + size]


class TierSubject(ABC):
    """A tier with values that lie where the suite says, and another way to look at its store."""

    place = Place.DRAM

    def __init__(self, tier: Tier, buffers: Buffers) -> None:
        self.tier = tier
        self.buffers = buffers

    def store(self, num_values: int = 1) -> dict[str, bytes]:
        """Put random values; by key."""
        data = {f"contract/{next(numbers)}": random.randbytes(SIZE) for _ in range(num_values)}
        values = [self.buffers.value(k, i, d) for i, (k, d) in enumerate(data.items())]
        assert self.tier.put(values) == [Status.OK] * num_values
        return data

    def put(self, value: Value) -> Status:
        """A tier that is full has room a moment later."""
        deadline = time.monotonic() + 10
        while True:
            (status,) = self.tier.put([value])
            if status is not Status.FULL or time.monotonic() > deadline:
                return status
            time.sleep(0.05)

    def get(self, *keys: str, size: int = SIZE) -> list[tuple[Status, bytes]]:
        values = [self.buffers.value(key, 64 + i, size=size) for i, key in enumerate(keys)]
        statuses = self.tier.get(values)
        return [(status, self.buffers.read(64 + i, size)) for i, status in enumerate(statuses)]

    @abstractmethod
    def held(self, key: str) -> bytes | None:
        """What the store holds, without the tier's help."""


class TierContract:
    """Of every tier, wherever its values lie."""

    def test_value_comes_back_as_it_was_put(self, subject: TierSubject) -> None:
        data = subject.store(3)
        assert [subject.held(key) for key in data] == list(data.values())
        assert subject.get(*data) == [(Status.OK, value) for value in data.values()]

    def test_lookup_says_where_each_value_is(self, subject: TierSubject) -> None:
        data = subject.store(2)
        unknown = f"contract/{next(numbers)}"
        first, second = data
        assert subject.tier.lookup([first, unknown, second]) == [
            subject.place,
            Place.NOWHERE,
            subject.place,
        ]

    def test_unknown_key_is_missing_and_spoils_no_other(self, subject: TierSubject) -> None:
        ((key, value),) = subject.store().items()
        got = subject.get(f"contract/{next(numbers)}", key)
        assert got[0][0] is Status.MISSING
        assert got[1] == (Status.OK, value)

    def test_first_value_of_a_key_stays(self, subject: TierSubject) -> None:
        ((key, value),) = subject.store().items()
        second = subject.buffers.value(key, 0, random.randbytes(SIZE))
        assert subject.put(second) is Status.OK
        assert subject.held(key) == value
        assert subject.get(key) == [(Status.OK, value)]

    def test_value_of_another_size_is_damaged(self, subject: TierSubject) -> None:
        ((key, _),) = subject.store().items()
        assert subject.get(key, size=SIZE // 2)[0][0] is Status.DAMAGED
        assert subject.get(key, size=2 * SIZE)[0][0] is Status.DAMAGED

    def test_removed_value_is_gone_and_can_be_put_again(self, subject: TierSubject) -> None:
        ((key, _),) = subject.store().items()
        subject.tier.remove([key, f"contract/{next(numbers)}"])
        assert subject.held(key) is None
        assert subject.tier.lookup([key]) == [Place.NOWHERE]
        assert subject.get(key)[0][0] is Status.MISSING
        data = random.randbytes(SIZE)
        assert subject.put(subject.buffers.value(key, 0, data)) is Status.OK
        assert subject.get(key) == [(Status.OK, data)]

    def test_nothing_is_asked_with_no_keys(self, subject: TierSubject) -> None:
        assert subject.tier.lookup([]) == []
        assert subject.tier.put([]) == []
        assert subject.tier.get([]) == []
        subject.tier.remove([])

    def test_open_tier_is_healthy(self, subject: TierSubject) -> None:
        assert subject.tier.is_healthy()

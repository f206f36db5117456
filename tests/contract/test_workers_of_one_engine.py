# SPDX-License-Identifier: Apache-2.0
"""Two workers of one engine on one real master, each with its part of the engine's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.config import PoolConfig
from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
from vllm_ascend_pd.pool.tier import Opening, Status, Value
from vllm_ascend_pd.types import Place

pytestmark = pytest.mark.slow

MIB = 1 << 20
LOCAL = "127.0.0.1"


@pytest.fixture(scope="module")
def backends() -> Iterator[list[MooncakeTier]]:
    said: list[Any] = []

    def first(value: Any) -> Any:
        said.append(value)
        return value

    config = PoolConfig(dram_size=32 * MIB)
    backends = [
        MooncakeTier.open(Opening(config.for_worker(0, 2), LOCAL, 0, 2, first)),
        MooncakeTier.open(Opening(config.for_worker(1, 2), LOCAL, 1, 2, lambda value: said.pop(0))),
    ]
    assert all(backend.store.wait_connected(60) for backend in backends)
    yield backends
    for backend in reversed(backends):
        backend.close()


def test_the_first_one_starts_the_master(backends: list[MooncakeTier]) -> None:
    assert backends[0].master is not None
    assert backends[1].master is None


def test_they_divide_the_memory(backends: list[MooncakeTier]) -> None:
    assert [backend.store.options.segment_bytes for backend in backends] == [16 * MIB] * 2


def test_each_stores_into_its_own_memory_first(backends: list[MooncakeTier]) -> None:
    memory = ctypes.create_string_buffer(MIB)
    addr = ctypes.addressof(memory)
    for rank, backend in enumerate(backends):
        backend.store.register(addr, MIB)
        values = [Value(f"worker/{rank}/{i}", addr, MIB) for i in range(8)]
        assert backend.put(values) == [Status.OK] * 8
        keys = [value.key for value in values]
        assert backend.lookup(keys) == [Place.DRAM] * 8
        assert backends[1 - rank].lookup(keys) == [Place.REMOTE] * 8
    # What is left of its own memory does not hold these; the other one's takes the rest.
    values = [Value(f"more/{i}", addr, MIB) for i in range(10)]
    statuses = backends[0].put(values)
    assert statuses == [Status.OK] * 10
    places = backends[0].lookup([value.key for value in values])
    assert set(places) == {Place.DRAM, Place.REMOTE}
    for backend in backends:
        backend.store.unregister(addr)

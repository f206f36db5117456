# SPDX-License-Identifier: Apache-2.0
"""A store on the engine of the transfers: real Mooncake, over TCP."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pytest

from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.mooncake_store import MooncakeStore
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.config import PoolConfig
from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
from vllm_ascend_pd.pool.tier import Opening

pytestmark = pytest.mark.slow

SIZE = 64 << 10


class Buffer:
    def __init__(self, value: int) -> None:
        self.memory = ctypes.create_string_buffer(bytes([value]) * SIZE, SIZE)
        self.addr = ctypes.addressof(self.memory)

    @property
    def bytes(self) -> bytes:
        return self.memory.raw


@pytest.fixture(scope="module")
def engine() -> Iterator[MooncakeTransferEngine]:
    engine = MooncakeTransferEngine("127.0.0.1")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def backend(engine: MooncakeTransferEngine) -> Iterator[MooncakeTier]:
    backend = MooncakeTier.open(Opening(PoolConfig(dram_size=16 << 20), shared=engine.share()))
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def store(backend: MooncakeTier) -> MooncakeStore:
    assert backend.store.wait_connected(60)
    return backend.store


def write(engine: MooncakeTransferEngine, session: str, source: int, target: int) -> None:
    handle = engine.submit_write(session, source, target, SIZE)
    deadline = time.monotonic() + 10
    while (status := engine.poll(handle)) is TransferStatus.RUNNING:
        assert time.monotonic() < deadline
        time.sleep(1e-4)
    assert status is TransferStatus.DONE


def test_value_comes_back(store: MooncakeStore) -> None:
    source, target = Buffer(7), Buffer(0)
    for buffer in (source, target):
        store.register(buffer.addr, SIZE)
    assert store.put(["shared/a"], [source.addr], [SIZE]) == [0]
    assert store.get(["shared/a"], [target.addr], [SIZE]) == [SIZE]
    assert target.bytes == source.bytes
    for buffer in (source, target):
        store.unregister(buffer.addr)


def test_transfers_and_the_store_do_not_disturb_each_other(
    store: MooncakeStore, engine: MooncakeTransferEngine
) -> None:
    """A peer's write arrives at the engine that the store uses too."""
    peer = MooncakeTransferEngine("127.0.0.1")
    ours, theirs, kept = Buffer(0), Buffer(9), Buffer(5)
    engine.register(ours.addr, SIZE)
    peer.register(theirs.addr, SIZE)
    store.register(kept.addr, SIZE)
    assert store.put(["shared/b"], [kept.addr], [SIZE]) == [0]
    write(peer, engine.session, theirs.addr, ours.addr)
    assert ours.bytes == theirs.bytes
    ctypes.memset(kept.addr, 0, SIZE)
    assert store.get(["shared/b"], [kept.addr], [SIZE]) == [SIZE]
    assert kept.bytes == bytes([5]) * SIZE
    store.unregister(kept.addr)
    engine.unregister(ours.addr)
    peer.close()


def test_engine_outlives_the_store() -> None:
    engine, peer = MooncakeTransferEngine("127.0.0.1"), MooncakeTransferEngine("127.0.0.1")
    backend = MooncakeTier.open(Opening(PoolConfig(dram_size=16 << 20), shared=engine.share()))
    assert backend.store.wait_connected(60)
    backend.close()
    ours, theirs = Buffer(3), Buffer(0)
    engine.register(ours.addr, SIZE)
    peer.register(theirs.addr, SIZE)
    write(engine, peer.session, ours.addr, theirs.addr)
    assert theirs.bytes == ours.bytes
    engine.close()
    peer.close()

# SPDX-License-Identifier: Apache-2.0
"""The contract of `Tier`, the same for every implementation and every place a value can lie."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.disk import wait_on_disk
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.backends.mooncake_store import MooncakeStore, StoreOptions
from vllm_ascend_pd.config import PoolConfig, SsdConfig
from vllm_ascend_pd.pool.composite_tier import CompositeTier
from vllm_ascend_pd.pool.fake_tier import FaultyTier
from vllm_ascend_pd.pool.fs_tier import FileTier
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.tier import Opening, Status, SupportsView, Tier, Value
from vllm_ascend_pd.testing.tier_contract import (
    MIB,
    SIZE,
    Buffers,
    TierContract,
    TierSubject,
    numbers,
)
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier

SSD = pytest.param("ssd", marks=pytest.mark.slow)
"""Mooncake's own."""


class InMemory(TierSubject):
    def held(self, key: str) -> bytes | None:
        tier = getattr(self.tier, "inner", self.tier)
        found = tier._values.get(key)
        return None if found is None else bytes(found.data)


class InMooncake(TierSubject):
    def held(self, key: str) -> bytes | None:
        """By Mooncake's own call."""
        return self.tier.store._store.get(key) or None  # type: ignore[attr-defined]


class OnDisk(TierSubject):
    place = Place.SSD

    def __init__(self, tier: Tier, buffers: Buffers, folder: Path) -> None:
        super().__init__(tier, buffers)
        self.folder = folder

    def held(self, key: str) -> bytes | None:
        found = list(self.folder.rglob(key.rpartition("/")[2]))
        files = [path for path in found if path.is_file()]
        return files[0].read_bytes() if files else None


class InBoth(InMemory):
    def held(self, key: str) -> bytes | None:
        memory, files = self.tier.tiers  # type: ignore[attr-defined]
        in_memory = InMemory(memory, self.buffers).held(key)
        assert OnDisk(files, self.buffers, files.folder).held(key) == in_memory
        return in_memory


class OnSsd(InMooncake):
    """Values that memory has evicted; a stock of them, because that takes a while."""

    place = Place.SSD

    def __init__(self, tier: MooncakeTier, buffers: Buffers, folder: Path) -> None:
        super().__init__(tier, buffers)
        self._stock = super().store(16)
        wait_on_disk(folder, len(self._stock))
        deadline = time.monotonic() + 60
        while set(tier.lookup(list(self._stock))) != {Place.SSD}:
            assert time.monotonic() < deadline, "memory does not evict"
            for _ in range(20):  # for longer than the lookup protects what is still in memory
                keys = [f"filler/{next(numbers)}" for _ in range(4)]
                tier.put([Value(key, buffers.addr + 2 * MIB, MIB) for key in keys])
                time.sleep(0.1)

    def store(self, num_values: int = 1) -> dict[str, bytes]:
        return dict(self._stock.popitem() for _ in range(num_values))


class Remote(InMooncake):
    """Values in the memory of another client."""

    place = Place.REMOTE

    def __init__(self, tier: Tier, owner: Tier, buffers: Buffers) -> None:
        super().__init__(tier, buffers)
        self.owner = owner


def _open(config: PoolConfig) -> Iterator[TierSubject]:
    pytest.importorskip("mooncake.store", exc_type=ImportError)
    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier

    backend = MooncakeTier.open(Opening(config))
    buffers = Buffers()
    backend.store.register(buffers.addr, len(buffers.memory))
    assert backend.store.wait_connected(60)
    if (ssd := config.ssd) is None:
        yield InMooncake(backend, buffers)
    else:
        yield OnSsd(backend, buffers, Path(ssd.path))
    backend.close()


@pytest.fixture(scope="module")
def dram() -> Iterator[TierSubject]:
    yield from _open(PoolConfig(dram_size=64 * MIB))


@pytest.fixture(scope="module")
def ssd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    """Of a master with which a lookup brings no value back to memory."""
    master = EmbeddedMaster(["--enable_offload=true", "--default_kv_lease_ttl=1000"])
    folder: Path = tmp_path_factory.mktemp("ssd")
    config = SsdConfig(str(folder), 256 * MIB)
    yield from _open(PoolConfig(master=master.address, dram_size=16 * MIB, ssd=config))
    master.stop()


@pytest.fixture(scope="module")
def remote(dram: TierSubject) -> Iterator[TierSubject]:
    """A client without memory of its own, beside the one that has it."""
    from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier

    owner: MooncakeStore = dram.tier.store  # type: ignore[attr-defined]
    store = MooncakeStore(StoreOptions("127.0.0.1", owner.options.master, 0))
    assert store.wait_connected(60)
    buffers = Buffers()
    store.register(buffers.addr, len(buffers.memory))
    tier = MooncakeTier(store)
    yield Remote(tier, dram.tier, buffers)
    tier.close()


@pytest.fixture(scope="module")
def memory() -> TierSubject:
    return InMemory(MemoryTier(64 * MIB), Buffers())


@pytest.fixture(scope="module")
def faulty() -> TierSubject:
    return InMemory(FaultyTier(MemoryTier(64 * MIB)), Buffers())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    folder = tmp_path_factory.mktemp("fs")
    tier = FileTier(folder, 64 * MIB)
    yield OnDisk(tier, Buffers(), folder)
    tier.close()


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierSubject]:
    """A value is in both, and found in memory."""
    folder = tmp_path_factory.mktemp("composite")
    tier = CompositeTier([MemoryTier(64 * MIB), FileTier(folder, 64 * MIB)])
    yield InBoth(tier, Buffers())
    tier.close()


class TestTiers(TierContract):
    @pytest.fixture(params=["memory", "faulty", "files", "composite", "dram", "remote", SSD])
    def subject(self, request: pytest.FixtureRequest) -> TierSubject:
        found: TierSubject = request.getfixturevalue(request.param)
        return found


def test_value_in_this_process_is_seen_in_place(dram: TierSubject) -> None:
    assert isinstance(dram.tier, SupportsView)
    data = dram.store(2)
    first, second = data
    unknown = f"contract/{next(numbers)}"
    with dram.tier.view([first, unknown, second], SIZE) as addrs:
        assert [bool(addr) for addr in addrs] == [True, False, True]
        seen = [ctypes.string_at(addr, SIZE) for addr in addrs if addr]
    assert seen == [data[first], data[second]]
    with dram.tier.view([first], SIZE // 2) as addrs:
        assert addrs == [0]  # of another size


@pytest.mark.parametrize("elsewhere", ["remote", SSD])
def test_value_that_lies_elsewhere_is_not_seen_in_place(
    elsewhere: str, request: pytest.FixtureRequest
) -> None:
    subject: TierSubject = request.getfixturevalue(elsewhere)
    assert isinstance(subject.tier, SupportsView)
    with subject.tier.view(list(subject.store()), SIZE) as addrs:
        assert addrs == [0]


@pytest.mark.parametrize("kind", ["memory", "files", "composite", "mooncake"])
def test_closed_tier_answers_as_one_that_is_down(kind: str, tmp_path: Path) -> None:
    buffers = Buffers()
    tier: Tier = MemoryTier(MIB)
    if kind == "files":
        tier = FileTier(tmp_path, MIB)
    if kind == "composite":
        tier = CompositeTier([tier, FileTier(tmp_path, MIB)])
    if kind == "mooncake":
        subject = next(gen := _open(PoolConfig(dram_size=16 * MIB)))
        tier, buffers = subject.tier, subject.buffers
    value = buffers.value("k", 0, b"x" * SIZE)
    assert tier.put([value]) == [Status.OK]
    tier.close()
    tier.close()
    assert not tier.is_healthy()
    assert tier.lookup(["k"]) == [Place.NOWHERE]
    assert tier.put([value]) == [Status.FAILED]
    assert tier.get([value]) == [Status.FAILED]
    if isinstance(tier, SupportsView):
        with tier.view(["k"], SIZE) as addrs:
            assert addrs == [0]
    tier.remove(["k"])
    if kind == "mooncake":
        next(gen, None)


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_tier_that_is_full_says_so(kind: str, tmp_path: Path) -> None:
    buffers = Buffers()
    small = SIZE // 2
    tier = MemoryTier(small) if kind == "memory" else FileTier(tmp_path, small)
    assert tier.put([buffers.value("k", 0, b"x" * SIZE)]) == [Status.FULL]

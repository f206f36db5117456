# SPDX-License-Identifier: Apache-2.0
"""The contract of `TransferEngine`, the same for every implementation."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from tests.unit.backends.native_mooncake import NativeEngine
from vllm_ascend_pd.backends import mooncake_engine
from vllm_ascend_pd.backends.fake_engine import (
    FakeTransferEngine,
    FaultyTransferEngine,
    InMemoryEngine,
)
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine
from vllm_ascend_pd.backends.shared_memory import SharedMemoryTransferEngine
from vllm_ascend_pd.backends.transfer_engine import (
    SupportsDirectPlacement,
    TransferEngine,
    TransferStatus,
)
from vllm_ascend_pd.testing.transfer_engine_contract import (
    REGION_BYTES,
    DirectPlacementContract,
    Memory,
    TransferEngineContract,
    wait,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class MooncakePool:
    """Real engines, used again by the next test: each takes a second to close."""

    def __init__(self) -> None:
        self.idle: list[TransferEngine] = []

    def take(self) -> TransferEngine:
        return self.idle.pop() if self.idle else self.start()

    def start(self) -> TransferEngine:
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
        from vllm_ascend_pd.backends.mooncake_engine import MooncakeTransferEngine

        pool = self

        class PooledEngine(MooncakeTransferEngine):
            def __init__(self) -> None:
                super().__init__("127.0.0.1")
                self.starts: set[int] = set()
                self.is_closed = False

            def register(self, addr: int, num_bytes: int) -> None:
                super().register(addr, num_bytes)
                self.starts.add(addr)

            def unregister(self, addr: int) -> None:
                super().unregister(addr)
                self.starts.remove(addr)

            def close(self) -> None:
                super().close()
                self.is_closed = True

            def give_back(self) -> None:
                if not self.is_closed:
                    for addr in list(self.starts):
                        self.unregister(addr)
                    pool.idle.append(self)

        return PooledEngine()


@pytest.fixture(scope="module")
def mooncake_pool() -> Iterator[MooncakePool]:
    pool = MooncakePool()
    yield pool
    for engine in pool.idle:
        engine.close()


STAGED = [
    "in_memory",
    "fake",
    "faulty",
    "mooncake",
    "faulty_mooncake",
    "shared_memory",
    "faulty_shared_memory",
]
DIRECT = ["fake_direct", "ascend_direct", "faulty_ascend_direct"]


@pytest.fixture(params=[*STAGED, *DIRECT])
def make_engine(request, mooncake_pool, monkeypatch) -> Iterator[Callable[[], TransferEngine]]:
    cleanups: list[Callable[[], None]] = []

    def make() -> TransferEngine:
        if "ascend" in request.param:
            engine = AscendEngine(monkeypatch)
            cleanups.append(engine.close)
        elif request.param == "fake_direct":
            engine = FakeTransferEngine(direct_placement=True)
            cleanups.append(engine.close)
        elif "mooncake" in request.param:
            engine = mooncake_pool.take()
            cleanups.append(engine.give_back)
        elif "shared_memory" in request.param:
            engine = SharedMemoryTransferEngine()
            cleanups.append(engine.close)
        else:
            engine = FakeTransferEngine() if request.param == "fake" else InMemoryEngine()
            cleanups.append(engine.close)
        if request.param.startswith("faulty"):
            return FaultyTransferEngine(engine, FaultScript.parse("ok*"))
        return engine

    yield make
    for cleanup in cleanups:
        cleanup()
    for thread in threading.enumerate():
        if thread.name.startswith("mooncake-contact-"):  # it may be about to write
            thread.join()


class AscendEngine(MooncakeTransferEngine):
    """Mooncake for NPUs over a library that plays it, with pages as small as those here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.native = NativeEngine()
        monkeypatch.setattr(mooncake_engine, "load_mooncake", lambda protocol: lambda: self.native)
        monkeypatch.setattr(mooncake_engine, "DIRECT_ALIGNMENT", 1)
        super().__init__("127.0.0.1", protocol="ascend", direct_placement=True)

    def close(self) -> None:
        super().close()
        self.native.close()


class TestTransferEngine(TransferEngineContract):
    """Every one."""


@pytest.mark.parametrize("make_engine", DIRECT, indirect=True)
class TestDirectPlacement(DirectPlacementContract):
    """Those for it."""


def test_only_engines_for_it_may_target_live_pages(make_engine, request):
    name = request.node.callspec.params["make_engine"]
    assert make_engine().direct_placement is (name in DIRECT)


@pytest.mark.parametrize("make_engine", STAGED, indirect=True)
def test_an_engine_that_does_not_declare_it_refuses_batches(make_engine):
    engine, peer = make_engine(), make_engine()
    if isinstance(engine, SupportsDirectPlacement):
        with pytest.raises(ValueError, match="direct placement"):
            engine.submit_batch(peer.session, [4096], [4096], [8])


def test_a_batch_of_the_real_library_arrives(mooncake_pool):
    """Over TCP, where it is not offered: the call itself, its lists and its return code."""
    engine, peer = mooncake_pool.start(), mooncake_pool.start()
    engine.direct_placement = True
    source, target = Memory(), Memory()
    engine.register(source.addr, source.num_bytes)
    peer.register(target.addr, target.num_bytes)
    source.view[:] = b"s" * REGION_BYTES
    starts = [4096 * i for i in range(100)]
    handle = engine.submit_batch(
        peer.session,
        [source.addr + start for start in starts],
        [target.addr + start + 11 for start in starts],
        [1000] * len(starts),
    )
    assert wait(engine, handle) is TransferStatus.DONE
    assert target.view[: 4096 * 100] == (bytes(11) + b"s" * 1000 + bytes(3085)) * 100
    bad = engine.submit_batch(peer.session, [source.addr], [Memory().addr], [8])
    assert wait(engine, bad) is TransferStatus.FAILED
    engine.close()
    peer.close()
    Memory.close_all()

# SPDX-License-Identifier: Apache-2.0
"""The contract of `TransferEngine`, the same for every implementation."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from typing import TYPE_CHECKING, ClassVar

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
from vllm_ascend_pd.backends.shared_memory import SharedMapping, SharedMemoryTransferEngine
from vllm_ascend_pd.backends.transfer_engine import (
    SupportsDirectPlacement,
    TransferEngine,
    TransferStatus,
)
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_ascend_pd.backends.transfer_engine import TransferHandle

REGION_BYTES = 1 << 20
POLL_LIMIT_S = 20.0


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


class Memory:
    """Page-aligned memory that outlives the engines of a test."""

    made: ClassVar[list[Memory]] = []

    def __init__(self, num_bytes: int = REGION_BYTES) -> None:
        self.made.append(self)
        self.mapping = SharedMapping(num_bytes)
        self.addr = self.mapping.addr
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.addr)).cast("B")
        self.num_bytes = num_bytes


@pytest.fixture(autouse=True)
def memories_end_after_engines() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("mooncake-contact-"):  # it may be about to write
            thread.join()
    while Memory.made:
        Memory.made.pop().mapping.close()


def wait(engine: TransferEngine, handle: TransferHandle) -> TransferStatus:
    deadline = time.monotonic() + POLL_LIMIT_S
    while time.monotonic() < deadline:
        status = engine.poll(handle)
        if status is not TransferStatus.RUNNING:
            return status
    raise AssertionError(f"still running after {POLL_LIMIT_S} s")


@pytest.fixture
def pair(make_engine):
    """(engine, its memory, peer engine, the peer's memory), all registered."""
    engine, peer = make_engine(), make_engine()
    source, target = Memory(), Memory()
    engine.register(source.addr, source.num_bytes)
    peer.register(target.addr, target.num_bytes)
    return engine, source, peer, target


@pytest.mark.parametrize("num_bytes", [1, 7, 4096, 100_003, REGION_BYTES])
def test_done_means_that_the_peer_has_every_byte(pair, num_bytes):
    engine, source, peer, target = pair
    source.view[:num_bytes] = (bytes(range(1, 252)) * (num_bytes // 251 + 1))[:num_bytes]
    handle = engine.submit_write(peer.session, source.addr, target.addr, num_bytes)
    assert wait(engine, handle) is TransferStatus.DONE
    assert target.view[:] == source.view[:]


def test_a_write_touches_only_its_own_range(pair):
    engine, source, peer, target = pair
    source.view[:] = b"s" * REGION_BYTES
    target.view[:] = b"t" * REGION_BYTES
    handle = engine.submit_write(peer.session, source.addr + 5, target.addr + 11, 100)
    assert wait(engine, handle) is TransferStatus.DONE
    assert target.view[:] == b"t" * 11 + b"s" * 100 + b"t" * (REGION_BYTES - 111)


def test_many_writes_in_flight_all_arrive(pair):
    engine, source, peer, target = pair
    piece = 4096
    source.view[:] = b"".join(bytes([i % 256]) * piece for i in range(REGION_BYTES // piece))
    handles = [
        engine.submit_write(peer.session, source.addr + start, target.addr + start, piece)
        for start in range(0, REGION_BYTES, piece)
    ]
    assert len(set(handles)) == len(handles)
    assert {wait(engine, handle) for handle in handles} == {TransferStatus.DONE}
    assert target.view[:] == source.view[:]


def test_writes_go_both_ways(pair):
    engine, source, peer, target = pair
    target.view[:3] = b"abc"
    handle = peer.submit_write(engine.session, target.addr, source.addr, 3)
    assert wait(peer, handle) is TransferStatus.DONE
    assert source.view[:3] == b"abc"


def test_a_finished_handle_is_forgotten(pair):
    engine, source, peer, target = pair
    handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
    wait(engine, handle)
    with pytest.raises(KeyError):
        engine.poll(handle)


def test_two_engines_have_two_sessions(pair):
    engine, _, peer, _ = pair
    assert engine.session != peer.session


def test_a_target_outside_the_peers_regions_fails(pair):
    engine, source, peer, _ = pair
    outside = Memory()
    handle = engine.submit_write(peer.session, source.addr, outside.addr, 8)
    assert wait(engine, handle) is TransferStatus.FAILED
    assert not any(outside.view[:8])


def test_a_target_that_leaves_its_region_fails(pair):
    engine, source, peer, target = pair
    end = target.addr + target.num_bytes
    handle = engine.submit_write(peer.session, source.addr, end - 8, 16)
    assert wait(engine, handle) is TransferStatus.FAILED


def test_a_region_is_closed_to_peers_once_unregistered(pair):
    engine, source, peer, target = pair
    assert wait(engine, engine.submit_write(peer.session, source.addr, target.addr, 8)) is (
        TransferStatus.DONE
    )
    peer.unregister(target.addr)
    handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
    assert wait(engine, handle) is TransferStatus.FAILED


def test_a_region_can_be_registered_after_first_contact(pair):
    engine, source, peer, target = pair
    wait(engine, engine.submit_write(peer.session, source.addr, target.addr, 8))
    later = Memory()
    peer.register(later.addr, later.num_bytes)
    source.view[:4] = b"late"
    handle = engine.submit_write(peer.session, source.addr, later.addr, 4)
    assert wait(engine, handle) is TransferStatus.DONE
    assert later.view[:4] == b"late"


def test_an_unknown_session_fails(pair):
    engine, source, _, target = pair
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session = f"127.0.0.1:{unused.getsockname()[1]}"
        handle = engine.submit_write(session, source.addr, target.addr, 8)
        assert wait(engine, handle) is TransferStatus.FAILED


def test_a_closed_peer_fails(pair):
    engine, source, peer, target = pair
    session = peer.session
    peer.close()
    handle = engine.submit_write(session, source.addr, target.addr, 8)
    assert wait(engine, handle) is TransferStatus.FAILED


@pytest.mark.parametrize(("addr", "num_bytes"), [(0, 4096), (1 << 20, 0), (1 << 20, -1)])
def test_register_refuses_null_and_empty_ranges(make_engine, addr, num_bytes):
    engine = make_engine()
    with pytest.raises(ValueError, match="cannot register"):
        engine.register(addr, num_bytes)
    assert engine.num_regions() == 0


@pytest.mark.parametrize("shift", [-4096, 0, 4096])
def test_register_refuses_an_overlap(make_engine, shift):
    engine = make_engine()
    memory = Memory()
    engine.register(memory.addr + 4096, 8192)
    with pytest.raises(ValueError, match="overlap"):
        engine.register(memory.addr + 4096 + shift, 8192)
    assert engine.num_regions() == 1


def test_neighbouring_regions_do_not_overlap(make_engine):
    engine = make_engine()
    memory = Memory()
    for i in (1, 0, 2):
        engine.register(memory.addr + i * 4096, 4096)
    assert engine.num_regions() == 3


def test_unregister_refuses_an_unknown_address(pair):
    engine, source, _, _ = pair
    with pytest.raises(ValueError, match="no region"):
        engine.unregister(source.addr + 8)
    assert engine.num_regions() == 1


def test_a_region_can_be_registered_again(pair):
    engine, source, peer, target = pair
    peer.unregister(target.addr)
    peer.register(target.addr, target.num_bytes)
    handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
    assert wait(engine, handle) is TransferStatus.DONE


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_submit_refuses_an_empty_range(pair, num_bytes):
    engine, source, peer, target = pair
    with pytest.raises(ValueError, match="a write of"):
        engine.submit_write(peer.session, source.addr, target.addr, num_bytes)


def test_submit_refuses_a_source_that_is_not_registered(pair):
    engine, source, peer, target = pair
    with pytest.raises(ValueError, match="registered"):
        engine.submit_write(peer.session, source.addr, target.addr, REGION_BYTES + 1)


def test_an_unknown_handle_is_a_key_error(pair):
    engine, source, peer, target = pair
    handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
    with pytest.raises(KeyError):
        engine.poll(handle + 1)
    wait(engine, handle)


def test_close_unregisters_and_can_be_repeated(pair):
    engine, _, _, _ = pair
    engine.close()
    engine.close()
    assert engine.num_regions() == 0


def test_a_closed_engine_refuses_work(pair):
    engine, source, peer, target = pair
    engine.close()
    with pytest.raises(BackendError):
        engine.register(source.addr, source.num_bytes)
    with pytest.raises(BackendError):
        engine.submit_write(peer.session, source.addr, target.addr, 8)


def test_writes_pending_at_close_are_failed(pair):
    engine, source, peer, target = pair
    handle = engine.submit_write(peer.session, source.addr, target.addr, REGION_BYTES)
    engine.close()
    assert engine.poll(handle) is TransferStatus.FAILED


def test_only_engines_for_it_may_target_live_pages(make_engine, request):
    name = request.node.callspec.params["make_engine"]
    assert make_engine().direct_placement is (name in DIRECT)


# Direct placement.


direct_only = pytest.mark.parametrize("make_engine", DIRECT, indirect=True)


@pytest.mark.parametrize("make_engine", STAGED, indirect=True)
def test_an_engine_that_does_not_declare_it_refuses_batches(pair):
    engine, source, peer, target = pair
    if isinstance(engine, SupportsDirectPlacement):
        with pytest.raises(ValueError, match="direct placement"):
            engine.submit_batch(peer.session, [source.addr], [target.addr], [8])
    assert not any(target.view[:8])


@direct_only
def test_a_batch_fills_its_ranges_and_no_other(pair):
    engine, source, peer, target = pair
    source.view[:] = (bytes(range(1, 252)) * (REGION_BYTES // 251 + 1))[:REGION_BYTES]
    expected = bytearray(REGION_BYTES)
    pieces = [(7 + i * 512, 100_003 + i * 800, 1 + i % 500) for i in range(1, 1100)]
    for src, dst, length in pieces:
        expected[dst : dst + length] = source.view[src : src + length]
    handle = engine.submit_batch(
        peer.session,
        [source.addr + src for src, _, _ in pieces],
        [target.addr + dst for _, dst, _ in pieces],
        [length for _, _, length in pieces],
    )
    assert wait(engine, handle) is TransferStatus.DONE
    assert target.view[:] == expected
    with pytest.raises(KeyError):
        engine.poll(handle)


@direct_only
def test_a_batch_with_a_target_that_is_not_registered_fails_and_writes_nothing(pair):
    engine, source, peer, target = pair
    source.view[:] = b"s" * REGION_BYTES
    outside = Memory()
    handle = engine.submit_batch(
        peer.session, [source.addr] * 2, [target.addr, outside.addr], [64, 64]
    )
    assert wait(engine, handle) is TransferStatus.FAILED
    assert not any(target.view[:])
    assert not any(outside.view[:64])


@direct_only
def test_a_batch_to_an_unknown_session_fails(pair):
    engine, source, _, target = pair
    handle = engine.submit_batch("127.0.0.1:1", [source.addr], [target.addr], [8])
    assert wait(engine, handle) is TransferStatus.FAILED


@direct_only
@pytest.mark.parametrize(("targets", "lengths"), [([], []), ([4096], [8, 8]), ([4096] * 2, [8])])
def test_a_batch_of_lists_that_do_not_fit_is_refused(pair, targets, lengths):
    engine, source, peer, _ = pair
    with pytest.raises(ValueError, match="a batch of"):
        engine.submit_batch(peer.session, [source.addr] * len(lengths), targets, lengths)


@direct_only
def test_a_batch_from_memory_that_is_not_registered_is_refused(pair):
    engine, source, peer, target = pair
    sources = [source.addr, source.addr + REGION_BYTES - 4]
    with pytest.raises(ValueError, match="registered"):
        engine.submit_batch(peer.session, sources, [target.addr] * 2, [8, 8])


@direct_only
def test_a_batch_pending_at_close_is_failed(pair):
    engine, source, peer, target = pair
    handle = engine.submit_batch(peer.session, [source.addr], [target.addr], [8])
    engine.close()
    assert engine.poll(handle) is TransferStatus.FAILED


def test_a_batch_of_the_real_library_arrives(mooncake_pool):
    """Over TCP, where it is not offered: the call itself, its lists and its return code."""
    engine, peer = mooncake_pool.start(), mooncake_pool.start()
    engine._direct_placement = True
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

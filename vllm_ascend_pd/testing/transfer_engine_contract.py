# SPDX-License-Identifier: Apache-2.0
"""The contract of `backends.transfer_engine.TransferEngine` as suites for pytest: derive from
``TransferEngineContract``, and from ``DirectPlacementContract`` where the engine declares that, and
define a fixture ``make_engine``, whose engines it closes.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import pytest

from vllm_ascend_pd.backends.shared_memory import SharedMapping
from vllm_ascend_pd.backends.transfer_engine import (
    SupportsDirectPlacement,
    TransferEngine,
    TransferHandle,
    TransferStatus,
)
from vllm_ascend_pd.errors import BackendError

REGION_BYTES = 1 << 20
POLL_LIMIT_S = 20.0
MakeEngine = Callable[[], TransferEngine]


class Memory:
    """Page-aligned memory that outlives the engines of a test."""

    made: ClassVar[list[Memory]] = []

    def __init__(self, num_bytes: int = REGION_BYTES) -> None:
        self.made.append(self)
        self.mapping = SharedMapping(num_bytes)
        self.addr = self.mapping.addr
        self.view = memoryview((ctypes.c_char * num_bytes).from_address(self.addr)).cast("B")
        self.num_bytes = num_bytes

    @classmethod
    def close_all(cls) -> None:
        while cls.made:
            cls.made.pop().mapping.close()


class EnginePair(NamedTuple):
    """Two engines and the memory that each has registered."""

    engine: TransferEngine
    source: Memory
    peer: TransferEngine
    target: Memory


def wait(engine: TransferEngine, handle: TransferHandle) -> TransferStatus:
    deadline = time.monotonic() + POLL_LIMIT_S
    while time.monotonic() < deadline:
        status = engine.poll(handle)
        if status is not TransferStatus.RUNNING:
            return status
    raise AssertionError(f"still running after {POLL_LIMIT_S} s")


def submit_batch(
    engine: TransferEngine,
    session: str,
    src_addrs: Sequence[int],
    dst_addrs: Sequence[int],
    lengths: Sequence[int],
) -> TransferHandle:
    assert isinstance(engine, SupportsDirectPlacement)
    return engine.submit_batch(session, src_addrs, dst_addrs, lengths)


class _OnPairs:
    @pytest.fixture(autouse=True)
    def memories(self) -> Iterator[None]:
        yield
        Memory.close_all()

    @pytest.fixture
    def pair(self, memories: None, make_engine: MakeEngine) -> EnginePair:
        engine, peer = make_engine(), make_engine()
        source, target = Memory(), Memory()
        engine.register(source.addr, source.num_bytes)
        peer.register(target.addr, target.num_bytes)
        return EnginePair(engine, source, peer, target)


class TransferEngineContract(_OnPairs):
    """Of every engine."""

    @pytest.mark.parametrize("num_bytes", [1, 7, 4096, 100_003, REGION_BYTES])
    def test_done_means_that_the_peer_has_every_byte(
        self, pair: EnginePair, num_bytes: int
    ) -> None:
        engine, source, peer, target = pair
        source.view[:num_bytes] = (bytes(range(1, 252)) * (num_bytes // 251 + 1))[:num_bytes]
        handle = engine.submit_write(peer.session, source.addr, target.addr, num_bytes)
        assert wait(engine, handle) is TransferStatus.DONE
        assert target.view[:] == source.view[:]

    def test_a_write_touches_only_its_own_range(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        source.view[:] = b"s" * REGION_BYTES
        target.view[:] = b"t" * REGION_BYTES
        handle = engine.submit_write(peer.session, source.addr + 5, target.addr + 11, 100)
        assert wait(engine, handle) is TransferStatus.DONE
        assert target.view[:] == b"t" * 11 + b"s" * 100 + b"t" * (REGION_BYTES - 111)

    def test_many_writes_in_flight_all_arrive(self, pair: EnginePair) -> None:
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

    def test_writes_go_both_ways(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        target.view[:3] = b"abc"
        handle = peer.submit_write(engine.session, target.addr, source.addr, 3)
        assert wait(peer, handle) is TransferStatus.DONE
        assert source.view[:3].tobytes() == b"abc"

    def test_a_finished_handle_is_forgotten(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
        wait(engine, handle)
        with pytest.raises(KeyError):
            engine.poll(handle)

    def test_two_engines_have_two_sessions(self, pair: EnginePair) -> None:
        engine, _, peer, _ = pair
        assert engine.session != peer.session

    def test_a_target_outside_the_peers_regions_fails(self, pair: EnginePair) -> None:
        engine, source, peer, _ = pair
        outside = Memory()
        handle = engine.submit_write(peer.session, source.addr, outside.addr, 8)
        assert wait(engine, handle) is TransferStatus.FAILED
        assert not any(outside.view[:8])

    def test_a_target_that_leaves_its_region_fails(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        end = target.addr + target.num_bytes
        handle = engine.submit_write(peer.session, source.addr, end - 8, 16)
        assert wait(engine, handle) is TransferStatus.FAILED

    def test_a_region_is_closed_to_peers_once_unregistered(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        assert wait(engine, engine.submit_write(peer.session, source.addr, target.addr, 8)) is (
            TransferStatus.DONE
        )
        peer.unregister(target.addr)
        handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
        assert wait(engine, handle) is TransferStatus.FAILED

    def test_a_region_can_be_registered_after_first_contact(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        wait(engine, engine.submit_write(peer.session, source.addr, target.addr, 8))
        later = Memory()
        peer.register(later.addr, later.num_bytes)
        source.view[:4] = b"late"
        handle = engine.submit_write(peer.session, source.addr, later.addr, 4)
        assert wait(engine, handle) is TransferStatus.DONE
        assert later.view[:4].tobytes() == b"late"

    def test_an_unknown_session_fails(self, pair: EnginePair) -> None:
        engine, source, _, target = pair
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            session = f"127.0.0.1:{unused.getsockname()[1]}"
            handle = engine.submit_write(session, source.addr, target.addr, 8)
            assert wait(engine, handle) is TransferStatus.FAILED

    def test_a_closed_peer_fails(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        session = peer.session
        peer.close()
        handle = engine.submit_write(session, source.addr, target.addr, 8)
        assert wait(engine, handle) is TransferStatus.FAILED

    @pytest.mark.parametrize(("addr", "num_bytes"), [(0, 4096), (1 << 20, 0), (1 << 20, -1)])
    def test_register_refuses_null_and_empty_ranges(
        self, make_engine: MakeEngine, addr: int, num_bytes: int
    ) -> None:
        engine = make_engine()
        with pytest.raises(ValueError, match="cannot register"):
            engine.register(addr, num_bytes)
        assert engine.num_regions() == 0

    @pytest.mark.parametrize("shift", [-4096, 0, 4096])
    def test_register_refuses_an_overlap(self, make_engine: MakeEngine, shift: int) -> None:
        engine = make_engine()
        memory = Memory()
        engine.register(memory.addr + 4096, 8192)
        with pytest.raises(ValueError, match="overlap"):
            engine.register(memory.addr + 4096 + shift, 8192)
        assert engine.num_regions() == 1

    def test_neighbouring_regions_do_not_overlap(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        memory = Memory()
        for i in (1, 0, 2):
            engine.register(memory.addr + i * 4096, 4096)
        assert engine.num_regions() == 3

    def test_unregister_refuses_an_unknown_address(self, pair: EnginePair) -> None:
        engine, source, _, _ = pair
        with pytest.raises(ValueError, match="no region"):
            engine.unregister(source.addr + 8)
        assert engine.num_regions() == 1

    def test_a_region_can_be_registered_again(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        peer.unregister(target.addr)
        peer.register(target.addr, target.num_bytes)
        handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
        assert wait(engine, handle) is TransferStatus.DONE

    @pytest.mark.parametrize("num_bytes", [0, -1])
    def test_submit_refuses_an_empty_range(self, pair: EnginePair, num_bytes: int) -> None:
        engine, source, peer, target = pair
        with pytest.raises(ValueError, match="a write of"):
            engine.submit_write(peer.session, source.addr, target.addr, num_bytes)

    def test_submit_refuses_a_source_that_is_not_registered(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        with pytest.raises(ValueError, match="registered"):
            engine.submit_write(peer.session, source.addr, target.addr, REGION_BYTES + 1)

    def test_an_unknown_handle_is_a_key_error(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        handle = engine.submit_write(peer.session, source.addr, target.addr, 8)
        with pytest.raises(KeyError):
            engine.poll(TransferHandle(handle + 1))
        wait(engine, handle)

    def test_close_unregisters_and_can_be_repeated(self, pair: EnginePair) -> None:
        engine, _, _, _ = pair
        engine.close()
        engine.close()
        assert engine.num_regions() == 0

    def test_a_closed_engine_refuses_work(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        engine.close()
        with pytest.raises(BackendError):
            engine.register(source.addr, source.num_bytes)
        with pytest.raises(BackendError):
            engine.submit_write(peer.session, source.addr, target.addr, 8)

    def test_writes_pending_at_close_are_failed(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        handle = engine.submit_write(peer.session, source.addr, target.addr, REGION_BYTES)
        engine.close()
        assert engine.poll(handle) is TransferStatus.FAILED


class DirectPlacementContract(_OnPairs):
    """Of engines that declare direct placement."""

    def test_a_batch_fills_its_ranges_and_no_other(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        source.view[:] = (bytes(range(1, 252)) * (REGION_BYTES // 251 + 1))[:REGION_BYTES]
        expected = bytearray(REGION_BYTES)
        pieces = [(7 + i * 512, 100_003 + i * 800, 1 + i % 500) for i in range(1, 1100)]
        for src, dst, length in pieces:
            expected[dst : dst + length] = source.view[src : src + length]
        handle = submit_batch(
            engine,
            peer.session,
            [source.addr + src for src, _, _ in pieces],
            [target.addr + dst for _, dst, _ in pieces],
            [length for _, _, length in pieces],
        )
        assert wait(engine, handle) is TransferStatus.DONE
        assert target.view[:] == expected
        with pytest.raises(KeyError):
            engine.poll(handle)

    def test_a_batch_with_a_target_that_is_not_registered_fails_and_writes_nothing(
        self, pair: EnginePair
    ) -> None:
        engine, source, peer, target = pair
        source.view[:] = b"s" * REGION_BYTES
        outside = Memory()
        handle = submit_batch(
            engine, peer.session, [source.addr] * 2, [target.addr, outside.addr], [64, 64]
        )
        assert wait(engine, handle) is TransferStatus.FAILED
        assert not any(target.view[:])
        assert not any(outside.view[:64])

    def test_a_batch_to_an_unknown_session_fails(self, pair: EnginePair) -> None:
        engine, source, _, target = pair
        handle = submit_batch(engine, "127.0.0.1:1", [source.addr], [target.addr], [8])
        assert wait(engine, handle) is TransferStatus.FAILED

    @pytest.mark.parametrize(
        ("targets", "lengths"), [([], []), ([4096], [8, 8]), ([4096] * 2, [8])]
    )
    def test_a_batch_of_lists_that_do_not_fit_is_refused(
        self, pair: EnginePair, targets: list[int], lengths: list[int]
    ) -> None:
        engine, source, peer, _ = pair
        with pytest.raises(ValueError, match="a batch of"):
            submit_batch(engine, peer.session, [source.addr] * len(lengths), targets, lengths)

    def test_a_batch_from_memory_that_is_not_registered_is_refused(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        sources = [source.addr, source.addr + REGION_BYTES - 4]
        with pytest.raises(ValueError, match="registered"):
            submit_batch(engine, peer.session, sources, [target.addr] * 2, [8, 8])

    def test_a_batch_pending_at_close_is_failed(self, pair: EnginePair) -> None:
        engine, source, peer, target = pair
        handle = submit_batch(engine, peer.session, [source.addr], [target.addr], [8])
        engine.close()
        assert engine.poll(handle) is TransferStatus.FAILED

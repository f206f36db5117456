# SPDX-License-Identifier: Apache-2.0
"""Transfer engines for tests and drills: one in process, and scripted faults around any engine."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vllm_ascend_pd.backends.fault_script import Fault, FaultKind, FaultScript, WriteRequest
from vllm_ascend_pd.backends.regions import RegionTable, check_batch
from vllm_ascend_pd.backends.transfer_engine import (
    SupportsDirectPlacement,
    SupportsReach,
    TransferEngine,
    TransferHandle,
    TransferStatus,
)
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Sequence


_SPOILED = (FaultKind.CORRUPT, FaultKind.GARBAGE)
_STARTED = (FaultKind.OK, FaultKind.SHORT, *_SPOILED)
"""With the call; the others when they are polled, or never."""


@dataclass(slots=True)
class _ScriptedWrite:
    """A write under the script; owned by the thread that polls its handle."""

    request: WriteRequest
    fault: Fault
    num_polls: int = 0
    inner: TransferHandle | None = None  # set once the inner engine has the write
    bounce: mmap.mmap | None = None  # private source of a corrupted write


class FaultyTransferEngine(TransferEngine):
    """Wraps any engine, also one between real processes, and spoils writes by script."""

    def __init__(self, inner: TransferEngine, script: FaultScript | None = None) -> None:
        self._inner = inner
        self.session, self.direct_placement = inner.session, inner.direct_placement
        self.script = script if script is not None else FaultScript()
        self._next_index = itertools.count()
        # Read and written by any thread, under the lock.
        self._lock = threading.Lock()
        self._next_handle = itertools.count(1)
        self._writes: dict[TransferHandle, _ScriptedWrite] = {}
        self._late: list[WriteRequest] = []
        self._num_bounces = 0
        self._abandoned: list[mmap.mmap] = []
        self._closed = False
        self._num_writes = 0

    def reaches(self, session: str) -> bool:
        return not isinstance(self._inner, SupportsReach) or self._inner.reaches(session)

    @property
    def num_writes(self) -> int:
        """Writes submitted so far, for tests."""
        with self._lock:
            return self._num_writes

    def register(self, addr: int, num_bytes: int) -> None:
        self._inner.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        self._inner.unregister(addr)

    def num_regions(self) -> int:
        with self._lock:
            num_bounces = self._num_bounces
        return self._inner.num_regions() - num_bounces

    def submit_write(
        self, session: str, src_addr: int, dst_addr: int, num_bytes: int
    ) -> TransferHandle:
        if num_bytes <= 0:
            raise ValueError(f"a write of {num_bytes} bytes")
        return self._submit(session, src_addr, dst_addr, num_bytes)

    def submit_batch(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> TransferHandle:
        if not self.direct_placement:
            raise ValueError("this engine does not declare direct placement")
        if not lengths or not len(src_addrs) == len(dst_addrs) == len(lengths):
            raise ValueError(f"a batch of {len(src_addrs)}, {len(dst_addrs)}, {len(lengths)}")
        pieces = tuple(zip(src_addrs, dst_addrs, lengths, strict=True))
        return self._submit(session, src_addrs[0], dst_addrs[0], sum(lengths), pieces)

    def _submit(
        self,
        session: str,
        src_addr: int,
        dst_addr: int,
        num_bytes: int,
        pieces: tuple[tuple[int, int, int], ...] = (),
    ) -> TransferHandle:
        index = next(self._next_index)
        request = WriteRequest(index, session, src_addr, dst_addr, num_bytes, pieces)
        write = _ScriptedWrite(request, self.script.next_fault(request))
        if write.fault.kind in _STARTED:
            self._start(write)
        with self._lock:
            handle = TransferHandle(next(self._next_handle))
            self._writes[handle] = write
            self._num_writes += 1
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        with self._lock:
            write = self._writes[handle]
            closed = self._closed
        status = TransferStatus.FAILED if closed else self._advance(write)
        if status is not TransferStatus.RUNNING:
            with self._lock:
                self._writes.pop(handle, None)
        return status

    def end_delays(self) -> None:
        """All writes that are held up go on."""
        with self._lock:
            for write in self._writes.values():
                write.num_polls = sys.maxsize

    def land_late_writes(self) -> int:
        """Writes the bytes of all LATE writes now; returns how many could still be written."""
        with self._lock:
            late, self._late = self._late, []
        num_landed = 0
        for request in late:
            inner = self._submit_inner(request, request.num_bytes)
            status = TransferStatus.RUNNING
            while status is TransferStatus.RUNNING:
                status = self._inner.poll(inner)
            num_landed += status is TransferStatus.DONE
        return num_landed

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._inner.close()

    def _submit_inner(self, request: WriteRequest, num_bytes: int) -> TransferHandle:
        if request.pieces:
            assert isinstance(self._inner, SupportsDirectPlacement)
            sources, targets, lengths = zip(*request.head(num_bytes), strict=True)
            return self._inner.submit_batch(request.session, sources, targets, lengths)
        return self._inner.submit_write(
            request.session, request.src_addr, request.dst_addr, num_bytes
        )

    def _start(self, write: _ScriptedWrite) -> None:
        request = write.request
        if write.fault.kind in _SPOILED:
            self._start_corrupted(write)
        elif write.fault.kind is FaultKind.SHORT:
            # The first half of a single byte is nothing at all.
            if half := request.num_bytes // 2:
                write.inner = self._submit_inner(request, half)
        else:
            write.inner = self._submit_inner(request, request.num_bytes)

    def _start_corrupted(self, write: _ScriptedWrite) -> None:
        """Sends a spoiled private copy, so that the caller's own memory stays as it is."""
        request = write.request
        bounce = mmap.mmap(-1, request.num_bytes)
        pieces = request.pieces or ((request.src_addr, request.dst_addr, request.num_bytes),)
        for src, _, length in pieces:
            bounce.write(ctypes.string_at(src, length))
        if write.fault.kind is FaultKind.GARBAGE:
            bounce[:] = b"\xff" * request.num_bytes
        else:
            bounce[request.num_bytes // 2] ^= 1
        bounce_addr = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
        self._inner.register(bounce_addr, request.num_bytes)
        with self._lock:
            self._num_bounces += 1
        write.bounce = bounce
        if not request.pieces:
            write.inner = self._inner.submit_write(
                request.session, bounce_addr, request.dst_addr, request.num_bytes
            )
            return
        assert isinstance(self._inner, SupportsDirectPlacement)
        lengths = [length for _, _, length in pieces]
        starts = itertools.accumulate(lengths[:-1], initial=bounce_addr)
        write.inner = self._inner.submit_batch(
            request.session, list(starts), [dst for _, dst, _ in pieces], lengths
        )

    def _advance(self, write: _ScriptedWrite) -> TransferStatus:
        kind = write.fault.kind
        if kind is FaultKind.NEVER:
            return TransferStatus.RUNNING
        if kind is FaultKind.DROP:
            return TransferStatus.DONE
        if kind is FaultKind.FAIL:
            return TransferStatus.FAILED
        if kind is FaultKind.LATE:
            with self._lock:
                self._late.append(write.request)
            return TransferStatus.FAILED
        if kind is FaultKind.DELAY and write.inner is None:
            if write.num_polls < write.fault.num_polls:
                write.num_polls += 1
                return TransferStatus.RUNNING
            self._start(write)
        if write.inner is None:
            return TransferStatus.DONE
        status = self._inner.poll(write.inner)
        if status is not TransferStatus.RUNNING and write.bounce is not None:
            self._inner.unregister(ctypes.addressof(ctypes.c_char.from_buffer(write.bounce)))
            with self._lock:
                self._num_bounces -= 1
                if status is TransferStatus.FAILED:
                    self._abandoned.append(write.bounce)  # the inner engine may still read it
            write.bounce = None
        return status


@dataclass(slots=True)
class _Pending:
    peer: str
    pieces: tuple[tuple[int, int, int], ...]


class InMemoryEngine(TransferEngine):
    """Sessions of one process; the bytes move when the sender polls.

    Moving them at the poll, not at the submit, fails a test that touches either side too early.
    A write that fails has written nothing, so this engine may declare direct placement.
    """

    # Session -> engine; read and written by any thread, under the lock.
    _sessions: ClassVar[dict[str, InMemoryEngine]] = {}
    _sessions_lock: ClassVar[threading.Lock] = threading.Lock()
    _next_session: ClassVar[itertools.count[int]] = itertools.count(1)

    def __init__(self, direct_placement: bool = False) -> None:
        self.direct_placement = direct_placement
        self._regions = RegionTable()
        self._lock = threading.Lock()
        self._closed = False
        self._next_handle = itertools.count(1)
        self._pending: dict[TransferHandle, _Pending] = {}
        with InMemoryEngine._sessions_lock:
            self.session = f"fake:{next(InMemoryEngine._next_session)}"
            InMemoryEngine._sessions[self.session] = self

    def register(self, addr: int, num_bytes: int) -> None:
        self._check_open()
        self._regions.add(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        self._check_open()
        self._regions.remove(addr)

    def num_regions(self) -> int:
        return len(self._regions)

    def submit_write(
        self, session: str, src_addr: int, dst_addr: int, num_bytes: int
    ) -> TransferHandle:
        self._check_open()
        self._regions.check_inside(src_addr, num_bytes)
        return self._enqueue(_Pending(session, ((src_addr, dst_addr, num_bytes),)))

    def submit_batch(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> TransferHandle:
        self._check_open()
        if not self.direct_placement:
            raise ValueError("this engine does not declare direct placement")
        check_batch(self._regions, src_addrs, dst_addrs, lengths)
        pieces = tuple(zip(src_addrs, dst_addrs, lengths, strict=True))
        return self._enqueue(_Pending(session, pieces))

    def _enqueue(self, write: _Pending) -> TransferHandle:
        with self._lock:
            handle = TransferHandle(next(self._next_handle))
            self._pending[handle] = write
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        with self._lock:
            write = self._pending.pop(handle)
            closed = self._closed
        with InMemoryEngine._sessions_lock:
            peer = InMemoryEngine._sessions.get(write.peer)
        if closed or peer is None:
            return TransferStatus.FAILED
        for src, dst, num_bytes in write.pieces:
            if not peer._regions.contains(dst, num_bytes):
                return TransferStatus.FAILED
            if not self._regions.contains(src, num_bytes):
                return TransferStatus.FAILED
        for src, dst, num_bytes in write.pieces:
            ctypes.memmove(dst, src, num_bytes)
        return TransferStatus.DONE

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with InMemoryEngine._sessions_lock:
            InMemoryEngine._sessions.pop(self.session, None)
        self._regions.clear()

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise BackendError(f"transfer engine {self.session} is closed")


class FakeTransferEngine(FaultyTransferEngine):
    """The in-process engine with a script, for unit tests and drills without a network."""

    def __init__(self, script: FaultScript | None = None, direct_placement: bool = False) -> None:
        super().__init__(InMemoryEngine(direct_placement), script)

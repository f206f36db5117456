# SPDX-License-Identifier: Apache-2.0
"""Mooncake's transfer engine, without the ways in which it can hang or corrupt."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from vllm_ascend_pd.backends.mooncake_library import load_mooncake, set_mooncake_env
from vllm_ascend_pd.backends.regions import RegionTable, check_batch
from vllm_ascend_pd.backends.transfer_engine import (
    TransferEngine,
    TransferHandle,
    TransferStatus,
)
from vllm_ascend_pd.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

DIRECT_ALIGNMENT = 2 << 20
"""What is registered for direct placement begins at a multiple of this (vllm-ascend aligns its KV
caches for it)."""

_MAX_PIECES = 1024
"""Of one call; TCP refuses more than 2048."""
_IDLE_SENDER_S = 300.0
_CLOSE_S = 2.0
"""So long closing waits for what is being written: its memory may go afterwards."""

# What transfer_check_status says; every other value is a failure.
_CHECK_RUNNING = 0
_CHECK_DONE = 1


class _NativeEngine(Protocol):
    """What is used of mooncake.engine.TransferEngine. All of it releases the GIL while it waits.

    `get_first_buffer_address` does not: with a stopped peer it freezes the process for a minute.
    """

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def get_engine(self) -> object: ...
    def register_memory(self, addr: int, num_bytes: int) -> int: ...
    def unregister_memory(self, addr: int) -> int: ...
    def send_probe(self, session: str) -> int: ...
    def transfer_submit_write(self, session: str, src: int, dst: int, num_bytes: int) -> int: ...
    def transfer_check_status(self, batch_id: int) -> int: ...
    def batch_transfer_sync_write(
        self, session: str, srcs: list[int], dsts: list[int], lengths: list[int]
    ) -> int: ...


class _Phase(Enum):
    """Where one write stands.

    WAITING -> STARTING -> STARTED
       |          '------> FAILED     (Mooncake refused it)
       '-----------------> FAILED     (first contact failed, or took too long)
    """

    WAITING = "waiting"  # for the first contact with its peer
    STARTING = "starting"  # being handed to Mooncake
    STARTED = "started"  # in Mooncake's hands, batch_id is valid
    FAILED = "failed"


@dataclass(slots=True)
class _Write:
    """All fields are read and written by any thread, under the engine's lock."""

    session: str
    src_addr: int
    dst_addr: int
    num_bytes: int
    phase: _Phase
    contact_deadline: float
    peer: str = ""
    """The session as Mooncake is told it, once the peer has been met."""
    batch_id: int = 0


@dataclass(slots=True)
class _Batch:
    """``status`` is written by its sender, read by any thread: one reference."""

    src_addrs: list[int]
    dst_addrs: list[int]
    lengths: list[int]
    begin_until: float
    status: TransferStatus = TransferStatus.RUNNING


class _Sender(threading.Thread):
    """Writes the batches for one peer, one after another: Mooncake's call blocks, without the GIL.
    It ends when none has come for long.

    A batch that could not begin in time, as after this process was stopped, is not begun: its
    peer has given it up long since.
    """

    def __init__(
        self,
        engine: _NativeEngine,
        session: str,
        bind_thread: Callable[[], None] | None,
        retire: Callable[[str], bool],
    ) -> None:
        """``retire`` says whether nothing will be put into ``batches`` any more."""
        super().__init__(name=f"mooncake-send-{session}", daemon=True)
        self._engine = engine
        self._retire = retire
        self._session = session
        self._bind_thread = bind_thread
        self.batches: queue.Queue[_Batch | None] = queue.Queue()

    def fail_all(self) -> None:
        """Where it could not be started, once nothing is put into ``batches`` any more."""
        while not self.batches.empty():
            batch = self.batches.get()
            if batch is not None:
                batch.status = TransferStatus.FAILED

    def run(self) -> None:
        bind_thread = self._bind_thread
        while True:
            try:
                batch = self.batches.get(timeout=_IDLE_SENDER_S)
            except queue.Empty:
                if self._retire(self._session):
                    return
                continue
            if batch is None:
                return
            try:
                if bind_thread is not None:  # one that fails is tried again with the next batch
                    bind_thread()
                    bind_thread = None
                done = self._write(batch)
            except Exception:  # a thread's boundary: the batch fails, and its load with it
                logger.exception("a batch of writes to %s failed", self._session)
                done = False
            batch.status = TransferStatus.DONE if done else TransferStatus.FAILED

    def _write(self, batch: _Batch) -> bool:
        for start in range(0, len(batch.lengths), _MAX_PIECES):
            if time.monotonic() >= batch.begin_until:
                logger.warning("a batch of writes to %s was not begun in time", self._session)
                return False
            part = slice(start, start + _MAX_PIECES)
            if rc := self._engine.batch_transfer_sync_write(
                self._session, batch.src_addrs[part], batch.dst_addrs[part], batch.lengths[part]
            ):
                logger.warning("a batch of writes to %s failed: rc %d", self._session, rc)
                return False
        return True


@dataclass(frozen=True, slots=True)
class SharedEngine:
    """What a `MooncakeStore` needs to use the engine of the transfers: one listener for both."""

    protocol: str
    session: str
    native: object
    """For `MooncakeDistributedStore.setup(engine=...)`."""
    bind_thread: Callable[[], None] | None


class MooncakeTransferEngine(TransferEngine):
    """One-sided writes over Mooncake. What is said of time and failure was measured over TCP.

    DONE comes after the peer's acknowledgement, so the bytes are in its memory. FAILED comes after
    the connection has been dropped, so the source is no longer read; but bytes that had already
    reached the socket of a peer that was stopped land when it goes on, however late. Only a
    checksum of what the peer copies out of staging guards against those.

    A live peer answers first contact in a few milliseconds. A stopped one would block Mooncake for
    a minute, so a thread for each new peer does that, and its writes fail after
    `contact_timeout_s`. With a peer that stops later, writes fail after about 3 s each, four at a
    time.

    Poll about every 0.1 ms: a busy loop takes the core that the transfer itself needs.

    Over TCP Mooncake never looks again at what it knows of a peer, and a process may get the port
    of one that has ended. So a peer is met anew once a write to it has failed, under a spelling of
    its session that Mooncake does not know: with one more zero before the port.

    With protocol "ascend" it may place directly: batches go out by `batch_transfer_sync_write`, as
    in vllm-ascend's own connector. Not yet run on NPUs, so that no byte lands after a failure there
    is what is declared, not what was measured.

    The engine listens on two ports, the data port on all interfaces, without authentication.
    """

    def __init__(
        self,
        host: str,
        contact_timeout_s: float = 3.0,
        protocol: str = "tcp",
        bind_thread: Callable[[], None] | None = None,
        direct_placement: bool = False,
    ) -> None:
        """`host` is the address at which peers reach this process; Mooncake picks the port.

        `protocol` is "tcp"; "rdma", over the cards of the host; or "ascend" for Mooncake's build
        for NPUs, with which writes go over the NPUs' own links; `bind_thread` then makes the
        device current in a thread of this class.

        Raises:
            ValueError: direct placement over "tcp" or "rdma", where bytes land after a failure.
            BackendError: Mooncake cannot be opened, or would use another protocol.
        """
        if direct_placement and protocol != "ascend":
            raise ValueError(
                f"over {protocol} Mooncake may write after a failure: no direct placement"
            )
        self.direct_placement = direct_placement
        self._alignment = DIRECT_ALIGNMENT if protocol == "ascend" else 1
        self._contact_timeout_s = contact_timeout_s
        self._protocol = protocol
        self._bind_thread = bind_thread
        set_mooncake_env(protocol, host)
        engine: _NativeEngine = load_mooncake(protocol)()
        if rc := engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise BackendError(f"Mooncake cannot listen for {host!r} ({protocol}): rc {rc}")
        self.session = f"{host}:{engine.get_rpc_port()}"
        logger.info("Mooncake listens at %s, over %s only", self.session, protocol)
        self._regions = RegionTable()
        # All fields below are read and written by any thread, under the lock. Mooncake is never
        # called under it; whoever calls it holds its own reference to the engine.
        self._lock = threading.RLock()
        self._engine: _NativeEngine | None = engine
        self._next_handle = itertools.count(1)
        self._writes: dict[TransferHandle, _Write] = {}
        self._known: dict[str, str] = {}  # session -> its spelling, of peers that have been met
        self._num_zeros: dict[str, int] = {}  # session -> those of its spelling
        self._waiting: dict[str, list[_Write]] = {}  # session -> writes until first contact
        self._batches: dict[TransferHandle, _Batch] = {}
        self._senders: dict[str, _Sender] = {}  # session -> its thread

    def share(self) -> SharedEngine:
        """For a store that uses this engine instead of one of its own; it must be closed first."""
        native = self._open_engine().get_engine()
        return SharedEngine(self._protocol, self.session, native, self._bind_thread)

    def register(self, addr: int, num_bytes: int) -> None:
        engine = self._open_engine()
        if addr % self._alignment:
            raise ValueError(
                f"cannot register {num_bytes} bytes at {addr:#x}: with protocol"
                f" {self._protocol} a region begins at a multiple of {self._alignment} bytes"
            )
        # Mooncake accepts a null address and is unusable from then on; the table refuses it.
        self._regions.add(addr, num_bytes)
        if rc := engine.register_memory(addr, num_bytes):
            self._regions.remove(addr)
            raise BackendError(f"Mooncake cannot register {num_bytes} bytes at {addr:#x}: rc {rc}")

    def unregister(self, addr: int) -> None:
        engine = self._open_engine()
        self._regions.remove(addr)
        if rc := engine.unregister_memory(addr):
            raise BackendError(f"Mooncake cannot unregister {addr:#x}: rc {rc}")

    def num_regions(self) -> int:
        return len(self._regions)

    def submit_write(
        self, session: str, src_addr: int, dst_addr: int, num_bytes: int
    ) -> TransferHandle:
        engine = self._open_engine()
        self._regions.check_inside(src_addr, num_bytes)
        deadline = time.monotonic() + self._contact_timeout_s
        write = _Write(session, src_addr, dst_addr, num_bytes, _Phase.WAITING, deadline)
        is_first = False
        with self._lock:
            handle = TransferHandle(next(self._next_handle))
            if peer := self._known.get(session):
                write.peer, write.phase = peer, _Phase.STARTING
            else:
                is_first = session not in self._waiting
                self._waiting.setdefault(session, []).append(write)
            is_known = write.phase is _Phase.STARTING
            self._writes[handle] = write
        if is_known:
            self._start(engine, write)
        elif is_first:
            name = f"mooncake-contact-{session}"
            contact = threading.Thread(
                target=self._contact, args=(engine, session), name=name, daemon=True
            )
            if not _start_thread(contact):
                self._take_waiting(session, None)
        return handle

    def submit_batch(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> TransferHandle:
        self._open_engine()
        if not self.direct_placement:
            raise ValueError("this engine does not declare direct placement")
        check_batch(self._regions, src_addrs, dst_addrs, lengths)
        begin_until = time.monotonic() + self.LATE_WRITE_S
        batch = _Batch(list(src_addrs), list(dst_addrs), list(lengths), begin_until)
        with self._lock:
            engine = self._open_engine()  # its end tells all senders
            handle = TransferHandle(next(self._next_handle))
            self._batches[handle] = batch
            sender = self._senders.get(session)
            is_new = sender is None
            if sender is None:
                sender = _Sender(engine, session, self._bind_thread, self._retire)
                self._senders[session] = sender
            sender.batches.put(batch)
        if is_new and not _start_thread(sender):
            with self._lock:
                del self._senders[session]
            sender.fail_all()
        return handle

    def _retire(self, session: str) -> bool:
        with self._lock:
            is_idle = self._senders[session].batches.empty()
            if is_idle:
                del self._senders[session]
            return is_idle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        with self._lock:
            batch = self._batches.get(handle)
            if batch is not None:
                status = TransferStatus.FAILED if self._engine is None else batch.status
                if status is not TransferStatus.RUNNING:
                    del self._batches[handle]
                return status
        # Taken out while it is looked at: Mooncake frees the id of a finished write, so two threads
        # that asked for the same one would touch freed memory.
        with self._lock:
            write = self._writes.pop(handle)
            engine = self._engine
            if write.phase is _Phase.WAITING and time.monotonic() >= write.contact_deadline:
                write.phase = _Phase.FAILED
            phase = write.phase
        if engine is None or phase is _Phase.FAILED:
            return TransferStatus.FAILED
        if phase is _Phase.STARTED:
            code = engine.transfer_check_status(write.batch_id)
            if code == _CHECK_DONE:
                return TransferStatus.DONE
            if code != _CHECK_RUNNING:
                self._meet_anew(write)
                return TransferStatus.FAILED
        with self._lock:
            self._writes[handle] = write
        return TransferStatus.RUNNING

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
            senders = list(self._senders.values())
            for sender in senders:
                sender.batches.put(None)
        if engine is None:
            return
        deadline = time.monotonic() + _CLOSE_S
        for sender in senders:
            sender.join(max(0.0, deadline - time.monotonic()))
        for addr in self._regions.clear():
            engine.unregister_memory(addr)
        # The last reference that goes joins Mooncake's threads, for about a second. A thread that
        # is stuck in first contact keeps it for at most another minute.
        del engine

    def _open_engine(self) -> _NativeEngine:
        with self._lock:
            if self._engine is None:
                raise BackendError(f"transfer engine {self.session} is closed")
            return self._engine

    def _start(self, engine: _NativeEngine, write: _Write) -> None:
        """Hands a STARTING write to Mooncake; about 10 us once the peer is known."""
        try:
            batch_id = engine.transfer_submit_write(
                write.peer, write.src_addr, write.dst_addr, write.num_bytes
            )
        except Exception:  # others wait behind it for the same first contact
            logger.exception("a write to %s could not be begun", write.peer)
            batch_id = 0
        with self._lock:
            write.batch_id = batch_id
            write.phase = _Phase.STARTED if batch_id > 0 else _Phase.FAILED
        if batch_id <= 0:
            self._meet_anew(write)

    def _meet_anew(self, failed: _Write) -> None:
        """Before the next write to its peer, which may be another process by now."""
        with self._lock:
            if self._known.get(failed.session) == failed.peer:
                del self._known[failed.session]
                if self._protocol == "tcp":
                    zeros = self._num_zeros.get(failed.session, 0)
                    self._num_zeros[failed.session] = zeros + 1

    def _spell(self, session: str) -> str:
        host, _, port = session.rpartition(":")
        with self._lock:
            return f"{host}:{'0' * self._num_zeros.get(session, 0)}{port}"

    def _contact(self, engine: _NativeEngine, session: str) -> None:
        """Meets a new peer, then starts the writes that wait for it. Its own thread."""
        peer = self._spell(session)
        try:
            if self._bind_thread is not None:
                self._bind_thread()
            is_there = engine.send_probe(peer) == 0
        except Exception:  # a thread's boundary: the writes that wait fail below
            logger.exception("first contact with %s failed", session)
            is_there = False
        if not is_there:
            logger.warning("transfer peer %s does not answer", session)
        while due := self._take_waiting(session, peer if is_there else None):
            for write in due:
                self._start(engine, write)

    def _take_waiting(self, session: str, peer: str | None) -> list[_Write]:
        """Writes to start now; once there are none, first contact with the session is over.
        ``peer`` is its spelling, if it is there.
        """
        with self._lock:
            due = [w for w in self._waiting[session] if w.phase is _Phase.WAITING]
            is_open = self._engine is not None
            for write in due:
                write.phase = _Phase.STARTING if peer and is_open else _Phase.FAILED
                write.peer = peer or ""
            if peer and is_open and due:
                self._waiting[session] = []
                return due
            # From here on a peer that is there gets its writes without this detour, and one that is
            # not is asked again by the next write.
            del self._waiting[session]
            if peer:
                self._known[session] = peer
            return []


def _start_thread(thread: threading.Thread) -> bool:
    """Whether the host has one left."""
    try:
        thread.start()
    except RuntimeError as e:
        logger.warning("%s: %s", thread.name, e)
        return False
    return True

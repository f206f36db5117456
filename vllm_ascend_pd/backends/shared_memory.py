# SPDX-License-Identifier: Apache-2.0
"""Writes into the memory of another process of this host.

    consumer                                        producer
    SharedMapping: memfd, sealed   <── connect ──   first write to this session
       [header page | slots ...]   ── fds, addr ─►  maps the memfd
                                                    copies, or packs right into the window
    the connection stays open: its end tells the producer that the consumer is gone

The socket is a file that only this user can open, and both sides check the other's user id.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from vllm_ascend_pd.backends.block_copy import Region
from vllm_ascend_pd.backends.regions import RegionTable
from vllm_ascend_pd.backends.socket_folder import SocketFolder
from vllm_ascend_pd.backends.transfer_engine import TransferEngine, TransferHandle, TransferStatus
from vllm_ascend_pd.errors import BackendError
from vllm_ascend_pd.log_limit import limited_logger

logger = limited_logger(__name__)

_SOCKET_NAME = re.compile(r"vllm-pd-[0-9a-f]{32}\.sock")
_HEADER_BYTES = mmap.PAGESIZE
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CONTACT_TIMEOUT_S = 1.0
_RETRY_AFTER_S = 5.0
_NOT_ACCEPTED_S = 0.1
_MAX_REGIONS = 64
_MAX_FRAME_BYTES = 1 << 16


class HostPinning(Protocol):
    """What copies to and from memory of the host faster once that is pinned: a device."""

    def pin(self, addr: int, num_bytes: int) -> None:
        """From now on, as far as that is possible. The memory stays mapped until `unpin`."""

    def unpin(self, addr: int) -> None:
        """Before the memory that begins at ``addr`` is unmapped."""


class NoPinning(HostPinning):
    """Of engines whose pages are in host memory."""

    def pin(self, addr: int, num_bytes: int) -> None: ...
    def unpin(self, addr: int) -> None: ...


_NO_PINNING = NoPinning()


class SharedMapping:
    """Zeroed memory that other processes can map: ``num_bytes`` at ``addr``, page aligned.

    A page before it holds one byte that says whether the owner lets peers write. The file cannot
    be made smaller, so that a peer's write never faults.
    """

    # Start address -> mapping, of those that are not closed; any thread.
    _live: ClassVar[dict[int, SharedMapping]] = {}

    def __init__(self, num_bytes: int, pinning: HostPinning = _NO_PINNING) -> None:
        self.num_bytes = num_bytes
        self._pinning = pinning
        self.fd = os.memfd_create("vllm-pd-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, _HEADER_BYTES + num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        # Its pages exist from the start, so that no copy pays for faults.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._map = mmap.mmap(self.fd, _HEADER_BYTES + num_bytes, flags=flags)
        self.addr = _address_of(self._map) + _HEADER_BYTES
        pinning.pin(self.addr, num_bytes)
        SharedMapping._live[self.addr] = self

    @classmethod
    def at(cls, addr: int) -> SharedMapping | None:
        """The mapping of this process that starts at ``addr``."""
        return cls._live.get(addr)

    def open_to_peers(self, is_open: bool) -> None:
        self._map[0] = is_open

    def close(self) -> None:
        """Unmap; a peer that has it mapped keeps its own view of it."""
        SharedMapping._live.pop(self.addr, None)
        self.open_to_peers(False)
        os.close(self.fd)
        self._pinning.unpin(self.addr)
        self._map.close()


class _Announcement(msgspec.Struct, frozen=True):
    """What a connection begins with; one fd follows for each region."""

    regions: tuple[tuple[int, int], ...]
    """(address in the owner's process, bytes)."""


@dataclass(slots=True)
class _PeerRegion:
    addr: int
    num_bytes: int
    view: mmap.mmap
    pinning: HostPinning
    is_pinned: bool = False

    @property
    def start(self) -> int:
        """Where it is mapped in this process."""
        return _address_of(self.view) + _HEADER_BYTES

    @property
    def is_open(self) -> bool:
        return self.view[0] == 1

    def window(self, addr: int, num_bytes: int) -> Region | None:
        offset = addr - self.addr
        if not self.is_open or offset < 0 or offset + num_bytes > self.num_bytes:
            return None
        if not self.is_pinned:
            self.pinning.pin(self.start, self.num_bytes)
            self.is_pinned = True
        return Region(self.start + offset, num_bytes)

    def close(self) -> None:
        if self.is_pinned:
            self.pinning.unpin(self.start)
        self.view.close()


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    regions: list[_PeerRegion]

    def is_alive(self) -> bool:
        try:
            return self.connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def window(self, addr: int, num_bytes: int) -> Region | None:
        windows = (region.window(addr, num_bytes) for region in self.regions)
        return next((window for window in windows if window is not None), None)

    def close(self) -> None:
        self.connection.close()
        for region in self.regions:
            region.close()


class SharedMemoryTransferEngine(TransferEngine):
    """One-sided writes between processes of one host: a memcpy, or none with ``window``.

    ``submit_write`` copies before it returns (about 0.1 ms a MiB, without the GIL). A write is
    DONE when its bytes are in the memory that both processes map. A peer that has unregistered the
    region, has closed, or has died, makes it FAILED. A writer that is stopped within a copy
    finishes it when it goes on, however late, so what is copied out must be verified, as with a
    network.

    What has ended is unmapped when another peer is met, so one thread writes to all of them.
    """

    def __init__(self, pinning: HostPinning = _NO_PINNING) -> None:
        """``pinning`` is told of a peer's memory once it is written to."""
        self._pinning = pinning
        self._regions = RegionTable()
        self._shared: dict[int, SharedMapping] = {}
        self._folder = SocketFolder()
        path = self._folder.path / f"vllm-pd-{secrets.token_hex(16)}.sock"
        self.session = f"shm:{path}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        # All fields below are read and written by any thread, under the lock.
        self._lock = threading.Lock()
        self._closed = False
        self._next_handle = itertools.count(1)
        self._ended: dict[TransferHandle, TransferStatus] = {}
        self._peers: dict[str, _Peer] = {}
        self._unreachable_until: dict[str, float] = {}
        self._stop, stop = socket.socketpair()
        selector = selectors.DefaultSelector()
        for each in (stop, self._listener):
            selector.register(each, selectors.EVENT_READ)
        self._thread = threading.Thread(
            target=self._answer, args=(selector, stop), name="pd-shared-memory", daemon=True
        )
        self._thread.start()

    def register(self, addr: int, num_bytes: int) -> None:
        """Any memory can be a source; peers can reach only that of a ``SharedMapping``."""
        self._check_open()
        self._regions.add(addr, num_bytes)
        mapping = SharedMapping.at(addr)
        if mapping is not None and mapping.num_bytes >= num_bytes:
            with self._lock:
                self._shared[addr] = mapping
            mapping.open_to_peers(True)

    def unregister(self, addr: int) -> None:
        self._check_open()
        self._regions.remove(addr)
        with self._lock:
            mapping = self._shared.pop(addr, None)
        if mapping is not None:
            mapping.open_to_peers(False)

    def num_regions(self) -> int:
        return len(self._regions)

    def reaches(self, session: str) -> bool:
        """Makes first contact; ``False`` on another host, for another user, or without answer."""
        with self._lock:
            if session in self._peers:
                return True
            if self._unreachable_until.get(session, 0.0) > time.monotonic():
                return False
        return self._contact(session)

    def window(self, session: str, addr: int, num_bytes: int) -> Region | None:
        """That part of the peer's memory, mapped here; ``None`` when it may not be written."""
        peer = self._peer(session)
        if peer is None:
            return None
        window = peer.window(addr, num_bytes)
        if window is None and self._contact(session):
            # It may have registered the region after the first contact.
            peer = self._peer(session)
            window = peer.window(addr, num_bytes) if peer is not None else None
        return window

    def submit_write(
        self, session: str, src_addr: int, dst_addr: int, num_bytes: int
    ) -> TransferHandle:
        self._check_open()
        self._regions.check_inside(src_addr, num_bytes)
        status = TransferStatus.FAILED
        window = self.window(session, dst_addr, num_bytes)
        if window is not None:
            ctypes.memmove(window.base, src_addr, num_bytes)
            if self.window(session, dst_addr, num_bytes) is not None:
                status = TransferStatus.DONE
        with self._lock:
            handle = TransferHandle(next(self._next_handle))
            self._ended[handle] = status
        return handle

    def poll(self, handle: TransferHandle) -> TransferStatus:
        with self._lock:
            return self._ended.pop(handle)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            shared = list(self._shared.values())
            self._shared.clear()
            peers = list(self._peers.values())
            self._peers.clear()
            self._ended = dict.fromkeys(self._ended, TransferStatus.FAILED)
        for mapping in shared:
            mapping.open_to_peers(False)
        self._regions.clear()
        self._stop.close()
        self._thread.join(5.0)
        for peer in peers:
            peer.close()
        self._folder.remove()

    def _check_open(self) -> None:
        with self._lock:
            if self._closed:
                raise BackendError(f"transfer engine {self.session} is closed")

    # As a writer.

    def _peer(self, session: str) -> _Peer | None:
        with self._lock:
            peer = self._peers.get(session)
        if peer is not None and peer.is_alive():
            return peer
        return self._peers.get(session) if self._contact(session) else None

    def _drop(self, session: str) -> None:
        """This peer, and those that have ended: they do not come again by themselves."""
        with self._lock:
            gone = [s for s, peer in self._peers.items() if s == session or not peer.is_alive()]
            dropped = [self._peers.pop(s) for s in gone]
        for peer in dropped:
            peer.close()

    def _contact(self, session: str) -> bool:
        """Connect, check whose socket it is, map what it offers."""
        self._drop(session)
        path = session.removeprefix("shm:")
        peer = None
        if path != session and _SOCKET_NAME.fullmatch(os.path.basename(path)):
            try:
                peer = _meet(path, self._pinning)
            except (OSError, ValueError, msgspec.MsgspecError) as e:
                logger.debug("no shared memory with %s: %s", session, e)
        with self._lock:
            if peer is not None and not self._closed:
                self._peers[session] = peer
                self._unreachable_until.pop(session, None)
                return True
            now = time.monotonic()
            # Each start of a peer has a session of its own, on other hosts too.
            for other in [s for s, until in self._unreachable_until.items() if until <= now]:
                del self._unreachable_until[other]
            self._unreachable_until[session] = now + _RETRY_AFTER_S
        if peer is not None:
            peer.close()
        return False

    # As an owner of memory.

    def _answer(self, selector: selectors.BaseSelector, stop: socket.socket) -> None:
        """Own thread: hand the regions to whoever connects, keep its connection."""
        with selector:
            while True:
                for key, _ in selector.select():
                    if key.fileobj is stop:
                        for other in list(selector.get_map().values()):
                            assert isinstance(other.fileobj, socket.socket)
                            other.fileobj.close()
                        return
                    if key.fileobj is self._listener:
                        self._accept(selector)
                        continue
                    # A writer sends nothing: it is gone.
                    assert isinstance(key.fileobj, socket.socket)
                    selector.unregister(key.fileobj)
                    key.fileobj.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        connection: socket.socket | None = None
        try:
            connection, _ = self._listener.accept()
            _check_same_user(connection)
            with self._lock:
                shared = dict(list(self._shared.items())[:_MAX_REGIONS])
            regions = tuple((addr, mapping.num_bytes) for addr, mapping in shared.items())
            frame = msgspec.msgpack.encode(_Announcement(regions))
            socket.send_fds(connection, [frame], [mapping.fd for mapping in shared.values()])
            selector.register(connection, selectors.EVENT_READ)
        except OSError as e:
            logger.warning("a process could not be given shared memory: %s", e)
            if connection is not None:
                connection.close()
            else:
                time.sleep(_NOT_ACCEPTED_S)  # who is left without a descriptor stays in line


def _meet(path: str, pinning: HostPinning) -> _Peer:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds: list[int] = []
    regions: list[_PeerRegion] = []
    try:
        connection.settimeout(_CONTACT_TIMEOUT_S)
        connection.connect(path)
        _check_same_user(connection)
        frame, fds, _, _ = socket.recv_fds(connection, _MAX_FRAME_BYTES, _MAX_REGIONS)
        announced = msgspec.msgpack.decode(frame, type=_Announcement)
        for (addr, num_bytes), fd in zip(announced.regions, fds, strict=True):
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("memory that could shrink under a write")
            if os.fstat(fd).st_size != _HEADER_BYTES + num_bytes:
                raise ValueError("memory of another size than announced")
            view = mmap.mmap(fd, _HEADER_BYTES + num_bytes)
            regions.append(_PeerRegion(addr, num_bytes, view, pinning))
        connection.setblocking(False)
    except BaseException:
        _Peer(connection, regions).close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return _Peer(connection, regions)


def _check_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, user_id, _ = struct.unpack("3i", credentials)
    if user_id != os.geteuid():
        raise PermissionError(f"the process on the other side runs as user {user_id}")


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))

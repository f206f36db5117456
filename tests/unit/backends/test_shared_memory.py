# SPDX-License-Identifier: Apache-2.0
"""What is special about shared memory: processes, permissions, windows. See the contract tests."""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from vllm_ascend_pd.backends import shared_memory
from vllm_ascend_pd.backends.shared_memory import (
    HostPinning,
    SharedMapping,
    SharedMemoryTransferEngine,
)
from vllm_ascend_pd.backends.transfer_engine import TransferStatus
from vllm_ascend_pd.backends.transports import SHARED_MEMORY, Transports

OWNER = """
import ctypes, sys, time
from vllm_ascend_pd.backends.shared_memory import SharedMapping, SharedMemoryTransferEngine
mapping = SharedMapping(1 << 16)
engine = SharedMemoryTransferEngine()
engine.register(mapping.addr, mapping.num_bytes)
print(engine.session, mapping.addr, flush=True)
for line in sys.stdin:
    print(ctypes.string_at(mapping.addr, 5).decode(), flush=True)
"""


class Owner:
    """A process that lets others write into its memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.session, addr = self.process.stdout.readline().split()
        self.addr = int(addr)

    def read(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner():
    owner = Owner()
    yield owner
    owner.kill()
    Path(owner.session.removeprefix("shm:")).unlink(missing_ok=True)


@pytest.fixture
def engine():
    engine = SharedMemoryTransferEngine()
    yield engine
    engine.close()


@pytest.fixture
def source(engine):
    mapping = SharedMapping(1 << 16)
    ctypes.memmove(mapping.addr, b"hello", 5)
    engine.register(mapping.addr, mapping.num_bytes)
    yield mapping
    engine.unregister(mapping.addr)
    mapping.close()


@pytest.fixture
def short_path():
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_bytes_reach_another_process(engine, source, owner):
    handle = engine.submit_write(owner.session, source.addr, owner.addr, 5)
    assert engine.poll(handle) is TransferStatus.DONE
    assert owner.read() == "hello"


def test_a_window_is_the_memory_of_the_other_process(engine, owner):
    window = engine.window(owner.session, owner.addr, 5)
    ctypes.memmove(window.base, b"there", 5)
    assert owner.read() == "there"
    assert engine.window(owner.session, owner.addr + (1 << 16) - 4, 5) is None


class Pins(HostPinning):
    """Where memory is pinned, and how much of it."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}
        self.count = 0

    def pin(self, addr: int, num_bytes: int) -> None:
        self.live[addr] = num_bytes
        self.count += 1

    def unpin(self, addr: int) -> None:
        ctypes.string_at(addr, self.live.pop(addr))  # it is still mapped


def test_own_memory_is_pinned_while_it_is_mapped():
    pins = Pins()
    mapping = SharedMapping(1 << 16, pins)
    assert pins.live == {mapping.addr: 1 << 16}
    mapping.close()
    assert pins.live == {}


def test_memory_of_a_peer_is_pinned_from_the_first_window_to_its_end(owner):
    pins = Pins()
    engine = SharedMemoryTransferEngine(pins)
    assert engine.reaches(owner.session)
    assert pins.live == {}
    for _ in range(2):
        window = engine.window(owner.session, owner.addr + 8, 5)
        assert pins.live == {window.base - 8: 1 << 16}
    assert pins.count == 1
    owner.kill()
    assert engine.window(owner.session, owner.addr, 5) is None
    assert pins.live == {}
    engine.close()


def test_memory_of_peers_that_have_ended_goes_when_another_is_met(owner):
    """Nobody asks for what they would be written any more."""
    pins = Pins()
    engine = SharedMemoryTransferEngine(pins)
    assert engine.window(owner.session, owner.addr, 5) is not None
    for _ in range(3):
        ended = Owner()
        assert engine.window(ended.session, ended.addr, 5) is not None
        assert len(pins.live) == 2
        ended.kill()
        Path(ended.session.removeprefix("shm:")).unlink()
    assert engine.window(owner.session, owner.addr, 5) is not None
    assert pins.count == 4
    engine.close()


def test_memory_of_peers_is_not_pinned_any_more_once_the_engine_is_closed(owner):
    pins = Pins()
    engine = SharedMemoryTransferEngine(pins)
    assert engine.window(owner.session, owner.addr, 5) is not None
    engine.close()
    assert (pins.live, pins.count) == ({}, 1)


def test_a_killed_owner_is_noticed_by_the_next_write(engine, source, owner):
    assert engine.reaches(owner.session)
    owner.kill()
    handle = engine.submit_write(owner.session, source.addr, owner.addr, 5)
    assert engine.poll(handle) is TransferStatus.FAILED
    assert engine.window(owner.session, owner.addr, 5) is None
    assert not engine.reaches(owner.session)


def test_a_stopped_owner_does_not_hold_up_first_contact_for_long(engine, owner):
    owner.stop()
    started = time.monotonic()
    assert not engine.reaches(owner.session)
    assert time.monotonic() - started < 5
    os.kill(owner.process.pid, signal.SIGCONT)


def test_what_cannot_be_reached_is_not_remembered_for_ever(engine, monkeypatch):
    """Each start of a peer on another host is one more."""
    monkeypatch.setattr(shared_memory, "_RETRY_AFTER_S", 0.0)
    for i in range(20):
        assert not engine.reaches(f"shm:/tmp/vllm-pd-{i:032x}.sock")
    assert len(engine._unreachable_until) == 1


def test_a_stopped_owner_that_is_known_can_be_written(engine, source, owner):
    assert engine.reaches(owner.session)
    owner.stop()
    handle = engine.submit_write(owner.session, source.addr, owner.addr, 5)
    os.kill(owner.process.pid, signal.SIGCONT)
    assert engine.poll(handle) is TransferStatus.DONE
    assert owner.read() == "hello"


def test_only_this_user_can_open_the_socket(engine):
    path = Path(engine.session.removeprefix("shm:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_process_of_another_user_is_turned_away(engine, owner, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not engine.reaches(owner.session)


@pytest.mark.parametrize("name", ["other.sock", "vllm-pd-1.sock"])
def test_a_socket_that_is_not_ours_is_not_connected_to(engine, short_path, name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(short_path / name))
        other.listen()
        other.setblocking(False)
        assert not engine.reaches(f"shm:{short_path / name}")
        with pytest.raises(BlockingIOError):
            other.accept()


def test_memory_that_could_shrink_is_refused(engine, short_path):
    path = short_path / f"vllm-pd-{'0' * 32}.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(path))
        other.listen()
        code = (
            "import os, socket, msgspec, sys; s = socket.socket(socket.AF_UNIX,"
            " socket.SOCK_SEQPACKET, fileno=int(sys.argv[1])); c, _ = s.accept();"
            " fd = os.memfd_create('x'); os.ftruncate(fd, 8192);"
            " socket.send_fds(c, [msgspec.msgpack.encode({'regions': [[4096, 4096]]})], [fd])"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(other.fileno())], pass_fds=[other.fileno()]
        ):
            assert not engine.reaches(f"shm:{path}")


def test_close_leaves_no_thread_no_file_and_no_fd():
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = fds()
    mapping = SharedMapping(4096)
    writer, owner = SharedMemoryTransferEngine(), SharedMemoryTransferEngine()
    owner.register(mapping.addr, 4096)
    assert writer.window(owner.session, mapping.addr, 4096) is not None
    folders = [Path(e.session.removeprefix("shm:")).parent for e in (writer, owner)]
    writer.close()
    owner.close()
    mapping.close()
    assert fds() == before
    assert not any(folder.exists() for folder in folders)


def test_the_first_transport_that_reaches_the_peer_is_taken(engine, owner):
    class Everywhere(SharedMemoryTransferEngine):
        def reaches(self, session: str) -> bool:
            return True

    other = Everywhere()
    transports = Transports({SHARED_MEMORY: engine, "other": other})
    try:
        sessions = {SHARED_MEMORY: owner.session, "other": "x"}
        assert transports.route(sessions).name == SHARED_MEMORY
        sessions[SHARED_MEMORY] = "shm:/nowhere/vllm-pd-" + "0" * 32 + ".sock"
        assert transports.route(sessions).name == "other"
        assert transports.route({"third": "y"}) is None
    finally:
        other.close()


def test_want_of_descriptors_takes_no_core(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, times = socket.socket.accept, []

    def want(listener: socket.socket) -> tuple[socket.socket, object]:
        times.append(time.monotonic())
        if len(times) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", want)
    owner, writer = SharedMemoryTransferEngine(), SharedMemoryTransferEngine()
    assert writer.reaches(owner.session)
    assert times[3] - times[0] > 0.2
    assert caplog.text.count("Too many open files") == 3
    for engine in (owner, writer):
        engine.close()


def test_process_that_cannot_be_watched_costs_no_other_one_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full(selectors.DefaultSelector):
        """This user may have no more descriptors in an epoll, for a moment."""

        num_calls = 0

        def register(self, *args: Any) -> selectors.SelectorKey:
            self.num_calls += 1
            if self.num_calls == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().register(*args)

    monkeypatch.setattr(shared_memory.selectors, "DefaultSelector", Full)
    engines = [SharedMemoryTransferEngine() for _ in range(3)]
    owner, *others = engines
    for other in others:
        assert other.reaches(owner.session)
    assert "given shared memory: [Errno 28] No space left on device" in caplog.text
    for engine in engines:
        engine.close()

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net import listener as listener_module
from vllm_ascend_pd.net.connection import MAX_FRAME_BYTES, MAX_FRAMES_A_TURN
from vllm_ascend_pd.net.listener import Listener, listen
from vllm_ascend_pd.net.reactor import Reactor

FRAME = b"\x00\x00\x00\x02hi"
LIMIT_S = 20.0


class Rests:
    """Instead of ``time``: counts, and lets a descriptor be there again after some rests."""

    def __init__(self, most: int) -> None:
        self.seconds: list[float] = []
        self.want = threading.Event()
        self.want.set()
        self._most = most

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self._most:
            self.want.clear()


class Scarce(socket.socket):
    """A socket that can accept nobody while there is ``want``."""

    want: threading.Event
    num_calls = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_calls += 1
        if self.want.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> Rests:
    made = Rests(3)
    monkeypatch.setattr(listener_module, "time", made)
    return made


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = Reactor("reactor")
    yield made
    made.stop()


def scarce(rests: Rests) -> Scarce:
    with listen("127.0.0.1", 0) as made:
        listening = Scarce(fileno=made.detach())
    listening.want = rests.want
    return listening


def test_want_of_descriptors_takes_no_core_where_nobody_can_make_room(
    reactor: Reactor, rests: Rests
) -> None:
    listening, came = scarce(rests), threading.Event()
    Listener(reactor, listening, None, lambda identity, frame: came.set())
    reactor.start()
    with socket.create_connection(listening.getsockname()) as peer:
        peer.sendall(FRAME)
        assert came.wait(LIMIT_S)
    assert len(rests.seconds) == 3
    assert listening.num_calls <= 6


def test_who_was_silent_longest_makes_room(reactor: Reactor, rests: Rests) -> None:
    listening, came = scarce(rests), threading.Semaphore(0)
    listening.want.clear()
    Listener(reactor, listening, None, lambda identity, frame: came.release())
    reactor.start()
    with socket.create_connection(listening.getsockname()) as silent:
        silent.sendall(FRAME)
        assert came.acquire(timeout=LIMIT_S)
        silent.settimeout(LIMIT_S)
        listening.want.set()
        with socket.create_connection(listening.getsockname()) as peer:
            while silent.recv(64):
                pass
            listening.want.clear()
            peer.sendall(FRAME)
            assert came.acquire(timeout=LIMIT_S)


def test_connection_that_cannot_be_watched_ends(
    reactor: Reactor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where this user may have no more descriptors in an epoll."""
    came, watch = threading.Event(), reactor.watch
    failures = [OSError(errno.ENOSPC, "No space left on device")]
    listening = listen("127.0.0.1", 0)
    listener = Listener(reactor, listening, None, lambda identity, frame: came.set())

    def refuse(*args: Any) -> None:
        if failures:
            raise failures.pop()
        watch(*args)

    monkeypatch.setattr(reactor, "watch", refuse)
    reactor.start()
    with socket.create_connection(listening.getsockname(), LIMIT_S) as lost:
        assert not lost.recv(1)
    with socket.create_connection(listening.getsockname()) as peer:
        peer.sendall(FRAME)
        assert came.wait(LIMIT_S)
        assert len(listener) == 1
    assert reactor.num_errors == 0


@pytest.mark.parametrize("port", [0, 24601])
def test_address_of_another_host_is_told_by_its_option(port: int) -> None:
    with pytest.raises(ConfigError, match=r"^kv_ip 192\.0\.2\.1 is no address of this host; "):
        listen("192.0.2.1", port)


def test_what_was_sent_before_the_end_leaves_before_it(reactor: Reactor) -> None:
    payload = b"x" * MAX_FRAME_BYTES
    ended = threading.Event()

    def answer(identity: bytes, frame: bytes) -> None:
        listener.send(identity, payload)
        reactor.submit(listener.close)
        reactor.at_end.remove(listener.close)
        ended.set()

    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    listener = Listener(reactor, listening, None, answer)
    reactor.start()
    with socket.create_connection(address, LIMIT_S) as peer:
        peer.sendall(FRAME)
        assert ended.wait(LIMIT_S)
        with peer.makefile("rb") as told:
            assert told.read() == bytes(4) + len(payload).to_bytes(4, "big") + payload
    assert reactor.num_errors == 0


def test_peer_that_sends_without_a_pause_leaves_turns_to_others() -> None:
    num_frames = 10 * MAX_FRAMES_A_TURN
    turns: list[int] = []
    came = threading.Event()

    class Counting(Reactor):
        def on_tick(self) -> float | None:
            turns.append(0)
            return None

    def take(identity: bytes, frame: bytes) -> None:
        turns[-1] += 1
        if sum(turns) == num_frames:
            came.set()

    reactor = Counting("reactor")
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    Listener(reactor, listening, None, take)
    reactor.start()
    with socket.create_connection(address, LIMIT_S) as peer:
        peer.sendall(FRAME * num_frames)
        assert came.wait(LIMIT_S)
    reactor.stop()
    # Its socket has something to say, and so has what was left the last time.
    assert max(turns) <= 2 * MAX_FRAMES_A_TURN

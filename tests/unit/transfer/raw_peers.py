# SPDX-License-Identifier: Apache-2.0
"""Peers that say what a test says, in the test's own thread."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_ascend_pd.net.listener import Listener, listen
from vllm_ascend_pd.net.reactor import Reactor
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.types import Endpoint

LIMIT_S = 10.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0)  # others need the GIL


class RawPeer:
    """One end of a connection, after its handshake."""

    def __init__(self, stream: ssl.SSLSocket) -> None:
        stream.settimeout(LIMIT_S)
        stream.do_handshake()
        self.stream = stream

    def send(self, *frames: bytes) -> None:
        self.stream.sendall(b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames))

    def receive(self) -> bytes:
        return self._read(int.from_bytes(self._read(4), "big"))

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.stream.recv(num_bytes - len(data))
            if not part:
                raise EOFError
            data += part
        return data


@contextmanager
def connected(endpoint: Endpoint, trust: Trust | None = None) -> Iterator[RawPeer]:
    """A consumer of one's own."""
    with socket.create_connection((endpoint.host, endpoint.port), LIMIT_S) as plain:
        peer = RawPeer((trust or Trust()).connect(plain))
        with peer.stream:
            assert peer.receive() == b"", "was not accepted"
            yield peer


class RawServer:
    """A producer of one's own."""

    def __init__(self, trust: Trust | None = None) -> None:
        self._trust = trust or Trust()
        self._listening = listen("127.0.0.1", 0)
        self._listening.settimeout(LIMIT_S)
        self._taken: list[ssl.SSLSocket] = []
        self.endpoint = Endpoint("127.0.0.1", self._listening.getsockname()[1], self._trust.key)

    def accept(self) -> RawPeer:
        stream, _ = self._listening.accept()
        stream.settimeout(LIMIT_S)
        peer = RawPeer(self._trust.serve(stream))
        peer.send(b"")
        self._taken.append(peer.stream)
        return peer

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._listening, *self._taken):
            stream.close()


@contextmanager
def silent_server() -> Iterator[Endpoint]:
    """A producer that takes everything and answers nothing."""
    reactor, trust = Reactor("silent"), Trust()
    listening = listen("127.0.0.1", 0)
    Listener(reactor, listening, trust, lambda identity, frame: None)
    endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], trust.key)
    reactor.start()
    yield endpoint
    reactor.stop()

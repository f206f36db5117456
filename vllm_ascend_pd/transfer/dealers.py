# SPDX-License-Identifier: Apache-2.0
"""Connections from one reactor to many peers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import zmq

from vllm_ascend_pd.transfer.seal import explain
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vllm_ascend_pd.transfer.reactor import Reactor
    from vllm_ascend_pd.transfer.seal import Channel, ClientSeal, Seals
    from vllm_ascend_pd.types import Endpoint

IDLE_CONNECTION_S = 300.0
MAX_UNHEARD_MS = 3000
"""After so long without an acknowledgement of TCP a connection is lost, also when nobody says so:
a cable that was cut. Else it would wake, long after it was mended, at the end of TCP's backoff."""
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 15,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_NOT_THERE = "is not there (connection refused or lost)"


@dataclass(slots=True)
class _Connection:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    seal: ClientSeal
    used_at: float = 0.0


class Dealers:
    """One DEALER a peer, made on first use, closed when idle or lost. Reactor thread only.

    ``on_frame(peer, payload)`` is called for what a peer sends; only what is authentic. When its
    connection broke or was refused, ``on_lost(peer, cause, text)`` is called, so that nobody waits
    for the answer of a dead process; ``text`` says what happened, to follow the peer's name.
    """

    def __init__(
        self,
        reactor: Reactor,
        seals: Seals,
        channel: Channel,
        on_frame: Callable[[Endpoint, bytes], None],
        on_lost: Callable[[Endpoint, Cause, str], None],
    ) -> None:
        self._reactor = reactor
        self._seals = seals
        self._channel = channel
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._connections: dict[Endpoint, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, peer: Endpoint, payload: bytes) -> bool:
        """Queue one payload; ``False`` when the queue to this peer is full."""
        connection = self._connections.get(peer) or self._connect(peer)
        connection.used_at = time.monotonic()
        frames = connection.seal.send(payload)
        return frames is not None and _send(connection.socket, frames)

    def receive(self) -> None:
        """Take what has arrived. One whose deadline is over does so before it gives up, for its
        thread may have had no turn meanwhile.
        """
        for peer, connection in list(self._connections.items()):
            self._receive_from(peer, connection)

    def close_idle(self, awaited: Collection[Endpoint] = ()) -> None:
        """But not those of which an answer is ``awaited``, however late."""
        oldest = time.monotonic() - IDLE_CONNECTION_S
        for peer, connection in list(self._connections.items()):
            if connection.used_at < oldest and peer not in awaited:
                self._close(peer)

    def _close(self, peer: Endpoint) -> None:
        connection = self._connections.pop(peer)
        connection.socket.disable_monitor()
        self._reactor.unwatch(connection.monitor)
        self._reactor.unwatch(connection.socket)

    def _connect(self, peer: Endpoint) -> _Connection:
        socket = make_dealer(self._reactor.context)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_LOST)
        where = f"[{peer.host}]" if ":" in peer.host else peer.host
        if ":" in peer.host:
            socket.setsockopt(zmq.IPV6, 1)
        socket.connect(f"tcp://{where}:{peer.port}")
        connection = _Connection(socket, monitor, self._seals.client(self._channel))

        def observe() -> None:
            self._receive_from(peer, connection)
            if self._connections.get(peer) is connection:
                self._close(peer)
                self._on_lost(peer, Cause.PEER_UNREACHABLE, _NOT_THERE)

        self._reactor.watch(socket, partial(self._receive_from, peer, connection))
        self._reactor.watch(monitor, observe)
        self._connections[peer] = connection
        return connection

    def _receive_from(self, peer: Endpoint, connection: _Connection) -> None:
        while self._connections.get(peer) is connection:
            try:
                frame = connection.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(peer, connection, frame)

    def _receive(self, peer: Endpoint, connection: _Connection, frame: bytes) -> None:
        received = connection.seal.receive(frame)
        _send(connection.socket, received.answers)
        if received.payload is not None:
            self._on_frame(peer, received.payload)
        if received.refused is not None:
            self._seals.note_refused(received.refused, str(peer))
        if received.lost is not None:
            self._close(peer)
            self._on_lost(peer, *explain(received.lost))


def _send(socket: zmq.Socket[bytes], frames: Iterable[bytes]) -> bool:
    try:
        for frame in frames:
            socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def make_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A DEALER that never blocks its thread. It does not connect again: a seal is for one
    connection, and what was sent before would be of no use to a process that was restarted.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    # A host that is gone is noticed in half a minute; a process that is stopped is not gone.
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.TCP_MAXRT, MAX_UNHEARD_MS)
    return socket

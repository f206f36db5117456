# SPDX-License-Identifier: Apache-2.0
"""Connections from one reactor to many peers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.transfer.reactor import Reactor
    from vllm_ascend_pd.types import Endpoint

IDLE_CONNECTION_S = 300.0
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


@dataclass(slots=True)
class _Connection:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    used_at: float


class Dealers:
    """One DEALER a peer, made on first use and closed when idle. Reactor thread only.

    ``on_frame(peer, frame)`` is called for what a peer sends, ``on_lost(peer)`` when its
    connection broke or was refused, so that nobody waits for the answer of a dead process.
    """

    def __init__(
        self,
        reactor: Reactor,
        on_frame: Callable[[Endpoint, bytes], None],
        on_lost: Callable[[Endpoint], None],
    ) -> None:
        self._reactor = reactor
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._connections: dict[Endpoint, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, peer: Endpoint, frame: bytes) -> bool:
        """Queue one frame; ``False`` when the queue to this peer is full."""
        connection = self._connections.get(peer) or self._connect(peer)
        connection.used_at = time.monotonic()
        try:
            connection.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close_idle(self) -> None:
        oldest = time.monotonic() - IDLE_CONNECTION_S
        for peer, connection in list(self._connections.items()):
            if connection.used_at < oldest:
                del self._connections[peer]
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

        def receive() -> None:
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._on_frame(peer, frame)

        def observe() -> None:
            recv_monitor_message(monitor)
            self._on_lost(peer)

        self._reactor.watch(socket, receive)
        self._reactor.watch(monitor, observe)
        connection = self._connections[peer] = _Connection(socket, monitor, 0.0)
        return connection


def make_dealer(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """A DEALER that reconnects by itself and never blocks its thread."""
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 10_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return socket

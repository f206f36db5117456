# SPDX-License-Identifier: Apache-2.0
"""The socket that many peers connect to."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.connection import Connection, FloodError, make_room
from vllm_ascend_pd.net.peers import set_options
from vllm_ascend_pd.net.trust import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.net.reactor import Reactor
    from vllm_ascend_pd.net.trust import Trust

logger = limited_logger(__name__)

_MAX_CONNECTIONS = 1024
_MAX_HANDSHAKES = 512
_MAX_HELD_BYTES = 64 << 20
"""Of frames that have begun or are not taken, of all peers together."""
_MAX_ACCEPTED_A_TURN = 64
_LINGER_S = 0.2
_BACKLOG = 1024
_NOT_ACCEPTED_S = 0.1


def listen(host: str, port: int) -> socket.socket:
    """0 is any free port.

    Raises:
        ConfigError: this host has no such address.
        OSError: the port cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as e:
        if e.errno != errno.EADDRNOTAVAIL:
            raise
        raise ConfigError(
            f"kv_ip {host} is no address of this host; give each node of an engine its own"
        ) from e


class Listener:
    """Takes connections, and calls ``on_frame(identity, payload)`` for what comes. Reactor thread.

    What peers can make it hold is bounded. The oldest handshake gives way to a new one, the
    connection that was silent longest to another, and who holds most is cut off first.
    """

    def __init__(
        self,
        reactor: Reactor,
        listening: socket.socket,
        trust: Trust | None,
        on_frame: Callable[[bytes, bytes], None],
        max_waiting_bytes: float | None = None,
    ) -> None:
        """Without ``trust`` for a Unix socket that only this user can reach. ``max_waiting_bytes``
        as of a ``Connection``.
        """
        self._reactor = reactor
        self._listening = listening
        self._trust = trust
        self._on_frame = on_frame
        self._max_waiting_bytes = max_waiting_bytes
        self._numbers = itertools.count(1)
        self._connections: dict[bytes, Connection] = {}
        listening.setblocking(False)
        reactor.watch(listening.fileno(), self._accept)
        reactor.at_end.append(self.close)

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, identity: bytes, payload: bytes) -> None:
        """To a peer that has sent something; dropped when it is gone."""
        if connection := self._connections.get(identity):
            if not connection.send(payload):
                connection.end(FloodError("it takes no answers"))
            self._check_memory(identity)

    def send_all(self, payload: bytes) -> None:
        for identity in list(self._connections):
            self.send(identity, payload)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close(_LINGER_S)
        self._connections.clear()
        self._reactor.unwatch(self._listening.fileno())
        self._listening.close()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED_A_TURN):
            try:
                stream, address = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as e:  # no descriptor is left, or the peer has gone meanwhile
                logger.warning("a connection could not be accepted: %s", e)
                if not make_room(self._connections.values(), 0, 0):
                    time.sleep(_NOT_ACCEPTED_S)  # who is left without one stays in line
                return
            make_room(self._connections.values(), _MAX_HANDSHAKES, _MAX_CONNECTIONS)
            self._add(stream, str(address[0]) if address else "a process of this user")

    def _add(self, stream: socket.socket, address: str) -> None:
        identity = next(self._numbers).to_bytes(8, "big")
        stream.setblocking(False)
        wrap = None
        if self._trust is not None:
            set_options(stream)
            wrap = self._trust.serve

        connection = self._connections[identity] = Connection(
            self._reactor,
            stream,
            wrap,
            on_frame=partial(self._on_frame, identity),
            on_end=partial(self._on_end, identity, address),
            on_held=partial(self._check_memory, identity),
            max_waiting_bytes=self._max_waiting_bytes,
        )
        connection.begin()

    def _check_memory(self, identity: bytes) -> None:
        if self._connections[identity].num_held_bytes <= _MAX_HELD_BYTES // _MAX_CONNECTIONS:
            return
        everyone = [c for c in self._connections.values() if not c.is_ended]
        if sum(c.num_held_bytes for c in everyone) > _MAX_HELD_BYTES:
            max(everyone, key=lambda c: c.num_held_bytes).end(
                FloodError("it holds too much memory")
            )

    def _on_end(self, identity: bytes, address: str, error: Exception | None) -> None:
        del self._connections[identity]
        if self._trust is not None and (reason := reason_of(error)) is not None:
            self._trust.note_refused(reason, f"{address} ({error})")

# SPDX-License-Identifier: Apache-2.0
"""Connections from one reactor to many peers."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.connection import Connection, make_room
from vllm_ascend_pd.net.names import Names, Question, is_address
from vllm_ascend_pd.net.trust import WrongKeyError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vllm_ascend_pd.net.names import Address
    from vllm_ascend_pd.net.reactor import Reactor
    from vllm_ascend_pd.net.trust import Trust
    from vllm_ascend_pd.types import Cause, Endpoint

logger = limited_logger(__name__)

IDLE_CONNECTION_S = 300.0
OPEN_WITHIN_S = 10.0
_LOOK_EVERY_S = 1.0
_MAX_CONNECTIONS = 1024
_MAX_OPENING = 512
"""A consumer that starts may ask hundreds of producers at once."""
_LINGER_S = 0.2
_MAX_UNHEARD_MS = 3000
_OPTIONS = {
    socket.TCP_NODELAY: 1,
    # A host that is gone is noticed in half a minute; a process that is stopped is not gone.
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    # After so long without an acknowledgement a connection is lost, also when nobody says so: a
    # cable that was cut. Else it would wake, long after it was mended, at the end of TCP's backoff.
    socket.TCP_USER_TIMEOUT: _MAX_UNHEARD_MS,
}


class Peers:
    """One connection a peer, made on first use, closed when idle or lost. Reactor thread only.

    ``on_frame(peer, payload)`` is called for what a peer sends. When its connection broke, was
    refused, or could not be tried, ``on_lost(peer, cause, text)`` is called, so that nobody waits
    for the answer of a dead process; ``text`` says what happened, to follow the peer's name. Only
    the next ``send`` makes a new one.

    Requests name peers, so their number is bounded: who is slow to open gives way to another, and
    so does who was silent longest. One whose host is a name connects once `Names` has found it.
    """

    def __init__(
        self,
        reactor: Reactor,
        trust: Trust,
        on_frame: Callable[[Endpoint, bytes], None],
        on_lost: Callable[[Endpoint, Cause, str], None],
    ) -> None:
        self._reactor = reactor
        self._trust = trust
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._names = Names()
        self.connections: dict[Endpoint, Connection] = {}
        self._lost: set[Endpoint] = set()
        """Those that could not be connected to, until that has been told."""
        self._look_at = 0.0
        self._opening_end: float | None = None
        """When the first that opens must have done so."""
        reactor.at_end.append(self._close)

    def __len__(self) -> int:
        return len(self.connections)

    def send(self, peer: Endpoint, payload: bytes) -> bool:
        """Queue one payload; ``False`` when the queue to this peer is full."""
        connection = self.connections.get(peer)
        if peer in self._lost:
            return True
        if connection is None:
            make_room(self.connections.values(), _MAX_OPENING, _MAX_CONNECTIONS)
            try:
                connection = self.connections[peer] = self._connect(peer)
                self._look_at = 0.0
            except OSError as e:  # no descriptor is left
                logger.warning("%s cannot be connected to: %s", peer, e)
                self._lost.add(peer)
                self._reactor.submit(partial(self._tell_lost, peer, e))
                return True  # which is told on a later turn
        return connection.send(payload)

    def _tell_lost(self, peer: Endpoint, error: Exception) -> None:
        self._lost.discard(peer)
        self._on_lost(peer, *self._trust.explain(error))

    def receive(self) -> None:
        """Take what has arrived. One whose deadline is over does so before it gives up, for its
        thread may have had no turn meanwhile.
        """
        for connection in list(self.connections.values()):
            connection.receive()

    def tidy(self, awaited: Collection[Endpoint] = ()) -> float | None:
        """End what does not open, and what is idle, but not those of which an answer is
        ``awaited``, however late. Returns when to come again, if something opens. Called on every
        turn, and looks at all of them once a second or when one must be done with opening.
        """
        now = time.monotonic()
        if now >= self._look_at:
            self._look(now, awaited)
        return None if self._opening_end is None else max(0.0, self._opening_end - now)

    def _look(self, now: float, awaited: Collection[Endpoint]) -> None:
        ends = []
        for peer, connection in list(self.connections.items()):
            if connection.is_ended:
                continue  # which is told on this turn
            if not connection.is_open:
                end = connection.made_at + OPEN_WITHIN_S
                if end <= now:
                    connection.end(TimeoutError("it does not open"))
                else:
                    ends.append(end)
            elif connection.used_at < now - IDLE_CONNECTION_S and peer not in awaited:
                del self.connections[peer]
                connection.close()
        self._opening_end = min(ends, default=None)
        self._look_at = min((now + _LOOK_EVERY_S, *ends))

    def _close(self) -> None:
        self._names.stop()
        for connection in self.connections.values():
            connection.close(_LINGER_S)

    def _connect(self, peer: Endpoint) -> Connection:
        family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
        host = "127.0.0.1" if peer.host == "localhost" else peer.host
        stream = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            set_options(stream)
        except BaseException:
            stream.close()
            raise
        connection = Connection(
            self._reactor,
            stream,
            self._trust.connect,
            on_frame=partial(self._on_frame, peer),
            on_end=partial(self._on_end, peer),
            on_handshake=lambda: self._check(peer, connection),
        )
        if is_address(host):
            self._begin(connection, (host, peer.port))
            return connection

        def found(address: Address | Exception) -> None:
            self._reactor.submit(partial(self._on_found, peer, connection, address))

        question = Question(host, peer.port, family, found, lambda: connection.is_ended)
        if not self._names.ask(question):
            connection.end(OSError("too many names are looked up already"))
        return connection

    def _on_found(
        self, peer: Endpoint, connection: Connection, address: Address | Exception
    ) -> None:
        if isinstance(address, Exception):
            logger.warning("%s cannot be connected to: %s", peer, address)
            connection.end(address)
        elif not connection.is_ended:
            self._begin(connection, address)

    def _begin(self, connection: Connection, address: Address) -> None:
        error = connection.stream.connect_ex(address)
        if error in (0, errno.EINPROGRESS):
            connection.begin()
        else:
            connection.end(OSError(error, os.strerror(error)))

    def _check(self, peer: Endpoint, connection: Connection) -> None:
        assert isinstance(connection.stream, ssl.SSLSocket)
        if not self._trust.knows(connection.stream, peer.key):
            raise WrongKeyError

    def _on_end(self, peer: Endpoint, error: Exception | None) -> None:
        del self.connections[peer]
        self._on_lost(peer, *self._trust.explain(error))


def set_options(stream: socket.socket) -> None:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        stream.setsockopt(socket.IPPROTO_TCP, option, value)

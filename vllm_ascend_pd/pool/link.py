# SPDX-License-Identifier: Apache-2.0
"""What carries `pool.messages` between the scheduler and its workers, beside the steps."""

from __future__ import annotations

import logging
import math
import socket
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from vllm_ascend_pd import hooks
from vllm_ascend_pd.net.connection import Connection
from vllm_ascend_pd.net.listener import Listener
from vllm_ascend_pd.net.reactor import Reactor
from vllm_ascend_pd.pool.messages import (
    DropAhead,
    DropSaves,
    Found,
    Lookup,
    Message,
    Packed,
    Save,
    Saved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Lookup | Found | Save | DropAhead | DropSaves | Packed | Saved
)

_MAX_WAITING_BYTES = math.inf
"""A save, or word of its end, that did not leave would keep its blocks pinned for ever."""
_listening: WeakValueDictionary[str, PoolLink] = WeakValueDictionary()
"""The ends of this process, by path."""


class PoolLink(Reactor):
    """One end; ``handle`` is called with each message that arrives, on its thread.

    A worker listens; the scheduler connects to every worker, and what it sends goes to all. Where
    scheduler and worker are one process, ``handle`` is called by whoever sends, so that a message
    costs no thread its turn; it must be quick and any thread may call it.
    """

    def __init__(self, name: str, handle: Callable[[Message], None]) -> None:
        super().__init__(name)
        self._handle = handle
        self._listener: Listener | None = None
        self._connections: list[Connection] = []
        self._neighbours: list[PoolLink] = []
        self.at_end.append(self._disconnect)

    def listen(self, path: str) -> None:
        """At a Unix socket in a folder that only this user can enter. Before ``start``."""
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        self._listener = Listener(
            self, listening, None, lambda _, frame: self._receive(frame), _MAX_WAITING_BYTES
        )
        _listening[path] = self

    def connect(self, path: str) -> None:
        """To one that listens. Before ``start``."""
        if (other := _listening.get(path)) is not None:
            self._neighbours.append(other)
            other._neighbours.append(self)
            return
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(path)
        stream.setblocking(False)
        connection = Connection(
            self,
            stream,
            None,
            self._receive,
            self._on_end,
            on_handshake=lambda: None,
            max_waiting_bytes=_MAX_WAITING_BYTES,
        )
        connection.begin()
        self._connections.append(connection)

    def start(self) -> None:
        """Without a socket there is nothing to do for a thread."""
        if self._connections or self._listener is not None:
            super().start()

    def send(self, message: Message) -> None:
        """Any thread; never blocks. What a handler raises ends with it, wherever that runs."""
        if self._neighbours:
            for other in self._neighbours:
                other.guard(partial(other._handle, message))
            return
        frame = _encoder.encode(message)
        self.submit(lambda: self._send(frame))

    def _send(self, frame: bytes) -> None:
        for connection in self._connections:
            if not connection.send(frame):
                logger.warning("a message of the pool's link is too long: %d bytes", len(frame))
        if self._listener is not None:
            self._listener.send_all(frame)

    def _receive(self, frame: bytes) -> None:
        self._handle(_decoder.decode(frame))

    def _on_end(self, error: Exception | None) -> None:
        logger.warning("the other end of the pool's link is gone: %s", error or "it was closed")

    def _disconnect(self) -> None:
        for connection in self._connections:
            connection.close()


def pool_address(worker: object) -> tuple[str, int]:
    """Runs in the worker process: the path of its end, and how many blocks one save may hold."""
    side: Any = hooks.worker
    address: tuple[str, int] = side.pool_address
    return address

# SPDX-License-Identifier: Apache-2.0
"""Between the scheduler and its workers' pool: lookups, saves, and what became of them.

Lookups and answers go beside the steps, so that a lookup leaves while a step runs. Saves go with
the next step, as loads do, or beside them when none follows (an engine with nothing to do sleeps
while its last blocks are stored) or several are under way at a time.

    scheduler:  Lookup ──► each worker     Save ──► each worker
                       ◄── Found                ◄── Packed   its blocks may be reused
                                                ◄── Saved    how it ended

Blocks may have been packed while their step computed them. The Save after the step says which of
them are good; DropAhead ends what no Save has asked for.

Each worker stores and finds its own share of a block; ``engine.scheduler.pool_answers`` folds what
they say.
"""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakValueDictionary

import msgspec

from vllm_ascend_pd import hooks
from vllm_ascend_pd.transfer.connection import Connection
from vllm_ascend_pd.transfer.listener import Listener
from vllm_ascend_pd.transfer.reactor import Reactor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class Lookup(msgspec.Struct, tag=True, frozen=True):
    """Where are these blocks? Not answered when nobody has come to it ``before`` (monotonic s)."""

    lookup_id: int
    hashes: bytes
    hash_bytes: int
    before: float


class Found(msgspec.Struct, tag=True, frozen=True):
    """``places[i]`` is a ``pool.tier.Place``."""

    lookup_id: int
    places: bytes
    healthy: bool
    elapsed_ms: float


class Save(msgspec.Struct, tag=True, frozen=True):
    """Store these blocks. They are computed, and stay as they are until ``Packed``.

    With an ``ahead_id`` they are some of those that a step announced under it (``AheadSpec``), and
    have stayed as that step left them.
    """

    save_id: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]
    ahead_id: int = 0


class DropAhead(msgspec.Struct, tag=True, frozen=True):
    """No further ``Save`` names what was announced up to this one."""

    last_ahead_id: int


class DropSaves(msgspec.Struct, tag=True, frozen=True):
    """Give up the saves up to this one that are not under way."""

    last_save_id: int


class Packed(msgspec.Struct, tag=True, frozen=True):
    """The blocks of this save are not read any more. Comes before ``Saved``."""

    save_id: int


class Saved(msgspec.Struct, tag=True, frozen=True):
    """``statuses[i]`` is the value of a ``pool.tier.Status``, or ``dropped``."""

    save_id: int
    statuses: tuple[str, ...]
    num_bytes: int
    elapsed_ms: float


DROPPED = "dropped"

Message: TypeAlias = Lookup | Found | Save | DropAhead | DropSaves | Packed | Saved

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Lookup | Found | Save | DropAhead | DropSaves | Packed | Saved
)


def join_hashes(hashes: Sequence[bytes]) -> tuple[bytes, int]:
    """One byte string, and the size of each hash."""
    return b"".join(hashes), len(hashes[0])


def split_hashes(joined: bytes, hash_bytes: int) -> list[bytes]:
    return [joined[i : i + hash_bytes] for i in range(0, len(joined), hash_bytes)]


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
        self._listener = Listener(self, listening, None, lambda _, frame: self._receive(frame))
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
            self, stream, None, self._receive, self._on_end, on_handshake=lambda: None
        )
        self._connections.append(connection)

    def start(self) -> None:
        """Without a socket there is nothing to do for a thread."""
        if self._connections or self._listener is not None:
            super().start()

    def send(self, message: Message) -> None:
        """Any thread; never blocks."""
        if self._neighbours:
            for other in self._neighbours:
                other._handle(message)
            return
        frame = _encoder.encode(message)
        self.submit(lambda: self._send(frame))

    def _send(self, frame: bytes) -> None:
        for connection in self._connections:
            if not connection.send(frame):
                logger.warning("a worker takes no more messages of the pool's link")
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
    side: Any = hooks._worker
    address: tuple[str, int] = side.pool_address
    return address

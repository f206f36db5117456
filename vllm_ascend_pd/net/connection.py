# SPDX-License-Identifier: Apache-2.0
"""Frames over one stream socket."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import ssl
import time
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_ascend_pd.net.reactor import Reactor

MAX_FRAME_BYTES = 8 << 20
"""Some hundred thousand block hashes."""
MAX_WAITING_BYTES = 4 * MAX_FRAME_BYTES
"""Sent, and not taken by the peer."""
_PREFIX_BYTES = 4
_READ_BYTES = 64 << 10
_MAX_READS_A_TURN = 16
MAX_FRAMES_A_TURN = 64
"""Of one connection, when its turn comes: others wait meanwhile."""
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class FloodError(OSError):
    """A peer sends more than any engine does, or does not take its answers."""


class Connection:
    """``| length 4, big endian | payload |``, in TLS if it is wrapped. Never blocks. Reactor
    thread.

    It begins, connects, makes its handshake, is open, and ends once, also before that. What is sent
    before it is open waits. ``on_end`` is called on a later turn.

    The first frame of the accepting end is empty: by it the other one knows that it is accepted.
    What it sent before would hide from it why it was not.
    """

    def __init__(
        self,
        reactor: Reactor,
        stream: socket.socket,
        wrap: Callable[[socket.socket], ssl.SSLSocket] | None,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[Exception | None], None],
        on_handshake: Callable[[], None] | None = None,
        on_held: Callable[[], None] = lambda: None,
        max_waiting_bytes: float | None = None,
    ) -> None:
        """``on_end`` is told the error, or ``None`` when the peer has closed it in order;
        ``on_handshake`` is called where it connects, and raises if it was the wrong peer's;
        ``on_held`` is called when something came that is not a whole frame yet. Without
        ``max_waiting_bytes`` so much as a peer may leave, ``MAX_WAITING_BYTES``, is kept for it.
        """
        self.stream = stream
        self.is_open = False
        self.is_ended = False
        self.used_at = self.made_at = time.monotonic()
        """When it was last sent or heard something; when it was made."""
        self._reactor = reactor
        self._wrap = wrap
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_handshake = on_handshake
        self._is_handshaken = False
        self._on_held = on_held
        self._max_waiting_bytes = max_waiting_bytes
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._fd = stream.fileno()
        self._events = 0
        """That are watched for; none before it begins."""

    @property
    def num_held_bytes(self) -> int:
        return len(self._incoming) + len(self._outgoing)

    def begin(self) -> None:
        """Its stream is connected, or connects."""
        self._attempt(partial(self._await, EVENT_READ | EVENT_WRITE))

    def send(self, payload: bytes) -> bool:
        """Queue one frame; ``False`` when it is too long or too much waits."""
        num_bytes = len(payload)
        most = MAX_WAITING_BYTES if self._max_waiting_bytes is None else self._max_waiting_bytes
        if num_bytes > MAX_FRAME_BYTES or len(self._outgoing) + num_bytes > most:
            return False
        self.used_at = time.monotonic()
        if self.is_ended:
            return True  # which is told on a later turn
        self._outgoing += num_bytes.to_bytes(_PREFIX_BYTES, "big")
        self._outgoing += payload
        if self.is_open:
            self._attempt(self._flush)
        return True

    def receive(self) -> None:
        """Take what has arrived."""
        if self._is_handshaken:
            self._attempt(partial(self._read, math.inf))

    def proceed(self) -> None:
        """Do what is possible now."""
        self._attempt(self._proceed)

    def end(self, error: Exception | None) -> None:
        """Close it. Idempotent."""
        if not self.is_ended:
            self.close()
            self._reactor.submit(partial(self._on_end, error))

    def close(self, linger_s: float = 0.0) -> None:
        """Without a word to anybody; what was sent leaves within ``linger_s``."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._events:
            self._reactor.unwatch(self._fd)
        if linger_s and self.is_open and self._outgoing:
            with contextlib.suppress(OSError):
                self.stream.settimeout(linger_s)
                self.stream.sendall(self._outgoing)
        self.stream.close()
        self._incoming.clear()
        self._outgoing.clear()

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.is_ended:
            return
        try:
            action()
        except OSError as e:  # those of TLS too
            self.end(e)

    def _proceed(self) -> None:
        if not self._is_handshaken and not self._shake_hands():
            return
        self._flush()
        self._read()

    def _shake_hands(self) -> bool:
        if not isinstance(self.stream, ssl.SSLSocket):
            if error := self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
            try:
                self.stream.getpeername()
            except OSError as e:
                if e.errno == errno.ENOTCONN:
                    return False
                raise
            if self._wrap is not None:
                self.stream = self._wrap(self.stream)
        if isinstance(self.stream, ssl.SSLSocket):
            try:
                self.stream.do_handshake()
            except ssl.SSLWantReadError:
                self._await(EVENT_READ)
                return False
            except ssl.SSLWantWriteError:
                self._await(EVENT_READ | EVENT_WRITE)
                return False
        self._is_handshaken = True
        if self._on_handshake is not None:
            self._on_handshake()
        else:
            self._outgoing[:0] = bytes(_PREFIX_BYTES)
            self.is_open = True
        return True

    def _flush(self) -> None:
        try:
            while self._outgoing and self.is_open:
                del self._outgoing[: self.stream.send(self._outgoing)]
        except _NOT_NOW:
            self._await(EVENT_READ | EVENT_WRITE)
        else:
            self._await(EVENT_READ)

    def _await(self, events: int) -> None:
        if events != self._events:
            self._reactor.watch(self._fd, self.proceed, events)
            self._events = events

    def _read(self, max_frames: float = MAX_FRAMES_A_TURN) -> None:
        for _ in range(_MAX_READS_A_TURN):
            max_frames -= self._take_frames(max_frames)
            if self._incoming:
                self._on_held()
            if self.is_ended:
                return
            if not max_frames:
                break
            try:
                data = self.stream.recv(_READ_BYTES)
            except _NOT_NOW:
                return
            if not data:
                self.end(None)
                return
            self.used_at = time.monotonic()
            self._incoming += data
        # More may be here, or in TLS, of which the socket says nothing.
        self._reactor.submit(self.proceed)

    def _take_frames(self, max_frames: float) -> int:
        """How many there were, at most so many."""
        num_frames = 0
        while (
            num_frames < max_frames and len(self._incoming) >= _PREFIX_BYTES and not self.is_ended
        ):
            num_bytes = int.from_bytes(self._incoming[:_PREFIX_BYTES], "big")
            if num_bytes > MAX_FRAME_BYTES:
                raise FloodError(f"a frame of {num_bytes} bytes")
            stop = _PREFIX_BYTES + num_bytes
            if len(self._incoming) < stop:
                break
            frame = bytes(self._incoming[_PREFIX_BYTES:stop])
            del self._incoming[:stop]
            if self.is_open:
                self._reactor.guard(partial(self._on_frame, frame))
            elif frame:
                raise FloodError("frames before it was accepted")
            else:
                self.is_open = True
                self._flush()
            num_frames += 1
        return num_frames


def make_room(connections: Iterable[Connection], max_opening: int, max_in_all: int) -> bool:
    """End one where there are so many: the one that opens longest, or was silent longest. Whether
    there was one.
    """
    everyone = [c for c in connections if not c.is_ended]
    opening = [c for c in everyone if not c.is_open]
    if opening and len(opening) >= max_opening:
        opening[0].end(TimeoutError("others came meanwhile"))
        return True
    if everyone and len(everyone) >= max_in_all:
        min(everyone, key=lambda c: c.used_at).end(TimeoutError("others came meanwhile"))
        return True
    return False

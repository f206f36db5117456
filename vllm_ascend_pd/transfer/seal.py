# SPDX-License-Identifier: Apache-2.0
"""Authenticated frames between two engines that share a secret. Pure: no sockets, no threads.

A frame of a sealed connection, after the four bytes of ``MAGIC``:

    client                                            server
      H | client nonce | MAC(base key)        ──►
                                              ◄──      W | server nonce | MAC(base key, both nonces)
      D | sequence | payload | MAC(its key)   ──►
                                              ◄──      D | sequence | payload | MAC(its key)
                                              ◄──      R | reason (plain: there is no common key)

The base key is the secret's for this kind of socket; the two keys of a connection come from it and
both nonces, one a direction. So a frame counts on no other connection, socket or start of either
process, nor when it is sent back, and the sequence refuses it a second time or after a later one.
A lost frame leaves a gap, which is allowed. Nothing is encrypted.

Without a secret payloads travel as they are. MessagePack never begins with ``MAGIC``, so an engine
with a secret and one without recognise each other and say so.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import stat
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

MAGIC = b"\xc1PD1"
MIN_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 4096
_HELLO, _WELCOME, _DATA, _REFUSED = b"H", b"W", b"D", b"R"
_KIND = slice(len(MAGIC), len(MAGIC) + 1)
_BODY = len(MAGIC) + 1
_NONCE_BYTES = 16
_SEQUENCE_BYTES = 8
_MAC_BYTES = hashlib.sha256().digest_size
_MAX_WAITING_FRAMES = 10_000
_MAX_HANDSHAKES = 1024
_FORGET_AFTER_S = 900.0
"""Longer than a client keeps an idle connection (``dealers.IDLE_CONNECTION_S``)."""
_LOG_EVERY_S = 10.0


class Channel(str, Enum):
    """The kinds of socket; a frame of one counts on no other."""

    CONTROL = "control"
    DATA = "data"


class Reason(str, Enum):
    """Why a frame does not count. The value is the label of the metric."""

    NO_SECRET = "no_secret"
    UNEXPECTED_SECRET = "unexpected_secret"
    WRONG_SECRET = "wrong_secret"
    UNKNOWN_CONNECTION = "unknown_connection"
    MALFORMED = "malformed"
    FORGED = "forged"
    REPLAYED = "replayed"
    NO_TICKET = "no_ticket"


_SEEN_HERE = {
    Reason.NO_SECRET: "it has no security.secret_file, and this engine has: give it a copy",
    Reason.UNEXPECTED_SECRET: "it has a security.secret_file, and this engine has none: set it",
    Reason.WRONG_SECRET: "security.secret_file there and here hold different secrets",
    Reason.UNKNOWN_CONNECTION: "its connection is not known here; it has to connect again",
    Reason.MALFORMED: "a sealed frame of no known form",
    Reason.FORGED: "a frame was changed on its way, or somebody else sent it",
    Reason.REPLAYED: "a frame came a second time, or after a later one",
    Reason.NO_TICKET: "it asked for blocks for which no open was accepted",
}
"""Of the sender of a frame, for a person who reads the log of the engine that refused it."""
_SEEN_THERE = {
    Reason.NO_SECRET: "has a security.secret_file, and this engine has none: set it",
    Reason.UNEXPECTED_SECRET: "has no security.secret_file, and this engine has: give it a copy",
    Reason.WRONG_SECRET: "has another secret: security.secret_file must be the same there and here",
}
_ANSWERED = (*_SEEN_THERE, Reason.UNKNOWN_CONNECTION)


def explain(reason: Reason) -> tuple[Cause, str]:
    """What a server that said ``reason`` means: the cause, and a text to follow its name."""
    if text := _SEEN_THERE.get(reason):
        return Cause.UNAUTHENTICATED, text
    return Cause.PEER_UNREACHABLE, f"refused this connection ({reason.value})"


class Secret:
    """What both engines know. Its bytes appear in no ``repr``, log or error."""

    __slots__ = ("_bytes",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"security.secret_file must hold at least {MIN_SECRET_BYTES} bytes, not"
                f" {len(value)}; make one with: openssl rand -hex 32"
            )
        self._bytes = value

    @classmethod
    def load(cls, path: str) -> Secret:
        """Read a file of one line that only its owner may read.

        Raises:
            ConfigError: It cannot be read, others may read it, or it is too short or too long.
        """
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                value = file.read(_MAX_SECRET_BYTES + 1)
        except OSError as e:
            raise ConfigError(f"security.secret_file {path!r}: {e.strerror}") from e
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise ConfigError(
                f"security.secret_file {path!r} is open to its group or to others (mode"
                f" {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
            )
        if len(value) > _MAX_SECRET_BYTES:
            raise ConfigError(
                f"security.secret_file {path!r} is longer than {_MAX_SECRET_BYTES} bytes; is it the"
                " right file?"
            )
        return cls(value.rstrip(b"\r\n"))

    def derive(self, channel: Channel) -> bytes:
        """The base key of one kind of socket."""
        return _mac(self._bytes, b"vllm-ascend-pd seal 1 ", channel.value.encode())


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _frame(kind: bytes, *parts: bytes) -> bytes:
    return b"".join((MAGIC, kind, *parts))


def _nonce_of(frame: bytes) -> bytes | None:
    """The nonce of a hello or welcome, if it has the length of one."""
    if len(frame) != _BODY + _NONCE_BYTES + _MAC_BYTES:
        return None
    return frame[_BODY : _BODY + _NONCE_BYTES]


def _refusal(reason: Reason) -> bytes:
    return _frame(_REFUSED, reason.value.encode())


@dataclass(frozen=True, slots=True)
class Received:
    """What a frame of the network turned out to be.

    ``payload`` is authentic. ``answers`` go back on the same connection. ``refused`` is why the
    frame does not count. ``lost`` is why the server refuses this connection, which is of no use any
    more; anybody on the way could have said so, and could have cut the connection as well.
    """

    payload: bytes | None = None
    answers: tuple[bytes, ...] = ()
    refused: Reason | None = None
    lost: Reason | None = None


@dataclass(slots=True)
class _Keys:
    """One end of an established connection."""

    send_key: bytes
    receive_key: bytes
    num_sent: int = 0
    last_received: int = 0
    used_at: float = 0.0

    @classmethod
    def agree(cls, base: bytes, client: bytes, server: bytes, is_client: bool) -> _Keys:
        up = _mac(base, b"client to server", client, server)
        down = _mac(base, b"server to client", client, server)
        return cls(up, down) if is_client else cls(down, up)

    def seal(self, payload: bytes) -> bytes:
        self.num_sent += 1
        frame = _frame(_DATA, self.num_sent.to_bytes(_SEQUENCE_BYTES, "big"), payload)
        return frame + _mac(self.send_key, frame)

    def open(self, frame: bytes) -> Received:
        if len(frame) < _BODY + _SEQUENCE_BYTES + _MAC_BYTES:
            return Received(refused=Reason.MALFORMED)
        sealed, mac = frame[:-_MAC_BYTES], frame[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, _mac(self.receive_key, sealed)):
            return Received(refused=Reason.FORGED)
        sequence = int.from_bytes(sealed[_BODY : _BODY + _SEQUENCE_BYTES], "big")
        if sequence <= self.last_received:
            return Received(refused=Reason.REPLAYED)
        self.last_received = sequence
        return Received(payload=sealed[_BODY + _SEQUENCE_BYTES :])


class ClientSeal(Protocol):
    """The connecting end of one connection. Not thread-safe."""

    def send(self, payload: bytes) -> list[bytes] | None:
        """Frames to send now, maybe none yet; ``None`` when too many wait for the server."""
        ...

    def receive(self, frame: bytes) -> Received: ...


class PlainClient:
    """Without a secret."""

    def send(self, payload: bytes) -> list[bytes]:
        return [payload]

    def receive(self, frame: bytes) -> Received:
        if not frame.startswith(MAGIC):
            return Received(payload=frame)
        reason = _reason_of(frame)
        return Received(refused=None if reason else Reason.UNEXPECTED_SECRET, lost=reason)


class SealedClient:
    """With a secret. The first ``send`` says hello; what is sent until the welcome waits for it."""

    def __init__(self, base_key: bytes) -> None:
        self._base_key = base_key
        self._nonce = b""
        self._waiting: list[bytes] = []
        self._keys: _Keys | None = None

    def send(self, payload: bytes) -> list[bytes] | None:
        if self._keys is not None:
            return [self._keys.seal(payload)]
        if len(self._waiting) >= _MAX_WAITING_FRAMES:
            return None
        self._waiting.append(payload)
        if self._nonce:
            return []
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        hello = _frame(_HELLO, self._nonce)
        return [hello + _mac(self._base_key, hello)]

    def receive(self, frame: bytes) -> Received:
        if not frame.startswith(MAGIC):
            return Received(refused=Reason.NO_SECRET)
        kind = frame[_KIND]
        if kind == _DATA and self._keys is not None:
            return self._keys.open(frame)
        if kind == _WELCOME and self._keys is None:
            return self._start(frame)
        reason = _reason_of(frame)
        return Received(refused=None if reason else Reason.MALFORMED, lost=reason)

    def _start(self, welcome: bytes) -> Received:
        nonce = _nonce_of(welcome)
        if nonce is None:
            return Received(refused=Reason.MALFORMED)
        expected = _mac(self._base_key, welcome[:-_MAC_BYTES], self._nonce)
        if not hmac.compare_digest(welcome[-_MAC_BYTES:], expected):
            return Received(refused=Reason.FORGED)
        keys = self._keys = _Keys.agree(self._base_key, self._nonce, nonce, is_client=True)
        waiting, self._waiting = self._waiting, []
        return Received(answers=tuple(keys.seal(payload) for payload in waiting))


def _reason_of(frame: bytes) -> Reason | None:
    """Why the server refuses, if that is what ``frame`` says."""
    if frame[_KIND] != _REFUSED:
        return None
    said = frame[_BODY:]
    return next((reason for reason in _ANSWERED if said == reason.value.encode()), None)


class ServerSeal(Protocol):
    """The listening end of all connections of one socket, by identity. Not thread-safe."""

    def send(self, identity: bytes, payload: bytes) -> bytes | None:
        """The frame to send, or ``None`` when the connection is not known any more."""
        ...

    def receive(self, identity: bytes, frame: bytes) -> Received: ...


class PlainServer:
    """Without a secret."""

    def send(self, identity: bytes, payload: bytes) -> bytes:
        return payload

    def receive(self, identity: bytes, frame: bytes) -> Received:
        if not frame.startswith(MAGIC):
            return Received(payload=frame)
        return _refuse(Reason.UNEXPECTED_SECRET)


def _refuse(reason: Reason) -> Received:
    answers = (_refusal(reason),) if reason in _ANSWERED else ()
    return Received(answers=answers, refused=reason)


class SealedServer:
    """With a secret. A connection is established by the first frame under its own keys."""

    def __init__(self, base_key: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._base_key = base_key
        self._clock = clock
        self._handshakes: OrderedDict[bytes, _Keys] = OrderedDict()
        self._connections: OrderedDict[bytes, _Keys] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handshakes) + len(self._connections)

    def send(self, identity: bytes, payload: bytes) -> bytes | None:
        keys = self._connections.get(identity)
        return None if keys is None else keys.seal(payload)

    def receive(self, identity: bytes, frame: bytes) -> Received:
        if not frame.startswith(MAGIC):
            return _refuse(Reason.NO_SECRET)
        kind = frame[_KIND]
        if kind == _HELLO:
            return self._welcome(identity, frame)
        if kind != _DATA:
            return _refuse(Reason.MALFORMED)
        keys = self._connections.get(identity) or self._handshakes.get(identity)
        if keys is None:
            return _refuse(Reason.UNKNOWN_CONNECTION)
        received = keys.open(frame)
        if received.payload is not None:
            self._handshakes.pop(identity, None)
            self._use(identity, keys)
        return received

    def _welcome(self, identity: bytes, hello: bytes) -> Received:
        nonce = _nonce_of(hello)
        if nonce is None:
            return _refuse(Reason.MALFORMED)
        if not hmac.compare_digest(hello[-_MAC_BYTES:], _mac(self._base_key, hello[:-_MAC_BYTES])):
            return _refuse(Reason.WRONG_SECRET)
        if identity in self._handshakes or identity in self._connections:
            return _refuse(Reason.REPLAYED)
        ours = secrets.token_bytes(_NONCE_BYTES)
        self._handshakes[identity] = _Keys.agree(self._base_key, nonce, ours, is_client=False)
        if len(self._handshakes) > _MAX_HANDSHAKES:
            self._handshakes.popitem(last=False)
        welcome = _frame(_WELCOME, ours)
        return Received(answers=(welcome + _mac(self._base_key, welcome, nonce),))

    def _use(self, identity: bytes, keys: _Keys) -> None:
        """Most recently used last; what nobody has used for long is forgotten."""
        keys.used_at = now = self._clock()
        self._connections[identity] = keys
        self._connections.move_to_end(identity)
        while now - next(iter(self._connections.values())).used_at > _FORGET_AFTER_S:
            self._connections.popitem(last=False)


@dataclass(slots=True)
class Seals:
    """How one process seals its connections, and what it has refused. Any thread."""

    secret: Secret | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _refused: Counter[Reason] = field(default_factory=Counter)
    _logged_at: dict[Reason, float] = field(default_factory=dict)

    @classmethod
    def load(cls, secret_file: str | None) -> Seals:
        """``ConfigError`` when there is such a file and it cannot be used."""
        return cls(None if secret_file is None else Secret.load(secret_file))

    def client(self, channel: Channel) -> ClientSeal:
        return SealedClient(self.secret.derive(channel)) if self.secret else PlainClient()

    def server(self, channel: Channel) -> ServerSeal:
        return SealedServer(self.secret.derive(channel)) if self.secret else PlainServer()

    def note_refused(self, reason: Reason, peer: str) -> None:
        """Count it, and log it unless the same was logged a moment ago."""
        now = time.monotonic()
        with self._lock:
            self._refused[reason] += 1
            due = now - self._logged_at.get(reason, -_LOG_EVERY_S) >= _LOG_EVERY_S
            if due:
                self._logged_at[reason] = now
        if due:
            logger.warning("refused a frame of %s: %s (%s)", peer, reason.value, _SEEN_HERE[reason])

    def take_refused(self) -> dict[str, int]:
        """Number of frames by reason since the last call."""
        if not self._refused:
            return {}
        with self._lock:
            refused, self._refused = self._refused, Counter()
        return {reason.value: count for reason, count in refused.items()}

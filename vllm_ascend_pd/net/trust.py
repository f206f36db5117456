# SPDX-License-Identifier: Apache-2.0
"""Whom an engine talks to. Every connection between two engines is TLS 1.3.

security.secret_file    the key and its certificate come from the secret, so all engines that
                        share it have the same one; both sides ask for it
without                 each process makes its own at start. ``Trust.key`` is its digest: it
                        travels in ``kv_transfer_params``, in the registration, and in
                        ``Opened``, and the connecting side compares. Anybody may connect
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
import threading
from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.connection import FloodError
from vllm_ascend_pd.private_file import read_private
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    import socket

logger = limited_logger(__name__)

MIN_SECRET_BYTES = 32
_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "vllm-ascend-pd")])
_ALWAYS = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


class Reason(str, Enum):
    """Why a peer was refused. The value is the label of the metric."""

    WRONG_SECRET = "wrong_secret"
    WRONG_KEY = "wrong_key"
    MALFORMED = "malformed"
    NO_TICKET = "no_ticket"


_EXPLAINED = {
    Reason.WRONG_SECRET: "has another secret than this engine, or none: security.secret_file must"
    " be the same there and here",
    Reason.WRONG_KEY: "is not the process that was named: it was restarted, or the port is"
    " another's now",
    Reason.MALFORMED: "does not speak as an engine of this version does",
    Reason.NO_TICKET: "asked for blocks for which no open was accepted",
}
"""For a person who reads the log; to follow the peer's name."""
_CAUSES = {
    Reason.WRONG_SECRET: Cause.UNAUTHENTICATED,
    Reason.WRONG_KEY: Cause.WRONG_EPOCH,
    Reason.MALFORMED: Cause.PEER_UNREACHABLE,
}
_THEIR_SECRET = "has a security.secret_file, and this engine has none: set it"


class Secret:
    """What both engines know. Its bytes appear in no ``repr``, log or error."""

    __slots__ = ("_bytes",)

    def __init__(self, value: bytes, option: str = "security.secret_file") -> None:
        if len(value) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{option} must hold at least {MIN_SECRET_BYTES} bytes, not {len(value)};"
                " make one with: openssl rand -hex 32"
            )
        self._bytes = value

    @classmethod
    def load(cls, path: str, option: str = "security.secret_file") -> Secret:
        """``ConfigError`` when it cannot be read, others may read it, or its length is wrong."""
        return cls(read_private(option, path, refuses_open=True), option)

    def derive(self, purpose: bytes) -> bytes:
        """32 bytes that only who has the secret can know."""
        return hmac.digest(self._bytes, b"vllm-ascend-pd " + purpose, "sha256")


class Trust:
    """The key of this process, whom it accepts, and what it has refused. Any thread."""

    def __init__(self, secret: Secret | None = None) -> None:
        self.is_shared = secret is not None
        private = Ed25519PrivateKey.generate()
        if secret is not None:
            private = Ed25519PrivateKey.from_private_bytes(secret.derive(b"transport key 1"))
        certificate = _certify(private)
        self.key = hashlib.sha256(certificate).hexdigest()
        """Of this process; the same for all that share its secret."""
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, private, certificate, self.is_shared)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, private, certificate, self.is_shared)
        self._lock = threading.Lock()
        self._refused: Counter[Reason] = Counter()

    @classmethod
    def load(cls, secret_file: str | None) -> Trust:
        """``ConfigError`` when there is such a file and it cannot be used."""
        return cls(None if secret_file is None else Secret.load(secret_file))

    def serve(self, connected: socket.socket) -> ssl.SSLSocket:
        return self._server.wrap_socket(connected, True, do_handshake_on_connect=False)

    def connect(self, connected: socket.socket) -> ssl.SSLSocket:
        return self._client.wrap_socket(connected, do_handshake_on_connect=False)

    def knows(self, connected: ssl.SSLSocket, key: str) -> bool:
        """Whether the server of this connection is the process with this ``key``. With a secret the
        handshake has seen to that.
        """
        certificate = connected.getpeercert(binary_form=True) or b""
        return self.is_shared or hmac.compare_digest(hashlib.sha256(certificate).hexdigest(), key)

    def explain(self, error: Exception | None) -> tuple[Cause, str]:
        """What ended a connection that this process made: the cause, and a text to follow the
        peer's name.
        """
        reason = reason_of(error)
        if reason is None:
            return Cause.PEER_UNREACHABLE, "is not there (connection refused or lost)"
        self.note_refused(reason, "a producer")
        if reason is Reason.WRONG_SECRET and not self.is_shared:
            return Cause.UNAUTHENTICATED, _THEIR_SECRET
        return _CAUSES[reason], _EXPLAINED[reason]

    def note_refused(self, reason: Reason, peer: str) -> None:
        """Count it, and log it."""
        with self._lock:
            self._refused[reason] += 1
        logger.warning("refused %s: %s (it %s)", peer, reason.value, _EXPLAINED[reason])

    def take_refused(self) -> dict[str, int]:
        """Number by reason since the last call."""
        if not self._refused:
            return {}
        with self._lock:
            refused, self._refused = self._refused, Counter()
        return {reason.value: count for reason, count in refused.items()}


class WrongKeyError(OSError):
    """The peer is another process than the one that was to be reached."""


def reason_of(error: Exception | None) -> Reason | None:
    """Why a connection was refused that ended with ``error``; ``None`` when it was only lost."""
    if isinstance(error, WrongKeyError):
        return Reason.WRONG_KEY
    if isinstance(error, FloodError):
        return Reason.MALFORMED
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return None
    said = error.reason or ""
    is_about_keys = "CERT" in said or "UNKNOWN_CA" in said or "DECRYPT_ERROR" in said
    return Reason.WRONG_SECRET if is_about_keys else Reason.MALFORMED


def _certify(private: Ed25519PrivateKey) -> bytes:
    """A certificate of its own making; the same at every call, as Ed25519 signs that way."""
    made = x509.CertificateBuilder(_NAME, _NAME, private.public_key(), 1, *_ALWAYS)
    return made.sign(private, None).public_bytes(serialization.Encoding.DER)


def _context(
    protocol: int, private: Ed25519PrivateKey, certificate: bytes, is_shared: bool
) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    if is_shared:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=certificate)
    if is_shared or protocol == ssl.PROTOCOL_TLS_SERVER:
        key = private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        # OpenSSL reads a key from a file only.
        fd = os.memfd_create("key", os.MFD_CLOEXEC)
        with open(fd, "wb", closefd=True) as file:
            file.write(key + ssl.DER_cert_to_PEM_cert(certificate).encode())
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context

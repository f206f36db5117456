# SPDX-License-Identifier: Apache-2.0
"""TLS towards clients and towards engines."""

from __future__ import annotations

import logging
import ssl
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.private_file import read_private
from vllm_ascend_pd.router.watched_file import WatchedFile

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

_MAX_KEY_BYTES = 1 << 20


class ServerCertificate:
    """Of the router's own port. Its files are read again when they change. Event loop thread."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """``ConfigError`` if they cannot be used."""
        self.context = self._newest = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # A context keeps one certificate for each kind of key, so each reading has one of its own.
        self.context.sni_callback = self._take_newest
        self._certificate, self._key = certificate, key
        self._files = (
            WatchedFile(
                "--tls-key",
                key,
                lambda: read_private("--tls-key", str(key), _MAX_KEY_BYTES),
                self._take,
            ),
            WatchedFile("--tls-certificate", certificate, certificate.read_bytes, self._take),
        )
        for file in self._files:
            file.read()

    def refresh(self) -> None:
        """Connections that come from now on get the new one."""
        were_read = [file.refresh() for file in self._files]
        if any(were_read):
            logger.info("--tls-certificate, --tls-key: read again")

    def _take(self, _: bytes) -> None:
        newest = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            newest.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as e:
            raise ConfigError(f"--tls-certificate, --tls-key: {e}") from e
        self._newest = newest

    def _take_newest(self, connection: ssl.SSLObject, *_: object) -> None:
        """In each handshake, whether the client names a server or not."""
        connection.context = self._newest


def client_context(option: str, ca: Path | None) -> ssl.SSLContext | None:
    """To trust who has a certificate of ``ca``; ``None``: the system's certificate authorities.
    ``ConfigError`` names ``option``."""
    if ca is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(f"{option} {ca}: {e}") from e

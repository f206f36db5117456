# SPDX-License-Identifier: Apache-2.0
"""API keys of clients, and the token with which engines register."""

from __future__ import annotations

import hashlib
import hmac
import logging
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.private_file import read_private
from vllm_ascend_pd.router.watched_file import WatchedFile

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

_BEARER = "bearer "
_MAX_BYTES = 1 << 20


def bearer_token(authorization: str | None) -> str | None:
    """Of an ``Authorization: Bearer ...`` header."""
    if authorization is None or not authorization.lower().startswith(_BEARER):
        return None
    return authorization[len(_BEARER) :].strip()


class Secrets:
    """The secrets of a file, one a line, '#' for comments. The file is read again when it changes.

    Only digests are kept, and each request is compared with every one of them, so the time that
    a comparison takes says nothing about a secret.
    """

    def __init__(self, path: Path, option: str) -> None:
        self._path = path
        self._option = option
        self._digests: tuple[bytes, ...] = ()
        self._file = WatchedFile(
            option, path, lambda: read_private(option, str(path), _MAX_BYTES), self._take
        )
        self._file.read()

    def accepts(self, secret: str | None) -> bool:
        digest = digest_of(secret or "")
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and secret is not None

    def refresh(self) -> None:
        if self._file.refresh():
            logger.info("%s: read %d keys again", self._option, len(self._digests))

    def _take(self, content: bytes) -> None:
        try:
            lines = [line.strip() for line in content.decode().splitlines()]
        except UnicodeDecodeError as e:
            raise ConfigError(f"{self._option}: {e}") from e
        secrets = [line for line in lines if line and not line.startswith("#")]
        if not secrets:
            raise ConfigError(f"{self._option}: {self._path} holds no key")
        self._digests = tuple(digest_of(secret) for secret in secrets)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()

# SPDX-License-Identifier: Apache-2.0
"""A file that is read again when it changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger(__name__)


class WatchedFile:
    """Event loop thread."""

    def __init__(
        self,
        option: str,
        path: Path,
        read: Callable[[], bytes],
        take: Callable[[bytes], None],
    ) -> None:
        """``take`` uses the whole content, or raises ``ConfigError`` and changes nothing."""
        self._option, self._path = option, path
        self._read, self._take = read, take
        self._stamp: tuple[int, ...] | None = None
        self._told = ""
        """Why it could not be used."""

    def read(self) -> None:
        """``ConfigError`` says why it cannot be used."""
        stamp = self._stat()  # first: what changes meanwhile is read the next time
        try:
            content = self._read()
        except OSError as e:
            raise ConfigError(f"{self._option}: {e}") from e
        self._stamp = stamp  # a wrong file stays wrong; one that cannot be read may soon be
        self._take(content)
        self._told = ""

    def refresh(self) -> bool:
        """Whether it was read again; one that is wrong now changes nothing."""
        try:
            if self._stat() == self._stamp:
                return False
            self.read()
        except ConfigError as e:
            if str(e) != self._told:
                self._told = str(e)
                logger.warning("kept what was read before: %s", e)
            return False
        return True

    def _stat(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError as e:
            raise ConfigError(f"{self._option}: {e}") from e
        # Who may read it changes its ctime only.
        return stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size

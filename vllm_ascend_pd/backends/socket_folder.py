# SPDX-License-Identifier: Apache-2.0
"""A folder for the Unix sockets of one process, which only its user can enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "vllm-pd-sockets-"
# The path of a socket has room for about a hundred characters.
_MAX_ROOT = 40
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SocketFolder:
    """Made on construction; ``remove`` ends it. What killed processes left is removed then too.

    A lock on the folder, which the kernel drops with the process, tells whose owner lives.
    """

    def __init__(self) -> None:
        root = tempfile.gettempdir()
        if len(root) > _MAX_ROOT:
            root = "/tmp"
        _remove_abandoned(Path(root))
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            with contextlib.suppress(FileNotFoundError):
                self._fd = os.open(self.path, _FLAGS)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                # Another process took it for abandoned before it was locked.
                os.close(self._fd)

    def remove(self) -> None:
        """With all that is in it; idempotent."""
        if self._fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = -1


def _remove_abandoned(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        # Of another user, or gone already, or its owner lives: not ours to remove.
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.geteuid():
                continue
            fd = os.open(path, _FLAGS)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)

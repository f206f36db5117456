# SPDX-License-Identifier: Apache-2.0
"""Folders of the pool's files: one engine uses one at a time."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger

logger = limited_logger(__name__)

_LOCK = "lock"


def make_folder(path: str) -> Path:
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"pool.ssd.path {path!r} cannot be made: {e}") from e
    return Path(path)


def lock_folder(folder: Path, whole: bool = False) -> int:
    """For this process, until the descriptor that is returned is closed. With ``whole`` nobody else
    may use a folder in it, or one that it is in.

    Raises:
        ConfigError: another engine uses it, or nobody can.
    """
    lock_fd = _lock(folder / _LOCK, fcntl.LOCK_EX, os.O_CREAT | os.O_RDWR)
    if whole:
        around = [parent / _LOCK for parent in folder.absolute().parents]
        within = [path for path in folder.rglob(_LOCK) if path.parent != folder]
        try:
            for other in around + within:
                if other.is_file() and os.access(other, os.R_OK):
                    os.close(_lock(other, fcntl.LOCK_SH, os.O_RDONLY))
        except ConfigError:
            os.close(lock_fd)
            raise
    return lock_fd


def _lock(path: Path, kind: int, flags: int) -> int:
    try:
        lock_fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise ConfigError(f"pool.ssd.path {path.parent} cannot be used: {e}") from e
    try:
        fcntl.flock(lock_fd, kind | fcntl.LOCK_NB)
    except OSError as e:
        os.close(lock_fd)
        if isinstance(e, BlockingIOError):
            raise ConfigError(f"pool.ssd.path {path.parent} is used by another engine") from e
        raise ConfigError(
            f"pool.ssd.path {path.parent} cannot be locked ({e}), so two engines could use it at a"
            " time; take a folder on another file system"
        ) from e
    return lock_fd


def warn_of_others(folder: Path, num_workers: int) -> None:
    """Of what this engine has stored with another parallel size. ``folder``: the first worker's."""
    engine_folder = folder if num_workers == 1 else folder.parent
    ours = {folder.with_name(f"worker-{rank}") for rank in range(num_workers)}
    patterns = ["worker-[0-9]*", "dp[0-9]*"] + ["pd[0-9]*"] * (num_workers > 1)
    for other in {path for pattern in patterns for path in engine_folder.glob(pattern)} - ours:
        num_bytes = 0
        with suppress(OSError):
            num_bytes = sum(path.stat().st_size for path in other.rglob("*") if path.is_file())
        logger.warning(
            "KV pool: %s holds %d bytes beyond pool.ssd.size, of an engine with another number of"
            " workers or ranks; remove it if that does not come back",
            other,
            num_bytes,
        )

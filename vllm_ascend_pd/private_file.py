# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret or a token."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from vllm_ascend_pd.errors import ConfigError

logger = logging.getLogger(__name__)


def read_token(option: str, path: str) -> str:
    """The one line of a file; ``ConfigError`` names ``option``."""
    token = read_private(option, path).decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{option}: {path} does not hold one line of printable ASCII")
    return token


def write_private(path: Path, value: str) -> None:
    """A file that only this user may read; in place of what is there once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    try:
        with open(new, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(value)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)  # a part, where the disk is full


def read_private(
    option: str, path: str, max_bytes: int = 4096, refuses_open: bool = False
) -> bytes:
    """The content of a file that only its owner should read, without line ends after it.

    One that others may read is refused or only warned of. The latter always where it is a link, as
    in a volume of Kubernetes: the volume decides the mode, and nobody else is in the container.

    Raises:
        ConfigError: It names ``option``.
    """
    try:
        with Path(path).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            value = file.read(max_bytes + 1)
    except OSError as e:
        raise ConfigError(f"{option} {path!r}: {e.strerror}") from e
    if len(value) > max_bytes:
        raise ConfigError(
            f"{option} {path!r} is longer than {max_bytes} bytes; is it the right file?"
        )
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        open_to = (
            f"{option} {path!r} is open to its group or to others (mode {stat.S_IMODE(mode):04o})"
        )
        if Path(path).is_symlink():
            logger.warning("%s; in a Kubernetes volume set defaultMode: 0400", open_to)
        elif refuses_open:
            raise ConfigError(f"{open_to}; run: chmod 600 {path}")
        else:
            logger.warning("%s; run: chmod 600 %s", open_to, path)
    return value.rstrip(b"\r\n")

# SPDX-License-Identifier: Apache-2.0
"""How files are replaced so that a kill at any moment leaves what the next run can finish or undo.

Each new content is written beside its file, under a name of ours, and renamed over it when all are
there. What may be left over is a file of such a name; `sweep` removes it.
"""

import base64
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path


def beside(target: Path) -> Path:
    """Where the new content of `target` waits; of a link: beside the file that it names."""
    real = Path(os.path.realpath(target))
    return real.with_name(f".{real.name}.pd-tmp")


def write_beside(target: Path, data: bytes) -> None:
    """With the owner and mode of `target`, where it exists.

    Raises:
        OSError: it cannot be written, or not with that owner.
    """
    handle = os.open(beside(target), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        if target.exists():
            old, new = target.stat(), os.fstat(handle)
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                os.fchown(handle, old.st_uid, old.st_gid)
            os.fchmod(handle, old.st_mode & 0o7777)
        os.fsync(handle)
    finally:
        os.close(handle)


def rename_beside(target: Path) -> None:
    """Put in place what `write_beside` has written; a link stays one."""
    new = beside(target)
    os.replace(new, os.path.realpath(target))


def replace(target: Path, data: bytes) -> None:
    write_beside(target, data)
    rename_beside(target)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def sweep(targets: Iterable[Path]) -> None:
    """Remove what a killed run has left beside these files."""
    for target in targets:
        if (left := beside(target)).is_file():
            remove(left)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One apply or revert at a time for each tree; the lock ends with the process."""
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# ---- RECORD, by which an installer knows the files of a package ----------------------------------


def rewrite_record(record: bytes, changes: dict[str, tuple[bytes, bytes]]) -> bytes:
    """`changes` are the contents of each path before and after.

    Only a row with the hash of the old content gets that of the new one; any other stays as it is.
    """
    rows = {_row(path, old): _row(path, new) for path, (old, new) in changes.items()}
    lines = record.split(b"\n")
    for n, line in enumerate(lines):
        row = line.rstrip(b"\r")
        lines[n] = rows.get(row, row) + line[len(row) :]
    return b"\n".join(lines)


def list_file(record: bytes, path: str, listed: bool) -> bytes:
    """With or without a row for a file that came later; undone byte for byte."""
    row = f"{path},,".encode()
    lines = record.split(b"\n")
    if b"\r" in lines[0]:
        row += b"\r"
    if listed and row not in lines:
        lines.insert(len(lines) - (lines[-1] == b""), row)
    elif not listed and row in lines:
        lines.remove(row)
    return b"\n".join(lines)


def _row(path: str, content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return b"%s,sha256=%s,%d" % (path.encode(), digest, len(content))

# SPDX-License-Identifier: Apache-2.0
"""How much memory of this host this process can still take."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Files(NamedTuple):
    """Where a version of cgroups says what its groups may have, and have."""

    folder: str
    limit: str
    usage: str
    file_lines: tuple[str, str]
    """Of ``memory.stat``, on files in memory, which make room for what asks for it."""


_V1 = _Files(
    folder="sys/fs/cgroup/memory",
    limit="memory.limit_in_bytes",
    usage="memory.usage_in_bytes",
    file_lines=("total_inactive_file", "total_active_file"),
)
_V2 = _Files(
    folder="sys/fs/cgroup",
    limit="memory.max",
    usage="memory.current",
    file_lines=("inactive_file", "active_file"),
)


def resident_memory_bytes() -> int:
    """That this process has; 0 where the system does not tell it as Linux does."""
    with suppress(OSError):
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def available_memory_bytes(root: Path = Path("/")) -> int:
    """That new allocations can have without swapping, and before the cgroup of this process, which
    is a container's, or one of those above is at its limit.

    Files in memory count as available there, as in the host's ``MemAvailable``.
    """
    return max(0, min([_of_host(root), *_left_in_cgroups(root)]))


def _of_host(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups(root: Path) -> Iterator[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # this system has none
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        group = PurePosixPath(path)
        # A container may see its own group as the uppermost one, and still be told its full path.
        for each in (group, *group.parents):
            # Without a limit the file is not there, or says "max".
            with suppress(OSError, ValueError, KeyError):
                yield _left(root / files.folder / each.relative_to("/"), files)


def _left(folder: Path, files: _Files) -> int:
    limit = int((folder / files.limit).read_text())
    usage = int((folder / files.usage).read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return limit - usage + sum(int(stat[line]) for line in files.file_lines)

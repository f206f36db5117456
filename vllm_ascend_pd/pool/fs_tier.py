# SPDX-License-Identifier: Apache-2.0
"""Values as plain files, which a restart of the engine finds again.

<pool.ssd.path>/lock                         held while the folder is used
<pool.ssd.path>/pd2/3f0c9a…/8e/8e17…         one value, by its key; 8e: begin of the block hash
<pool.ssd.path>/.pd-value-17                 one that is being written
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import math
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, TierStats, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = limited_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NEW = ".pd-value-"
_REST_S = 1.0
"""After a failure, so long nothing is expected to work."""


def make_folder(path: str) -> Path:
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"pool.ssd.path {path!r} cannot be made: {e}") from e
    return Path(path)


class FileTier(Tier):
    """A folder of this process alone. The least recently used files are removed for new ones.

    What is in the folder is kept in memory, from a look at it at the start. A file appears under
    its name when it is whole; that its bytes are the right ones is the reader's to verify, also
    after a loss of power.
    """

    stores_to = Place.SSD

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self.folder = folder
        self._capacity_bytes = capacity_bytes
        self._numbers = itertools.count()
        try:
            self._lock_fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise ConfigError(f"pool.ssd.path {folder} cannot be used: {e}") from e
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(self._lock_fd)
            raise ConfigError(f"pool.ssd.path {folder} is used by another engine") from e
        self._lock = threading.Lock()  # guards the fields below; no file is touched under it
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._used_bytes = 0
        self._is_open = True
        self._failed_at = -math.inf
        self._find_files()

    @classmethod
    def open(cls, opening: Opening) -> FileTier:
        ssd = opening.config.ssd
        if ssd is None:
            raise ConfigError('pool.tiers fs needs pool.ssd: {"path": …, "size": …}')
        tier = cls(make_folder(ssd.path), ssd.size)
        held = tier.stats()
        logger.info("KV pool: %s of %d bytes holds %s values", ssd.path, ssd.size, held.num_keys)
        return tier

    def _find_files(self) -> None:
        for leftover in self.folder.glob(f"{_NEW}*"):
            leftover.unlink()
        found = []
        # Those of other formats are found by nobody, and go, as the oldest ones, for new ones.
        for path in self.folder.glob("pd[0-9]*/*/*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                key = f"{path.parts[-4]}/{path.parts[-3]}/{path.name}"
                found.append((status.st_mtime, key, status.st_size))
        for _, key, num_bytes in sorted(found):
            self._sizes[key] = num_bytes
            self._used_bytes += num_bytes
        self._delete(self._make_room(0))

    def path_of(self, key: str) -> Path:
        space, _, name = key.rpartition("/")
        return self.folder / space / name[:2] / name

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            for key in reversed(keys):  # a prompt's last blocks are of no use without its first
                if key in self._sizes:
                    self._sizes.move_to_end(key)
            return [Place.SSD if key in self._sizes else Place.NOWHERE for key in keys]

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [self._put(value) for value in values]

    def _put(self, value: Value) -> Status:
        with self._lock:
            if not self._is_open:
                return Status.FAILED
            if value.key in self._sizes:
                return Status.OK
            if value.num_bytes > self._capacity_bytes:
                return Status.FULL
            evicted = self._make_room(value.num_bytes)
            self._used_bytes += value.num_bytes  # so that others leave room for it
        status = Status.FAILED
        try:
            self._delete(evicted)
            self._write(value)
            status = Status.OK
        except OSError as e:
            status = self._disk_full(value) if e.errno in _NO_ROOM else self._failed(e)
        finally:
            with self._lock:
                if status is not Status.OK or value.key in self._sizes:
                    self._used_bytes -= value.num_bytes
                if status is Status.OK:
                    self._sizes[value.key] = value.num_bytes
        return status

    def _disk_full(self, value: Value) -> Status:
        """Others use the disk, too: give up as much as a later put of this value needs."""
        logger.warning("the pool's files in %s: the disk is full", self.folder)
        with self._lock:
            evicted = self._make_room(self._capacity_bytes - self._used_bytes + value.num_bytes)
        with suppress(OSError):
            self._delete(evicted)
        return Status.FULL

    def _make_room(self, num_bytes: int) -> list[str]:
        """Under the lock: forget what goes for it."""
        evicted = []
        while self._sizes and self._used_bytes + num_bytes > self._capacity_bytes:
            key, size = self._sizes.popitem(last=False)
            self._used_bytes -= size
            evicted.append(key)
        return evicted

    def _delete(self, keys: Sequence[str]) -> None:
        error = None
        for key in keys:
            try:
                self.path_of(key).unlink(missing_ok=True)
            except OSError as e:
                error = e
        if error is not None:
            raise error

    def _write(self, value: Value) -> None:
        new = self.folder / f"{_NEW}{next(self._numbers)}"
        data = memoryview((ctypes.c_char * value.num_bytes).from_address(value.addr)).cast("B")
        try:
            file_fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            with open(file_fd, "wb", buffering=0) as file:
                while data:
                    data = data[file.write(data) :]
            path = self.path_of(value.key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):  # of another thread: the first one stays
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)

    def get(self, values: Sequence[Value]) -> list[Status]:
        return [self._get(value) for value in values]

    def _get(self, value: Value) -> Status:
        with self._lock:
            if not self._is_open:
                return Status.FAILED
            if value.key not in self._sizes:
                return Status.MISSING
        data = memoryview((ctypes.c_char * value.num_bytes).from_address(value.addr)).cast("B")
        try:
            with self.path_of(value.key).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != value.num_bytes:
                    return Status.DAMAGED
                while data:
                    num_read = file.readinto(data)
                    if not num_read:
                        return Status.DAMAGED
                    data = data[num_read:]
        except FileNotFoundError:
            self._forget([value.key])
            return Status.MISSING
        except OSError as e:
            self._forget([value.key])
            return self._failed(e)
        with suppress(OSError):
            os.utime(self.path_of(value.key))  # of what is kept, the next start knows what was used
        return Status.OK

    def _failed(self, error: OSError) -> Status:
        logger.warning("the pool's files in %s: %s", self.folder, error)
        self._failed_at = time.monotonic()
        return Status.FAILED

    def _forget(self, keys: Sequence[str]) -> list[str]:
        with self._lock:
            known = [key for key in keys if key in self._sizes]
            for key in known:
                self._used_bytes -= self._sizes.pop(key)
        return known

    def remove(self, keys: Sequence[str]) -> None:
        try:
            self._delete(self._forget(keys))
        except OSError as e:
            self._failed(e)

    def clear(self) -> int:
        with self._lock:
            keys = list(self._sizes)
        self.remove(keys)
        return len(keys)

    def stats(self) -> TierStats:
        with self._lock:
            return TierStats(len(self._sizes), self._used_bytes, self._capacity_bytes)

    def is_healthy(self) -> bool:
        return self._is_open and time.monotonic() - self._failed_at > _REST_S

    def close(self) -> None:
        """The files stay."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            self._sizes.clear()
            self._used_bytes = 0
        os.close(self._lock_fd)

# SPDX-License-Identifier: Apache-2.0
"""Values as plain files, which a restart of the engine finds again.

<pool.ssd.path>/lock                         held while the folder is used
<pool.ssd.path>/pd2/3f0c9a…/8e/8e17…         one value, by its key; 8e: begin of the block hash
<pool.ssd.path>/pd2/3f0c9a…/8e/8e17…~5d02…   one of a tenant's
<pool.ssd.path>/.pd-value-17                 one that is being written
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import math
import os
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.pool.room import Room, Shares
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from io import FileIO

    from vllm_ascend_pd.pool.room import Gone

logger = limited_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FILE_IS_GOOD = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of a read: this process, or the host, has too much open."""
_LOCK = "lock"
_NEW = ".pd-value-"
_OF_TENANT = "~"
_STUCK = "./"
"""Begins the key of a file that could not be removed: its path is the same, nobody looks for it,
and its turn to go comes again."""
_REST_S = 1.0
"""After a failure, so long nothing is expected to work."""
_HANGS_S = 2.0
"""A call that has not ended after that hangs, as on a file system of a network whose server is
away. Nothing more is asked of that disk until it has ended."""


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
        raise ConfigError(f"pool.ssd.path {path.parent} is used by another engine") from e
    return lock_fd


def _warn_of_others(folder: Path, num_workers: int) -> None:
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


class FileTier(Tier):
    """A folder of this process alone. The least recently used files are removed for new ones.

    What is in the folder is kept in memory, from a look at it at the start. A file appears under
    its name when it is whole; that its bytes are the right ones is the reader's to verify, also
    after a loss of power.
    """

    stores_to = Place.SSD

    def __init__(self, folder: Path, capacity_bytes: int, shares: Shares | None = None) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self._lock_fd = lock_folder(folder)
        self._lock = threading.Lock()  # guards the fields below; no file is touched under it
        self.room = Room(capacity_bytes, shares)
        self._is_open = True
        self._read_failed_at = -math.inf
        self._write_failed_at = -math.inf
        self._calls: dict[int, float] = {}
        """On the disk and under way: when each began."""
        self._is_hanging = False
        try:
            self._find_files()
        except OSError as e:
            os.close(self._lock_fd)
            raise ConfigError(f"pool.ssd.path {folder} cannot be used: {e}") from e

    @classmethod
    def open(cls, opening: Opening) -> FileTier:
        ssd = opening.config.ssd
        if ssd is None:
            raise ConfigError('pool.tiers fs needs pool.ssd: {"path": …, "size": …}')
        opening.check_share("pool.ssd.size", ssd.size)
        opening.warn_of_no_room("pool.ssd.size", ssd.size)
        if opening.rank == 0:
            _warn_of_others(Path(ssd.path), opening.num_workers)
        tier = cls(make_folder(ssd.path), ssd.size, Shares.of(opening.config))
        left = shutil.disk_usage(ssd.path).free + tier.room.used_bytes
        if left < ssd.size:
            logger.warning(
                "KV pool: pool.ssd.size, %d bytes, is more than the %d bytes that %s has room for:"
                " nobody else could write to that disk any more; lower it",
                *(ssd.size, left, ssd.path),
            )
        num_held = len(tier.room)
        logger.info("KV pool: %s of %d bytes holds %d values", ssd.path, ssd.size, num_held)
        return tier

    def _find_files(self) -> None:
        for leftover in self.folder.glob(f"{_NEW}*"):
            leftover.unlink()
        found = []
        # Those of other formats are found by nobody, and go, as the oldest ones, for new ones.
        for path in self.folder.glob("pd[0-9]*/*/*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        for _, num_bytes, path in sorted(found):
            name, _, tenant = path.name.partition(_OF_TENANT)
            key = f"{path.parts[-4]}/{path.parts[-3]}/{name}"
            evicted = self.room.reserve(num_bytes, tenant)
            self.room.keep(key, num_bytes, tenant)
            self._delete(evicted)
        self._delete(self.room.make_room(0))

    def path_of(self, key: str, tenant: str = "") -> Path:
        space, _, name = key.rpartition("/")
        suffix = _OF_TENANT + tenant if tenant else ""
        return self.folder / space / name[:2] / (name + suffix)

    @property
    def num_over_share(self) -> int:  # type: ignore[override]
        return self.room.num_over_share

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        with self._lock:
            for key in reversed(keys):  # a prompt's last blocks are of no use without its first
                self.room.touch(key)
            return [Place.SSD if key in self.room else Place.NOWHERE for key in keys]

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [self._put(value) for value in values]

    def _put(self, value: Value) -> Status:
        with self._lock:
            if not self._is_open:
                return Status.FAILED
            if value.key in self.room:
                return Status.OK
            if time.monotonic() - self._write_failed_at <= _REST_S:
                return Status.FAILED
            if not self.room.fits(value.num_bytes, value.tenant):
                return Status.FULL
        if self._hangs():
            return Status.FAILED
        try:
            with self._on_disk():
                self._write(value)
        except OSError as e:
            return self._disk_full(value) if e.errno in _NO_ROOM else self._write_failed(e)
        return Status.OK

    def _disk_full(self, value: Value) -> Status:
        """Others use the disk, too: give up as much as a later put of this value needs."""
        logger.warning(
            "the pool's files in %s: the disk is full before they have pool.ssd.size; make room"
            " there, or lower it",
            self.folder,
        )
        with self._lock:
            self.num_file_errors += 1
            left = self.room.capacity_bytes - self.room.used_bytes + value.num_bytes
            evicted = self.room.make_room(left)
        with suppress(OSError), self._on_disk():
            self._delete(evicted)
        return Status.FULL

    @contextmanager
    def _on_disk(self) -> Iterator[None]:
        call = next(self._numbers)
        with self._lock:
            self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[call]

    def _hangs(self) -> bool:
        with self._lock:
            began = min(self._calls.values(), default=math.inf)
            hangs = time.monotonic() - began > _HANGS_S
            is_news = hangs and not self._is_hanging
            self._is_hanging = hangs
            self.num_file_errors += is_news
        if is_news:
            logger.warning(
                "the pool's files in %s: the disk does not answer; until it does nothing is read"
                " from it or stored there",
                self.folder,
            )
        return hangs

    def _delete(self, values: Iterable[Gone]) -> None:
        """What cannot be removed goes on to take its room."""
        error = None
        for key, num_bytes, tenant in values:
            try:
                self.path_of(key, tenant).unlink(missing_ok=True)
            except OSError as e:
                error = e
                with self._lock:
                    self.room.put_back(_STUCK + key.removeprefix(_STUCK), num_bytes, tenant)
        if error is not None:
            raise error

    def _write(self, value: Value) -> None:
        new = self.folder / f"{_NEW}{next(self._numbers)}"
        # Before room is made: on a disk that takes no file, no other value goes for this one.
        file_fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            with open(file_fd, "wb", buffering=0) as file:
                self._fill(file, new, value)
        finally:
            new.unlink(missing_ok=True)

    def _fill(self, file: FileIO, new: Path, value: Value) -> None:
        """Write the value into ``file`` at ``new``, and give that its name."""
        data = memoryview((ctypes.c_char * value.num_bytes).from_address(value.addr)).cast("B")
        is_there = False
        with self._lock:
            evicted = self.room.reserve(value.num_bytes, value.tenant)
        try:
            self._delete(evicted)
            while data:
                data = data[file.write(data) :]
            file.close()  # some disks say only now that it does not fit
            self._name(new, value)
            is_there = True
        finally:
            with self._lock:
                if is_there:
                    self.room.keep(value.key, value.num_bytes, value.tenant)
                else:
                    self.room.release(value.num_bytes, value.tenant)

    def _name(self, new: Path, value: Value) -> None:
        """In place of a file that is there and that no value is known of."""
        path = self.path_of(value.key, value.tenant)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._lock:
            if value.key in self.room:  # of another thread: the first one stays
                return
        os.replace(new, path)
        stuck = _STUCK + value.key
        with self._lock:
            if self.room.tenant(stuck) == value.tenant:
                self.room.pop(stuck)

    def get(self, values: Sequence[Value]) -> list[Status]:
        return [self._get(value) for value in values]

    def _get(self, value: Value) -> Status:
        with self._lock:
            if not self._is_open:
                return Status.FAILED
            entry = self.room.entry(value.key)
            if entry is None:
                return Status.MISSING
            path = self.path_of(value.key, entry[1])
        if self._hangs():
            return Status.FAILED
        with self._on_disk():
            return self._read(value, entry, path)

    def _read(self, value: Value, entry: tuple[int, str], path: Path) -> Status:
        data = memoryview((ctypes.c_char * value.num_bytes).from_address(value.addr)).cast("B")
        try:
            with path.open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != value.num_bytes:
                    return Status.DAMAGED
                while data:
                    num_read = file.readinto(data)
                    if not num_read:
                        return Status.DAMAGED
                    data = data[num_read:]
        except OSError as e:
            if e.errno not in _FILE_IS_GOOD:
                self._drop(value.key, entry, is_gone=e.errno == errno.ENOENT)
            return Status.MISSING if e.errno == errno.ENOENT else self._read_failed(e)
        with suppress(OSError):
            os.utime(path)  # of what is kept, the next start knows what was used
        return Status.OK

    def _drop(self, key: str, entry: tuple[int, str], is_gone: bool) -> None:
        """A value that cannot be read, with its file unless that is gone."""
        with self._lock:
            if self.room.entry(key) is not entry:  # it was put again meanwhile
                return
            self.room.pop(key)
        if not is_gone:
            with suppress(OSError):
                self._delete([(key, *entry)])

    def tenants(self, keys: Sequence[str]) -> list[str]:
        with self._lock:
            return [self.room.tenant(key) for key in keys]

    def _read_failed(self, error: OSError) -> Status:
        logger.warning("the pool's files in %s cannot be read: %s", self.folder, error)
        self._read_failed_at = time.monotonic()
        with self._lock:
            self.num_file_errors += 1
        return Status.FAILED

    def _write_failed(self, error: OSError) -> Status:
        """What is there may still be read, as on a disk that has become read-only."""
        logger.warning("the pool's files in %s cannot be written: %s", self.folder, error)
        self._write_failed_at = time.monotonic()
        with self._lock:
            self.num_file_errors += 1
        return Status.FAILED

    def _forget(self, keys: Sequence[str]) -> list[Gone]:
        """Those that were there."""
        forgotten = []
        with self._lock:
            for key in keys:
                if (entry := self.room.entry(key)) is not None:
                    forgotten.append((key, *entry))
                    self.room.pop(key)
        return forgotten

    def remove(self, keys: Sequence[str]) -> None:
        try:
            with self._on_disk():
                self._delete(self._forget(keys))
        except OSError as e:
            self._write_failed(e)

    def is_healthy(self) -> bool:
        is_well = time.monotonic() - self._read_failed_at > _REST_S
        return self._is_open and is_well and not self._hangs()

    def close(self) -> None:
        """The files stay."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for key in self.room.all_keys():
                self.room.pop(key)
        os.close(self._lock_fd)

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
import itertools
import math
import os
import shutil
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.pool.disk import Disk
from vllm_ascend_pd.pool.folder import lock_folder, make_folder, warn_of_others
from vllm_ascend_pd.pool.room import Room, Shares
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from io import FileIO

    from vllm_ascend_pd.pool.disk import GivenUp
    from vllm_ascend_pd.pool.room import Gone

logger = limited_logger(__name__)

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE)
"""Of a read: somebody has removed it; on NFS, as it was opened."""
_FILE_IS_GOOD = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Of a read: this process, or the host, has too much open."""
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
_FULL_S = 10.0
"""After a disk was full, so long the files are taken to have no more room than they had then."""
_PUT_WAITS_S = 1.0
"""For one file. Other tiers take blocks meanwhile, and the pool must not be taken for slow."""


def _create(path: Path) -> FileIO:
    return open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600))


class FileTier(Tier):
    """A folder of this process alone. The least recently used files are removed for new ones.

    What is in the folder is kept in memory, from a look at it at the start. A file appears under
    its name when it is whole; that its bytes are the right ones is the reader's to verify, also
    after a loss of power. Files are written and removed by one thread.
    """

    stores_to = Place.SSD

    def __init__(self, folder: Path, capacity_bytes: int, shares: Shares | None = None) -> None:
        self.folder = folder
        self._numbers = itertools.count()
        self._lock_fd = lock_folder(folder)
        self._device = os.fstat(self._lock_fd).st_dev
        self._lock = threading.Lock()  # guards the fields below; no file is touched under it
        self.room = Room(capacity_bytes, shares)
        self._capacity_bytes = capacity_bytes
        self._full_until = -math.inf
        self._is_open = True
        self._read_failed_at = -math.inf
        self._write_failed_at = -math.inf
        self._is_hanging = False
        try:
            self._find_files()
        except OSError as e:
            os.close(self._lock_fd)
            raise ConfigError(f"pool.ssd.path {folder} cannot be used: {e}") from e
        self._disk = Disk()

    @classmethod
    def open(cls, opening: Opening) -> FileTier:
        ssd = opening.config.ssd
        if ssd is None:
            raise ConfigError('pool.tiers fs needs pool.ssd: {"path": …, "size": …}')
        opening.check_share("pool.ssd.size", ssd.size)
        opening.warn_of_no_room("pool.ssd.size", ssd.size)
        if opening.rank == 0:
            warn_of_others(Path(ssd.path), opening.num_workers)
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
        with self._lock:
            known = [self._known(value) for value in values]
        statuses = [status or Status.FAILED for status in known]
        left = [i for i, status in enumerate(known) if status is None]

        def write(given_up: GivenUp) -> None:
            for i in left:
                if given_up():
                    break
                statuses[i] = self._put(values[i], given_up)

        if not left or self._hangs() or self._disk.is_held(_PUT_WAITS_S):
            return statuses
        if not self._disk.do(write, _PUT_WAITS_S):
            self._write_failed(TimeoutError(f"no answer in {_PUT_WAITS_S:g} s"))
        return list(statuses)

    def _known(self, value: Value) -> Status | None:
        """Under the lock: of a put that the disk need not be asked for."""
        if not self._is_open:
            return Status.FAILED
        if value.key in self.room:
            return Status.OK
        now = time.monotonic()
        if now - self._write_failed_at <= _REST_S:
            return Status.FAILED
        if now > self._full_until:
            self.room.capacity_bytes = self._capacity_bytes
        return None if self.room.fits(value.num_bytes, value.tenant) else Status.FULL

    # Disk thread.

    def _put(self, value: Value, given_up: GivenUp) -> Status:
        with self._lock:
            if (known := self._known(value)) is not None:
                return known
        try:
            with self._disk.call():
                is_there = self._write(value, given_up)
        except OSError as e:
            return self._disk_full(value) if e.errno in _NO_ROOM else self._write_failed(e)
        return Status.OK if is_there else Status.FAILED

    def _disk_full(self, value: Value) -> Status:
        """Others use the disk, too: give up as much as a later put of this value needs."""
        logger.warning(
            "the pool's files in %s: the disk is full before they have pool.ssd.size; make room"
            " there, or lower it",
            self.folder,
        )
        with self._lock:
            self.num_file_errors += 1
            self.room.capacity_bytes = max(self.room.used_bytes, value.num_bytes)
            self._full_until = time.monotonic() + _FULL_S
            evicted = self.room.make_room(value.num_bytes)
        with suppress(OSError), self._disk.call():
            self._delete(evicted)
        return Status.FULL

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

    def _write(self, value: Value, given_up: GivenUp) -> bool:
        """Whether it is there now."""
        new = self.folder / f"{_NEW}{next(self._numbers)}"
        try:
            # Before room is made: on a disk that takes no file, no other value goes for this one.
            try:
                file = _create(new)
            except FileNotFoundError:
                self._make_folder_again()
                file = _create(new)
            with file:
                return self._fill(file, new, value, given_up)
        finally:
            new.unlink(missing_ok=True)

    def _make_folder_again(self) -> None:
        """Somebody has removed it, with all that was in it. Raises ``OSError``."""
        logger.warning(
            "the pool's files in %s: the folder was removed, with what it held; it is made again",
            self.folder,
        )
        try:
            lock_fd = lock_folder(make_folder(str(self.folder)))
        except ConfigError as e:
            raise OSError(str(e)) from e
        if os.fstat(lock_fd).st_dev != self._device:
            with suppress(OSError):  # to find it missing again
                (self.folder / "lock").unlink()
                self.folder.rmdir()
            os.close(lock_fd)
            raise OSError("its disk is not mounted any more")
        os.close(self._lock_fd)
        self._lock_fd = lock_fd
        with self._lock:
            self.num_file_errors += 1
            for key in self.room.all_keys():
                self.room.pop(key)

    def _fill(self, file: FileIO, new: Path, value: Value, given_up: GivenUp) -> bool:
        """Write the value into ``file`` at ``new``, and give that its name."""
        data = memoryview((ctypes.c_char * value.num_bytes).from_address(value.addr)).cast("B")
        is_there = False
        with self._lock:
            evicted = self.room.reserve(value.num_bytes, value.tenant)
        try:
            self._delete(evicted)
            while data and not given_up():
                data = data[file.write(data) :]
            file.close()  # some disks say only now that it does not fit
            if not given_up():  # else it may hold what has come into that memory since
                self._name(new, value)
                is_there = True
        finally:
            with self._lock:
                if is_there:
                    self.room.keep(value.key, value.num_bytes, value.tenant)
                else:
                    self.room.release(value.num_bytes, value.tenant)
        return is_there

    def _name(self, new: Path, value: Value) -> None:
        """In place of a file that is there and that no value is known of."""
        path = self.path_of(value.key, value.tenant)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            os.replace(new, path)
        except OSError:
            with suppress(OSError):
                path.unlink()  # NFS may say so of what it has done; nobody would count it
            raise
        stuck = _STUCK + value.key
        with self._lock:
            if self.room.tenant(stuck) == value.tenant:
                self.room.pop(stuck)

    # Any thread.

    def _hangs(self) -> bool:
        hangs = self._disk.is_held(_HANGS_S)
        with self._lock:
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
        with self._disk.call():
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
            return Status.MISSING if e.errno in _GONE else self._read_failed(e)
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
                self._disk.do(lambda _: self._remove([(key, *entry)]), _PUT_WAITS_S)

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
        if gone := self._forget(keys):
            try:
                self._disk.do(lambda _: self._remove(gone), _PUT_WAITS_S)
            except OSError as e:
                self._write_failed(e)

    def _remove(self, gone: list[Gone]) -> None:
        """Disk thread."""
        with self._lock:  # a file that was put in its place meanwhile stays
            gone = [x for x in gone if x[0] not in self.room or self.room.tenant(x[0]) != x[2]]
        with self._disk.call():
            self._delete(gone)

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
        self._disk.stop()
        os.close(self._lock_fd)

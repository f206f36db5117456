# SPDX-License-Identifier: Apache-2.0
"""Tiers by name, several as one, and what plain files add to the contract."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.backends import mooncake_store
from vllm_ascend_pd.config import PoolConfig, SsdConfig
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool import folder, fs_tier, memory_tier, mooncake_tier, registry
from vllm_ascend_pd.pool.composite_tier import CompositeTier
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.fs_tier import FileTier
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.mooncake_tier import MooncakeTier
from vllm_ascend_pd.pool.tier import Opening, Status, Value
from vllm_ascend_pd.types import Place

SIZE = 1000
SPACE = KeySpace.of("tiers")
buffer = ctypes.create_string_buffer(64 * SIZE)


def key_of(number: int) -> str:
    return SPACE.key(bytes([number]) * 32)


def value(number: int, slot: int = 0) -> Value:
    return Value(key_of(number), ctypes.addressof(buffer) + slot * SIZE, SIZE)


def put(tier: MemoryTier | FileTier | CompositeTier | FaultyTier, *numbers: int) -> list[Status]:
    for slot, number in enumerate(numbers):
        buffer[slot * SIZE : (slot + 1) * SIZE] = bytes([number]) * SIZE
    return tier.put([value(number, slot) for slot, number in enumerate(numbers)])


def get(tier: MemoryTier | FileTier | CompositeTier, *numbers: int) -> list[Status]:
    """What is ``OK`` holds what was put."""
    slots = range(32, 32 + len(numbers))
    statuses = tier.get([value(number, slot) for number, slot in zip(numbers, slots, strict=True)])
    for number, slot, status in zip(numbers, slots, statuses, strict=True):
        if status is Status.OK:
            assert buffer[slot * SIZE : (slot + 1) * SIZE] == bytes([number]) * SIZE
    return statuses


def refuse_with(number: int, only: Path | None = None) -> Callable[..., None]:
    """In place of a call on a path, or only on this one: a method of `Path` is ``unlink``."""
    unlink = Path.unlink

    def refuse(path: Path, *_: object, **__: object) -> None:
        if only not in (None, path):
            return unlink(path, missing_ok=True)
        raise OSError(number, os.strerror(number))

    return refuse


def lookup(tier: MemoryTier | FileTier | CompositeTier, *numbers: int) -> list[Place]:
    return tier.lookup([key_of(number) for number in numbers])


# By name.


def test_unknown_tier_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"'s3' is none of \['dram', 'fs', 'mooncake'"):
        registry.open_tiers(Opening(PoolConfig(tiers=("s3",))))


def test_module_of_a_tier_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TIERS", dict(registry._TIERS))
    registry.register_tier("ours", "a_module_of_ours", "OurTier")
    with pytest.raises(ConfigError, match="'ours' cannot be loaded: No module named"):
        registry.tier_class("ours")
    module = ModuleType("a_module_of_ours")
    module.OurTier = MemoryTier  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tier = registry.open_tiers(Opening(PoolConfig(tiers=("ours",), dram_size=16 << 20)))
    assert isinstance(tier, MemoryTier)
    assert tier.room.capacity_bytes == 16 << 20
    registry.register_tier("ours", "a_module_of_ours", "OurTier")  # plugins are loaded twice
    with pytest.raises(ValueError, match="registered already"):
        registry.register_tier("ours", "another", "Tier")


def test_tiers_that_were_opened_are_closed_when_one_cannot_be(tmp_path: Path) -> None:
    config = PoolConfig(
        tiers=("fs", "dram"), dram_size=16 << 20, ssd=SsdConfig(str(tmp_path), 1 << 30)
    )

    def fail(value: object) -> object:
        raise OSError("the other worker is gone")

    with pytest.raises(OSError, match="is gone"):
        registry.open_tiers(Opening(config, from_first=fail))
    registry.open_tiers(Opening(config)).close()  # its folder is free again


def test_only_what_all_workers_find_is_stored_by_one_of_them() -> None:
    """Of those that hold the same KV heads."""
    assert registry.is_shared(PoolConfig(tiers=("mooncake",)))
    assert not registry.is_shared(PoolConfig(tiers=("dram",)))


def test_place_has_one_meaning() -> None:
    assert Place(3) is Place.SSD
    assert [place.label for place in map(Place, range(4))] == ["nowhere", "dram", "remote", "ssd"]
    with pytest.raises(ValueError, match="no place has the number 77"):
        Place(77)
    with pytest.raises(ValueError, match=r"place 1 is Place\(dram\)"):
        Place.declare(1, "hbm", "GPU", 1.0)


# Several as one.


@pytest.fixture
def memory() -> MemoryTier:
    return MemoryTier(2 * SIZE)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileTier]:
    tier = FileTier(tmp_path, 8 * SIZE)
    yield tier
    tier.close()


def test_memory_of_what_is_evicted_is_used_again(memory: MemoryTier) -> None:
    """By whichever thread: malloc would keep what is given back for the one that it was made in."""
    put(memory, 1, 2)
    addresses = {memory._values[key_of(n)].data.ctypes.data for n in (1, 2)}
    for number in range(3, 9):
        thread = threading.Thread(target=put, args=(memory, number))
        thread.start()
        thread.join()
        assert memory._values[key_of(number)].data.ctypes.data in addresses
    assert get(memory, 7, 8) == [Status.OK] * 2


def test_memory_of_what_is_being_read_is_not_used_again(
    memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(memory, 1)

    def evict_and_move(target: int, source: int, num_bytes: int) -> None:
        monkeypatch.undo()
        assert put(memory, 2, 3, 4) == [Status.OK] * 3
        ctypes.memmove(target, source, num_bytes)

    monkeypatch.setattr(memory_tier, "ctypes", SimpleNamespace(memmove=evict_and_move))
    assert get(memory, 1) == [Status.OK]
    assert get(memory, 1, 3, 4) == [Status.MISSING, Status.OK, Status.OK]


def test_room_of_what_finds_no_memory_is_not_lost(
    memory: MemoryTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(memory_tier.np, "empty", refuse)
    assert put(memory, 1, 2, 3) == [Status.FULL] * 3
    assert memory.room.used_bytes == 0
    monkeypatch.undo()
    assert put(memory, 1, 2) == [Status.OK] * 2
    assert lookup(memory, 1, 2) == [Place.DRAM] * 2


def test_memory_that_no_value_fits_into_any_more_is_given_back() -> None:
    tier = MemoryTier(4 * SIZE)
    put(tier, 1, 2, 3, 4)
    tier.remove([key_of(1), key_of(2)])
    large = Value(key_of(9), ctypes.addressof(buffer), 3 * SIZE)
    assert tier.put([large]) == [Status.OK]
    assert tier._spare_bytes + tier.room.used_bytes <= 4 * SIZE
    assert lookup(tier, 3, 4, 9) == [Place.NOWHERE, Place.DRAM, Place.DRAM]


def test_what_memory_evicts_is_found_in_the_tier_below(memory: MemoryTier, files: FileTier) -> None:
    tier = CompositeTier([memory, files])
    assert put(tier, 1, 2, 3) == [Status.OK] * 3
    assert lookup(tier, 1, 2, 3, 4) == [Place.SSD, Place.DRAM, Place.DRAM, Place.NOWHERE]
    assert get(tier, 3, 1, 4) == [Status.OK, Status.OK, Status.MISSING]


def test_what_was_read_below_is_copied_above(memory: MemoryTier, files: FileTier) -> None:
    tier = CompositeTier([memory, files])
    put(files, 1)
    assert lookup(tier, 1) == [Place.SSD]
    assert get(tier, 1) == [Status.OK]
    assert lookup(tier, 1) == [Place.DRAM]
    assert get(memory, 1) == [Status.OK]


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [("ok", "fail", Status.OK), ("fail", "ok", Status.OK), ("full", "fail", Status.FULL)],
)
def test_value_is_stored_if_one_tier_has_it(first: str, second: str, status: Status) -> None:
    tiers = [
        FaultyTier(MemoryTier(1 << 20), TierScript(f"put:{fault}")) for fault in (first, second)
    ]
    tier = CompositeTier(tiers)
    assert put(tier, 1) == [status]
    assert (lookup(tier, 1) == [Place.DRAM]) is (status is Status.OK)


def test_buffer_of_a_failed_read_is_given_to_no_other_tier(memory: MemoryTier) -> None:
    """Its bytes may still land."""
    below = MemoryTier(1 << 20)
    tier = CompositeTier([FaultyTier(memory, TierScript("get:fail")), below])
    put(tier, 1)
    assert get(tier, 1) == [Status.FAILED]
    assert get(tier, 1) == [Status.OK]


def test_one_tier_that_is_down_leaves_the_others(memory: MemoryTier, files: FileTier) -> None:
    tier = CompositeTier([memory, files])
    put(tier, 1)
    memory.close()
    assert tier.is_healthy()
    assert lookup(tier, 1) == [Place.SSD]
    assert get(tier, 1) == [Status.OK]


def test_tier_that_has_just_failed_is_not_asked(memory: MemoryTier, files: FileTier) -> None:
    tier = CompositeTier([memory, files])
    put(files, 1, 2)
    files.path_of(key_of(1)).unlink()
    files.path_of(key_of(1)).mkdir()
    assert get(tier, 1) == [Status.FAILED]
    assert lookup(tier, 2) == [Place.NOWHERE]
    assert get(tier, 2) == [Status.MISSING]


@pytest.fixture
def hanging(
    files: FileTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[FileTier]:
    """It has values 1 to 3, and its disk does not answer who reads the first: to open a pipe waits
    for a writer. So does a read of a file whose server is away."""
    put(files, 1, 2, 3)
    pipe = files.path_of(key_of(1))
    pipe.unlink()
    os.mkfifo(pipe)
    reading = threading.Thread(target=get, args=(files, 1))
    reading.start()
    while not files._disk._calls:
        time.sleep(0.001)
    monkeypatch.setattr(fs_tier, "_HANGS_S", 0.0)
    yield files
    monkeypatch.undo()
    os.close(os.open(pipe, os.O_WRONLY))
    reading.join()
    assert files.is_healthy()
    assert lookup(files, 2) == [Place.SSD]
    assert get(files, 2) == [Status.OK]
    told = [record.getMessage() for record in caplog.get_records("call")]
    assert sum("the disk does not answer" in text for text in told) == 1


def test_disk_that_hangs_is_asked_nothing_more_until_it_answers(hanging: FileTier) -> None:
    assert not hanging.is_healthy()
    assert get(hanging, 2) == [Status.FAILED]
    assert put(hanging, 4) == [Status.FAILED]
    assert hanging.num_file_errors == 1


def test_disk_that_hangs_leaves_the_other_tiers(hanging: FileTier, memory: MemoryTier) -> None:
    tier = CompositeTier([memory, hanging])
    put(memory, 2)
    assert lookup(tier, 2, 3) == [Place.DRAM, Place.NOWHERE]
    assert get(tier, 2, 3) == [Status.OK, Status.MISSING]
    assert put(tier, 4) == [Status.OK]
    assert lookup(tier, 4) == [Place.DRAM]


@pytest.fixture
def held_write(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, the disk makes no file."""
    monkeypatch.setattr(fs_tier, "_PUT_WAITS_S", 0.0)
    answers, create = threading.Event(), fs_tier._create

    def create_late(path: Path) -> int:
        answers.wait()
        return create(path)

    monkeypatch.setattr(fs_tier, "_create", create_late)
    yield answers
    answers.set()


def test_disk_that_hangs_keeps_no_block_from_other_tiers(
    files: FileTier,
    memory: MemoryTier,
    held_write: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """And what comes into the memory that it has not read yet gets no name of a value."""
    tier = CompositeTier([memory, files])
    assert put(files, 1, 2) == [Status.FAILED] * 2
    assert files.num_file_errors == 1
    assert put(tier, 3, 4) == [Status.OK] * 2
    assert lookup(tier, 1, 2, 3, 4) == [Place.NOWHERE, Place.NOWHERE, Place.DRAM, Place.DRAM]
    monkeypatch.setattr(fs_tier, "_REST_S", 0.0)
    monkeypatch.setattr(fs_tier, "_PUT_WAITS_S", 60.0)
    held_write.set()
    assert put(files, 5) == [Status.OK]
    assert files.room.all_keys() == [key_of(5)]
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"lock", files.path_of(key_of(5)).name}


def test_value_is_removed_once_the_disk_answers(
    files: FileTier, held_write: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_write.set()
    monkeypatch.setattr(fs_tier, "_PUT_WAITS_S", 60.0)
    assert put(files, 1) == [Status.OK]
    held_write.clear()
    monkeypatch.setattr(fs_tier, "_PUT_WAITS_S", 0.0)
    assert put(files, 2) == [Status.FAILED]
    files.remove([key_of(1)])
    assert lookup(files, 1) == [Place.NOWHERE]
    assert files.path_of(key_of(1)).exists()
    monkeypatch.setattr(fs_tier, "_REST_S", 0.0)
    monkeypatch.setattr(fs_tier, "_PUT_WAITS_S", 60.0)
    held_write.set()
    assert put(files, 3) == [Status.OK]
    assert not files.path_of(key_of(1)).exists()


def test_folder_that_was_removed_is_made_again(files: FileTier, tmp_path: Path) -> None:
    put(files, 1, 2)
    shutil.rmtree(tmp_path)
    assert put(files, 2) == [Status.OK]  # nobody has looked since
    assert put(files, 3) == [Status.OK]
    assert lookup(files, 1, 2, 3) == [Place.NOWHERE, Place.NOWHERE, Place.SSD]
    assert get(files, 3) == [Status.OK]
    assert files.num_file_errors == 1
    assert files.room.used_bytes == SIZE
    with pytest.raises(ConfigError, match="used by another engine"):
        FileTier(tmp_path, 8 * SIZE)


def test_folder_whose_disk_is_not_there_any_more_is_not_filled(
    files: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_dev=fd))
        for _ in range(2):
            assert put(files, 1) == [Status.FAILED]
            patch.setattr(fs_tier, "_REST_S", -1.0)
            assert not tmp_path.exists()
    FileTier(folder.make_folder(str(tmp_path)), 8 * SIZE).close()


def test_folder_that_cannot_be_locked_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network's file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folder.fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked .*No locks available"):
        FileTier(tmp_path, 8 * SIZE)


def test_damaged_copy_gives_way_to_a_good_one_below(files: FileTier, tmp_path: Path) -> None:
    below = MemoryTier(8 * SIZE)
    tier = CompositeTier([files, below])
    put(tier, 1)
    (path,) = (tmp_path / "pd2").glob("*/*/*")
    path.write_bytes(b"short")
    assert get(tier, 1) == [Status.OK]
    assert get(files, 1) == [Status.OK]


# Files.


def test_folder_that_cannot_be_looked_through_is_named_and_left(tmp_path: Path) -> None:
    odd = tmp_path / ".pd-value-1" / "in it"
    odd.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"pool.ssd.path .* cannot be used"):
        FileTier(tmp_path, 8 * SIZE)
    odd.rmdir()
    odd.parent.rmdir()
    FileTier(tmp_path, 8 * SIZE).close()


def test_values_outlive_their_process(files: FileTier, tmp_path: Path) -> None:
    put(files, 1, 2)
    files.close()
    again = FileTier(tmp_path, 8 * SIZE)
    assert lookup(again, 1, 2, 3) == [Place.SSD, Place.SSD, Place.NOWHERE]
    assert get(again, 1, 2) == [Status.OK, Status.OK]
    assert again.room.used_bytes == 2 * SIZE
    again.close()


def test_values_of_an_older_format_take_room_until_it_is_needed(
    files: FileTier, tmp_path: Path
) -> None:
    put(files, *range(8))
    files.close()
    (tmp_path / "pd2").rename(tmp_path / "pd1")
    again = FileTier(tmp_path, 8 * SIZE)
    assert lookup(again, *range(8)) == [Place.NOWHERE] * 8
    assert put(again, *range(8)) == [Status.OK] * 8
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert num_bytes == again.room.used_bytes == 8 * SIZE
    again.close()


def test_folder_belongs_to_one_engine(files: FileTier, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is used by another engine"):
        FileTier(tmp_path, 8 * SIZE)


@pytest.fixture
def no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def setup(self, *_: Any, **__: Any) -> int:
            return 0

        def close(self) -> int:
            return 0

    monkeypatch.setattr(mooncake_store, "_load_store", lambda: Store)
    monkeypatch.setattr(mooncake_tier, "prepare_store_env", lambda _: None)


def with_files(folder: Path) -> Opening:
    ssd = SsdConfig(str(folder), 1 << 30)
    return Opening(PoolConfig(master="127.0.0.1:1", dram_size=0, ssd=ssd))


@pytest.mark.usefixtures("no_store")
@pytest.mark.parametrize(("first", "second"), [("", "worker-0"), ("worker-1", "")])
def test_folders_for_mooncakes_files_are_not_within_each_other(
    tmp_path: Path, first: str, second: str
) -> None:
    """As those of engines with one worker and with two, and the same ``pool.ssd.path``."""
    tier = MooncakeTier.open(with_files(tmp_path / first))
    with pytest.raises(ConfigError, match="is used by another engine"):
        MooncakeTier.open(with_files(tmp_path / second))
    tier.close()
    MooncakeTier.open(with_files(tmp_path / second)).close()


@pytest.mark.usefixtures("no_store")
def test_each_worker_has_a_folder_for_mooncakes_files(tmp_path: Path) -> None:
    MooncakeTier.open(with_files(tmp_path)).close()  # it had one worker once
    tiers = [MooncakeTier.open(with_files(tmp_path / f"worker-{rank}")) for rank in range(2)]
    for tier in tiers:
        tier.close()


@pytest.mark.usefixtures("no_store")
def test_folder_for_mooncakes_files_belongs_to_one_engine(tmp_path: Path) -> None:
    """Its client would take the files of another one for its own, and delete them."""
    opening = with_files(tmp_path / "kv")
    tier = MooncakeTier.open(opening)
    with pytest.raises(ConfigError, match="is used by another engine"):
        MooncakeTier.open(opening)
    with pytest.raises(ConfigError, match="is used by another engine"):
        FileTier.open(opening)
    tier.close()
    MooncakeTier.open(opening).close()


def test_least_recently_used_files_make_room(files: FileTier, tmp_path: Path) -> None:
    put(files, *range(8))
    lookup(files, 0)
    assert put(files, 8, 9) == [Status.OK] * 2
    assert lookup(files, 0, 1, 2, 3) == [Place.SSD, Place.NOWHERE, Place.NOWHERE, Place.SSD]
    num_bytes = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert num_bytes == files.room.used_bytes == 8 * SIZE


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        (4, 2, {"worker-2", "worker-3"}),
        (2, 1, {"worker-0", "worker-1"}),
        (1, 2, {"pd2"}),
        (2, 2, set()),
        (1, 1, set()),
        (1, 4, {"pd2"}),
    ],
)
def test_folders_of_workers_that_are_no_more_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, after: int, left: set[str]
) -> None:
    """What is in them comes on top of ``pool.ssd.size``, and no worker opens them."""
    config = PoolConfig(tiers=("fs",), ssd=SsdConfig(str(tmp_path), 1 << 30))

    def run(num_workers: int) -> None:
        for rank in range(num_workers):
            part = config.for_worker(rank, num_workers)
            tier = FileTier.open(Opening(part, rank=rank, num_workers=num_workers))
            put(tier, 1, 2)
            tier.close()

    run(before)
    caplog.clear()
    run(after)
    found = re.findall(r"(\S+) holds (\d+) bytes beyond pool.ssd.size", caplog.text)
    assert {(Path(path), int(size)) for path, size in found} == {
        (tmp_path / name, 2 * SIZE) for name in left
    }


def test_folder_that_holds_no_block_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PoolConfig(tiers=("fs",), ssd=SsdConfig(str(tmp_path), 64 << 20))
    FileTier.open(Opening(config, value_bytes=64 << 20)).close()
    assert "holds no block" not in caplog.text
    FileTier.open(Opening(config, value_bytes=(64 << 20) + 1)).close()
    assert "pool.ssd.size, 67108864 bytes for each worker, holds no block" in caplog.text


def test_folder_that_is_more_than_the_disk_has_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = shutil.disk_usage(tmp_path)
    for size, is_told in ((64 << 20, False), (there.total * 2, True)):
        config = PoolConfig(tiers=("fs",), ssd=SsdConfig(str(tmp_path), size))
        FileTier.open(Opening(config)).close()
        assert (f"pool.ssd.size, {size} bytes, is more than" in caplog.text) == is_told


def test_smaller_folder_keeps_what_was_used_last(files: FileTier, tmp_path: Path) -> None:
    put(files, *range(4))
    for number, path in enumerate(sorted((tmp_path / "pd2").glob("*/*/*"))):
        os.utime(path, (number, number))
    files.close()
    again = FileTier(tmp_path, 2 * SIZE)
    assert lookup(again, 0, 1, 2, 3) == [Place.NOWHERE, Place.NOWHERE, Place.SSD, Place.SSD]
    again.close()


@pytest.mark.parametrize("num_bytes", [0, SIZE // 2, SIZE + 1])
def test_file_of_another_size_is_damaged(files: FileTier, tmp_path: Path, num_bytes: int) -> None:
    put(files, 1)
    (path,) = (tmp_path / "pd2").glob("*/*/*")
    path.write_bytes(bytes(num_bytes))
    assert get(files, 1) == [Status.DAMAGED]


def test_file_that_somebody_removed_is_missing(files: FileTier, tmp_path: Path) -> None:
    put(files, 1)
    (path,) = (tmp_path / "pd2").glob("*/*/*")
    path.unlink()
    assert get(files, 1) == [Status.MISSING]
    assert lookup(files, 1) == [Place.NOWHERE]
    assert put(files, 1) == [Status.OK]


@pytest.mark.parametrize(
    ("error", "status"), [(errno.ENOENT, Status.MISSING), (errno.EIO, Status.FAILED)]
)
def test_value_that_is_put_again_while_its_old_file_is_read_stays(
    files: FileTier, monkeypatch: pytest.MonkeyPatch, error: int, status: Status
) -> None:
    put(files, 1)

    def replace(path: Path, *args: object, **kwargs: object) -> None:
        monkeypatch.undo()
        files.remove([key_of(1)])
        put(files, 1)
        raise OSError(error, "the old one")

    monkeypatch.setattr(Path, "open", replace)
    assert get(files, 1) == [status]
    assert lookup(files, 1) == [Place.SSD]
    assert get(files, 1) == [Status.OK]


def test_value_that_is_put_again_while_its_old_file_goes_stays(
    files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, 1, 2)
    disk_do = files._disk.do

    def do(*order: Any) -> bool:
        """Another thread was quicker."""
        monkeypatch.undo()
        assert put(files, 1) == [Status.OK]
        return disk_do(*order)

    monkeypatch.setattr(files._disk, "do", do)
    files.remove([key_of(1), key_of(2)])
    assert get(files, 1, 2) == [Status.OK, Status.MISSING]
    assert len(list(files.folder.glob("pd2/*/*/*"))) == len(files.room) == 1


def test_half_written_file_is_no_value(files: FileTier, tmp_path: Path) -> None:
    files.close()
    (tmp_path / ".pd-value-3").write_bytes(b"half")
    again = FileTier(tmp_path, 8 * SIZE)
    assert not (tmp_path / ".pd-value-3").exists()
    assert len(again.room) == 0
    again.close()


def test_files_of_somebody_else_stay(files: FileTier, tmp_path: Path) -> None:
    files.close()
    (tmp_path / "new-results.csv").write_bytes(b"theirs")
    (tmp_path / "new-model").mkdir()
    FileTier(tmp_path, 8 * SIZE).close()
    assert (tmp_path / "new-results.csv").read_bytes() == b"theirs"
    assert (tmp_path / "new-model").is_dir()


def test_nobody_else_may_read_a_value(files: FileTier, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    put(files, 1)
    (path,) = (tmp_path / "pd2").glob("*/*/*")
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("in_memory", [True, False])
def test_begin_of_a_prompt_outlives_its_end(files: FileTier, in_memory: bool) -> None:
    """Without its first blocks the others are of no use."""
    tier = MemoryTier(8 * SIZE) if in_memory else files
    put(tier, *range(8))
    lookup(tier, *range(8))
    put(tier, 8, 9, 10)
    kept = [place != Place.NOWHERE for place in lookup(tier, *range(8))]
    assert kept == [True] * 5 + [False] * 3


def test_file_that_cannot_be_removed_does_not_keep_the_others(
    files: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, 1, 2, 3)
    stuck = files.path_of(key_of(1))
    monkeypatch.setattr(Path, "unlink", refuse_with(errno.EPERM, stuck))
    files.remove([key_of(1), key_of(2), key_of(3)])
    assert list((tmp_path / "pd2").glob("*/*/*")) == [stuck]


def test_full_disk_makes_room_for_what_comes_next(
    files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others have taken of it cannot be had, however much the configuration allows."""
    put(files, 1, 2)
    replace = os.replace

    def fits_two(new: Path, path: Path) -> None:
        if len(files.room) >= 2:
            raise OSError(errno.ENOSPC, "full")
        replace(new, path)

    monkeypatch.setattr(os, "replace", fits_two)
    assert put(files, 3) == [Status.FULL]
    assert put(files, 3, 4, 5) == [Status.OK] * 3
    assert lookup(files, 3, 4, 5) == [Place.NOWHERE, Place.SSD, Place.SSD]
    assert files.num_file_errors == 1
    # In a while it is tried how much there is now.
    monkeypatch.undo()
    monkeypatch.setattr(fs_tier.time, "monotonic", lambda: files._full_until + 1)
    assert put(files, 6) == [Status.OK]
    assert lookup(files, 4, 5, 6) == [Place.SSD] * 3


@pytest.fixture
def bad_sector(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of value 1, after a put of it: this very file cannot be read."""
    put(files, 1)
    path = files.path_of(key_of(1))
    os.link(path, files.folder / "bad")  # so that no file that comes in its place has its inode
    open_file = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.samefile(files.folder / "bad"):
            raise OSError(errno.EIO, "bad sector")
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    return path


def test_file_that_cannot_be_read_is_stored_again(files: FileTier, bad_sector: Path) -> None:
    assert get(files, 1) == [Status.FAILED]
    assert files.num_file_errors == 1
    assert not bad_sector.exists()
    assert lookup(files, 1) == [Place.NOWHERE]
    assert put(files, 1) == [Status.OK]
    assert get(files, 1) == [Status.OK]
    assert files.room.used_bytes == SIZE


def test_value_that_is_put_again_while_its_bad_file_goes_stays(
    files: FileTier, bad_sector: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_do = files._disk.do

    def do(*order: Any) -> bool:
        """Another thread was quicker."""
        monkeypatch.setattr(files._disk, "do", disk_do)
        assert put(files, 1) == [Status.OK]
        return disk_do(*order)

    monkeypatch.setattr(files._disk, "do", do)
    assert get(files, 1) == [Status.FAILED]
    assert get(files, 1) == [Status.OK]
    assert not (files.folder / "bad").samefile(bad_sector)


@pytest.mark.parametrize("tenant", ["", "a"])
def test_file_that_can_neither_be_read_nor_removed_is_replaced(
    files: FileTier, bad_sector: Path, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    """Until then, and for good where another tenant stores it, it takes room and is not found."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse_with(errno.EPERM))
        assert get(files, 1) == [Status.FAILED]
    assert bad_sector.exists()
    assert files.room.used_bytes == SIZE
    assert lookup(files, 1) == [Place.NOWHERE]
    assert files.put([replace(value(1), tenant=tenant)]) == [Status.OK]
    assert get(files, 1) == [Status.OK]
    assert files.room.used_bytes == sum(
        path.stat().st_size for path in (files.folder / "pd2").glob("*/*/*")
    )
    files.remove(files.room.all_keys())
    assert not bad_sector.exists()
    assert files.room.used_bytes == 0


def test_file_that_is_stale_is_missing(files: FileTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one on the same NFS has removed it; the disk is read on."""
    put(files, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse_with(errno.ESTALE))
        assert get(files, 1) == [Status.MISSING]
    assert files.is_healthy()
    assert lookup(files, 1, 2) == [Place.NOWHERE, Place.SSD]
    assert not files.path_of(key_of(1)).exists()


def test_file_that_was_named_though_the_disk_denies_it_takes_no_room(
    files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NFS server does when its answer is lost and it is asked again."""
    replace = os.replace

    def replace_twice(new: Path, path: Path) -> None:
        replace(new, path)
        replace(new, path)

    monkeypatch.setattr(os, "replace", replace_twice)
    assert put(files, 1) == [Status.FAILED]
    assert files.room.used_bytes == 0
    assert not files.path_of(key_of(1)).exists()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_file_that_is_not_opened_for_want_of_descriptors_is_kept(
    files: FileTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    put(files, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse_with(number))
        assert get(files, 1) == [Status.FAILED]
    assert lookup(files, 1) == [Place.SSD]
    assert get(files, 1) == [Status.OK]


def test_file_that_cannot_be_removed_takes_room_until_it_can(
    files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, *range(8))
    monkeypatch.setattr(fs_tier, "_REST_S", 0.0)
    with monkeypatch.context() as patch:
        stuck = files.path_of(key_of(0))
        patch.setattr(Path, "unlink", refuse_with(errno.EPERM, stuck))
        assert put(files, 8) == [Status.FAILED]
        assert lookup(files, 0) == [Place.NOWHERE]
        assert put(files, *range(8, 16)) == [Status.OK] * 7 + [Status.FAILED]
        assert files.room.used_bytes == 8 * SIZE
    assert put(files, *range(16, 24)) == [Status.OK] * 8
    assert not stuck.exists()
    assert files.room.used_bytes == 8 * SIZE


def test_file_that_no_value_is_known_of_is_replaced(files: FileTier) -> None:
    path = files.path_of(key_of(1))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"old" * SIZE)
    assert put(files, 1) == [Status.OK]
    assert get(files, 1) == [Status.OK]


def test_nothing_is_evicted_on_a_disk_that_takes_no_file(
    files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(files, *range(8))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse_with(errno.EROFS))
        assert put(files, 8) == [Status.FAILED]
    assert get(files, *range(8)) == [Status.OK] * 8


@pytest.mark.parametrize(
    ("number", "status"), [(errno.ENOSPC, Status.FULL), (errno.EIO, Status.FAILED)]
)
def test_disk_that_refuses_keeps_nothing(
    files: FileTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: Status
) -> None:
    monkeypatch.setattr(os, "replace", refuse_with(number))
    assert put(files, 1) == [status]
    assert files.num_file_errors == 1
    assert files.room.used_bytes == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["lock"]
    monkeypatch.undo()
    monkeypatch.setattr(fs_tier, "_REST_S", 0.0)
    assert put(files, 1) == [Status.OK]


def test_a_disk_that_cannot_be_written_is_still_read(
    memory: MemoryTier, files: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not tried again for a while."""
    tries = []

    def refuse(*_: object) -> None:
        tries.append(1)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tier = CompositeTier([memory, files])
    put(files, 1)
    monkeypatch.setattr(os, "replace", refuse)
    assert put(files, 2, 3) == [Status.FAILED, Status.FAILED]
    assert len(tries) == 1
    assert lookup(tier, 1) == [Place.SSD]
    assert get(tier, 1) == [Status.OK]

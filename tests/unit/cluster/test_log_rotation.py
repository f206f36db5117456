# SPDX-License-Identifier: Apache-2.0
"""Logs that are rotated while somebody writes to them."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ascend_pd.cluster import log_rotation
from vllm_ascend_pd.cluster.log_rotation import Rotation


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


async def until_cut(log: Path) -> None:
    """Keep it, until it has been rotated."""
    keeping = asyncio.create_task(Rotation(max_bytes=6, num_old=2).keep([log]))
    while log.stat().st_size and not keeping.done():
        await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


def test_a_full_log_is_rotated_under_its_writer(tmp_path: Path) -> None:
    log, rotation = tmp_path / "a.log", Rotation(max_bytes=6, num_old=2)
    with log.open("a") as writer:
        for word in ("first\n", "second\n", "third__\n", "fourth_\n"):
            writer.write(word)
            writer.flush()
            rotation.rotate(log)
        writer.write("last\n")
    assert texts(tmp_path) == {"a.log": "last\n", "a.log.1": "fourth_\n", "a.log.2": "third__\n"}


def test_a_log_that_is_not_full_stays(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("123456")
    assert not Rotation(max_bytes=6).rotate(log)
    assert texts(tmp_path) == {"a.log": "123456"}


@pytest.mark.parametrize("exists", [True, False])
def test_without_old_logs_it_is_cut(tmp_path: Path, exists: bool) -> None:
    log = tmp_path / "a.log"
    if exists:
        log.write_text("1234567")
    assert Rotation(max_bytes=6, num_old=0).rotate(log) is exists
    assert texts(tmp_path) == ({"a.log": ""} if exists else {})


def test_a_log_that_cannot_be_copied_keeps_the_old_ones_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy, num_tries = shutil.copyfile, 0

    def fill_disk(source: Path, target: Path) -> None:
        nonlocal num_tries
        num_tries += 1
        if num_tries > 3:
            copy(source, target)
            return
        target.write_text("a part")
        raise OSError(28, "No space left on device")

    log = tmp_path / "a.log"
    log.write_text("1234567")
    log.with_name("a.log.1").write_text("older")
    monkeypatch.setattr(shutil, "copyfile", fill_disk)
    monkeypatch.setattr(log_rotation, "CHECK_S", 0)

    asyncio.run(until_cut(log))
    assert texts(tmp_path) == {"a.log": "", "a.log.1": "1234567", "a.log.2": "older"}
    assert [record.getMessage() for record in caplog.records] == [
        f"{log} is not rotated, and grows: [Errno 28] No space left on device"
    ]


def test_want_of_a_thread_ends_no_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_thread, num_tries = asyncio.to_thread, 0

    async def want(work: Callable[[Path], bool], log: Path) -> bool:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 3:
            raise RuntimeError("can't start new thread")
        return await to_thread(work, log)

    log = tmp_path / "a.log"
    log.write_text("1234567")
    monkeypatch.setattr(asyncio, "to_thread", want)
    monkeypatch.setattr(log_rotation, "CHECK_S", 0)
    asyncio.run(until_cut(log))
    assert texts(tmp_path) == {"a.log": "", "a.log.1": "1234567"}


def test_where_a_disk_is_full_the_oldest_log_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, log, oldest = shutil.copyfile, tmp_path / "a.log", tmp_path / "a.log.2"

    def copy_if_room(source: Path, target: Path) -> None:
        if oldest.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(source, target)

    log.write_text("1234567")
    log.with_name("a.log.1").write_text("older")
    oldest.write_text("oldest")
    monkeypatch.setattr(shutil, "copyfile", copy_if_room)
    monkeypatch.setattr(log_rotation, "CHECK_S", 0)
    asyncio.run(asyncio.wait_for(until_cut(log), 20))
    assert texts(tmp_path) == {"a.log": "", "a.log.1": "1234567", "a.log.2": "older"}

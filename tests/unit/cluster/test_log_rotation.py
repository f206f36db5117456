# SPDX-License-Identifier: Apache-2.0
"""Logs that are rotated while somebody writes to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_pd.cluster.log_rotation import Rotation


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


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

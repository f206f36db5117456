# SPDX-License-Identifier: Apache-2.0
"""The process that keeps a fleet: what must not end its engines."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest

from vllm_ascend_pd.cluster.machine import FreePorts
from vllm_ascend_pd.cluster.scaling import driver
from vllm_ascend_pd.cluster.scaling.driver import DriverSpec, drive
from vllm_ascend_pd.cluster.scaling.fleet import Member
from vllm_ascend_pd.cluster.scaling.orders import Shared
from vllm_ascend_pd.cluster.scaling.target import Ratio, Target
from vllm_ascend_pd.cluster.topology import parse
from vllm_ascend_pd.cluster.up_socket import Scaling
from vllm_ascend_pd.testing.fake_fleet import FakeFleet

NUM_LOOKS = 3


class StoppingFleet(FakeFleet):
    """Has its driver stopped after some looks, the first of which takes the target away."""

    def __init__(self, target_file: Path) -> None:
        super().__init__()
        self.num_looks = 0
        self._target_file = target_file

    async def look(self) -> tuple[Member, ...]:
        self.num_looks += 1
        self._target_file.unlink(missing_ok=True)
        if self.num_looks == NUM_LOOKS:
            os.kill(os.getpid(), signal.SIGTERM)
        return await super().look()


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoppingFleet:
    """The fleet of a driver that was stopped."""
    target_file, ports = tmp_path / "target.json", FreePorts()
    Scaling(target_file, "").aim(Target(Ratio(1, 1), 2))
    fleet = StoppingFleet(target_file)
    monkeypatch.setattr(driver, "RayFleet", lambda *_: fleet)
    monkeypatch.setattr(driver, "STEP_S", 0.0)
    router = f"http://127.0.0.1:{ports('127.0.0.1')}"
    shared = Shared(parse({"model": "m"}), "cpu", 1, router, str(tmp_path))
    port = ports("127.0.0.1")
    asyncio.run(drive(DriverSpec("auto", shared, str(target_file), port, {}, None)))
    return fleet


def test_a_target_that_cannot_be_read_is_told_once_and_ends_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert driven(tmp_path, monkeypatch).num_looks >= NUM_LOOKS
    told = capsys.readouterr().out
    assert told.count("target.json cannot be read: ") == 1
    assert "the engines stay as they were to be" in told


def test_a_full_disk_of_its_log_ends_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert driven(tmp_path, monkeypatch).num_looks >= NUM_LOOKS

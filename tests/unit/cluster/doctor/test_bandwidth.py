# SPDX-License-Identifier: Apache-2.0
"""Measuring transports: real ones, one that fails, one that is slow."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest

from vllm_ascend_pd.cluster.doctor import bandwidth
from vllm_ascend_pd.cluster.doctor.bandwidth import MEASUREMENTS, Bandwidth
from vllm_ascend_pd.cluster.doctor.findings import Verdict

pytestmark = pytest.mark.slow


def test_every_transport_of_this_host_is_measured() -> None:
    findings = asyncio.run(Bandwidth().run())
    assert [f.values["transport"] for f in findings] == list(MEASUREMENTS)
    assert all(f.values["bytes_per_s"] > 0 for f in findings)


def test_a_measurement_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    # The child process knows no such transport, so it ends with an error.
    monkeypatch.setattr(bandwidth, "MEASUREMENTS", {"no-such-transport": float})
    (failed,) = asyncio.run(Bandwidth().run())
    assert failed.verdict is Verdict.FAIL
    assert "no-such-transport" in failed.found
    assert failed.fix.startswith(sys.executable)


def test_a_measurement_ends_when_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_WRITE_TIMEOUT_S", 0.05)
    sender, receiver = socket.socketpair()
    with sender, receiver:
        target = memoryview(bytearray(8))
        with pytest.raises(TimeoutError):
            bandwidth.receive(receiver, target)
        sender.sendall(b"1234")
        sender.close()
        with pytest.raises(RuntimeError, match="after 4 bytes"):
            bandwidth.receive(receiver, target)


def test_a_slow_transport_is_warned_of() -> None:
    assert Bandwidth().judge("tcp", 99e6).verdict is Verdict.WARN
    assert Bandwidth().judge("tcp", 101e6).verdict is Verdict.OK

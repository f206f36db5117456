# SPDX-License-Identifier: Apache-2.0
"""A master of our own ends with its parent, and is started again when it ends alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_ascend_pd.backends import mooncake_master
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.errors import BackendError

_PARENT = """
import time
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
print(EmbeddedMaster().process_id, flush=True)
time.sleep(60)
"""


def is_running(process_id: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process_id}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def _needs_mooncake() -> None:
    pytest.importorskip("mooncake.store", exc_type=ImportError)


def test_master_ends_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    master_id = int(parent.stdout.readline())
    assert is_running(master_id)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(master_id))


def test_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers an earlier environment
    master = EmbeddedMaster()
    assert is_running(master.process_id)
    master.stop()


def test_master_that_ends_is_started_again_on_its_ports() -> None:
    master = EmbeddedMaster()
    ports, first = (master.rpc_port, master.http_port), master.process_id
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: master.process_id != first)
    assert (master.rpc_port, master.http_port) == ports
    second = master.process_id
    master.stop()
    assert not is_running(second)


def test_master_that_cannot_be_started_again_now_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mooncake_master, "_SUPERVISE_S", 0.01)
    master = EmbeddedMaster()
    first, spawn, failures = master.process_id, mooncake_master._spawn, [12, 24]

    def want(command: list[str]) -> subprocess.Popen[bytes]:
        if failures:
            raise OSError(failures.pop(), "not now")
        return spawn(command)

    monkeypatch.setattr(mooncake_master, "_spawn", want)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: master.process_id != first)
    assert caplog.text.count("not now") == 2
    second = master.process_id
    master.stop()
    assert not is_running(second)


def test_master_that_cannot_be_started_at_all_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def want(command: list[str]) -> subprocess.Popen[bytes]:
        raise OSError(12, "not now")

    monkeypatch.setattr(mooncake_master, "_spawn", want)
    began = time.monotonic()
    with pytest.raises(BackendError, match="not now"):
        EmbeddedMaster()
    assert time.monotonic() - began < 10


def test_master_that_ends_at_once_is_told_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_master, "master_program", lambda: "/bin/false")
    with pytest.raises(BackendError, match="/bin/false ended with 1 at each of five tries"):
        EmbeddedMaster()

# SPDX-License-Identifier: Apache-2.0
"""Two masters and an etcd that says which of them leads: the store goes on with the other one."""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vllm_ascend_pd.backends.mooncake_master import free_port, master_command, master_program
from vllm_ascend_pd.backends.mooncake_store import MooncakeStore, StoreOptions, prepare_store_env

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs the program etcd")

NUM_BYTES = 4096


def until(condition: Callable[[], bool], timeout: float = 90.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def serves(http_port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/health", timeout=5) as answer:
            return b'"service_ready":true' in answer.read()
    except OSError:
        return False


class Cluster:
    """An etcd and two masters."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._masters: dict[int, subprocess.Popen[bytes]] = {}  # by HTTP port
        client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self.address = f"etcd://{client}"
        self._run(
            "etcd",
            *("etcd", "--data-dir", str(folder / "data"), "--initial-cluster"),
            *(f"default=http://{peer}", "--initial-advertise-peer-urls", f"http://{peer}"),
            *("--listen-peer-urls", f"http://{peer}", "--listen-client-urls", f"http://{client}"),
            *("--advertise-client-urls", f"http://{client}"),
        )
        until(lambda: b"ready to serve client requests" in (folder / "etcd").read_bytes())
        for name in ("first", "second"):
            port = free_port()
            command = master_command(master_program(), "127.0.0.1", free_port(), port)
            options = ("--enable_ha=true", f"--etcd_endpoints={client}")
            self._masters[port] = self._run(name, *command, *options)

    def _run(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / name).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._processes.append(process)
        return process

    def kill_leader(self) -> None:
        """Only the one that leads serves."""
        until(lambda: any(map(serves, self._masters)))
        leader = next(port for port in self._masters if serves(port))
        self._masters[leader].kill()
        self._masters[leader].wait()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.stop()


def test_store_goes_on_with_the_master_that_takes_over(cluster: Cluster) -> None:
    prepare_store_env(0)
    store = MooncakeStore(StoreOptions("127.0.0.1", cluster.address, 32 << 20))
    try:
        assert store.wait_connected(60)
        value = np.arange(NUM_BYTES, dtype=np.uint8)
        found = np.zeros_like(value)
        for part in (value, found):
            store.register(part.ctypes.data, NUM_BYTES)
        assert store.put(["before"], [value.ctypes.data], [NUM_BYTES]) == [0]
        cluster.kill_leader()
        until(lambda: store.put(["after"], [value.ctypes.data], [NUM_BYTES]) == [0])
        assert store.is_healthy()
        until(lambda: store.exists(["after"]) == [True])
        assert store.get(["after"], [found.ctypes.data], [NUM_BYTES]) == [NUM_BYTES]
        assert (found == value).all()
    finally:
        store.close()

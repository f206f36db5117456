# SPDX-License-Identifier: Apache-2.0
"""Real servers on loopback: started, waited for, and stopped by the process group they lead."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import requests

START_TIMEOUT_S = 600


def free_port() -> int:
    """None of those that the kernel gives to who asks for any: it may take until a server listens,
    and its engines ask for many meanwhile.
    """
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """One HTTP server process; its output goes to a file that an error quotes."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, health: str, log: Path
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self._health = health
        self._log = log
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PORT": str(free_port()),
        }
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            try:
                if requests.get(self.url + self._health, timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} did not come up:\n{self.output()[-4000:]}")

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(60)

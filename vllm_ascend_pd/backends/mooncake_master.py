# SPDX-License-Identifier: Apache-2.0
"""A ``mooncake_master`` of our own, on loopback, that ends with this process."""

from __future__ import annotations

import http.client
import importlib.util
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import BackendError
from vllm_ascend_pd.net.direct_http import direct_opener

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 15.0
_POLL_S = 0.02
_SUPERVISE_S = 0.5

# Runs before the master in its process: it gets SIGTERM when its parent ends, however it ends. The
# parent may have ended before that was arranged.
_LAUNCH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, {signal});"
    "os.getppid() == {parent} or os._exit(1); os.execv(sys.argv[1], sys.argv[1:])"
)

_FLAGS = (
    "--enable_metric_reporting=false",
    # A lookup protects what it found for so long; what is protected cannot make room either.
    "--default_kv_lease_ttl=3000",
    # The values of a client that is gone are forgotten after this many seconds.
    "--client_ttl=5",
    # Room is made in the background, so it must be made before memory is full. What finds none is
    # tried again.
    "--eviction_high_watermark_ratio=0.95",
    "--eviction_ratio=0.05",
)


def master_program() -> str:
    """The path of the program in the installed wheel."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "mooncake_master"
        if program.exists():
            return str(program)
    raise BackendError("mooncake_master is not in the installed Mooncake package")


def master_command(program: str, host: str, rpc_port: int, http_port: int) -> tuple[str, ...]:
    """``http_port`` answers ``/health`` and ``/metrics``."""
    return (
        *(program, f"--rpc_address={host}", f"--rpc_port={rpc_port}"),
        *(f"--metrics_host={host}", f"--metrics_port={http_port}", "--logtostderr=1"),
        *_FLAGS,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EmbeddedMaster:
    """Starts the master, and starts it again on the same ports when it has ended.

    Its thread forks the master and lives as long as this process, so that the kernel's signal at
    the end of the parent comes when the process ends and not before.
    """

    def __init__(self, extra_flags: Sequence[str] = ()) -> None:
        """Raises ``BackendError`` when it does not come up in 15 s."""
        self._extra_flags = tuple(extra_flags)
        self._program = master_program()
        self._stopping = threading.Event()
        self._up = threading.Event()
        self._error = ""
        self._process: subprocess.Popen[bytes] | None = None
        self.rpc_port = 0
        self.http_port = 0
        self._thread = threading.Thread(target=self._run, name="pd-master", daemon=True)
        self._thread.start()
        if not self._up.wait(_START_TIMEOUT_S) or self._error:
            self.stop()
            raise BackendError(f"mooncake_master does not start: {self._error or 'no answer'}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """Idempotent."""
        self._stopping.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            self._start()
        except OSError as e:
            self._error = str(e)
        self._up.set()
        while not self._error and not self._stopping.wait(_SUPERVISE_S):
            if self._process is not None and self._process.poll() is not None:
                self._start_again(self._process.returncode)
        if self._process is not None:
            # It keeps nothing for later, and would take a second to end in order.
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        for _ in range(5):
            self.rpc_port, self.http_port = free_port(), free_port()
            process = self._process = self._launch()
            if self._wait_ready(process) or self._stopping.is_set():
                return
        self._error = f"{self._program} ended with {process.returncode} at each of five tries"

    def _start_again(self, code: int) -> None:
        try:
            process = self._process = self._launch()
        except OSError as e:  # no memory or no file now
            logger.warning("mooncake_master ended with %d, and is tried again: %s", code, e)
            return
        logger.warning(
            "mooncake_master ended with %d; starting it again. What the pool held in memory is"
            " lost",
            code,
        )
        self._wait_ready(process)

    def _launch(self) -> subprocess.Popen[bytes]:
        launch = _LAUNCH.format(signal=int(signal.SIGTERM), parent=os.getpid())
        command = [
            *(sys.executable, "-I", "-S", "-c", launch),
            *master_command(self._program, "127.0.0.1", self.rpc_port, self.http_port),
            *self._extra_flags,
        ]
        return _spawn(command)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """A port that accepts connections is not enough; its health page says when it serves."""
        deadline = time.monotonic() + _START_TIMEOUT_S / 2
        url = f"http://127.0.0.1:{self.http_port}/health"
        opener = direct_opener()
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with opener.open(url, timeout=0.5) as answer:
                    if b'"service_ready":true' in answer.read():
                        return True
            except (OSError, http.client.HTTPException):
                pass
            if self._stopping.wait(_POLL_S):
                return False
        if process.poll() is None:
            process.kill()
        process.wait()
        return False


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null)

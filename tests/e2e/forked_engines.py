# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` engines that start fast: vLLM is imported once, and each engine is a fork.

    tests ──► launcher (imports vLLM) ──fork──► ``vllm serve`` ──fork──► EngineCore

Run as a script it is the launcher: it reads one JSON line per engine (``{"argv", "log"}``) and
answers with its process id. Each engine leads a session of its own, so it can be killed whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from tests import zygote
from tests.zygote import ENVIRONMENT, prepare_to_fork

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 600


@dataclass
class ForkedEngine:
    """One engine; its output is in ``log``."""

    name: str
    url: str
    argv: list[str]
    log: Path
    launcher: Launcher
    pid: int = 0

    def start(self) -> None:
        self.pid = self.launcher.fork(self.argv, self.log)

    def kill(self) -> None:
        """As the out-of-memory killer does it, with all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def slow(self) -> AbstractContextManager[None]:
        """It does not come to an end of what it answers meanwhile, however busy the host is."""
        return zygote.slow(self.log)

    def wait_ready(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end:
            try:
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                time.sleep(0.2)
            if not Path(f"/proc/{self.pid}").exists():
                break
        raise RuntimeError(f"{self.name} did not come up:\n{self.log.read_text()[-4000:]}")


class Launcher:
    """The tests' side of the launcher process."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_RESPONSES_API_STORE": "1",
            # A worker in its engine's process, as on a GPU: on a CPU vLLM gives each one of its
            # own otherwise, and a quarter of the time goes to what the two tell each other.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.forked_engines"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._engines: list[ForkedEngine] = []

    def engine(self, name: str, model: Path, folder: Path, port: int, *more: str) -> ForkedEngine:
        argv = ["vllm", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
        argv += ["--max-model-len", "4096", "--kv-cache-memory-bytes", str(192 << 20), *more]
        log = folder / f"{name}.log"
        engine = ForkedEngine(name, f"http://127.0.0.1:{port}", argv, log, self)
        self._engines.append(engine)
        return engine

    def fork(self, argv: Sequence[str], log: Path) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"argv": argv, "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill_engines(self) -> None:
        while self._engines:
            engine = self._engines.pop()
            if engine.pid:
                engine.kill()

    def close(self) -> None:
        self.kill_engines()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


def _serve(command: dict[str, Any]) -> None:
    """The forked child: a ``vllm serve`` of its own."""
    os.setsid()
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= zygote.slowable(Path(command["log"]))
    sys.argv = command["argv"]
    from vllm.entrypoints.cli.main import main

    main()


def _launch() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to the standard output
    prepare_to_fork(
        "vllm.entrypoints.cli.main",
        "vllm.entrypoints.cli.serve",
        "vllm.entrypoints.openai.api_server",
        "vllm.v1.engine.async_llm",
        "tests.e2e.experts_on_cpu",
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve(json.loads(line))
            os._exit(0)
        answers.write(f"{pid}\n")
        answers.flush()


if __name__ == "__main__":
    _launch()

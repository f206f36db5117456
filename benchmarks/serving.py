# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` processes for comparisons: quick to start, pinned, still in others' turns.

A launcher per tree of vLLM (the patched one, and a copy without patches for stock systems) imports
vLLM once and forks each engine:

    benchmark ──"start"──► launcher ──fork──► API server ──fork──► engine core, worker included

The engine core and its worker are one process here (executor ``uni``), so that two engines on two
cores do not spin. No torch operation runs before a fork. Engines of a set-up that is not being
measured are stopped with SIGSTOP, so that their idle threads cost the others nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".cache" / "peers"
"""Where the other systems' packages are: ``pip install --no-deps --target .cache/peers/NAME``."""

IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.engine.utils",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
SERVE = (
    *("--enforce-eager", "--max-model-len", "8192", "--max-num-batched-tokens", "8192"),
    *("--kv-cache-memory-bytes", str(1 << 30), "--distributed-executor-backend", "uni"),
    *("--host", "127.0.0.1", "--disable-uvicorn-access-log", "--no-enable-log-requests"),
)


# -------------------------------------------------------------------------------------- launcher


def launcher_main() -> None:
    """The launcher: one JSON line per engine to start, answered with its process id."""
    import multiprocessing

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    for name in IMPORTS:
        importlib.import_module(name)
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):  # the CPU platform asks for "spawn"
        module.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(job)
        print(pid, file=answers, flush=True)


def serve(job: dict[str, Any]) -> None:
    """The forked child: becomes ``vllm serve``; never returns."""
    os.setsid()
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.sched_setaffinity(0, job["cores"])
    os.environ.update(job["env"])
    logging.getLogger("vllm").setLevel(logging.INFO)
    sys.path[:0] = job["paths"]
    importlib.invalidate_caches()
    import torch

    torch.set_num_threads(job["num_threads"])
    if job["pretend_device"]:  # stock MooncakeConnector and store ask an accelerator for these
        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.Event = NoEvent  # type: ignore[misc, assignment]
    if delay_us := job["nixl_delay_us"]:
        slow_nixl(delay_us)
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", "serve", *job["arguments"]]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def slow_nixl(delay_us: int) -> None:
    """Let NIXL's progress thread sleep between turns: its Python API fixes the pause at zero."""
    bindings = importlib.import_module("nixl._bindings")
    plain = bindings.nixlAgentConfig

    class SlowConfig(plain):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return delay_us

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:
            plain.pthrDelay.fset(self, delay_us)

    bindings.nixlAgentConfig = SlowConfig


class NoEvent:
    """Stands for torch.cuda.Event where there is no device: everything has happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


# ------------------------------------------------------------------------------------- benchmark


@dataclass
class EnginePlan:
    """One ``vllm serve``."""

    name: str
    cores: set[int]
    transfer: dict[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    pretend_device: bool = False
    nixl_delay_us: int = 0
    num_threads: int = 0
    """Of OpenMP; 0: as many as cores."""


class Launcher:
    """Starts engines from one tree of vLLM."""

    def __init__(self, tree: Path | None = None) -> None:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",  # of the launcher
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # so that the executor may be "uni"
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_SERVER_DEV_MODE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        }
        if tree is not None:
            env["PYTHONPATH"] = str(tree)
        libgomp = sorted((Path(find_spec("torch").origin).parent / "lib").glob("libgomp*.so*"))  # type: ignore[union-attr, arg-type]
        if libgomp:
            env["LD_PRELOAD"] = str(libgomp[0])  # as vLLM does for its workers
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        if self._process.stdout.readline().strip() != "ready":
            raise SystemExit("error: the launcher ended; its messages are above")

    def start(self, plan: EnginePlan, model: str, log_folder: Path) -> Engine:
        port = free_port()
        arguments = [model, "--served-model-name", "model", "--port", str(port), *SERVE]
        arguments += plan.arguments
        if plan.transfer is not None:
            arguments += ["--kv-transfer-config", json.dumps(plan.transfer)]
        log = log_folder / f"{plan.name}.log"
        job = {
            "arguments": arguments,
            "cores": sorted(plan.cores),
            "env": plan.env,
            "paths": [str(path) for path in plan.paths],
            "pretend_device": plan.pretend_device,
            "num_threads": plan.num_threads or len(plan.cores),
            "nixl_delay_us": plan.nixl_delay_us,
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        return Engine(plan, pid, port, log)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Engine:
    """A running ``vllm serve``."""

    def __init__(self, plan: EnginePlan, pid: int, port: int, log: Path) -> None:
        import psutil

        self.plan = plan
        self.name = plan.name
        self.log = log
        self.url = f"http://127.0.0.1:{port}"
        self._process = psutil.Process(pid)

    def wait_until_ready(self, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self._process.is_running():
                break
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                self.pin()
                return
            time.sleep(0.2)
        raise SystemExit(f"error: {self.name} did not start; see {self.log}\n{self.tail()}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])

    def processes(self) -> list[Any]:
        return [self._process, *self._process.children(recursive=True)]

    def pin(self) -> None:
        """All threads to the engine's cores: stock NIXL moves some of them elsewhere."""
        for process in self.processes():
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, self.plan.cores)

    def reset_prefix_cache(self) -> None:
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        urllib.request.urlopen(request, timeout=20).close()

    def freeze(self) -> None:
        for process in self.processes():
            process.suspend()

    def thaw(self) -> None:
        for process in self.processes():
            process.resume()

    def stop(self) -> None:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            processes = self.processes()
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
                    process.terminate()
            _, alive = psutil.wait_procs(processes, timeout=4)
            for process in alive:
                process.kill()


def stop_engines_when_terminated() -> None:
    """SIGTERM unwinds the benchmark as an error does; engines are sessions of their own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def unpatched_tree() -> Iterator[Path]:
    """A copy of the installed vLLM (hard links) in which the patches are reverted."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    installed = Path(spec.origin).parent
    # Beside the installed package, because hard links do not cross file systems.
    with tempfile.TemporaryDirectory(dir=installed.parent, prefix="unpatched-") as folder:
        shutil.copytree(installed, Path(folder) / "vllm", copy_function=os.link)
        command = [sys.executable, str(ROOT / "tools" / "apply_patches.py"), "revert"]
        command += ["--source-tree", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        yield Path(folder)


if __name__ == "__main__":
    launcher_main()

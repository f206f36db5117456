# SPDX-License-Identifier: Apache-2.0
"""Starts child processes, waits until they are up, starts them again when they crash or no longer
answer, stops all.

Each child leads a process group of its own. When it has ended, what is left of its group is killed
before anything else happens, so that no engine core keeps a port or memory of an API server that is
gone. When the supervisor itself is killed, its guard ends the children (``guard``). Secrets that
they read from files are there as long as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_pd.private_file import write_private
from vllm_ascend_pd.processes import guard
from vllm_ascend_pd.processes.child import (
    TRANSITIONS,
    Child,
    ChildEvent,
    ChildSpec,
    Patience,
    StartError,
    State,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs on one asyncio loop, in the main thread. ``run`` is called once."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        log_dir: Path | None,
        on_change: Callable[[Child], None],
        on_ready: Callable[[], None],
        patience: Patience | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        """``on_change`` is told of each new state, ``on_ready`` once, when all are up. Without
        ``log_dir`` the children write where this process does. ``secrets`` by path."""
        self.children = [
            Child(spec, log_dir / f"{spec.name}.log" if log_dir else None) for spec in specs
        ]
        self._on_change = on_change
        self._on_ready = on_ready
        self._patience = patience or Patience()
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._secrets = secrets or {}
        self._guard = _Guard(self._patience.orphan_s, tuple(self._secrets))
        self._announced = False
        self._failed: Child | None = None
        self._unasked: set[str] = set()
        """Children whose probes have raised, which is told once."""

    def stop(self) -> None:
        """End everything; a second call does not wait for anybody. Loop thread."""
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()

    def restart(self, child: Child) -> None:
        """End this one, and start it again; nothing while it is not up. Loop thread."""
        if child.state is State.READY:
            child.restart.set()

    async def run(self) -> None:
        """Until ``stop``. Returns when no process of any child is left.

        Raises:
            StartError: a child did not come up the first time; the others were stopped.
            OSError: a secret cannot be written.
        """
        now = time.monotonic()
        for child in self.children:
            child.since = now
        await self._guard.start()
        tasks: list[asyncio.Task[None]] = []
        try:
            for path, content in self._secrets.items():
                write_private(Path(path), content)
            tasks += [asyncio.create_task(self._keep(child)) for child in self.children]
            with _adopting_orphans():
                await asyncio.gather(*tasks)
        finally:
            self._stop.set()
            self._kill.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._guard.close()
        if self._failed is not None:
            raise StartError(self._failed)

    async def _keep(self, child: Child) -> None:
        """One child, from its first start to its last end."""
        while not self._stop.is_set():
            await self._run_once(child)
            if self._stop.is_set():
                break
            if child.restart.is_set():
                continue
            if not self._announced:
                # It has never worked: a wrong option or a missing file, which no restart mends.
                self._failed = self._failed or child
                self._stop.set()
                break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._next_backoff(child))
        if child.state in (State.WAITING, State.BACKOFF):
            self._advance(child, ChildEvent.OVER, child.note)

    async def _run_once(self, child: Child) -> None:
        child.restart.clear()
        try:
            process = self._spawn(child)
        except OSError as e:
            self._advance(child, ChildEvent.START, "")
            self._crashed(child, f"cannot be started: {e}")
            return
        child.pid = process.pid
        self._guard.tell("+", process.pid)
        self._advance(child, ChildEvent.START, "")
        exited = asyncio.create_task(_wait_exit(process))
        stop = asyncio.create_task(self._stop.wait())
        restart = asyncio.create_task(child.restart.wait())
        healthy = asyncio.create_task(self._wait_healthy(child, process.pid))
        silent = asyncio.create_task(self._wait_silent(child, healthy))
        try:
            await asyncio.wait(
                {exited, stop, healthy},
                timeout=self._patience.startup_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if healthy.done() and not exited.done() and not stop.done():
                self._ready(child)
                await asyncio.wait(
                    {exited, stop, restart, silent}, return_when=asyncio.FIRST_COMPLETED
                )
            if not exited.done():
                note = ""
                if not stop.done() and child.state is not State.READY:
                    note = f"not up after {self._patience.startup_s:g} s"
                elif not stop.done() and silent.done():
                    note = f"did not answer for {self._patience.silent_s:g} s"
                was_well = child.state is State.READY and not note
                if not note:
                    self._advance(child, ChildEvent.END, "")
                await self._terminate(child.spec, process, exited, was_well)
                if note:
                    self._crashed(child, note)
            elif not self._stop.is_set():
                child.restart.clear()
                self._crashed(child, _describe_exit(exited.result()))
        finally:
            for task in (healthy, silent, stop, restart):
                task.cancel()
            if not exited.done():
                _signal_group(process.pid, signal.SIGKILL)
            await asyncio.gather(exited, healthy, silent, stop, restart, return_exceptions=True)
            await _sweep(process.pid)
            self._guard.tell("-", process.pid)
            child.pid = None
            if self._stop.is_set() and child.state is not State.BACKOFF:
                if child.state is not State.STOPPING:
                    self._advance(child, ChildEvent.END, "")
                self._advance(child, ChildEvent.OVER, "")

    def _spawn(self, child: Child) -> subprocess.Popen[bytes]:
        """Not by asyncio: to wait for what it has started it needs a thread or a descriptor more,
        and where there is none left nobody would know of the child.
        """
        if child.log is not None:
            child.log.parent.mkdir(parents=True, exist_ok=True)
            child.log_start = child.log.stat().st_size if child.log.is_file() else 0
        with child.log.open("ab") if child.log else contextlib.nullcontext() as output:
            return subprocess.Popen(
                child.spec.argv,
                env={**os.environ, **child.spec.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output and subprocess.STDOUT,
                start_new_session=True,
            )

    async def _says_yes(self, child: Child, answer: Awaitable[bool]) -> bool:
        """A probe that raises has got no answer."""
        try:
            return await answer
        except Exception as e:  # noqa: BLE001 - else the child would be taken for up
            if child.spec.name not in self._unasked:
                logger.warning("%s cannot be asked whether it is up: %r", child.spec.name, e)
                self._unasked.add(child.spec.name)
            return False

    async def _wait_healthy(self, child: Child, group: int) -> None:
        while not await self._says_yes(child, child.spec.is_up(group)):
            await asyncio.sleep(self._patience.probe_s)

    async def _wait_silent(self, child: Child, healthy: asyncio.Task[None]) -> None:
        """Once it is up: until it does not answer any more."""
        await asyncio.wait({healthy})
        if (is_alive := child.spec.is_alive) is None:
            await asyncio.get_running_loop().create_future()
            return
        answered, num_misses = time.monotonic(), 0
        # Twice at least: the first time it may have been this process that was stopped.
        while num_misses < 2 or time.monotonic() - answered < self._patience.silent_s:
            await asyncio.sleep(self._patience.watch_s)
            num_misses += 1
            if await self._says_yes(child, is_alive()):
                answered, num_misses = time.monotonic(), 0

    def _ready(self, child: Child) -> None:
        self._advance(child, ChildEvent.UP, "")
        if not self._announced and all(c.state is State.READY for c in self.children):
            self._announced = True
            self._on_ready()

    def _crashed(self, child: Child, note: str) -> None:
        was_stable = time.monotonic() - child.since >= self._patience.stable_s
        if child.state is State.READY and was_stable:
            child.num_backoffs = 0
        child.num_crashes += 1
        child.last_crash = note
        if self._announced:
            child.num_backoffs += 1
            note += f"; starts again in {self._next_backoff(child):g} s"
        self._advance(child, ChildEvent.CRASH, note)

    def _next_backoff(self, child: Child) -> float:
        doublings = min(child.num_backoffs - 1, 64)  # 2.0**1024 overflows
        doubled = self._patience.first_backoff_s * 2.0**doublings
        return min(doubled, self._patience.max_backoff_s)

    async def _terminate(
        self,
        spec: ChildSpec,
        process: subprocess.Popen[bytes],
        exited: asyncio.Task[int],
        was_well: bool,
    ) -> None:
        """SIGTERM for the leader, which ends its own children; SIGKILL for who is left."""
        process.terminate()
        kill = asyncio.create_task(self._kill.wait())
        patience_s = self._patience.stop_s if was_well else self._patience.early_stop_s
        await asyncio.wait({exited, kill}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if kill.done() and not exited.done() and spec.hurry_s:
            process.send_signal(signal.SIGINT)
            await asyncio.wait({exited}, timeout=spec.hurry_s)
        kill.cancel()
        await asyncio.gather(kill, return_exceptions=True)
        _signal_group(process.pid, signal.SIGKILL)
        await asyncio.wait({exited})

    def _advance(self, child: Child, event: ChildEvent, note: str) -> None:
        child.state = TRANSITIONS.after(child.state, event)
        child.since, child.note = time.monotonic(), note
        self._on_change(child)


class _Guard:
    """The process that outlives this one. If it is killed itself, the children live on alone."""

    def __init__(self, patience_s: float, files: Sequence[str]) -> None:
        self._argv = (sys.executable, "-m", guard.__name__, str(patience_s), *files)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, change: str, pid: int) -> None:
        """``+``: a child was started; ``-``: nothing of it is left."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{change}{pid}\n".encode())

    async def close(self) -> None:
        """There is nothing left to guard."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()


async def _wait_exit(process: subprocess.Popen[bytes]) -> int:
    """Its exit code, or minus the number of the signal."""
    while (code := process.poll()) is None:
        await asyncio.sleep(guard.POLL_S)
    return code


def _describe_exit(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Inside, processes whose parent ended become children of this one, which reaps them.

    Else they would be adopted by process 1, which in a container may never reap them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


async def _sweep(group: int, patience_s: float = 10.0) -> None:
    """Kill what a leader that has ended left behind, and wait until it is gone."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        _signal_group(group, signal.SIGKILL)
        try:
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        await asyncio.sleep(0.02)
    logger.error("process group %d cannot be killed; see ps -g %d", group, group)

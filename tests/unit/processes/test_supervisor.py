# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real, trivial child processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from vllm_ascend_pd.cluster.machine import FreePorts, answers
from vllm_ascend_pd.processes.child import (
    TRANSITIONS,
    Child,
    ChildSpec,
    Patience,
    StartError,
    State,
)
from vllm_ascend_pd.processes.supervisor import Supervisor

SERVER = """
import http.server, os, subprocess, sys
if {with_child}:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
if {stubborn}:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("serving", os.environ.get("GREETING"), flush=True)
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
QUICK = Patience(startup_s=20, stop_s=5, first_backoff_s=0.05, max_backoff_s=0.2, probe_s=0.05)


def server(
    name: str, with_child: bool = False, stubborn: bool = False, port: int | None = None
) -> ChildSpec:
    port = port or FreePorts()("127.0.0.1")
    code = SERVER.format(port=port, with_child=with_child, stubborn=stubborn)
    is_up = answers(f"http://127.0.0.1:{port}/")
    return ChildSpec(name, (sys.executable, "-c", code), {"GREETING": "hello"}, is_up)


class Watched:
    """A supervisor that runs in the background of a test, and what it told."""

    def __init__(self, specs: list[ChildSpec], folder: Path, patience: Patience = QUICK) -> None:
        self.changes: list[tuple[str, State]] = []
        self.ready = asyncio.Event()
        self.supervisor = Supervisor(specs, folder, self._note, self.ready.set, patience)
        self.task = asyncio.create_task(self.supervisor.run())

    def _note(self, child: Child) -> None:
        self.changes.append((child.spec.name, child.state))

    def child(self, name: str) -> Child:
        return next(c for c in self.supervisor.children if c.spec.name == name)

    async def until(self, condition: Callable[[], bool], patience_s: float = 20) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, self.changes
            await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        done, _ = await asyncio.wait(
            {asyncio.create_task(self.ready.wait()), self.task},
            timeout=20,
            return_when=asyncio.FIRST_COMPLETED,
        )
        assert done
        assert self.ready.is_set()

    async def stop(self) -> None:
        self.supervisor.stop()
        await asyncio.wait_for(self.task, 20)


def group_of(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == pid:
                found.append(process)
    return found


def test_starts_waits_and_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched([server("a", with_child=True), server("b")], tmp_path)
        await watched.until_ready()
        pids = [watched.child(name).pid for name in "ab"]
        assert len(group_of(pids[0] or 0)) == 2
        await watched.stop()
        assert not any(group_of(pid or 0) for pid in pids)
        for name in "ab":
            states = [state for who, state in watched.changes if who == name]
            assert states == [State.STARTING, State.READY, State.STOPPING, State.STOPPED]
            assert (tmp_path / f"{name}.log").read_text() == "serving hello\n"

    asyncio.run(scenario())


def test_a_crashed_child_is_reported_and_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched([server("a", with_child=True), server("b")], tmp_path)
        await watched.until_ready()
        child, other = watched.child("a"), watched.child("b").pid
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await watched.until(lambda: child.state is State.BACKOFF)
        assert child.note == "killed by SIGKILL; starts again in 0.05 s"
        await watched.until(lambda: child.state is State.READY)
        assert child.pid != first
        assert not group_of(first)  # its own child did not survive it
        assert child.num_crashes == 1
        assert watched.child("b").pid == other
        await watched.stop()

    asyncio.run(scenario())


def test_a_child_is_restarted_when_that_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched([server("a", with_child=True), server("b")], tmp_path)
        await watched.until_ready()
        child, other = watched.child("a"), watched.child("b").pid
        first = child.pid
        assert first is not None
        watched.supervisor.restart(child)
        watched.supervisor.restart(child)  # twice is once
        await watched.until(lambda: child.state is State.STARTING)
        watched.supervisor.restart(child)  # it is on its way
        await watched.until(lambda: child.state is State.READY)
        assert child.pid != first
        assert not group_of(first)
        assert (child.num_crashes, child.num_backoffs) == (0, 0)
        assert watched.child("b").pid == other
        states = [state for who, state in watched.changes if who == "a"]
        assert states[2:] == [State.STOPPING, State.STARTING, State.READY]
        await watched.stop()

    asyncio.run(scenario())


def test_stop_during_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        patience = Patience(startup_s=20, stop_s=60, probe_s=0.05)
        watched = Watched([server("a", stubborn=True)], tmp_path, patience)
        await watched.until_ready()
        watched.supervisor.restart(watched.child("a"))
        await watched.until(lambda: watched.child("a").state is State.STOPPING)
        watched.supervisor.stop()
        await watched.stop()
        assert watched.changes[-2:] == [("a", State.STOPPING), ("a", State.STOPPED)]

    asyncio.run(scenario())


def test_backoff_grows_and_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        watched = Watched([server("a")], tmp_path)
        await watched.until_ready()
        child, notes = watched.child("a"), []
        for crash in range(1, 5):
            assert child.pid is not None
            os.kill(child.pid, signal.SIGTERM)
            await watched.until(lambda n=crash: child.num_crashes == n)  # type: ignore[misc]
            notes.append(child.note.rpartition("again in ")[2])
            await watched.until(lambda: child.state is State.READY)
        assert notes == ["0.05 s", "0.1 s", "0.2 s", "0.2 s"]
        child.num_backoffs = 2000
        os.kill(child.pid or 0, signal.SIGTERM)
        await watched.until(lambda: child.num_crashes == 5)
        assert child.note.endswith("again in 0.2 s")
        await watched.until(lambda: child.state is State.READY)
        await watched.stop()

    asyncio.run(scenario())


def test_a_child_that_never_worked_ends_everything(tmp_path: Path) -> None:
    async def scenario() -> None:
        bad = ChildSpec(
            "bad",
            (sys.executable, "-c", "print('no such model'); raise SystemExit(3)"),
            {},
            answers("http://127.0.0.1:1/"),
        )
        watched = Watched([server("a"), bad], tmp_path)
        with pytest.raises(StartError, match="bad did not come up: exited with code 3") as error:
            await asyncio.wait_for(watched.task, 20)
        assert error.value.child.last_lines() == ["no such model"]
        assert not watched.ready.is_set()
        assert all(child.state is State.STOPPED for child in watched.supervisor.children)

    asyncio.run(scenario())


def test_a_missing_program_is_an_error_of_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        missing = ChildSpec("gone", ("/no/such/program",), {}, answers("http://127.0.0.1:1/"))
        watched = Watched([missing], tmp_path)
        with pytest.raises(StartError, match=r"cannot be started: .*No such file"):
            await asyncio.wait_for(watched.task, 20)

    asyncio.run(scenario())


def test_a_child_that_is_not_up_in_time_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        sleeper = ChildSpec(
            "sleeper",
            (sys.executable, "-c", "import time; time.sleep(600)"),
            {},
            answers("http://127.0.0.1:1/"),
        )
        watched = Watched([sleeper], tmp_path, Patience(startup_s=0.5, stop_s=5, probe_s=0.05))
        with pytest.raises(StartError, match=r"not up after 0.5 s"):
            await asyncio.wait_for(watched.task, 20)

    asyncio.run(scenario())


def test_a_stranger_on_its_port_does_not_make_a_child_ready(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = FreePorts()("127.0.0.1")
        stranger = server("stranger", port=port)
        sleep = (sys.executable, "-c", "import time; time.sleep(600)")
        other = Watched([stranger], tmp_path / "other")
        await other.until_ready()
        patience = Patience(startup_s=1, stop_s=5, probe_s=0.05)
        mistaken = ChildSpec("mistaken", sleep, {}, answers(f"http://127.0.0.1:{port}/"))
        watched = Watched([mistaken], tmp_path, patience)
        with pytest.raises(StartError, match="not up after 1 s"):
            await asyncio.wait_for(watched.task, 20)
        await other.stop()

    asyncio.run(scenario())


def test_who_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        patience = Patience(startup_s=20, stop_s=0.3, probe_s=0.05)
        watched = Watched([server("a", with_child=True, stubborn=True)], tmp_path, patience)
        await watched.until_ready()
        pid = watched.child("a").pid
        await watched.stop()
        assert not group_of(pid or 0)

    asyncio.run(scenario())


def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        patience = Patience(startup_s=20, stop_s=60, probe_s=0.05)
        watched = Watched([server("a", stubborn=True)], tmp_path, patience)
        await watched.until_ready()
        watched.supervisor.stop()
        await asyncio.sleep(0.2)
        assert not watched.task.done()
        await watched.stop()

    asyncio.run(scenario())


POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, lambda *_: sys.exit(print("hurries", flush=True)))
print("up", flush=True)
time.sleep(600)
"""


def test_a_second_stop_is_a_sigint_for_who_gets_time_to_hurry(tmp_path: Path) -> None:
    async def is_up(group: int) -> bool:
        return (tmp_path / "a.log").read_text() == "up\n"

    async def scenario() -> None:
        patience = Patience(startup_s=20, stop_s=60, hurry_s=10, probe_s=0.05)
        spec = ChildSpec("a", (sys.executable, "-c", POLITE), {}, is_up)
        watched = Watched([spec], tmp_path, patience)
        await watched.until_ready()
        watched.supervisor.stop()
        await asyncio.sleep(0.2)
        assert not watched.task.done()
        await watched.stop()
        assert (tmp_path / "a.log").read_text() == "up\nhurries\n"

    asyncio.run(scenario())


def test_a_child_may_end_just_before_a_second_stop() -> None:
    async def scenario() -> None:
        patience = Patience(hurry_s=10)
        supervisor = Supervisor([], None, lambda child: None, lambda: None, patience)
        process = await asyncio.create_subprocess_exec("true", start_new_session=True)
        await process.wait()
        supervisor.stop()
        supervisor.stop()
        exited = asyncio.create_task(asyncio.sleep(0.1, 0))  # its end is not known yet
        await supervisor._terminate(process, exited, was_up=True)

    asyncio.run(scenario())


def test_stop_during_backoff(tmp_path: Path) -> None:
    async def scenario() -> None:
        patience = Patience(startup_s=20, first_backoff_s=60, max_backoff_s=60, probe_s=0.05)
        watched = Watched([server("a")], tmp_path, patience)
        await watched.until_ready()
        child = watched.child("a")
        os.kill(child.pid or 0, signal.SIGKILL)
        await watched.until(lambda: child.state is State.BACKOFF)
        await watched.stop()
        assert watched.changes[-1] == ("a", State.STOPPED)

    asyncio.run(scenario())


SUPERVISE = """
import asyncio
from pathlib import Path
from vllm_ascend_pd.cluster.machine import answers
from vllm_ascend_pd.processes.child import *
from vllm_ascend_pd.processes.supervisor import *

async def main():
    def ready():
        print(supervisor.children[0].pid, flush=True)

    spec = ChildSpec("a", {argv!r}, {{}}, answers("http://127.0.0.1:{port}/"))
    patience = Patience(stop_s=0.5, probe_s=0.05)
    supervisor = Supervisor([spec], Path({folder!r}), lambda child: None, ready, patience)
    await supervisor.run()

asyncio.run(main())
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_end_when_the_supervisor_is_killed(tmp_path: Path, stubborn: bool) -> None:
    port = FreePorts()("127.0.0.1")
    spec = server("a", with_child=True, stubborn=stubborn, port=port)
    script = tmp_path / "supervise.py"
    script.write_text(SUPERVISE.format(argv=spec.argv, port=port, folder=str(tmp_path)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        family = group_of(int(parent.stdout.readline()))
        assert len(family) == 2
        parent.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_every_state_has_its_transitions() -> None:
    assert TRANSITIONS.table.keys() == set(State)
    reachable = {State.WAITING}.union(*(after.values() for after in TRANSITIONS.table.values()))
    assert reachable == set(State)

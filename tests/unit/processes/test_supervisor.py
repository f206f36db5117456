# SPDX-License-Identifier: Apache-2.0
"""The supervisor with real, trivial child processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.slow

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
SLEEP = "import time; time.sleep(600)"
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


def supervised(
    patience: Patience = QUICK, **servers: dict[str, Any]
) -> Callable[[Callable[[Watched], Awaitable[None]]], Callable[[Path], None]]:
    """The test begins when these servers are up, and ends with a stop."""

    def decorate(test: Callable[[Watched], Awaitable[None]]) -> Callable[[Path], None]:
        async def run(folder: Path) -> None:
            specs = [server(name, **options) for name, options in servers.items()]
            watched = Watched(specs, folder, patience)
            await watched.until_ready()
            await test(watched)
            await watched.stop()

        return lambda tmp_path: asyncio.run(run(tmp_path))

    return decorate


def start_error(folder: Path, *specs: ChildSpec, patience: Patience = QUICK) -> StartError:
    """With which these end."""

    async def run() -> StartError:
        watched = Watched(list(specs), folder, patience)
        with pytest.raises(StartError) as error:
            await asyncio.wait_for(watched.task, 20)
        assert not watched.ready.is_set()
        assert all(child.state is State.STOPPED for child in watched.supervisor.children)
        return error.value

    return asyncio.run(run())


def never_up(name: str, code: str, port: int = 1) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), {}, answers(f"http://127.0.0.1:{port}/"))


@supervised(a={"with_child": True}, b={})
async def test_starts_waits_and_stops(watched: Watched) -> None:
    pids = [watched.child(name).pid for name in "ab"]
    assert len(group_of(pids[0] or 0)) == 2
    await watched.stop()
    assert not any(group_of(pid or 0) for pid in pids)
    for name in "ab":
        states = [state for who, state in watched.changes if who == name]
        assert states == [State.STARTING, State.READY, State.STOPPING, State.STOPPED]
        log = watched.child(name).log
        assert log is not None
        assert log.read_text() == "serving hello\n"


@supervised(a={"with_child": True}, b={})
async def test_a_crashed_child_is_reported_and_started_again(watched: Watched) -> None:
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


@supervised(a={"with_child": True}, b={})
async def test_a_child_is_restarted_when_that_is_asked_for(watched: Watched) -> None:
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


@supervised(a={})
async def test_a_child_is_kept_where_nothing_is_left_to_wait_by(watched: Watched) -> None:
    """Neither a thread nor a descriptor more, once it runs."""
    start = threading.Thread.start

    def want_thread(thread: threading.Thread) -> None:
        if "waitpid" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    def want_descriptor(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    child = watched.child("a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", want_thread)
        patch.setattr(os, "pidfd_open", want_descriptor)
        watched.supervisor.restart(child)
        await watched.until(lambda: child.state is not State.READY)
        await watched.until(lambda: child.state is State.READY)
    assert child.num_crashes == 0


@supervised(Patience(startup_s=20, stop_s=60, probe_s=0.05), a={"stubborn": True})
async def test_stop_during_a_restart(watched: Watched) -> None:
    watched.supervisor.restart(watched.child("a"))
    await watched.until(lambda: watched.child("a").state is State.STOPPING)
    watched.supervisor.stop()
    await watched.stop()
    assert watched.changes[-2:] == [("a", State.STOPPING), ("a", State.STOPPED)]


@supervised(a={})
async def test_backoff_grows_and_is_bounded(watched: Watched) -> None:
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


def test_a_child_that_never_worked_ends_everything(tmp_path: Path) -> None:
    bad = never_up("bad", "print('no such model'); raise SystemExit(3)")
    error = start_error(tmp_path, server("a"), bad)
    assert "bad did not come up: exited with code 3" in str(error)
    assert error.child.last_lines() == ["no such model"]


LOG = """
(Server pid=1) WARNING 01-01 [limits.py:1] errors like `OSError: [Errno 24] Too many open files`
ERROR 01-01 [worker.py:9] Traceback (most recent call last):
ERROR 01-01 [worker.py:9]     raise ValueError(
ERROR 01-01 [worker.py:9] torch.OutOfMemoryError: 3 GiB are less than 4
(Core pid=2) Exception: a worker has failed. See stack trace for root cause.
(Server pid=1) RuntimeError: the core has failed. See root cause above.
"""


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (LOG, "torch.OutOfMemoryError: 3 GiB are less than 4"),
        ("x" * (1 << 20) + LOG, "torch.OutOfMemoryError: 3 GiB are less than 4"),
        ("Traceback (most recent call last):\n  assert x\nAssertionError\n", "AssertionError"),
    ],
)
def test_why_it_never_worked_is_the_first_error_of_its_log(
    tmp_path: Path, said: str, why: str
) -> None:
    (tmp_path / "bad.log").write_text("OSError: that of an earlier start\n")
    (tmp_path / "said").write_text(said)
    bad = never_up("bad", f"print(open({str(tmp_path / 'said')!r}).read()); raise SystemExit(3)")
    assert str(start_error(tmp_path, bad)) == f"bad did not come up: exited with code 3: {why}"


def test_a_missing_program_is_an_error_of_the_start(tmp_path: Path) -> None:
    missing = ChildSpec("gone", ("/no/such/program",), {}, answers("http://127.0.0.1:1/"))
    assert re.search(r"cannot be started: .*No such file", str(start_error(tmp_path, missing)))


def test_a_child_that_is_not_up_in_time_is_ended(tmp_path: Path) -> None:
    patience = Patience(startup_s=0.5, stop_s=5, probe_s=0.05)
    error = start_error(tmp_path, never_up("sleeper", SLEEP), patience=patience)
    assert "not up after 0.5 s" in str(error)


def test_a_stranger_on_its_port_does_not_make_a_child_ready(tmp_path: Path) -> None:
    patience = Patience(startup_s=1, stop_s=5, probe_s=0.05)
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as stranger:
        threading.Thread(target=stranger.serve_forever).start()
        mistaken = never_up("mistaken", SLEEP, stranger.server_port)
        assert "not up after 1 s" in str(start_error(tmp_path, mistaken, patience=patience))
        stranger.shutdown()


@supervised(
    Patience(startup_s=20, stop_s=0.3, probe_s=0.05), a={"with_child": True, "stubborn": True}
)
async def test_who_ignores_sigterm_is_killed(watched: Watched) -> None:
    pid = watched.child("a").pid
    await watched.stop()
    assert not group_of(pid or 0)


@supervised(Patience(startup_s=20, stop_s=60, probe_s=0.05), a={"stubborn": True})
async def test_a_second_stop_does_not_wait(watched: Watched) -> None:
    watched.supervisor.stop()
    await watched.until(lambda: watched.child("a").state is State.STOPPING)
    assert not watched.task.done()
    await watched.stop()


POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("was told", flush=True))
signal.signal(signal.SIGINT, lambda *_: sys.exit(print("hurries", flush=True)))
print("up", flush=True)
while True:
    time.sleep(600)
"""


def test_a_second_stop_is_a_sigint_for_who_gets_time_to_hurry(tmp_path: Path) -> None:
    log = tmp_path / "a.log"

    async def is_up(group: int) -> bool:
        return log.read_text() == "up\n"

    async def scenario() -> None:
        patience = Patience(startup_s=20, stop_s=60, probe_s=0.05)
        spec = ChildSpec("a", (sys.executable, "-c", POLITE), {}, is_up, hurry_s=10)
        watched = Watched([spec], tmp_path, patience)
        await watched.until_ready()
        watched.supervisor.stop()
        await watched.until(lambda: log.read_text() == "up\nwas told\n")
        assert not watched.task.done()
        await watched.stop()
        assert log.read_text() == "up\nwas told\nhurries\n"

    asyncio.run(scenario())


async def watched_by_nobody(group: int) -> bool:
    return True


def test_a_child_may_end_just_before_a_second_stop() -> None:
    async def scenario() -> None:
        spec = ChildSpec("a", ("true",), {}, watched_by_nobody, hurry_s=10)
        supervisor = Supervisor([], None, lambda child: None, lambda: None)
        process = subprocess.Popen("true", start_new_session=True)
        process.wait()
        supervisor.stop()
        supervisor.stop()
        exited = asyncio.create_task(asyncio.sleep(0.1, 0))  # its end is not known yet
        await supervisor._terminate(spec, process, exited, was_well=True)

    asyncio.run(scenario())


def test_a_child_that_is_up_and_no_longer_answers_is_started_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        answering = asyncio.Event()
        answering.set()

        async def answers(group: int = 0) -> bool:
            return answering.is_set()

        spec = ChildSpec("a", (sys.executable, "-c", SLEEP), {}, answers, answers)
        patience = replace(QUICK, watch_s=0.05, silent_s=0.2)
        watched = Watched([spec], tmp_path, patience)
        await watched.until_ready()
        child = watched.child("a")
        first = child.pid
        answering.clear()
        await watched.until(lambda: child.num_crashes == 1)
        assert child.note.startswith("did not answer for 0.2 s; starts again in")
        answering.set()
        await watched.until(lambda: child.state is State.READY)
        assert child.pid != first
        await watched.stop()

    asyncio.run(scenario())


def test_a_probe_that_raises_says_no_and_that_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        num_raised = 0

        async def raises(group: int = 0) -> bool:
            nonlocal num_raised
            num_raised += 1
            if num_raised <= 3:
                raise RuntimeError("not sure how to interpret line")
            return True

        async def is_silent() -> bool:
            raise RuntimeError("not sure how to interpret line")

        spec = ChildSpec("a", (sys.executable, "-c", SLEEP), {}, raises, is_silent)
        watched = Watched([spec], tmp_path, replace(QUICK, watch_s=0.05, silent_s=0.2))
        child = watched.child("a")
        await watched.until_ready()
        assert num_raised == 4
        await watched.until(lambda: child.num_crashes == 1)
        assert child.note.startswith("did not answer for 0.2 s; starts again in")
        await watched.stop()

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "a cannot be asked whether it is up: RuntimeError('not sure how to interpret line')"
    ]


@supervised(Patience(startup_s=20, first_backoff_s=60, max_backoff_s=60, probe_s=0.05), a={})
async def test_stop_during_backoff(watched: Watched) -> None:
    child = watched.child("a")
    os.kill(child.pid or 0, signal.SIGKILL)
    await watched.until(lambda: child.state is State.BACKOFF)
    await watched.stop()
    assert watched.changes[-1] == ("a", State.STOPPED)


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
    patience = Patience(orphan_s=0.5, probe_s=0.05)
    folder, secrets = Path({folder!r}), {{{secret!r}: "s3cret"}}
    supervisor = Supervisor([spec], folder, lambda child: None, ready, patience, secrets)
    await supervisor.run()

asyncio.run(main())
"""


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_and_their_secrets_end_when_the_supervisor_is_killed(
    tmp_path: Path, stubborn: bool
) -> None:
    port = FreePorts()("127.0.0.1")
    spec = server("a", with_child=True, stubborn=stubborn, port=port)
    script = tmp_path / "supervise.py"
    secret = tmp_path / "secret"
    words = {"argv": spec.argv, "port": port, "folder": str(tmp_path), "secret": str(secret)}
    script.write_text(SUPERVISE.format(**words))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        family = group_of(int(parent.stdout.readline()))
        assert len(family) == 2
        assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("s3cret", 0o600)
        parent.kill()
        _, alive = psutil.wait_procs(family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    end = time.monotonic() + 10
    while secret.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_state_has_its_transitions() -> None:
    assert TRANSITIONS.table.keys() == set(State)
    reachable = {State.WAITING}.union(*(after.values() for after in TRANSITIONS.table.values()))
    assert reachable == set(State)

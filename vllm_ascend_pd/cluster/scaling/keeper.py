# SPDX-License-Identifier: Apache-2.0
"""Runs one engine on its node, for a process that may be killed at any time.

``python -m`` this, with a pipe as standard input: the first line is a ``KeeperOrder``, a second one
the order to stop. At the pipe's end nobody is left who asks, and who takes the engine's place may
come at any moment: it is killed. Standard output is a ``KeeperReport`` a line.

The engine has a process group, a log and a guard of its own (``processes.supervisor``): whatever is
killed, this process too, nothing of it is left, nor of its secrets. It is not started again here;
whoever asked decides that, and where.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from vllm_ascend_pd.cluster.launch import refuse_unpatched_engine
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.machine import answers, responds
from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.processes.child import Child, ChildSpec, Patience, StartError, State
from vllm_ascend_pd.processes.supervisor import Supervisor

_LAST_LINES = 12


class KeeperOrder(msgspec.Struct, frozen=True):
    """One engine."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str]
    health_url: str
    log_dir: str
    secrets: dict[str, str]
    """By path; files of mode 0600, which are there as long as the engine."""
    startup_s: float
    rotation: Rotation
    needs_patches: bool = True

    def __repr__(self) -> str:
        """Without its secrets."""
        return f"KeeperOrder({self.name!r})"


class KeeperReport(msgspec.Struct, frozen=True):
    """What the engine is now."""

    phase: Literal["starting", "ready", "ending", "ended"]
    note: str = ""


_PHASES: dict[State, Literal["starting", "ready", "ending"]] = {
    State.STARTING: "starting",
    State.READY: "ready",
    State.STOPPING: "ending",
}


async def keep(order: KeeperOrder) -> str:
    """Run it until it ends, or is to end; how it ended."""
    url = order.health_url
    spec = ChildSpec(order.name, order.argv, order.env, answers(url), responds(url))
    all_up = asyncio.Event()
    note = ""

    def changed(child: Child) -> None:
        nonlocal note
        if child.state in _PHASES:
            _tell(KeeperReport(_PHASES[child.state]))
        elif child.state is State.BACKOFF and all_up.is_set():
            note = child.note.partition("; starts again")[0]
            supervisor.stop()

    def read() -> None:
        supervisor.stop()
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            supervisor.stop()  # at once

    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    patience = Patience(startup_s=order.startup_s, orphan_s=0)
    supervisor = Supervisor(
        [spec], Path(order.log_dir), changed, all_up.set, patience, order.secrets
    )
    (child,) = supervisor.children
    assert child.log is not None
    loop.add_reader(stdin, read)
    rotating = asyncio.create_task(order.rotation.keep([child.log]))
    try:
        if order.needs_patches:
            await refuse_unpatched_engine()
        await supervisor.run()
    except StartError as e:
        lines = "\n".join(f"  {line}" for line in child.last_lines(_LAST_LINES))
        return f"{e.child.why}; the end of {child.log} there:\n{lines}"
    finally:
        rotating.cancel()
        await asyncio.gather(rotating, return_exceptions=True)
    return f"{note}; see {child.log} there" if note else ""


def _tell(report: KeeperReport) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody is left who asks
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.flush()


def main() -> None:
    """See the module."""
    order = msgspec.json.decode(_first_line(), type=KeeperOrder)
    try:
        note = asyncio.run(keep(order))
    except (PDError, OSError) as e:
        note = str(e)
    _tell(KeeperReport("ended", note))
    os._exit(0)  # a broken pipe is no news


def _first_line() -> bytes:
    """Without reading on: the pipe's end is asked for later."""
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(sys.stdin.fileno(), 1)):
            raise SystemExit(0)
        line += byte
    return bytes(line)


if __name__ == "__main__":
    main()

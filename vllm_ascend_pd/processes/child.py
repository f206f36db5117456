# SPDX-License-Identifier: Apache-2.0
"""One child process: what it is to be, its states, and how long it may take."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import PDError
from vllm_ascend_pd.states import Transitions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path


_ERROR = re.compile(
    r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?(?P<error>(?:\w+\.)*\w*(?:Error|Exception)(?:: .+)?)"
)
"""A whole line of a log: the exception at the end of a traceback, as Python or vLLM writes it."""


class State(str, Enum):
    """Of one child."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"


class ChildEvent(Enum):
    """What happens to one child."""

    START = "start"
    UP = "up"
    CRASH = "crash"
    END = "end"
    """It is told to end; for good, or to be started again."""
    OVER = "over"
    """It is not started again."""


TRANSITIONS = Transitions(
    {
        State.WAITING: {ChildEvent.START: State.STARTING, ChildEvent.OVER: State.STOPPED},
        State.STARTING: {
            ChildEvent.UP: State.READY,
            ChildEvent.CRASH: State.BACKOFF,
            ChildEvent.END: State.STOPPING,
        },
        State.READY: {ChildEvent.CRASH: State.BACKOFF, ChildEvent.END: State.STOPPING},
        State.BACKOFF: {ChildEvent.START: State.STARTING, ChildEvent.OVER: State.STOPPED},
        State.STOPPING: {ChildEvent.START: State.STARTING, ChildEvent.OVER: State.STOPPED},
        State.STOPPED: {},
    }
)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run, and how to see that it is up."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_up: Callable[[int], Awaitable[bool]]
    """Asked again and again, with the id of its process group."""
    is_alive: Callable[[], Awaitable[bool]] | None = None
    """Asked once it is up; ``None``: nobody asks."""
    hurry_s: float = 0.0
    """After a second stop it gets SIGINT, and SIGKILL so long after that; 0: SIGKILL at once."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long the supervisor waits for what. Seconds."""

    startup_s: float = 1800.0
    """For one child to be up; then it counts as crashed."""
    stop_s: float = 60.0
    """From SIGTERM to SIGKILL, of a child that is up."""
    early_stop_s: float = 3.0
    """The same before it is up, when it has nothing to finish and vLLM may not listen; and of one
    that does not answer."""
    orphan_s: float = 60.0
    """The same when the supervisor itself was killed."""
    first_backoff_s: float = 1.0
    max_backoff_s: float = 30.0
    stable_s: float = 60.0
    """A child that was up for so long starts again with the first backoff."""
    probe_s: float = 0.5
    """Between two questions before it is up."""
    watch_s: float = 10.0
    """The same afterwards."""
    silent_s: float = 60.0
    """It counts as crashed when it was up and does not answer for so long."""


@dataclass(slots=True)
class Child:
    """One child as it stands. Written by the supervisor, read by whoever shows it."""

    spec: ChildSpec
    log: Path | None
    """Where its output goes; ``None``: where the supervisor's own goes."""
    state: State = State.WAITING
    since: float = 0.0
    """``time.monotonic`` of the last change of state."""
    pid: int | None = None
    num_crashes: int = 0
    last_crash: str = ""
    """Why it ended by itself, or was ended, last."""
    note: str = ""
    """Why it is in this state, for a person."""
    num_backoffs: int = 0
    """Crashes in a row, by which the next start waits longer."""
    restart: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it ended and started again."""

    log_start: int = 0
    """How long its log was when it was started last. Bytes."""

    @property
    def why(self) -> str:
        """``note``, and the first error of its log since it was started: of several processes the
        one that fails first is the cause, and the others only tell that it has."""
        if self.log is None or not self.log.is_file():
            return self.note
        with self.log.open("rb") as file:
            if self.log_start <= self.log.stat().st_size:  # else it was rotated since
                file.seek(self.log_start)
            lines = (line.decode(errors="replace").rstrip() for line in file)
            found = next((match for line in lines if (match := _ERROR.fullmatch(line))), None)
        return f"{self.note}: {found['error']}" if found else self.note

    def last_lines(self, number: int = 20) -> list[str]:
        """The end of its log."""
        if self.log is None or not self.log.is_file():
            return []
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
        return list(deque(text.splitlines(), number))


class StartError(PDError):
    """A child ended, or did not come up in time, before everything was up once."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.spec.name} did not come up: {child.why}")
        self.child = child

# SPDX-License-Identifier: Apache-2.0
"""How transfer threads get the interpreter and a core beside the engine's own threads."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SWITCH_INTERVAL_S = 1e-4


def shorten_turns() -> None:
    """Let a waiting thread have the GIL after 0.1 ms instead of 5.

    The main threads of EngineCore and worker spin for a second after each step, waiting for the
    next one in shared memory with the GIL held. A transfer thread needs the GIL for some
    microseconds per piece, and at Python's default it would wait 5 ms for each of them.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))


@contextmanager
def on_any_core() -> Iterator[None]:
    """Threads made inside may run on every core that this engine was given.

    The CPU worker pins its main thread to one core, new threads inherit that, and on that core
    they would take turns with the model and with a main thread that spins.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | pinned)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)

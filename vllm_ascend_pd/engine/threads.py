# SPDX-License-Identifier: Apache-2.0
"""How transfer threads get the interpreter and a core beside the engine's own threads."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.host_pass import MAX_DEFAULT_THREADS
from vllm_ascend_pd.engine.vllm_api.process import sleep_while_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 1e-4


def shorten_turns() -> None:
    """Let a waiting thread have the GIL after 0.1 ms instead of 5.

    The main threads of EngineCore and worker spin for a second after each step, waiting for the
    next one in shared memory. A transfer thread needs the GIL for some
    microseconds per piece, and at Python's default it would wait 5 ms for each of them.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))


def sleep_where_cores_are_few(num_workers: int) -> None:
    """Let the processes of an engine that has fewer cores than processes sleep when they wait for
    each other.

    vLLM's processes wait in a loop of ``sched_yield``: for a second after each step, and while a
    load is parked for as long as that takes, because the engine asks its workers for news. With a
    core for each that harms nobody. With fewer they take the cores from those they wait for: on
    Linux 6.18 the two workers of a consumer held two cores for seconds, while the producer that
    they waited for got none.
    """
    num_cores = len(_cores_of_engine())
    if num_workers >= num_cores and sleep_while_waiting():
        logger.info(
            "%d workers and an engine core on %d cores: they sleep while they wait for each other",
            num_workers,
            num_cores,
        )


def default_copy_threads(num_workers: int) -> int:
    """Of one copy within host memory: together the workers take a quarter of the engine's cores."""
    return max(1, min(MAX_DEFAULT_THREADS, len(_cores_of_engine()) // (4 * num_workers)))


def _cores_of_engine() -> set[int]:
    """Those of the process that started this one too: the CPU worker pins its main thread."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0) | os.sched_getaffinity(os.getppid())


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
    os.sched_setaffinity(0, _cores_of_engine())
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)

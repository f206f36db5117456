# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import threading

import pytest

from vllm_ascend_pd.net.reactor import Reactor


class Ticking(Reactor):
    """Comes to its commands without being woken."""

    def on_tick(self) -> float | None:
        return 0.01


def test_descriptor_that_wakes_it_stays_open_while_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once closed, its number may be that of a connection."""
    reactor = Ticking("reactor")
    reactor.start()
    write = os.eventfd_write

    def write_late(fd: int, value: int) -> None:
        reactor.join(0.3)
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    reactor.stop()
    assert not reactor.is_alive()
    reactor.submit(lambda: None)  # comes to nothing


def test_thread_that_was_never_started_stops() -> None:
    reactor = Reactor("reactor")
    reactor.stop()
    reactor.stop()
    reactor.submit(lambda: None)


def test_what_is_due_in_a_year_ends_no_thread() -> None:
    class Patient(Reactor):
        def on_tick(self) -> float | None:
            return 3e7

    reactor = Patient("reactor")
    reactor.start()
    came = threading.Event()
    reactor.submit(came.set)
    assert came.wait(20)
    reactor.stop()
    assert not reactor.is_alive()


def test_command_that_submits_itself_holds_up_no_deadline() -> None:
    """As that of a connection whose peer sends faster than it is read."""
    turns: list[int] = []
    done = threading.Event()

    class Counting(Reactor):
        def on_tick(self) -> float | None:
            turns.append(0)
            return None

    reactor = Counting("reactor")

    def go_on(num_left: int) -> None:
        turns[-1] += 1
        if num_left:
            reactor.submit(lambda: go_on(num_left - 1))
        else:
            done.set()

    reactor.submit(lambda: go_on(100))
    reactor.start()
    assert done.wait(20)
    reactor.stop()
    assert max(turns) == 1

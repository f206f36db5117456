# SPDX-License-Identifier: Apache-2.0
"""Calls on a disk that may not return."""

from __future__ import annotations

import threading

import pytest

from vllm_ascend_pd.pool.disk import Disk, GivenUp


def test_what_raises_is_raised_where_it_was_asked_for_and_the_thread_goes_on() -> None:
    disk, done = Disk(), []

    def fail(_: GivenUp) -> None:
        raise ValueError("no file")

    with pytest.raises(ValueError, match="no file"):
        disk.do(fail, 60.0)
    assert disk.do(lambda _: done.append(threading.current_thread().name), 60.0)
    assert done == ["pd-pool-disk"]
    disk.stop()


def test_call_that_does_not_return_holds_nobody_and_is_told_that_it_was_given_up() -> None:
    disk, returns, found = Disk(), threading.Event(), []

    def hang(given_up: GivenUp) -> None:
        with disk.call():
            returns.wait()
        found.append(given_up())

    assert not disk.do(hang, 0.0)
    assert disk.is_held(0.0)
    assert not disk.do(lambda given_up: found.append(given_up()), 0.0)
    returns.set()
    assert disk.do(lambda given_up: found.append(given_up()), 60.0)
    assert found == [True, True, False]
    assert not disk.is_held(0.0)
    disk.stop()


def test_who_asks_after_the_end_does_not_wait() -> None:
    disk = Disk()
    disk.stop()
    assert not disk.do(lambda _: None, 60.0)

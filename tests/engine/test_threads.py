# SPDX-License-Identifier: Apache-2.0
"""Processes that wait for each other leave the cores to those that have work."""

from __future__ import annotations

import os
import resource

import pytest
from vllm.distributed import utils
from vllm.distributed.device_communicators import shm_broadcast

from vllm_ascend_pd.engine.threads import default_copy_threads, sleep_where_cores_are_few

NUM_TURNS = 50


def num_turns_slept() -> int:
    """Of some turns of the loop in which vLLM's processes wait for a message."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(NUM_TURNS):
        shm_broadcast.sched_yield()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


@pytest.fixture(autouse=True)
def restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "USE_SCHED_YIELD", True)


def give_cores(monkeypatch: pytest.MonkeyPatch, own: set[int], parents: set[int]) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process_id: parents if process_id else own)


@pytest.mark.parametrize(
    ("own", "parents", "num_workers", "sleeps"),
    [
        ({0, 1}, {0, 1}, 1, False),
        ({0, 1}, {0, 1}, 2, True),
        ({1}, {0, 1, 2}, 2, False),
        ({1}, {0, 1, 2}, 4, True),
        ({3}, {0, 1}, 3, True),
        (set(range(64)), set(range(64)), 8, False),
    ],
)
def test_they_sleep_only_where_cores_are_few(
    monkeypatch: pytest.MonkeyPatch,
    own: set[int],
    parents: set[int],
    num_workers: int,
    sleeps: bool,
) -> None:
    give_cores(monkeypatch, own, parents)
    sleep_where_cores_are_few(num_workers)
    assert utils.USE_SCHED_YIELD is not sleeps
    # A turn does not count whose zero seconds are over before the thread has left its core.
    assert any(num_turns_slept() >= NUM_TURNS for _ in range(10)) is sleeps


def test_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Scheduler and worker are one process with some executors."""
    give_cores(monkeypatch, {0, 1}, {0, 1})
    with caplog.at_level("INFO", "vllm_ascend_pd"):
        sleep_where_cores_are_few(2)
        sleep_where_cores_are_few(2)
    assert caplog.messages == [
        "2 workers and an engine core on 2 cores: they sleep while they wait for each other"
    ]


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "expected"),
    [(1, 1, 1), (4, 1, 1), (8, 1, 2), (16, 1, 4), (64, 1, 4), (16, 8, 1), (64, 8, 2), (128, 8, 4)],
)
def test_threads_of_a_copy_leave_most_cores_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_workers: int, expected: int
) -> None:
    give_cores(monkeypatch, set(range(num_cores)), {0})
    assert default_copy_threads(num_workers) == expected

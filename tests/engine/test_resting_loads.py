# SPDX-License-Identifier: Apache-2.0
"""Blocks at rest, of several workers: each says for itself when a peer writes no more."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.kv.load import LoadResult, merge_results
from vllm_ascend_pd.types import Cause, LoadId

ID = LoadId(1)
BLOCKS: Any = ["block 7", "block 8"]


def failed(num_resting: int) -> LoadResult:
    return LoadResult(ID, Cause.DEADLINE.value, 0, 1.0, num_resting=num_resting)


@pytest.fixture
def loads() -> Loads:
    return Loads(num_workers=2)


def end(loads: Loads, *results: LoadResult) -> None:
    merged = [merged for result in results if (merged := loads.fold(result)) is not None]
    assert len(merged) == 1
    loads.rest(merged[0], BLOCKS)


def test_blocks_come_back_when_every_worker_has_rested(loads: Loads) -> None:
    end(loads, failed(1), failed(1))
    assert (loads.take_rested(), loads.need_steps, len(loads)) == ([], True, 1)
    loads.note_rested([ID])
    assert loads.take_rested() == []
    loads.note_rested([ID])
    assert loads.take_rested() == BLOCKS
    assert (loads.need_steps, len(loads)) == (False, 0)


def test_worker_that_wrote_nothing_is_not_waited_for(loads: Loads) -> None:
    end(loads, failed(0), failed(1))
    loads.note_rested([ID])
    assert loads.take_rested() == BLOCKS


def test_worker_may_have_rested_before_the_others_have_ended(loads: Loads) -> None:
    """Its report comes first; the load has ended when the last worker says so."""
    assert loads.fold(failed(1)) is None
    loads.note_rested([ID])
    assert loads.take_rested() == []
    end(loads, failed(1))
    assert loads.take_rested() == []
    loads.note_rested([ID])
    assert loads.take_rested() == BLOCKS


def test_results_of_several_workers_add_up() -> None:
    assert merge_results([failed(1), failed(0), failed(1)]).num_resting == 2

# SPDX-License-Identifier: Apache-2.0
"""An engine that is paused or asleep begins nothing that another engine or its pool would have it
do, and what it has of others goes back to them."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.schedulers.harness import POLL_LIMIT_S, Engine, Engines, prompt_of
from tests.schedulers.test_forwards import Pair, quick
from tests.schedulers.test_move_faults import PATIENT, Move
from tests.schedulers.test_random_schedulers import SimulatedPool
from vllm_ascend_pd.engine.suspension import Suspension

__all__ = ["quick"]

PAUSES = pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])


def fall_asleep(engine: Engine) -> Suspension:
    """Before its caches are unmapped."""
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    side = engine.scheduler.pd
    executor: Any = SimpleNamespace(collective_rpc=lambda method: None)
    unasked: Any = None
    suspension = Suspension(side.common.loads, side.common.parking, side.parts, unasked, executor)
    suspension.begin(1)
    return suspension


def tell_at_once(move: Move) -> None:
    """Nothing turns the loop of a paused engine again: no answer of another one does."""
    assert move.target.scheduler.has_requests()
    move.target.step()
    assert move.outcome == "move_busy"


@PAUSES
def test_request_does_not_move_to_a_paused_engine(engines: Engines, state: PauseState) -> None:
    move = Move(engines, **PATIENT)
    move.target.scheduler.set_pause_state(state)
    move.begin()
    tell_at_once(move)
    move.target.scheduler.set_pause_state(PauseState.UNPAUSED)
    move.run()
    move.expect_one_answer()
    assert not move.loads


def test_request_that_is_copied_stays_when_its_target_is_paused(engines: Engines) -> None:
    move = Move(engines, **PATIENT)
    move.begin()
    move.loads_end = False
    deadline = time.monotonic() + POLL_LIMIT_S
    while not move.loads:
        move.step()
        assert time.monotonic() < deadline
    move.target.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    tell_at_once(move)
    move.loads_end = True
    move.target.scheduler.set_pause_state(PauseState.UNPAUSED)
    move.run()
    move.expect_one_answer()


@PAUSES
def test_request_is_not_forwarded_to_a_paused_engine(
    engines: Engines, tmp_path: Path, state: PauseState
) -> None:
    pair = Pair(engines, tmp_path)
    pair.target.scheduler.set_pause_state(state)
    pair.begin()
    assert pair.run() == {"busy": 1}
    pair.expect_whole()


@PAUSES
def test_guest_goes_back_when_its_engine_is_paused(
    engines: Engines, tmp_path: Path, state: PauseState
) -> None:
    pair = Pair(engines, tmp_path)
    pair.begin()
    pair.step_until(lambda: "AWAY" in pair.states)
    pair.target.scheduler.set_pause_state(state)
    assert pair.run() == {"back_busy": 1}
    pair.expect_whole()


def test_engine_that_sleeps_loads_nothing_from_its_pool(engines: Engines) -> None:
    pool = {"load": "all", "lookup_timeout_ms": 5000}
    engine = engines.make("kv_both", pool=pool, load_mode="park")
    simulated = SimulatedPool(engine, {}, Random(1))
    try:
        prompt = prompt_of(6 * 16 + 3)
        engine.add("stored", prompt)
        engine.run_to_end()
        simulated.finish()
        suspension = fall_asleep(engine)
        engine.add("waits", prompt, max_tokens=4, temperature=0.0)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            engine.scheduler.pd.has_pending_work()
            assert not engine.step().loads
        suspension.end(None)
        engine.worker.blocks.clear()  # as sleep discards them
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        while engine.scheduler.has_requests():
            engine.step()
            for load_id in list(engine.worker.parked):
                engine.worker.end_parked(load_id)
        engine.run_to_end()
        engine.expect_tokens("waits", 4)
        simulated.finish()  # it has evicted some meanwhile, which are stored again
    finally:
        simulated.close()

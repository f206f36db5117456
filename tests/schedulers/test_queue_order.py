# SPDX-License-Identifier: Apache-2.0
"""First come, first served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from tests.schedulers.harness import Engines, prompt_of
from tests.schedulers.test_random_schedulers import SimulatedPool

LATE_S, EARLY_S = 2e9, 1e9


def test_clock_that_was_put_back_has_nobody_overtaken(engines: Engines) -> None:
    blocked = prompt_of(40, start=300)
    params = engines.make("kv_producer", lease_s=0.5).prefill("p", blocked)
    engine = engines.make(
        "kv_consumer",
        scheduler_fields={"max_num_seqs": 1},
        peer_timeout_s=60.0,
        arrival_timeout_s=60.0,
    )
    engine.add("running", prompt_of(5), max_tokens=6)
    engine.step()
    waits = {**params, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "none"}
    for name, prompt, asked in ("blocked", blocked, waits), ("old", prompt_of(6, start=400), None):
        engine.add(name, prompt, asked).arrival_time = LATE_S
    scheduled: list[str] = []
    for number in range(20):
        new = engine.add(f"new {number}", prompt_of(6, start=500 + 10 * number))
        new.arrival_time = EARLY_S + number
        scheduled += engine.step().output.num_scheduled_tokens
    assert scheduled.index("old") < scheduled.index("new 0")


def test_one_that_waits_for_its_peer_leaves_the_others_in_want_of_room(engines: Engines) -> None:
    """As the engine counts them, and by which it throttles prefills."""
    params = engines.make("kv_producer", lease_s=0.5).prefill("p", prompt_of(64, start=3000))
    patient = {"peer_timeout_s": 60.0, "arrival_timeout_s": 60.0}
    fields = {"max_num_batched_tokens": 64}
    engine = engines.make("kv_consumer", scheduler_fields=fields, **patient)
    waits = {**params, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "none"}
    engine.add("waits", prompt_of(64, start=3000), waits)
    for number in range(4):
        engine.add(f"new {number}", prompt_of(60, start=100 * number), max_tokens=100)
    engine.step()
    engine.step()
    scheduler = engine.scheduler
    assert scheduler.prefill_capacity_bound
    # From 0.31 on the one itself is told apart.
    assert scheduler.make_stats().num_skipped_waiting_reqs <= 1
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)


def test_lookups_in_the_pool_leave_those_to_come_in_want_of_room(engines: Engines) -> None:
    """Each request is blocked by its lookup at first; one that no pass comes to waits for room."""
    options = {"load": "all", "lookup_timeout_ms": 5000}
    fields = {"max_num_batched_tokens": 64}
    engine = engines.make("kv_both", pool=options, scheduler_fields=fields)
    draw: Any = SimpleNamespace(random=lambda: 0.5)
    pool = SimulatedPool(engine, {}, draw)
    try:
        requests = [engine.add(f"r{n}", prompt_of(64, start=100 * n)) for n in range(4)]
        engine.schedule_until_admitted(requests[0])
        scheduler = engine.scheduler
        assert scheduler.prefill_capacity_bound
        assert scheduler.make_stats().num_waiting_reqs == 3
        assert scheduler.make_stats().num_skipped_waiting_reqs == 0
        engine.run_to_end()
        pool.finish()
    finally:
        pool.close()

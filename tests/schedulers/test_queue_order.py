# SPDX-License-Identifier: Apache-2.0
"""First come, first served."""

from __future__ import annotations

from tests.schedulers.harness import Engines, prompt_of

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
    order = list(dict.fromkeys(scheduled))
    assert order[:3] == ["running", "old", "new 0"]

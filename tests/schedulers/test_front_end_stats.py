# SPDX-License-Identifier: Apache-2.0
"""What vLLM's front end counts of requests that are refused, or that move here: times and tokens
that can be. One that cannot be spoils the sum of a histogram, or ends the front end.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
from vllm.v1.metrics.stats import (
    IterationStats,
    LoRARequestStates,
    PrefixCacheStats,
    RequestStateStats,
)

from tests.schedulers.harness import BLOCK_SIZE, Engines, prompt_of, right_token
from tests.schedulers.test_move_faults import PATIENT, PROMPT, Move, coming

NUM_OUTPUT = 60


def test_request_that_is_refused_has_waited_no_longer_than_it_has_been_here(
    engines: Engines,
) -> None:
    began = time.monotonic()
    engine = engines.make("kv_both")
    engine.add("t", PROMPT, {"resume": {}})
    step = engine.schedule()
    engine.in_flight.clear()
    output = engine.worker.execute(step.output, step.samples)
    told = engine.scheduler.update_from_output(step.output, output)[0]
    (refused,) = told.outputs
    assert refused.kv_transfer_params == {"resume": {"refused": "malformed"}}

    iteration, stats = IterationStats(), RequestStateStats(arrival_time=time.time())
    loras = LoRARequestStates(log_stats=True)
    iteration.update_from_output(refused, told.timestamp, True, stats, loras, None)
    assert refused.finish_reason is not None
    iteration.update_from_finished_request(refused.finish_reason, "t", len(PROMPT), 1, stats)
    (times,) = iteration.finished_requests
    most = time.monotonic() - began
    assert 0 <= times.queued_time <= most
    assert 0 <= times.prefill_time <= most
    assert 0 <= times.inference_time <= most


def test_request_that_moves_and_reads_no_prefix_cache_is_computed_and_has_no_hits(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is within its tail block, which has come all the same."""
    move = Move(engines, **PATIENT)
    manager = move.target.scheduler.kv_cache_manager
    take, told = manager.make_prefix_cache_stats, list[PrefixCacheStats]()

    def note() -> PrefixCacheStats:
        told.append(take())
        return told[-1]

    monkeypatch.setattr(manager, "make_prefix_cache_stats", note)
    prompt = prompt_of(BLOCK_SIZE // 4)
    sampling: dict[str, Any] = {"temperature": 0, "skip_reading_prefix_cache": True}
    move.source.add("r", prompt, max_tokens=NUM_OUTPUT, **sampling)
    move.source.run(lambda: len(move.source.tokens["r"]) > 1)
    params = {"resume": coming("r", move.source, prompt)}
    move.target.add("t", prompt, params, max_tokens=NUM_OUTPUT, **sampling)
    move.run()
    assert move.has_left
    assert move.outcome == "exact"
    expected = [right_token(len(prompt) + i) for i in range(NUM_OUTPUT)]
    assert move.target.tokens["t"] == expected
    assert [stats.hits for stats in told if stats.hits] == []

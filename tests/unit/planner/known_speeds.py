# SPDX-License-Identifier: Apache-2.0
"""Speeds with which times can be worked out by hand, traces, and a profile in plain values."""

from __future__ import annotations

import random
from typing import Any

from vllm_ascend_pd.planner.profile import FORMAT
from vllm_ascend_pd.planner.speeds import Line, Speeds
from vllm_ascend_pd.planner.trace_file import RequestTrace, TraceRequest

MAX_SEQS = 4
# A prompt of n tokens takes P n ms, the hand-over 10 ms, a step of D 20 ms.
SPEEDS = Speeds(
    prefill_s=Line.through([(0, 0.0), (1000, 1.0)]),
    prefill_base_s=0.0,
    prefill_first_s=0.0,
    step_base_s=[0.02] * (MAX_SEQS + 1),
    step_slope_s=[0.0] * (MAX_SEQS + 1),
    handover_s=Line.through([(1, 0.01)]),
    sending_s_per_token=0.0,
    prefill_slowdown=Line.through([(0, 1.0)]),
    decode_alone=1.0,
    measured_batch=MAX_SEQS,
    block_size=1,
    max_num_batched_tokens=100,
    max_num_seqs=MAX_SEQS,
    prefill_kv_tokens=1000,
    decode_kv_tokens=10_000,
)


def trace(
    *requests: tuple[float, int, int], prefixes: tuple[tuple[int, ...], ...] = ()
) -> RequestTrace:
    """Arrival in seconds, prompt, answer."""
    ids = prefixes or ((),) * len(requests)
    rows = [TraceRequest(1000 * r[0], r[1], r[2], i) for r, i in zip(requests, ids, strict=True)]
    return RequestTrace(rows, tokens_per_id=10)


def poisson(
    num_requests: int, per_second: float, prompt: int, answer: int, seed: int
) -> RequestTrace:
    rng, now, rows = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        rows.append((now, prompt, answer))
        now += rng.expovariate(per_second)
    return trace(*rows)


def plain(**changed: Any) -> dict[str, Any]:
    """P computes a token in 1 ms, and any step takes 5 ms more; two requests share a step of D."""
    fields: dict[str, Any] = {
        "format": FORMAT,
        "model": "tiny",
        "prefill": [
            {"num_tokens": 100, "batch": 1, "seconds": 0.105},
            {"num_tokens": 200, "batch": 1, "seconds": 0.205},
            {"num_tokens": 100, "batch": 4, "seconds": 0.405},
        ],
        "decode": [
            {"batch": 1, "context_tokens": 100, "seconds": 0.011},
            {"batch": 1, "context_tokens": 1100, "seconds": 0.021},
            {"batch": 3, "context_tokens": 100, "seconds": 0.022},
            {"batch": 3, "context_tokens": 1100, "seconds": 0.042},
        ],
        "handover": [{"num_tokens": 100, "seconds": 0.004}],
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 8,
        "prefill_kv_tokens": 65536,
        "decode_kv_tokens": 65536,
    }
    return {**fields, **changed}

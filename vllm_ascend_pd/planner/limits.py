# SPDX-License-Identifier: Apache-2.0
"""What a trace would cost one process of the router: a rate and a cost for each kind of work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.registration import HEARTBEAT_S

if TYPE_CHECKING:
    from vllm_ascend_pd.planner.search import Row
    from vllm_ascend_pd.planner.trace_file import RequestTrace

# Seconds of one core, as `benchmarks/planner.py --part costs` measured them; docs/planner.md.
REQUEST_S = 114e-6
"""All of one request but its choice of engines and the tokens of its stream."""
CHOICE_S = 17e-6
"""By the policy least-loaded, of however many."""
TOKEN_S = 52e-6
"""One piece of a stream, if each comes by itself; 12 where many come together."""
HEARTBEAT_COST_S = 200e-6
BLOCK_EVENT_S = 15e-6
"""One block in a KV event."""
TOKENS_PER_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Need:
    """One kind of work."""

    what: str
    per_second: float
    busy: float
    """Share of one core."""


def router_needs(trace: RequestTrace, row: Row) -> tuple[Need, ...]:
    """At the trace's mean rate, with as many instances as ``row`` has; nothing where all requests
    come at the same moment, which is no rate."""
    seconds = float(trace.arrival_s[-1])
    if not seconds:
        return ()
    num_instances = sum(row.split)
    requests = len(trace) / seconds
    tokens = float(trace.num_output_tokens.sum()) / seconds
    prompts = float(trace.num_prompt_tokens.sum()) / seconds
    # P stores what it computes, D every prompt and answer; what is stored is removed some day.
    blocks = 2 * (prompts * (2 - row.hit_rate) + tokens) / TOKENS_PER_BLOCK
    rates = (
        ("requests", requests, REQUEST_S),
        ("choice of engines", requests, CHOICE_S),
        ("tokens of streams", tokens, TOKEN_S),
        ("heartbeats", num_instances / HEARTBEAT_S, HEARTBEAT_COST_S),
        ("KV events (prefix-aware)", blocks, BLOCK_EVENT_S),
    )
    return tuple(Need(what, rate, rate * cost_s) for what, rate, cost_s in rates)

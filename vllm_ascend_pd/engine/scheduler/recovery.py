# SPDX-License-Identifier: Apache-2.0
"""After a failed load: no block that it should have filled is ever read again.

Bad blocks and every block computed after them are evicted from the prefix cache, and the running
requests whose tables hold one are preempted. Their output of steps already in flight is dropped,
so no token computed on bad KV is delivered, also when a step ahead has been scheduled already.

On a CPU, attention multiplies what lies behind a request's last token by zero, and NaN times zero
is NaN: so what a failed load left there, or was computed from it, is cleared before anybody else
has the block. FlashAttention's kernels do not look behind the last token.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    from vllm_ascend_pd.engine.metadata import StepMeta


def find_affected(
    tables: dict[str, list[int]], bad_block_ids: set[int]
) -> tuple[set[str], set[int]]:
    """Which requests use a bad block, and all blocks that are bad because of it.

    A block after a bad one in any table was computed on bad KV, so it is bad too; that may affect
    further requests, hence the fixed point.
    """
    bad = set(bad_block_ids)
    first_bad = {request_id: len(table) for request_id, table in tables.items()}
    changed = True
    while changed:
        changed = False
        for request_id, table in tables.items():
            known = first_bad[request_id]
            first = next((i for i in range(known) if table[i] in bad), known)
            if first < known:
                first_bad[request_id] = first
                bad.update(table[first:])
                changed = True
    affected = {i for i, table in tables.items() if first_bad[i] < len(table)}
    return affected, bad


def clear(output: SchedulerOutput, block_ids: frozenset[int], meta: StepMeta | None) -> None:
    """Have the runner zero these blocks before its forward, but for those that the step loads."""
    loaded = {i for load in (meta.loads if meta is not None else ()) for i in load.block_ids}
    spoiled = sorted(block_ids - loaded)
    if spoiled:
        output.new_block_ids_to_zero = [*(output.new_block_ids_to_zero or ()), *spoiled]


def recover(scheduler: Scheduler, bad_block_ids: set[int]) -> tuple[list[Request], set[int]]:
    """Evict and preempt; returns the preempted requests and all evicted block ids."""
    manager = scheduler.kv_cache_manager
    tables = {
        request.request_id: manager.get_block_ids(request.request_id)[0]
        for request in scheduler.running
    }
    affected, bad = find_affected(tables, bad_block_ids)
    bad.discard(manager.block_pool.null_block.block_id)
    manager.evict_blocks(bad)
    preempted = [request for request in scheduler.running if request.request_id in affected]
    now = time.monotonic()
    # Backwards, because each goes to the head of the waiting queue.
    for request in reversed(preempted):
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now, drop_stale_output=True)
        # It may be resumed by the very next step, with its whole block table.
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
    return preempted, bad

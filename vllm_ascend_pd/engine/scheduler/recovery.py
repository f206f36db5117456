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

from vllm_ascend_pd.engine.vllm_api import prefill_stats
from vllm_ascend_pd.engine.vllm_api.groups import allocated_span
from vllm_ascend_pd.engine.vllm_api.status import drop_output_under_way, preempt
from vllm_ascend_pd.engine.vllm_api.steps import clear_blocks
from vllm_ascend_pd.log_limit import limited_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
    from vllm_ascend_pd.engine.scheduler.parts import Common, Part
    from vllm_ascend_pd.engine.vllm_api.types import Request, SchedulerOutput
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import Span


logger = limited_logger(__name__)


def find_affected(
    spans: Mapping[str, Span], bad_block_ids: set[int], begins: Mapping[str, int]
) -> tuple[set[str], set[int]]:
    """Which requests use a bad block, and all blocks that are bad because of it.

    What comes after a bad block in any span, in any group, was computed on bad KV, so it is bad
    too; that may affect further requests, hence the fixed point. A request computes from its token
    in ``begins`` on: what it has before was cached, or is loaded. With several groups that may be
    behind a bad block of another group, and good.
    """
    bad = set(bad_block_ids)
    first_bad = {request_id: span.end for request_id, span in spans.items()}
    changed = True
    while changed:
        changed = False
        for request_id, span in spans.items():
            first = span.first_of(bad)
            if first < first_bad[request_id]:
                first_bad[request_id] = first
                bad |= span.block_ids_from(max(first, begins[request_id]))
                changed = True
    affected = {i for i, span in spans.items() if first_bad[i] < span.end}
    return affected, bad


def recover(
    common: Common, bad_block_ids: set[int], users: Container[Request]
) -> tuple[list[Request], set[int]]:
    """Evict and preempt, ``users`` in any case; returns the preempted requests and all evicted
    block ids.
    """
    manager, scheduler = common.manager, common.scheduler
    running = {request.request_id: request for request in scheduler.running}
    spans = {i: allocated_span(manager, common.groups, running[i]) for i in running}
    begins = {i: common.loads.begin_of(running[i]) * common.block_size for i in running}
    affected, bad = find_affected(spans, bad_block_ids, begins)
    manager.evict_blocks(bad)
    preempted = [
        request
        for request in scheduler.running
        if request.request_id in affected or request in users
    ]
    now = time.monotonic()
    # Backwards, because each goes to the head of the waiting queue.
    for request in reversed(preempted):
        preempt(scheduler, request, now)
    return preempted, bad


class LoadEnds:
    """Scheduler thread. One way for every load that ends, well or not."""

    def __init__(
        self, common: Common, parts: Sequence[Part], hand_on: Callable[[Request], None]
    ) -> None:
        """``hand_on`` asks the next source for what a request lacks whose source has failed."""
        self._common = common
        self._parts = parts
        self._hand_on = hand_on
        self._is_cpu = common.scheduler.vllm_config.device_config.device_type == "cpu"
        self._spoiled: set[int] = set()
        """Blocks that the next step clears."""

    def fold(self, report: StepReport) -> None:
        """Of one worker or all of them; before any token of the step is used."""
        loads = self._common.loads
        bad_block_ids: set[int] = set()
        users: set[Request] = set()
        for result in filter(None, map(loads.fold, report.results)):
            bad_block_ids |= self._end(result, users)
        loads.note_rested(report.rested)
        rested = loads.take_rested()
        self._spoil({block.block_id for block in rested})  # a peer may have written in the end
        self._common.manager.block_pool.free_blocks(reversed(rested))
        if bad_block_ids or users:
            self._recover(bad_block_ids, users)

    def _end(self, result: LoadResult, users: set[Request]) -> set[int]:
        """The block ids that must be recovered from, and so must who is added to ``users``."""
        record = self._common.loads.end(result.load_id)
        if record.parked_for is not None:
            self._common.parking.end(record, result)
        record.source.load_ended(result, record.places(), record.parked_for is not None)
        if not result.cause:
            return set()
        self._spoil(record.spoiled_block_ids(result.failed))
        bad = record.bad_block_ids(result.failed)
        self._common.phantoms.withdraw(record.source)
        for request in record.spoiled_users(result.failed):
            drop_output_under_way(request)
            users.add(request)
        return bad

    def _recover(self, bad_block_ids: set[int], users: set[Request]) -> None:
        preempted, bad = recover(self._common, bad_block_ids, users)
        self._spoil(bad)
        for part in self._parts:
            part.recovered(bad)
        self._common.stats.add("recovered_requests", len(preempted))
        for request in preempted:
            logger.warning("request %s: recomputing after a failed load", request.request_id)
            prefill_stats.count(request, 0, 0)
            self._hand_on(request)

    def _spoil(self, block_ids: set[int]) -> None:
        """Of a failed load: have the next step clear them, where that matters."""
        if self._is_cpu:
            self._spoiled |= block_ids

    def clear_spoiled(self, output: SchedulerOutput, meta: StepMeta) -> None:
        """Have the runner zero these blocks before its forward, but for those that it loads: also
        of vLLM's own list, as blocks change hands within a pass.
        """
        if not self._spoiled and not (meta.loads and output.new_block_ids_to_zero):
            return
        loaded = {i for load in meta.loads for i in load.block_ids}
        zeroed = [*(output.new_block_ids_to_zero or ()), *sorted(self._spoiled)]
        clear_blocks(output, [i for i in zeroed if i not in loaded])
        self._spoiled = set()

# SPDX-License-Identifier: Apache-2.0
"""The scheduler's waiting and running requests. Scheduler thread."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from vllm_ascend_pd.engine.vllm_api.status import is_queued, waits_for_kv

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Request, RequestQueue, Scheduler


def waiting_queues(scheduler: Scheduler) -> tuple[RequestQueue, RequestQueue]:
    """All waiting requests: those of the first queue are tried before those of the second.

    In the first are the requests that were blocked when they were tried last; from 0.31 on, only
    those of them that hold blocks.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.kv_holding_waiting
            | vllm/v1/core/sched/scheduler.py:Scheduler.skipped_waiting
    """
    any_version: Any = scheduler
    if (holding := getattr(scheduler, "kv_holding_waiting", None)) is not None:
        return holding, scheduler.waiting
    return any_version.skipped_waiting, scheduler.waiting


def num_waiting(scheduler: Scheduler) -> int:
    first, second = waiting_queues(scheduler)
    return len(first) + len(second)


def max_running(scheduler: Scheduler) -> int:
    """So many run at once, from 0.32 on perhaps fewer than the model runner has rows for.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.max_num_active_reqs
            | vllm/v1/core/sched/scheduler.py:Scheduler.max_num_running_reqs
    """
    any_version: Any = scheduler
    if (num_active := getattr(scheduler, "max_num_active_reqs", None)) is not None:
        return int(num_active)
    return int(any_version.max_num_running_reqs)


def next_waiting(scheduler: Scheduler, num_requests: int) -> list[Request]:
    """So many, in the order in which they are tried."""
    first, second = waiting_queues(scheduler)
    return list(islice(chain(first, second), num_requests))


def remove_waiting(scheduler: Scheduler, request: Request) -> None:
    """It has ended before it was scheduled.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.deferred_waiting
            | vllm/v1/core/sched/scheduler.py:Scheduler.skipped_waiting
    """
    for queue in waiting_queues(scheduler):
        queue.remove_requests({request})
    if (deferred := getattr(scheduler, "deferred_waiting", None)) is not None:
        deferred.discard(request)


def keep_order_of_arrival(scheduler: Scheduler) -> None:
    """First come, first served, where the engine tries requests that were blocked before all others
    (before 0.31). With a lookup for every request each is blocked at first, so one that needs none,
    or has been preempted, would wait for as long as new ones come.

    Touches:
        vllm/v1/core/sched/request_queue.py:FCFSRequestQueue
    """
    if skipped := getattr(scheduler, "skipped_waiting", None):
        waiting = scheduler.waiting
        if isinstance(waiting, FCFSRequestQueue) and isinstance(skipped, FCFSRequestQueue):
            queued = {request.request_id for request in chain(skipped, waiting)}
            # In the order in which they were added, which clocks do not change.
            ordered = [scheduler.requests[one] for one in scheduler.requests if one in queued]
            waiting.clear()
            skipped.clear()
            # Where the engine looks for those that wait for nothing but room: those that it finds
            # blocked do not stay there.
            waiting.extend(ordered)


def count_anew_who_wants_room(scheduler: Scheduler) -> None:
    """From 0.31 on the engine takes who was blocked once for blocked until it is scheduled. With a
    lookup for every request that is each of them, and none seems to want room.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.deferred_waiting
            | vllm/v1/core/sched/scheduler.py:Scheduler.skipped_waiting
    """
    if deferred := getattr(scheduler, "deferred_waiting", None):
        # A pass enters those again that it finds blocked.
        deferred.difference_update([r for r in deferred if is_queued(r) or waits_for_kv(r)])


def take_out(scheduler: Scheduler, request: Request) -> int:
    """Schedule a running request no more, and keep its blocks and its row in the model runner; its
    place in the queue.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.num_waiting_for_streaming_input
    """
    place = scheduler.running.index(request)
    del scheduler.running[place]
    scheduler.num_waiting_for_streaming_input += 1  # these have a row and do not run
    return place


def put_back(scheduler: Scheduler, request: Request, place: int) -> None:
    """Schedule again what was taken out, without drafts: an engine that runs ahead is told only of
    those of the last step, and holds no others against a grammar.
    """
    scheduler.running.insert(place, request)
    request.spec_token_ids = []


def give_row_back(scheduler: Scheduler) -> None:
    """A request that was taken out has ended, or goes back into the queue."""
    scheduler.num_waiting_for_streaming_input -= 1

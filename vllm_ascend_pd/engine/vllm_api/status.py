# SPDX-License-Identifier: Apache-2.0
"""How a request stands: queued, held until its KV is there, or ended. Scheduler thread.

Touches:
    vllm/v1/request.py:RequestStatus.WAITING
    vllm/v1/request.py:RequestStatus.RUNNING
    vllm/v1/request.py:RequestStatus.WAITING_FOR_KV
    vllm/v1/request.py:RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    vllm/v1/request.py:RequestStatus.PREEMPTED
    vllm/v1/request.py:RequestStatus.FINISHED_STOPPED
    vllm/v1/request.py:RequestStatus.FINISHED_LENGTH_CAPPED
    vllm/v1/request.py:RequestStatus.FINISHED_REPETITION
    vllm/v1/request.py:RequestStatus.FINISHED_ABORTED
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Request, Scheduler

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_COMPLETED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def wait_for_kv(request: Request) -> None:
    """Until ``try_promote`` lets it go, it is not scheduled."""
    request.status = RequestStatus.WAITING_FOR_KV


def waits_for_kv(request: Request) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_KV)


def waits_for_grammar(request: Request) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)


def queue(request: Request) -> None:
    """It waits for memory only."""
    request.status = RequestStatus.WAITING


def is_queued(request: Request) -> bool:
    """Whether it waits for memory only, and not for a grammar, say."""
    return request.status in _QUEUED


def is_preempted(request: Request) -> bool:
    return bool(request.status == RequestStatus.PREEMPTED)


def is_running(request: Request) -> bool:
    """Whether it has blocks and is computed, or was taken out of the running queue with them."""
    return bool(request.status == RequestStatus.RUNNING)


def preempt(
    scheduler: Scheduler, request: Request, now: float, *, drops_output: bool = True
) -> None:
    """A running request, to the head of the queue. What steps under way sample is dropped, or it
    waits for that before it runs again."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, now, drop_stale_output=drops_output)
    # It may be resumed by the very next step, with its whole block table.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def put_away(scheduler: Scheduler, request: Request) -> None:
    """A request that was taken out of the running queue and of which nothing is in flight: it gives
    its blocks back and waits for KV. To the worker it has ended: there it is new when it is queued.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.reset_preempted_req_ids
        vllm/v1/core/sched/scheduler.py:Scheduler.finished_req_ids
    """
    any_version: Any = scheduler
    scheduler.running.append(request)
    preempt(scheduler, request, time.monotonic())
    any_version.reset_preempted_req_ids.discard(request.request_id)
    any_version.finished_req_ids.add(request.request_id)
    request.num_preemptions = 0
    wait_for_kv(request)


def drop_output_under_way(request: Request) -> None:
    """Of one that has been preempted already, with tokens kept that steps under way sample; it may
    wait for KV by now.
    """
    if not is_running(request) and request.num_stale_output_tokens:
        request.drop_stale_output = True


def queue_as(request: Request, status: Any) -> None:
    """It waits for no KV any more: see ``status_in_queue``."""
    request.status = status


def status_in_queue(request: Request, at_arrival: Any) -> Any:
    """What a request goes back to that waits for no KV any more. One that was ``put_away`` since it
    was preempted is new to the worker.
    """
    if request.num_preemptions:
        return RequestStatus.PREEMPTED
    return RequestStatus.WAITING if at_arrival == RequestStatus.PREEMPTED else at_arrival


def is_completed(request: Request) -> bool:
    """Whether it has ended well, with all that it was to give."""
    return request.status in _COMPLETED


def is_aborted(request: Request) -> bool:
    return bool(request.status == RequestStatus.FINISHED_ABORTED)

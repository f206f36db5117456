# SPDX-License-Identifier: Apache-2.0
"""What a step would do with a request, done between steps. Scheduler thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.vllm_api.queues import remove_waiting

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Request, Scheduler


def append_output(scheduler: Scheduler, request: Request, token_id: int) -> tuple[list[int], bool]:
    """The token as output of a request that no step computes: what is new, and whether it ends.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler._update_request_with_output
    """
    return scheduler._update_request_with_output(request, [token_id], is_stale=True)


def end_waiting(scheduler: Scheduler, request: Request) -> dict[str, Any] | None:
    """It has ended before it was scheduled; the ``kv_transfer_params`` of its output.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler._free_request
    """
    params, _ = scheduler._free_request(request)
    remove_waiting(scheduler, request)
    return params

# SPDX-License-Identifier: Apache-2.0
"""How many drafts of each request were accepted: layers that keep a state go on from the one behind
these. Model Runner V1 with speculative decoding. Worker process, main thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class AcceptedCounts:
    """Counts by request, whose rows differ from step to step. A step may leave a running request
    out; then its count is kept until it is back."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}  # of the last step, in which the counts come
        self._left_out: dict[str, int] = {}

    def arrange(self, runner: Any, scheduler_output: SchedulerOutput) -> None:
        """Move the counts of the last step, which have come to the host, into rows of this one.

        A request that is new has none yet, nor has one that is resumed from preemption, as it
        begins with a state that is stored: then it is 1.

        Touches:
            vllm/v1/core/sched/output.py:SchedulerOutput.scheduled_new_reqs
            vllm/v1/core/sched/output.py:SchedulerOutput.scheduled_cached_reqs
            vllm/v1/core/sched/output.py:CachedRequestData.resumed_req_ids
            vllm/v1/core/sched/output.py:NewRequestData.req_id
            vllm/v1/worker/gpu_input_batch.py:InputBatch.num_accepted_tokens_cpu
            vllm/v1/worker/gpu_input_batch.py:InputBatch.req_id_to_index
            vllm/v1/worker/gpu_input_batch.py:InputBatch.req_ids
            vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.input_batch
            vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.num_accepted_tokens
            vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.requests
        """
        batch, counts = runner.input_batch, runner.num_accepted_tokens.np
        rows: dict[str, int] = batch.req_id_to_index
        for request_id in self._rows.keys() - rows.keys():
            self._left_out[request_id] = int(counts[self._rows[request_id]])
        fresh = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        fresh |= scheduler_output.scheduled_cached_reqs.resumed_req_ids
        last = np.array([self._rows.get(i, -1) for i in batch.req_ids], dtype=np.int64)
        counts[: len(last)] = np.where(last < 0, 1, counts[last])
        for request_id in self._left_out.keys() & rows.keys():
            counts[rows[request_id]] = self._left_out.pop(request_id)
        for request_id in fresh & rows.keys():
            counts[rows[request_id]] = 1
        batch.num_accepted_tokens_cpu[: len(last)] = counts[: len(last)]
        self._rows = dict(rows)
        ended = self._left_out.keys() - runner.requests.keys()
        for request_id in ended:
            del self._left_out[request_id]

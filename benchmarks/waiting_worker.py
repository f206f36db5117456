# SPDX-License-Identifier: Apache-2.0
"""A worker on the CPU whose steps take as long as if an accelerator computed them.

A small model computes, and then the worker waits: for ``BASE_S``, more for each request in the step
and each prompt token. So an engine's steps leave the cores of the host to all else, as those of an
accelerator do, while engines that compute on the CPU share them with copies, router and clients.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

BASE_S, REQUEST_S, PROMPT_TOKEN_S = 0.015, 0.0012, 0.0002


class WaitingWorker(CPUWorker):
    """Engine core's thread."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """As soon as the model has computed, or later."""
        ends = time.perf_counter()
        if num_tokens := scheduler_output.total_num_scheduled_tokens:
            num_requests = len(scheduler_output.num_scheduled_tokens)
            ends += BASE_S + REQUEST_S * num_requests
            ends += PROMPT_TOKEN_S * (num_tokens - num_requests)
        output = super().execute_model(scheduler_output)
        time.sleep(max(0.0, ends - time.perf_counter()))
        return output

# SPDX-License-Identifier: Apache-2.0
"""In which order requests that wait are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.parts import Part
from vllm_ascend_pd.engine.vllm_api.queues import keep_order_of_arrival

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler, SchedulerOutput


class QueueOrder(Part):
    """First come, first served, whether a request was blocked or not."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        keep_order_of_arrival(self._scheduler)

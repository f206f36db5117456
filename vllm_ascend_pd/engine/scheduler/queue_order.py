# SPDX-License-Identifier: Apache-2.0
"""In which order requests that wait are tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.parts import Part
from vllm_ascend_pd.engine.vllm_api.queues import (
    count_anew_who_wants_room,
    keep_order_of_arrival,
)

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler


class QueueOrder(Part):
    """First come, first served, whether a request was blocked or not."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def settle(self) -> bool:
        # Right before a pass: after it the queues tell who is blocked from who wants room.
        keep_order_of_arrival(self._scheduler)
        count_anew_who_wants_room(self._scheduler)
        return False

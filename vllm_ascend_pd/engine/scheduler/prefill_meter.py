# SPDX-License-Identifier: Apache-2.0
"""How fast this engine computes prompts, from what its steps take."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.parts import Part

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.vllm_api.types import SchedulerOutput
    from vllm_ascend_pd.kv.cost import Speed


_MIN_TOKENS = 32
"""Fewer of one request say nothing about prefill, however many requests a step gives some; nor do
those of prompts of which a step has fewer than of answers.
"""


class PrefillMeter(Part):
    def __init__(self, speed: Speed, clock: Callable[[], float] = time.monotonic) -> None:
        self._speed = speed
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque()
        self._last_end = 0.0

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        nums_tokens = output.num_scheduled_tokens.values()
        num_tokens = sum([num for num in nums_tokens if num >= _MIN_TOKENS])
        is_prefill = 2 * num_tokens >= sum(nums_tokens)
        self._steps.append((self._clock(), num_tokens if is_prefill else 0))

    def end_step(self) -> None:
        if not self._steps:
            return
        began, num_tokens = self._steps.popleft()
        now = self._clock()
        # A step that was sent ahead begins when the one before it ends.
        self._speed.note(num_tokens, (now - max(began, self._last_end)) * 1000)
        self._last_end = now

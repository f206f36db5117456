# SPDX-License-Identifier: Apache-2.0
"""``--roles auto --profile``: which kind of engine there should be one more of.

The planner's model of a P and a D, and what clients have asked lately: what would have become of
those requests with the engines as they are used, and with one of them used for the other thing?
For the same requests it never asks for a switch and later for the way back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.planner.profile import load
from vllm_ascend_pd.planner.search import Objective, Row
from vllm_ascend_pd.planner.simulate import Split, simulate
from vllm_ascend_pd.planner.speeds import Speeds
from vllm_ascend_pd.planner.trace_file import RequestTrace, TraceRequest

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import Planning
    from vllm_ascend_pd.router.instances import Kind

WINDOW_S = 60.0
MAX_REQUESTS = 3000
"""Of the window: simulating them with three splits takes a thread some 0.6 s."""
MIN_REQUESTS = 20
"""Fewer tell nothing."""
MIN_GAIN = 0.02
"""Of the share of requests that get what was promised: less is not worth a switch."""


@dataclass(slots=True)
class PlannedRoles:
    """Of the engines that serve ``model``. ``saw`` and ``requests`` on the event loop's thread."""

    model: str
    speeds: Speeds
    objective: Objective
    _seen: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_REQUESTS))

    @classmethod
    def of(cls, planning: Planning) -> PlannedRoles:
        profile = load(planning.profile)
        objective = Objective(planning.slo_ttft_s, planning.slo_itl_s)
        return cls(profile.model, Speeds.of(profile), objective)

    def saw(self, at_s: float, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        """A request that came then has been answered."""
        if num_answer_tokens > 0:
            self._seen.append((at_s, num_prompt_tokens, num_answer_tokens))

    def requests(self, now: float) -> RequestTrace | None:
        """Those of the window, or ``None`` where they are too few to tell anything."""
        recent = sorted(one for one in self._seen if one[0] >= now - WINDOW_S)
        if len(recent) < MIN_REQUESTS:
            return None
        return RequestTrace(
            TraceRequest(timestamp_ms=at * 1000, input_length=prompt, output_length=answer)
            for at, prompt, answer in recent
        )

    def wanted(
        self, asked: RequestTrace, does: dict[Kind, int], movable: dict[Kind, bool]
    ) -> Kind | None:
        """Which kind should get an engine of the other one. Pure, and slow.

        ``does``: how many engines do this now; ``movable``: one of them could do the other thing.
        """
        split = Split(does["prefill"], does["decode"])
        now = self._attained(asked, split)
        best, gain = None, MIN_GAIN
        kinds: tuple[tuple[Kind, Kind, int], ...] = (
            ("prefill", "decode", 1),
            ("decode", "prefill", -1),
        )
        for kind, other, more in kinds:
            changed = Split(split.num_prefill + more, split.num_decode - more)
            if movable[other] and min(changed) > 0:
                gained = self._attained(asked, changed) - now
                if gained >= gain:
                    best, gain = kind, gained
        return best

    def _attained(self, asked: RequestTrace, split: Split) -> float:
        return Row.of(simulate(asked, self.speeds, split), self.objective).attained

# SPDX-License-Identifier: Apache-2.0
"""How blocks that are held elsewhere come: in a step, parked, only the first ones, or computed.

Pure: a ``Question`` holds all that is looked at, a ``LoadPlan`` what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import LoadMode

if TYPE_CHECKING:
    from collections.abc import Sequence

_RELAXATION = 0.1
_GROWTH = 1.05
_LONG_MS = 200.0
"""What has taken so long counts for half of the mean."""
_STEP_SHARE = 0.5
"""A load that is expected to take this share of ``step_timeout_ms`` is parked in any case."""


class Speed:
    """Running mean of what was measured on this engine, in bytes or tokens per millisecond."""

    def __init__(self, first: float = 0.0, smoothing: float = 0.3) -> None:
        """``first`` is believed before anything has been measured; 0 where it is not known."""
        self._hoped = first
        """Towards this a bad moment is forgotten soon. Each slow load is a reason to hope less."""
        self._smoothing = smoothing
        self.per_ms = first

    def note(self, amount: float, elapsed_ms: float) -> None:
        """What took long counts for more: a slow load is tried again less often than a fast one."""
        if not amount or elapsed_ms <= 0:
            return
        measured = amount / elapsed_ms
        mean = self.per_ms or measured
        weight = max(self._smoothing, elapsed_ms / (elapsed_ms + _LONG_MS))
        self.per_ms = mean + weight * (measured - mean)
        self._hoped += weight * min(0.0, measured - self._hoped)

    def drop_to(self, amount: float, elapsed_ms: float) -> None:
        """Somebody has waited for this in vain, or too long: if it was slower than was believed, it
        counts at once, also where nothing has come at all.
        """
        self.per_ms = min(self.per_ms, max(amount, 1.0) / elapsed_ms)

    def relax(self) -> None:
        """Something was not loaded because that seemed slow: believe it a little less each time, so
        that neither a bad moment nor a wrong ``first`` is believed for ever.
        """
        back = self.per_ms + _RELAXATION * (self._hoped - self.per_ms)
        self.per_ms = max(back, self.per_ms * _GROWTH)

    def ms(self, amount: float) -> float:
        """How long so much is expected to take; 0 where that is not known."""
        return amount / self.per_ms if self.per_ms else 0.0


@dataclass(frozen=True, slots=True)
class Question:
    load_ms: Sequence[float | None]
    """Of each leading block up to the last that can be had; ``None`` of one that is cached."""
    compute_ms: float
    """To compute one block here; 0 where that is not known, or not an option."""
    mode: LoadMode
    max_step_ms: float
    """A step may be held up for so long, where others wait for it."""
    step_timeout_ms: float
    others_wait: bool


@dataclass(frozen=True, slots=True)
class LoadPlan:
    num_blocks: int
    """So many leading blocks are used, the rest is computed."""
    parks: bool
    load_ms: float
    """What loading them is expected to take."""


def plan(question: Question) -> LoadPlan:
    num_blocks = _cut(question.load_ms, question.compute_ms)
    load_ms = sum(ms for ms in question.load_ms[:num_blocks] if ms is not None)
    return LoadPlan(num_blocks, _parks(question, load_ms), load_ms)


def _cut(load_ms: Sequence[float | None], compute_ms: float) -> int:
    """How many leading blocks to use so that the prompt is ready soonest.

    Blocks can only be used from the front, so this is the cut ``k`` with the least
    ``load time of missing blocks before k + compute time of all blocks from k on``.
    """
    if not compute_ms:
        return len(load_ms)
    best, best_ms, total_ms = 0, 0.0, 0.0
    for index, block_ms in enumerate(load_ms):
        total_ms += (block_ms or 0.0) - compute_ms
        if total_ms <= best_ms:
            best, best_ms = index + 1, total_ms
    return best


def _parks(question: Question, load_ms: float) -> bool:
    """Whether this load is so long that the rest of the batch should not wait for it."""
    if question.mode is not LoadMode.AUTO:
        return question.mode is LoadMode.PARK
    if load_ms <= question.max_step_ms:
        return False
    return question.others_wait or load_ms > _STEP_SHARE * question.step_timeout_ms

# SPDX-License-Identifier: Apache-2.0
"""From the points of a profile to seconds for any prompt, batch and context."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from vllm_ascend_pd.planner.profile import DecodePoint, PrefillPoint, Profile


@dataclass(frozen=True, slots=True)
class Line:
    """Straight pieces between measured points, ``x`` ascending; beyond them as the last piece goes
    on, but never below 0."""

    x: npt.NDArray[np.float64]
    y: npt.NDArray[np.float64]

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Line:
        """Several values of one ``x`` are one: their median."""
        values = defaultdict(list)
        for x, y in points:
            values[x].append(y)
        ordered = sorted(values)
        return cls(np.array(ordered, float), np.array([median(values[x]) for x in ordered], float))

    def __call__(self, at: npt.ArrayLike) -> npt.NDArray[np.float64]:
        at = np.asarray(at, float)
        found: npt.NDArray[np.float64] = np.interp(at, self.x, self.y)
        if len(self.x) > 1:
            found = found + self._slope(-2, -1) * np.maximum(0.0, at - self.x[-1])
        return found.clip(min=0.0)

    def at_zero(self) -> float:
        """Where the first piece would have begun, never below 0 nor above the first point; with one
        point it is not known and taken for 0.
        """
        if len(self.x) < 2:
            return 0.0
        return max(0.0, float(self.y[0] - self._slope(0, 1) * self.x[0]))

    def _slope(self, first: int, second: int) -> float:
        """Of a piece; what falls is a matter of measuring."""
        return max(0.0, float((self.y[second] - self.y[first]) / (self.x[second] - self.x[first])))


@dataclass(frozen=True, slots=True)
class Speeds:
    """One P, one D, and the way between them.

    P computes prompts in steps: ``prefill_base_s`` and what each prompt adds. D's step takes
    ``step_base_s[batch] + step_slope_s[batch] * mean context``.
    """

    prefill_s: Line
    """Of one prompt alone, by its tokens; the base included."""
    prefill_base_s: float
    """Seconds of a step that prompts of one batch share."""
    prefill_first_s: float
    """Of each prompt, however little of it is computed; the base not included."""
    step_base_s: Sequence[float]
    """By the number of requests, from 0 to ``max_num_seqs``."""
    step_slope_s: Sequence[float]
    """Seconds for each token of the requests' mean context, likewise."""
    handover_s: Line
    sending_s_per_token: float
    """Of the hand-over: in which P computes nothing else."""
    prefill_slowdown: Line
    """Of P's steps, by the tokens a second that there are of D for each P."""
    decode_alone: float
    """Of a step of D, what it takes while no P computes."""
    measured_batch: int
    """The largest one of D in the profile."""
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    prefill_kv_tokens: int
    decode_kv_tokens: int

    @classmethod
    def of(cls, profile: Profile) -> Speeds:
        prefill_s = Line.through((p.num_tokens, p.seconds) for p in profile.prefill if p.batch == 1)
        bases, slopes = _steps(profile.decode, profile.max_num_seqs)
        base_s = _prefill_base(prefill_s, profile.prefill)
        return cls(
            prefill_s,
            base_s,
            max(0.0, prefill_s.at_zero() - base_s),
            bases,
            slopes,
            Line.through((p.num_tokens, p.seconds) for p in profile.handover),
            profile.sending_seconds_per_token,
            Line.through(
                [(p.tokens_per_second, p.slowdown) for p in profile.prefill_beside] or [(0.0, 1.0)]
            ),
            profile.decode_alone,
            max(p.batch for p in profile.decode),
            profile.block_size,
            profile.max_num_batched_tokens,
            profile.max_num_seqs,
            profile.prefill_kv_tokens,
            profile.decode_kv_tokens,
        )


def _prefill_base(prefill_s: Line, points: Iterable[PrefillPoint]) -> float:
    """What ``batch`` prompts share: with ``s`` for one alone they take
    ``base + batch * (s - base)``."""
    found = [
        (p.batch * float(prefill_s(p.num_tokens)) - p.seconds) / (p.batch - 1)
        for p in points
        if p.batch > 1
    ]
    return min(max(0.0, median(found)), float(prefill_s.y.min())) if found else 0.0


def _steps(points: Iterable[DecodePoint], max_num_seqs: int) -> tuple[list[float], list[float]]:
    """Base and slope by batch: of each batch that was measured a straight line over the contexts,
    and between batches straight lines again."""
    by_batch = defaultdict(list)
    for point in points:
        by_batch[point.batch].append((point.context_tokens, point.seconds))
    bases, slopes = [], []
    for batch, measured in sorted(by_batch.items()):
        contexts, seconds = np.array(measured, float).T
        slope = 0.0
        if len(set(contexts)) > 1:
            slope = max(0.0, float(np.polyfit(contexts, seconds, 1)[0]))
        bases.append((batch, max(0.0, float(np.mean(seconds - slope * contexts)))))
        slopes.append((batch, slope))
    at = np.arange(max_num_seqs + 1)
    return Line.through(bases)(at).tolist(), Line.through(slopes)(at).tolist()

# SPDX-License-Identifier: Apache-2.0
"""Which split of so many instances is best, and how few meet the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.planner.simulate import Outcome, Split

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

MAX_ROWS = 16
"""Splits of one table; of more, these many first, and then those around the best."""

SLOWER = 1.15
"""As far as predictions are to be right."""
NUM_PARTS = 4
"""Of a trace, by which a queue that grows is told from one that is long for a while."""

Simulate = Callable[[Split], Outcome]


@dataclass(frozen=True, slots=True)
class Objective:
    """What users are promised (SLO), and to how many of them."""

    ttft_s: float
    itl_s: float
    """Mean between the tokens of one answer."""
    attained: float = 0.99
    """Share of the requests that must get both."""

    def num_met(self, outcome: Outcome, slower: float = 1.0) -> int:
        """Requests that get both, if all takes so many times as long."""
        ttft, itl = outcome.ttft_s * slower, outcome.itl_s * slower
        return int(np.count_nonzero((ttft <= self.ttft_s) & (itl <= self.itl_s)))

    def met(self, row: Row) -> bool:
        return row.attained >= self.attained and not row.is_overloaded


@dataclass(frozen=True, slots=True)
class Row:
    """One split in the table; times in seconds."""

    split: Split
    goodput: float
    """Requests in a second that got what was promised."""
    attained: float
    """Their share of all requests."""
    attained_if_slower: float
    """The same if all took ``SLOWER`` times as long: far less where half of them are just in time,
    and what is predicted is not to be relied on."""
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    prefill_use: float
    decode_use: float
    hit_rate: float
    decode_batch: int
    is_overloaded: bool
    """The queue grows as long as requests come, so all the rest depends on how long that is."""

    @classmethod
    def of(cls, outcome: Outcome, objective: Objective) -> Row:
        num_good = objective.num_met(outcome)
        ttft_p50, ttft_p99 = np.percentile(outcome.ttft_s, (50, 99))
        return cls(
            split=outcome.split,
            goodput=num_good / outcome.duration_s if outcome.duration_s else 0.0,
            attained=num_good / len(outcome.ttft_s),
            attained_if_slower=objective.num_met(outcome, SLOWER) / len(outcome.ttft_s),
            ttft_p50_s=float(ttft_p50),
            ttft_p99_s=float(ttft_p99),
            itl_p50_s=outcome.itl_percentile(50),
            itl_p99_s=outcome.itl_percentile(99),
            prefill_use=outcome.prefill_use,
            decode_use=outcome.decode_use,
            hit_rate=outcome.hit_rate,
            decode_batch=outcome.decode_batch,
            is_overloaded=_grows(outcome.ttft_s, objective.ttft_s),
        )


def _grows(ttft_s: npt.NDArray[np.float64], too_long_s: float) -> bool:
    """Whether requests wait ever longer, evenly, up to more than is promised. A burst that is over
    makes them wait less again, and what is only busy does not have them wait for so long."""
    medians = [float(np.median(part)) for part in np.array_split(ttft_s, NUM_PARTS) if len(part)]
    growth = np.diff(medians)
    is_even = len(growth) and growth.min() > growth.mean() / 20
    return bool(is_even and growth.mean() > 0 and medians[-1] > too_long_s)


@dataclass(frozen=True, slots=True)
class Splits:
    """``rows`` are of splits of all instances, in order of their P engines."""

    rows: tuple[Row, ...]
    best: Row
    least: Row | None
    """The fewest instances that meet the objective; ``None`` if so many do not."""


class Search:
    """Simulates each split once."""

    def __init__(self, simulate: Simulate, objective: Objective) -> None:
        self._simulate = simulate
        self._objective = objective
        self._rows: dict[Split, Row] = {}

    def row(self, split: Split) -> Row:
        if split not in self._rows:
            self._rows[split] = Row.of(self._simulate(split), self._objective)
        return self._rows[split]

    def find(self, num_instances: int) -> Splits:
        """The best split of ``num_instances``, at least 2, and the least that would do."""
        rows = self._all_splits(num_instances)
        best = max(rows, key=_merit)
        return Splits(rows, best, self._least(best))

    def _all_splits(self, num_instances: int) -> tuple[Row, ...]:
        """Each one, or where they are many, those on an ever finer grid around the best."""
        first, last = 1, num_instances - 1
        tried: set[int] = set()
        while True:
            step = max(1, -(-(last - first) // (MAX_ROWS - 1)))
            grid = {*range(first, last + 1, step), last}
            tried |= grid
            if step == 1:
                splits = (Split(p, num_instances - p) for p in sorted(tried))
                return tuple(self.row(split) for split in splits)
            rows = [self.row(Split(p, num_instances - p)) for p in sorted(grid)]
            best = max(rows, key=_merit).split.num_prefill
            first, last = max(first, best - step + 1), min(last, best + step - 1)

    def _least(self, best: Row) -> Row | None:
        """More instances, divided as well as can be, do no worse."""
        if not self._objective.met(best):
            return None
        least = self._near_least(sum(best.split)) or best
        while sum(least.split) > 2:
            fewer = max(self._all_splits(sum(least.split) - 1), key=_merit)
            if not self._objective.met(fewer):
                break
            least = fewer
        return least

    def _near_least(self, num_instances: int) -> Row | None:
        """The least if more engines of a role never do worse, as they may on a shared host: they
        make those of the other role slower. So the fewest P with all the D that there could be, and
        the fewest D likewise, are too few or just enough: from there on, upwards."""
        most = num_instances - 1
        if not self._meets(Split(most, most)):
            return None
        fewest_p = self._fewest(most, lambda p: Split(p, most))
        fewest_d = self._fewest(most, lambda d: Split(most, d))
        for total in range(fewest_p + fewest_d, num_instances + 1):
            meeting = list(self._meeting(total, range(fewest_p, total - fewest_d + 1)))
            if meeting:
                return max(meeting, key=_merit)
        return None

    def _meeting(self, total: int, prefills: Iterable[int]) -> Iterable[Row]:
        rows = (self.row(Split(p, total - p)) for p in prefills)
        return (row for row in rows if self._objective.met(row))

    def _fewest(self, most: int, split: Callable[[int], Split]) -> int:
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            if self._meets(split(middle)):
                high = middle
            else:
                low = middle + 1
        return low

    def _meets(self, split: Split) -> bool:
        return self._objective.met(self.row(split))


def _merit(row: Row) -> tuple[bool, float, float, float]:
    """Larger is better: more requests in time; of equals the quicker one."""
    return not row.is_overloaded, row.attained, -row.ttft_p99_s, -row.itl_p99_s

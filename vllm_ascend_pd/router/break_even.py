# SPDX-License-Identifier: Apache-2.0
"""Up to which length D computes a prompt itself sooner than P can hand it over. Measured.

Prompts are put into classes by how many of their tokens D does not hold, two classes an octave. For
each class the median time to the first token is known in both ways:

    with P      prefill leg and hand-over, as long as they took, P's queue included
    D alone     a few requests are sent that way to measure it

D alone is better where ``median alone * (1 + r) < median with P``: each of the ``r`` requests that
D is answering is held up, too, while it computes a prompt. The first class, from the shortest one
upwards, where that is not so ends the range. D alone is measured up to and in that class, and with
P in all of them, so both stay known when engines or their load change.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NUM_KEPT = 31
"""Times of a class, the latest."""
NUM_NEEDED = 5
"""For a median."""
MEASURE_FIRST = 4
"""One in so many requests measures the other way, until that is known once."""
MEASURE_AGAIN = 16
"""One in so many afterwards."""
LONGEST = 2048
"""Tokens: longer prompts are P's unmeasured. vLLM computes as many in one step by default."""


class _Times:
    """Seconds to the first token, of the latest requests of one class."""

    __slots__ = ("_kept", "median")

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=NUM_KEPT)
        self.median: float | None = None
        """``None`` until there are enough."""

    def add(self, seconds: float) -> None:
        self._kept.append(seconds)
        if len(self._kept) >= NUM_NEEDED:
            self.median = median(self._kept)


class _Class:
    """Prompts of about one length."""

    __slots__ = ("alone", "num_asked", "with_prefill")

    def __init__(self) -> None:
        self.with_prefill = _Times()
        self.alone = _Times()
        self.num_asked = 0


class BreakEven:
    """Of one model. Event loop thread."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    @property
    def num_tokens(self) -> int:
        """Prompts of at most so many tokens are better computed by an idle D; 0: none, or not
        known yet."""
        best, _ = self._range(0)
        return _longest(best)

    def learn(self, num_tokens: int, *, with_prefill: bool, seconds: float) -> None:
        """Time to the first token of a request, ``num_tokens`` of whose prompt D did not hold."""
        if 0 < num_tokens <= LONGEST:
            known = self._classes.setdefault(_class_of(num_tokens), _Class())
            (known.with_prefill if with_prefill else known.alone).add(seconds)

    def choose(self, num_tokens: int, num_running: int) -> str | None:
        """Why P is left out (``short_prompt``, ``measuring``), or ``None``; ``num_running``
        requests are on D now."""
        known = self._classes.get(_class_of(num_tokens)) if 0 < num_tokens <= LONGEST else None
        if known is None or known.with_prefill.median is None:
            return None
        known.num_asked += 1
        every = MEASURE_FIRST if known.alone.median is None else MEASURE_AGAIN
        is_measuring = known.num_asked % every == 0
        best, _ = self._range(num_running)
        if num_tokens <= _longest(best):
            return None if is_measuring else "short_prompt"
        _, worse = self._range(0)
        is_in_reach = worse is None or _class_of(num_tokens) <= worse
        return "measuring" if is_measuring and is_in_reach else None

    def _range(self, num_running: int) -> tuple[int | None, int | None]:
        """The longest class that D computes better, and the first that it does not."""
        best = None
        for number, known in sorted(self._classes.items()):
            alone, with_prefill = known.alone.median, known.with_prefill.median
            if alone is None or with_prefill is None:
                continue
            if alone * (1 + num_running) >= with_prefill:
                return best, number
            best = number
        return best, None


def _class_of(num_tokens: int) -> int:
    return int(2 * math.log2(num_tokens))


def _longest(number: int | None) -> int:
    """Tokens of the longest prompt of a class."""
    return 0 if number is None else math.ceil(2 ** ((number + 1) / 2)) - 1

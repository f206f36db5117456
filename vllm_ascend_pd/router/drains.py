# SPDX-License-Identifier: Apache-2.0
"""What runs on an engine that drains moves to others, whoever says that it drains: an operator, the
engine itself because it is to end, its pod, or the file of instances. So does what is answered by
an engine that is to compute prompts only.

What cannot move, or finds no other engine, ends where it is. Who drains an engine asks how many are
left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.moves import Answering, Moves

logger = logging.getLogger(__name__)

REASON = "drain"
AT_ONCE = 8
"""Moves away from one engine at a time: others compute what they do not have of a prompt."""
RETRY_S = 1.0
"""Doubled with each move of a request that fails."""
LOOK_S = 0.1
_FOR_NOW = ("moving", "no_token")
"""Obstacles that pass."""


def share_of(num_workers: int) -> int:
    """Of ``AT_ONCE``, for one of several workers, each of which moves what it has."""
    return -(-AT_ONCE // num_workers)


def to_move(running: Sequence[Answering], now: float, at_once: int) -> list[Answering]:
    """Of those whose engines they leave, the ones that begin to move now, oldest first."""
    moving = Counter(one.instance for one in running if one.move is not None)
    chosen = []
    for one in running:
        is_due = one.failed_at is None or now >= one.failed_at + RETRY_S * 2**one.num_failed
        if is_due and one.obstacle() is None and moving[one.instance] < at_once:
            moving[one.instance] += 1
            chosen.append(one)
    return chosen


@dataclass(slots=True)
class Drains:
    """Event loop thread."""

    moves: Moves
    metrics: Metrics
    at_once: int = AT_ONCE
    """Moves away from one engine."""
    _told: set[Answering] = field(default_factory=set)
    """Those that stay, counted already."""

    async def keep_looking(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look(time.monotonic())
            except Exception:
                logger.exception("draining")  # the next look may find what this one did not

    def look(self, now: float) -> None:
        running = self.moves.running
        self._told &= running.keys()
        engines = {one.instance for one in running}
        leaving = {engine for engine in engines if engine.is_leaving}
        if not leaving:
            return
        there = [one for one in running if one.instance in leaving]
        for one in to_move(there, now, self.at_once):
            if self.moves.may_leave(one.instance):
                self.moves.start(one, None, REASON)
        for one in there:
            obstacle = one.obstacle()
            if one in self._told or obstacle in (None, *_FOR_NOW):
                continue
            self._told.add(one)
            self.metrics.add("not_moved", REASON, str(obstacle))

# SPDX-License-Identifier: Apache-2.0
"""What is left of requests in an engine that has none."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.scheduler.parts import COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_ascend_pd.engine.scheduler.parts import Common, Part
    from vllm_ascend_pd.metrics import Stats

logger = logging.getLogger(__name__)

OF_REQUESTS = (
    "phantoms",
    "loads",
    "remote_prompts",
    "pool_prompts",
    "resumes",
    "moves_out",
    "moves_in",
    "forwards",
    "guests",
)
"""Counts of ``SchedulerSide.counts`` that go back to zero when the last request has ended: leases
wait for consumers, and saves end by themselves."""
LASTS_S = 60.0
"""What a peer must answer first may be there for a while."""


def count(common: Common, parts: Iterable[Part]) -> dict[str, int]:
    """See ``SchedulerSide.counts``."""
    return {
        **dict.fromkeys(COUNTS, 0),
        "free_blocks": common.manager.block_pool.get_num_free_blocks(),
        "phantoms": len(common.phantoms),
        "loads": len(common.loads),
        **{name: num for part in parts for name, num in part.counts().items()},
    }


class IntegrityCheck:
    """``transfer.check_integrity``: each leak is logged, and counted once. Scheduler thread."""

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._left_since: dict[str, float] = {}
        self._told: set[str] = set()

    def look(self, counts: Mapping[str, int]) -> None:
        """The engine has no request: a count that is not zero now, and was not each time before
        for ``LASTS_S``, is a leak."""
        now = self._clock()
        for name in OF_REQUESTS:
            if not counts[name]:
                self._left_since.pop(name, None)
                self._told.discard(name)
            elif now - self._left_since.setdefault(name, now) >= LASTS_S and name not in self._told:
                self._told.add(name)
                self._stats.add("internal_errors", 1, "leak")
                logger.error("without any request there are still %d %s", counts[name], name)

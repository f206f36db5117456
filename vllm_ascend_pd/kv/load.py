# SPDX-License-Identifier: Apache-2.0
"""One load of KV into blocks of this engine, wherever the KV comes from: it ends once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.types import LoadId

QUARANTINE_S = 5.0
"""A slot whose write may still land is not reused for so long, and no longer: steps wait for slots.
What lands even later spoils a checksum, never a page."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended, worker to scheduler: ``cause`` is empty or a value of ``types.Cause``."""

    load_id: LoadId
    cause: str
    num_bytes: int
    elapsed_ms: float
    failed: tuple[int, ...] = ()
    """The block ids that a failed load has not filled; empty when it may be any of them."""
    transport: str = ""
    was_awaited: bool = False
    """Whether the time is mostly that of the producer's computing."""
    num_resting: int = 0
    """Workers in whose blocks a peer may still write, until they report that it is over."""


def merge_results(results: Sequence[LoadResult]) -> LoadResult:
    """One load's result of several parts that have all ended: failed if one of them is."""
    if len(results) == 1:
        return results[0]
    first_failed = next((result for result in results if result.cause), results[0])
    causes = [result for result in results if result.cause]
    knows = bool(causes) and all(result.failed for result in causes)
    return replace(
        first_failed,
        failed=tuple(sorted({b for r in causes for b in r.failed})) if knows else (),
        num_bytes=sum(result.num_bytes for result in results),
        elapsed_ms=max(result.elapsed_ms for result in results),
        num_resting=sum(result.num_resting for result in results),
        transport=next((result.transport for result in results if result.transport), ""),
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Load:
    """One load under way, or the part of it that comes from one peer.

    ``lock`` guards ``ended`` and the copies into live pages. They are made under it on purpose:
    whoever ends a load waits for a copy that is under way (a memcpy), and after that not one byte
    more is written for it, by no thread, for its blocks may be somebody else's.
    """

    load_id: LoadId
    in_step: bool
    """It ends within the step that carries it: the main thread waits for it."""
    timeout_s: float
    clock: Callable[[], float] = time.monotonic
    started: float = 0.0
    deadline: float = 0.0
    """In seconds of the clock; whoever runs the load may put it off."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: LoadResult | None = None
    num_bytes: int = 0
    others: list[Load] = field(default_factory=list)
    """The other parts: a load ends as a whole, and when one part fails so do these."""

    def __post_init__(self) -> None:
        self.started = self.clock()
        self.deadline = self.started + self.timeout_s

    def has_layer(self, layer: int) -> bool:
        """Whether every page of it has landed; by default not before all of them have."""
        return self.ended is not None

    def has_tails(self) -> bool:
        """Whether every block that the forward writes into has landed."""
        return self.ended is not None

    def end(self, cause: str) -> bool:
        """Whether this ended it: empty, or a value of ``types.Cause``. Any thread."""
        with self.lock:
            if self.ended is not None:
                return False
            self.ended = self.result(cause, (self.clock() - self.started) * 1000)
            return True

    def result(self, cause: str, elapsed_ms: float) -> LoadResult:
        """Of an end with ``cause``, under the lock."""
        return LoadResult(self.load_id, cause, self.num_bytes, elapsed_ms)

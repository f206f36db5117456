# SPDX-License-Identifier: Apache-2.0
"""The contract of what loads KV in a worker, and the half of it that is the same for all."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from vllm_ascend_pd.kv.load import Load, LoadResult, merge_results
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.types import Cause, LoadId

if TYPE_CHECKING:
    from collections.abc import Callable

logger = limited_logger(__name__)

SpecT = TypeVar("SpecT")
LoadT = TypeVar("LoadT", bound=Load)


class Loader(ABC, Generic[SpecT, LoadT]):
    """Runs loads from one kind of source: from peers, or from the pool.

    All public methods are the main thread's. Threads of the loader do the work; with the main
    thread they share each ``Load``, and ``_landed``, which they notify.

    The caller guarantees that a load id is new, and that the blocks of a load belong to nobody else
    until its result has been taken (if that has ``num_resting`` set, until ``take_rested`` names
    the load).

    The loader guarantees:

    - ``start_load`` and ``cancel`` do not wait for a peer or a store; ``cancel`` waits for a copy
      that is under way.
    - A load ends once, at its deadline at the latest, though its threads be held; its result is
      taken once.
    - Without a cause, every block holds what its source has, verified. With one, those that
      ``LoadResult.failed`` names (all, if it names none) may hold anything.
    - After its end nothing is written into its pages (``Load.lock``).
    - A wait ends when what it waits for has landed, or the load has ended.
    """

    overdue_s: ClassVar[float] = 0.0
    """So long after its deadline a load is ended here, if the loader's threads have not done it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[LoadId, list[LoadT]] = {}
        """The parts of each load whose result has not been taken; main thread only."""
        self._for_steps: list[LoadT] = []
        """Those that steps wait for, until they have ended; main thread only."""
        self._landed = threading.Condition()

    @abstractmethod
    def start_load(self, spec: SpecT) -> None:
        """Begin a load; returns at once."""

    @abstractmethod
    def stop(self) -> None:
        """End the threads, but for one that a foreign call holds. Idempotent."""

    def cancel(self, load_id: LoadId) -> None:
        """End a load now, if it has not ended yet."""
        for load in self._loads.get(load_id, ()):
            self._end(load, Cause.CANCELLED.value)

    def wait_layer(self, layer: int) -> None:
        """Until this layer of every in-step load has landed, or that load has ended."""
        for load in self._in_step():
            self._wait(load, partial(load.has_layer, layer))

    def wait_tails(self) -> None:
        """Until every in-step block that the forward writes into is in place."""
        for load in self._in_step():
            self._wait(load, load.has_tails)

    def wait_all(self) -> None:
        """Until every in-step load has ended."""
        for load in self._in_step():
            self._wait(load, lambda: False)

    def in_step_under_way(self) -> bool:
        """Whether an in-step load has not ended yet."""
        return bool(self._in_step())

    def take_results(self) -> list[LoadResult]:
        """The loads that ended since the last call."""
        if not self._loads:
            return []
        results = []
        now = self._clock()
        for load_id, loads in list(self._loads.items()):
            for load in loads:
                if load.ended is None and now >= load.deadline + self.overdue_s:
                    self._end(load, Cause.DEADLINE.value)
            ended = [load.ended for load in loads if load.ended is not None]
            if len(ended) == len(loads):
                results.append(merge_results(ended))
                del self._loads[load_id]
        return results

    def take_rested(self) -> list[LoadId]:
        """The loads in whose blocks nothing is written any more, since the last call. Each of them
        has ended before, with ``num_resting`` set.
        """
        return []

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and there is nothing to take."""
        return not self._loads

    def num_loads(self) -> int:
        return len(self._loads)

    def num_loaded_bytes(self) -> int:
        """What the loads whose results have not been taken have brought so far."""
        return sum(load.num_bytes for load in chain.from_iterable(self._loads.values()))

    def _add(self, load_id: LoadId, loads: list[LoadT]) -> None:
        """It is about to begin, in these parts."""
        self._loads[load_id] = loads
        self._for_steps += [load for load in loads if load.in_step]

    def _in_step(self) -> list[LoadT]:
        """Those that are under way. Each layer asks, and many others may be beside them."""
        self._for_steps = [load for load in self._for_steps if load.ended is None]
        return self._for_steps

    def _wait(self, load: LoadT, landed: Callable[[], bool]) -> None:
        if landed():
            return
        with self._landed:
            self._landed.wait_for(
                lambda: load.ended is not None or landed(),
                timeout=max(0.0, load.deadline - self._clock()),
            )
        if load.ended is None and not landed():
            self._end(load, Cause.DEADLINE.value)

    # Any thread.

    def _end(self, load: LoadT, cause: str) -> None:
        if not load.end(cause):
            return
        assert load.ended is not None
        if load.ended.cause:
            logger.warning("%s failed: %s", load, load.ended.cause)
            for other in load.others:
                other.end(load.ended.cause)
        with self._landed:
            self._landed.notify_all()

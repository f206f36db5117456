# SPDX-License-Identifier: Apache-2.0
"""What the pool is believed to have."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class KnownKeys:
    """Blocks that the pool is believed to have, by hash and KV cache group, and where, so that they
    are not stored again. Scheduler thread.

    The pool evicts without telling us, so what is believed is forgotten after a while.
    """

    def __init__(
        self,
        max_keys: int,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = 600.0,
    ) -> None:
        self._clock = clock
        self._max_keys = max_keys
        self._ttl_s = ttl_s
        self._found: OrderedDict[bytes, tuple[float, Place]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._found)

    def __contains__(self, key: bytes) -> bool:
        found = self._found.get(key)
        return found is not None and found[0] > self._clock()

    def is_recent(self, key: bytes, age_s: float) -> bool:
        """Whether it was noted not longer ago than that."""
        found = self._found.get(key)
        return found is not None and self._clock() < found[0] - self._ttl_s + age_s

    def note(self, key: bytes, place: Place) -> Place:
        """It is there now (``NOWHERE``: it is gone); where it was believed to be."""
        _, before = self._found.pop(key, (0.0, Place.NOWHERE))
        if place is not Place.NOWHERE:
            self._found[key] = self._clock() + self._ttl_s, place
            if len(self._found) > self._max_keys:
                self._found.popitem(last=False)
        return before

    def clear(self) -> dict[bytes, Place]:
        """Forget everything; what was believed."""
        found, self._found = self._found, OrderedDict()
        return {key: place for key, (_, place) in found.items()}

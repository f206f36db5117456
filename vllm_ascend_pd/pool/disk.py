# SPDX-License-Identifier: Apache-2.0
"""Calls on a disk that may not return, as that of a network whose server is away.

read threads ──call───────────────► disk     each is held by its own call
save thread  ──do──► disk thread ──► disk     it goes on without a call that does not return
"""

from __future__ import annotations

import math
import queue
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_POLL_S = 0.1
_STOP_TIMEOUT_S = 2.0

GivenUp: TypeAlias = "Callable[[], bool]"
"""Whether the one who has asked waits no longer, and his memory is another one's."""


@dataclass(slots=True, eq=False)
class _Order:
    work: Callable[[GivenUp], None]
    ended: threading.Event = field(default_factory=threading.Event)
    given_up: bool = False
    """The one who has asked writes, the disk thread reads."""
    error: Exception | None = None


class Disk:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards ``_calls``
        self._numbers = count()
        self._calls: dict[int, float] = {}
        """Under way: when each began."""
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pd-pool-disk", daemon=True)
        self._thread.start()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around each call."""
        number = next(self._numbers)
        with self._lock:
            self._calls[number] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._calls[number]

    def is_held(self, seconds: float) -> bool:
        """Whether a call has not returned for longer."""
        with self._lock:
            began = min(self._calls.values(), default=math.inf)
        return time.monotonic() - began > seconds

    def do(self, work: Callable[[GivenUp], None], patience_s: float) -> bool:
        """On the disk thread, behind what others have asked for. Whether it has ended, or was given
        up since a call on the disk has not returned for longer than ``patience_s``, or after
        ``stop``. Raises what it raises.
        """
        order = _Order(work)
        self._orders.put(order)
        while not order.ended.wait(_POLL_S):
            if self.is_held(patience_s) or not self._thread.is_alive():
                order.given_up = True
                return False
        if order.error is not None:
            raise order.error
        return True

    def stop(self) -> None:
        """What has been asked for is done; a thread that a call holds is left behind."""
        self._orders.put(None)
        self._thread.join(_STOP_TIMEOUT_S)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                order.work(lambda order=order: order.given_up)  # type: ignore[misc]
            except Exception as e:  # noqa: BLE001 - it is raised where it was asked for
                order.error = e
            order.ended.set()

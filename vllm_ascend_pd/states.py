# SPDX-License-Identifier: Apache-2.0
"""States that change by a table: ``{state: {event: next state}}``.

A table names every event that may come in a state, also the one that comes too late and changes
nothing. Any other is a bug: it is logged and counted, and changes nothing either, because a request
is better served without its transfer than not at all. Tests have it raise.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Generic, TypeVar

from vllm_ascend_pd import envs
from vllm_ascend_pd.errors import StateError
from vllm_ascend_pd.log_limit import limited_logger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from enum import Enum

logger = limited_logger(__name__)

S = TypeVar("S", bound="Enum")
E = TypeVar("E", bound="Enum")


class _Impossible:
    """How many impossible events this process has seen. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def note(self) -> None:
        with self._lock:
            self._count += 1

    def take(self) -> dict[str, int]:
        """Since the last call, in the form of ``Reactor.take_errors``."""
        with self._lock:
            count, self._count = self._count, 0
        return {"states": count} if count else {}


impossible = _Impossible()


class Transitions(Generic[S, E]):
    """One table. It holds no state itself, so it may be shared by all threads."""

    def __init__(self, table: Mapping[S, Mapping[E, S]]) -> None:
        self.table = table

    def after(self, state: S, event: E) -> S:
        """The state after ``event``; ``state`` itself where the event comes too late."""
        after = self.table[state].get(event)
        if after is not None:
            return after
        text = f"{type(state).__name__} {state.name} knows no {event.name}"
        if envs.raises_state_errors():
            raise StateError(text)
        logger.error("%s: please report it", text)
        impossible.note()
        return state

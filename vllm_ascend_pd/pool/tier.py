# SPDX-License-Identifier: Apache-2.0
"""The contract of a pool tier. Every tier, and the fake one, passes the same test suite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class Place(IntEnum):
    """Where a value lies, seen from this process. Small: lookups answer one for each key."""

    NOWHERE = 0
    DRAM = 1
    """Memory of this host that this process contributes."""
    REMOTE = 2
    """Memory that another process contributes, here or on another host."""
    SSD = 3

    @property
    def label(self) -> str:
        """Of metrics and provenance."""
        return self.name.lower()


class Status(Enum):
    """How one put or get ended."""

    OK = "ok"
    MISSING = "missing"
    """Get: there is no such value (any more)."""
    FULL = "full"
    """Put: no memory now; it may be there later."""
    DAMAGED = "damaged"
    """Get: there is a value, and it is not what was put."""
    FAILED = "failed"
    """The tier could not do it. After a failed get, bytes may land in the buffer later."""


@dataclass(frozen=True, slots=True)
class Value:
    """A key and the memory of this process that its value is read from or written to."""

    key: str
    addr: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """What the tier holds now; ``None`` where it cannot say."""

    num_keys: int | None
    used_bytes: int | None
    capacity_bytes: int | None


class Tier(ABC):
    """Keys with immutable values. Worker process, any thread.

    Every method blocks until the tier has answered, and releases the GIL meanwhile. Nothing is
    raised for what happens to a tier in operation: a tier that is down answers with ``FAILED``
    and ``NOWHERE``. The caller keeps buffers mapped, and does not use the buffer of a failed get
    again for some seconds. Whether a value is the right one is the caller's to verify.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[str]) -> list[Place]:
        """Where each value is. One that is found stays readable for about a second."""

    @abstractmethod
    def put(self, values: Sequence[Value]) -> list[Status]:
        """Store copies of the buffers. The first value of a key stays: a second put is ``OK`` and
        changes nothing.
        """

    @abstractmethod
    def get(self, values: Sequence[Value]) -> list[Status]:
        """Fill the buffers. A value whose size is not ``num_bytes`` is ``DAMAGED``."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Forget these values; unknown keys are ignored."""

    @abstractmethod
    def clear(self) -> int:
        """Forget every value; how many there were."""

    @abstractmethod
    def stats(self) -> TierStats:
        """What it holds."""

    @abstractmethod
    def is_healthy(self) -> bool:
        """Whether a call is expected to work now. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; idempotent. Later calls answer as a tier that is down."""


@runtime_checkable
class SupportsView(Protocol):
    """A tier of which some values lie in this process's memory and need not be copied to be read.
    Any thread.
    """

    def view(self, keys: Sequence[str], num_bytes: int) -> AbstractContextManager[list[int]]:
        """The address of each value of ``num_bytes``, 0 when it cannot be read in place.

        Inside the context the memory stays mapped, but what it holds may be evicted and replaced
        at any time. A copy that does not verify says nothing about the value: ``get`` does.
        """

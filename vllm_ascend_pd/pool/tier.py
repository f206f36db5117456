# SPDX-License-Identifier: Apache-2.0
"""The contract of a pool tier. Every tier, and the fake one, passes the same test suite."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.host_memory import available_memory_bytes
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from vllm_ascend_pd.backends.mooncake_engine import SharedEngine
    from vllm_ascend_pd.config import PoolConfig

logger = logging.getLogger(__name__)

_DRAM_SHARE = 0.25


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
    tenant: str = ""
    """Of a put: whose share of the tier it takes, see ``keys.tenant_of``."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a tier is told when a worker opens it. All workers of an engine do so at a time."""

    config: PoolConfig
    """With this worker's part of memory and disk, and a folder of its own."""
    host: str = "127.0.0.1"
    """Where this engine is reached."""
    rank: int = 0
    num_workers: int = 1
    from_first: Callable[[Any], Any] = lambda value: value
    """What the first worker calls it with, for all of them, which call it at the same time."""
    shared: SharedEngine | None = None
    """The transfers' engine, where a process can have only one."""
    value_bytes: int = 0
    """Of the largest values that it is to keep."""

    def memory_bytes(self) -> int:
        """To contribute: as configured, or a quarter of what is available.

        Raises:
            ConfigError: this host, or its container, does not have it for all workers, of which
                the first one says so: another may have taken its part before the last one looks.
        """
        available = available_memory_bytes()
        num_bytes = self.config.dram_size
        if num_bytes is None:
            num_bytes = int(available * _DRAM_SHARE) // self.num_workers
        if self.rank == 0 and num_bytes * self.num_workers > available:
            raise ConfigError(
                f"pool.dram_size, {num_bytes * self.num_workers} bytes, is more than the"
                f" {available} bytes that are available here: the engine would be killed once it is"
                " full; lower it"
            )
        # What is available changes as soon as one of them takes its part.
        num_bytes = int(self.from_first(num_bytes))
        if self.config.dram_size is None:
            self.warn_of_no_room(
                "a quarter of the memory that is available here",
                num_bytes,
                "see the memory limit of the container, or say pool.dram_size",
            )
        elif num_bytes or "dram" in self.config.tiers:  # to Mooncake an engine may give nothing
            self.warn_of_no_room("pool.dram_size", num_bytes)
        return num_bytes

    def warn_of_no_room(self, field: str, num_bytes: int, advice: str = "") -> None:
        """Where a tier's so many bytes, as ``field`` says, are less than a value has."""
        if num_bytes < self.value_bytes:
            least_bytes = self.value_bytes * self.num_workers
            logger.warning(
                "KV pool: %s, %d bytes for each worker, holds no block (%d bytes), so nothing is"
                " kept in it: %s",
                field,
                num_bytes,
                self.value_bytes,
                advice or f"raise it to {least_bytes} bytes or more",
            )

    def check_share(self, field: str, num_bytes: int) -> None:
        """Of a tier with so many bytes, as ``field`` says.

        Raises:
            ConfigError: no value fits into a tenant's share of them.
        """
        for option, share in self.config.shares.items():
            if int(num_bytes * share) < self.value_bytes:
                least_bytes = math.ceil(self.value_bytes / share) * self.num_workers
                raise ConfigError(
                    f"{option} {share:g} of the {num_bytes} bytes that a worker has of {field} is"
                    f" less than the {self.value_bytes} bytes of a block, so nothing could be"
                    f" stored; raise {field} to {least_bytes} bytes or more, or the share"
                )


class Tier(ABC):
    """Keys with immutable values. Worker process, any thread.

    Every method blocks until the tier has answered, and releases the GIL meanwhile. Nothing is
    raised for what happens to a tier in operation: a tier that is down answers with ``FAILED``
    and ``NOWHERE``. The caller keeps buffers mapped, and does not use the buffer of a failed get
    again for some seconds. Whether a value is the right one is the caller's to verify.
    """

    stores_to: ClassVar[Place] = Place.DRAM
    """Where a value lies that has just been put."""
    is_shared: ClassVar[bool] = False
    """Whether every worker of the engine, and others, find what one of them has put."""

    num_over_share = 0
    """Values that were evicted because their tenant had its share."""
    num_file_errors = 0
    """Files that could not be written, on a disk that is full too, or read."""

    @classmethod
    @abstractmethod
    def open(cls, opening: Opening) -> Tier:
        """Raises ``ConfigError`` or ``BackendError`` if it cannot be opened as configured."""

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

    def tenants(self, keys: Sequence[str]) -> list[str]:
        """Whose they are, where the tier knows."""
        return [""] * len(keys)

    def register(self, addr: int, num_bytes: int) -> None:  # noqa: B027 - most need not know
        """Values will be read from and written to this memory."""

    def unregister(self, addr: int) -> None:  # noqa: B027
        """Not any more."""

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

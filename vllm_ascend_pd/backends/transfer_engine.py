# SPDX-License-Identifier: Apache-2.0
"""The contract between P2P transfer and whatever moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NewType, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.backends.block_copy import Region

TransferHandle = NewType("TransferHandle", int)


class TransferStatus(Enum):
    """What has become of one submitted write."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class TransferEngine(ABC):
    """One-sided writes from registered memory of this process into registered memory of a peer.

    Threads: every method may be called from any thread; the engine locks for itself and holds no
    lock while bytes move. No call holds the GIL while it waits for the network.

    Blocking: `submit_write` and `poll` return promptly (a copy in memory is prompt), `register`,
    `unregister` and `close` may take milliseconds to seconds and belong to start-up and shutdown.
    `submit_write` may make first contact with a peer, but does not wait for a network.

    The caller guarantees that source bytes do not change, and that source and destination stay
    mapped, from `submit_write` until the write is terminal. It sets its own deadline, since a write
    that never ends is legal; after the deadline the source is still busy until `poll` is terminal.
    After FAILED without `direct_placement` late bytes may still land in the destination, mostly
    within `LATE_WRITE_S`; of a process that was stopped meanwhile they come later still. So what is
    copied out of it must be verified, and it had better rest before it is reused.

    The implementation guarantees that DONE is reported only when all bytes are visible in the
    memory of the peer, and that an outcome the network can cause (peer dead, unknown session,
    address not registered over there) is FAILED and never an exception. Exceptions are
    bugs of the caller: `ValueError` for bad arguments, `KeyError` for an unknown handle, and
    `BackendError` for a call on a closed engine or a library that refuses a local operation.
    """

    LATE_WRITE_S: ClassVar[float] = 10.0
    """How long after a failure or a time-out bytes of a write may be under way, seconds. What no
    checksum guards rests so long; for staging see `kv.load.QUARANTINE_S`."""

    session: str
    """Address that peers pass to `submit_write`, e.g. "127.0.0.1:15321"."""
    direct_placement: bool = False
    """True only if no byte is ever written after FAILED; only then may live KV be a target."""

    @abstractmethod
    def register(self, addr: int, num_bytes: int) -> None:
        """Opens [addr, addr + num_bytes) to peers and as a source.

        Few large regions are far cheaper than many small ones.

        Raises:
            ValueError: null address, empty range, or overlap with a registered region.
        """

    @abstractmethod
    def unregister(self, addr: int) -> None:
        """Closes the region that starts at `addr`; `ValueError` if there is none."""

    @abstractmethod
    def submit_write(
        self, session: str, src_addr: int, dst_addr: int, num_bytes: int
    ) -> TransferHandle:
        """Starts one contiguous write and returns at once; its outcome is told by `poll`.

        Raises:
            ValueError: the range is empty or the source is not inside one registered region.
        """

    @abstractmethod
    def poll(self, handle: TransferHandle) -> TransferStatus:
        """Status of a write; once DONE or FAILED has been returned, the handle is forgotten.

        The caller polls a handle from one thread at a time. Writes that were pending when the
        engine was closed are FAILED.
        """

    @abstractmethod
    def num_regions(self) -> int:
        """Number of registered regions, for leak checks."""

    @abstractmethod
    def close(self) -> None:
        """Unregisters everything and leaves the network; idempotent."""


@runtime_checkable
class SupportsDirectPlacement(Protocol):
    """An engine whose `direct_placement` may be True: it writes many pieces as one, into live KV.

    A batch is a write as any other: DONE once all of it is visible in the memory of the peer, and
    after FAILED not one byte of it is written any more, though some may have been. The caller
    holds source and destination until the batch is terminal, however long that takes; a peer that
    died is not heard of again, and `LATE_WRITE_S` later nothing of it is under way.
    """

    def submit_batch(
        self,
        session: str,
        src_addrs: Sequence[int],
        dst_addrs: Sequence[int],
        lengths: Sequence[int],
    ) -> TransferHandle:
        """Starts writes of `lengths[i]` bytes from `src_addrs[i]` to the peer's `dst_addrs[i]`.

        Raises:
            ValueError: the lists are empty or of different length, a source is not inside one
                registered region, or this engine does not declare direct placement.
        """


@runtime_checkable
class SupportsReach(Protocol):
    """An engine that does not reach every peer, and knows which."""

    def reaches(self, session: str) -> bool:
        """Whether writes to `session` can be tried; may make first contact, for milliseconds."""


@runtime_checkable
class SupportsWindow(Protocol):
    """An engine whose peers' registered memory can be written as if it were this process's.

    What is packed right into a window needs no staging memory and no write. The bytes are in the
    peer's memory when the packer returns; the caller asks for the window again to learn whether
    the peer was there to the end, and before it packs more: what is asked of the engine meanwhile,
    for whichever peer, may unmap that of one that has ended.
    """

    def window(self, session: str, addr: int, num_bytes: int) -> Region | None:
        """The peer's `[addr, addr + num_bytes)`, or None when it may not be written (any more)."""

# SPDX-License-Identifier: Apache-2.0
"""The prompts that a producer keeps for its consumers."""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.transfer.lease_states import (
    PRODUCER_TRANSITIONS,
    ProducerEvent,
    ProducerState,
)
from vllm_ascend_pd.types import Cause, Epoch, LeaseRef, TransferId, serves
from vllm_ascend_pd.wire import WIRE_VERSION, Open, Opened, Refused, Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.kv.span import Span
    from vllm_ascend_pd.transfer.tickets import PageServer
    from vllm_ascend_pd.wire import GroupHashes, Worker

logger = limited_logger(__name__)

_MAX_RELEASED_EARLY = 4096
_MAX_ASKERS = 64
"""Consumers of one prompt that are told its first token; others compute it."""


def tail_digest(parent_hash: bytes, extra_keys: bytes, token_ids: Sequence[int]) -> bytes:
    """Identifies the tokens of a block that is not full, with all that its hash would cover.

    Args:
        parent_hash: Hash of the block before it, or ``b""``.
        extra_keys: What vLLM adds to the hash beside tokens (cache salt, LoRA, images).
        token_ids: The tokens of the tail.
    """
    digest = hashlib.blake2b(digest_size=32)
    for part in (parent_hash, extra_keys):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


class Tail(NamedTuple):
    """What a span's last unit holds in one group: at least a token, and what vLLM would hash beside
    them. One that ``is_whole``, a state, is of use to whoever wants all of these tokens.
    """

    token_ids: tuple[int, ...]
    extra_keys: bytes
    is_whole: bool = False


@dataclass(slots=True, eq=False)
class Lease:
    """A span of one sequence on this engine. Immutable but for ``state``, ``expires_at``,
    ``ends_at``, ``is_opened``, ``first_token_id``, ``askers`` and, while it is computed, ``span``,
    whose blocks become known then, and whose end may grow: with it grow its hashes and ``tails``
    (scheduler thread only).

    ``tails`` are by group. An ``announced`` lease can be opened before its span is computed.
    """

    transfer_id: TransferId
    span: Span
    tails: tuple[Tail, ...]
    announced: bool = False
    request_id: str = ""
    """Whose prompt it is, for the log."""
    state: ProducerState = ProducerState.OPEN
    expires_at: float = 0.0
    ends_at: float = math.inf
    """Nothing renews it beyond."""
    is_opened: bool = False
    """Whether a consumer has come."""
    cause: str = ""
    generation: int = 0
    """Counted by the book."""
    sampling_key: bytes = b""
    """How the token after the prompt is sampled here; empty when it is not for consumers."""
    first_token_id: int | None = None
    """That token, once the prompt is computed."""
    askers: list[tuple[bytes, Open]] = field(default_factory=list)
    """Consumers that are told that token, by the identity of their connection."""

    @property
    def ref(self) -> LeaseRef:
        return LeaseRef(self.transfer_id, self.generation)

    @property
    def num_blocks(self) -> int:
        """Those that it holds, of all groups."""
        return len(self.span.block_ids)

    def match(self, request: Open) -> int:
        """How many of the tokens that ``request`` asks for are here, in every group: all, or whole
        units.
        """
        if len(request.groups) != len(self.span.groups):
            return 0
        return min(self._match(i, theirs, request.end) for i, theirs in enumerate(request.groups))

    def _match(self, group: int, theirs: GroupHashes, end: int) -> int:
        blocks, tail = self.span.groups[group], self.tails[group]
        num_units = 0
        for our_hash, their_hash in zip(blocks.hashes, theirs.block_hashes, strict=False):
            if our_hash != their_hash:
                break
            num_units += 1
        unit, start = self.span.unit_size, self.span.unit_start
        matched, num_before_tail = num_units * unit, start // unit
        count = end - start
        if (
            num_units < num_before_tail
            or len(theirs.block_hashes) != num_before_tail
            or not 0 < count <= len(tail.token_ids)
            or (tail.is_whole and count < len(tail.token_ids))
        ):
            return matched
        parent = blocks.hashes[num_before_tail - 1] if num_before_tail else b""
        digest = tail_digest(parent, tail.extra_keys, tail.token_ids[:count])
        return end if digest == theirs.tail_digest else matched


class LeaseBook:
    """The leases by transfer id.

    Written by the scheduler thread (grant, finish, revoke) and by the control thread (open,
    heartbeat, release, expire), under one lock; nothing is sent or freed under it. A closed lease
    waits in ``take_closed`` until the scheduler thread unpins its blocks.
    """

    def __init__(
        self,
        epoch: Epoch,
        fingerprint: str,
        lease_s: float,
        clock: Callable[[], float],
        max_lease_s: float = math.inf,
    ) -> None:
        self._max_lease_s = max_lease_s
        self._epoch = epoch
        self._fingerprint = fingerprint
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._closed: list[Lease] = []
        # Blocks of those that are computed and no consumer has opened, the oldest first.
        self._unopened: dict[Lease, int] = {}
        self._num_unopened_blocks = 0
        # Transfer ids that were released before they came, and until when that is remembered.
        self._released_early: dict[str, float] = {}
        self._next_look = math.inf
        """Nothing is over before: to look at all of them each time would cost their square."""
        self._generations = itertools.count(1)
        self.page_servers: tuple[PageServer, ...] = ()
        """Of the workers, by rank; written by the scheduler thread, once."""

    def identify(self, fingerprint: str) -> None:
        """What this engine is from now on (scheduler thread)."""
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        with self._lock:
            return len(self._leases)

    def __contains__(self, transfer_id: str) -> bool:
        with self._lock:
            return transfer_id in self._leases

    @property
    def num_released_early(self) -> int:
        with self._lock:
            return len(self._released_early)

    # Scheduler thread.

    def grant(self, lease: Lease) -> None:
        with self._lock:
            lease.generation = next(self._generations)
            self._leases[lease.transfer_id] = lease
            is_released = self._released_early.pop(lease.transfer_id, None) is not None
        if is_released:
            self._end(lease.transfer_id, ProducerEvent.RELEASED)

    def finish(self, lease: Lease, first_token_id: int | None = None) -> bool:
        """The prompt is computed and pinned: consumers may open it from now on."""
        with self._lock:
            if not _advance(lease, ProducerEvent.FINISHED):
                return False
            lease.ends_at = self._clock() + self._max_lease_s
            lease.first_token_id = first_token_id
            self._renew(lease)
            if not lease.is_opened:
                self._unopened[lease] = lease.num_blocks
                self._num_unopened_blocks += self._unopened[lease]
            return True

    def revoke(self, lease: Lease) -> bool:
        return self._end(lease.transfer_id, ProducerEvent.REVOKED)

    def differing(self, request: Open) -> str:
        """Why the KV of this engine is none for who asks; empty if it is. Any thread."""
        if request.version != WIRE_VERSION:
            return f"wire version {request.version} there, {WIRE_VERSION} here"
        if not serves(self._fingerprint, request.fingerprint):
            return f"the engines differ: {request.fingerprint} there, {self._fingerprint} here"
        return ""

    def admit(self, lease: Lease, end: int) -> tuple[Worker, ...]:
        """What entitles who has opened it to its tokens [0, ``end``)."""
        return tuple(server.admit(lease.ref, end) for server in self.page_servers)

    def make_way(self, max_blocks: int) -> int:
        """Leases that no consumer has opened hold no more blocks: the oldest ones end, but not the
        newest. Returns how many.
        """
        over = []
        with self._lock:
            num_blocks = self._num_unopened_blocks
            if num_blocks > max_blocks:
                for lease in list(self._unopened)[:-1]:
                    if num_blocks <= max_blocks:
                        break
                    num_blocks -= self._unopened[lease]
                    over.append(lease.transfer_id)
        return sum(self._end(transfer_id, ProducerEvent.DISPLACED) for transfer_id in over)

    def revoke_all(self) -> None:
        with self._lock:
            ids = list(self._leases)
        for transfer_id in ids:
            self._end(transfer_id, ProducerEvent.REVOKED)

    def take_closed(self) -> list[Lease]:
        """Leases that ended since the last call; their blocks may be unpinned."""
        if not self._closed:
            return []
        with self._lock:
            closed, self._closed = self._closed, []
            return closed

    # Control thread.

    def open(self, request: Open, identity: bytes = b"") -> Opened | Waiting | Refused:
        """Answer a consumer; an accepted open renews the lease.

        ``identity`` is that of its connection: see ``take_askers``.
        """

        def refuse(cause: Cause, detail: str) -> Refused:
            logger.warning("refused transfer %s: %s", request.transfer_id, detail)
            return Refused(request.transfer_id, cause.value, detail)

        if differing := self.differing(request):
            return refuse(Cause.INCOMPATIBLE, differing)
        if request.epoch and request.epoch != self._epoch:
            return refuse(Cause.WRONG_EPOCH, "this engine was restarted since the prefill")
        with self._lock:
            lease = self._leases.get(request.transfer_id)
            is_computed = lease is not None and lease.state is ProducerState.LEASED
            if lease is not None and not is_computed and not lease.announced:
                lease = None
            # The next tick ends it.
            is_over = is_computed and lease is not None and lease.expires_at <= self._clock()
            servers = self.page_servers
        if (lease is None or not servers) and not request.epoch:
            return Waiting(request.transfer_id)
        if lease is None or is_over or not servers:
            return refuse(Cause.LEASE_EXPIRED, "no such lease (expired, released or revoked)")
        end = lease.match(request)
        if not end:
            return refuse(Cause.HASH_MISMATCH, "the lease holds another prompt's KV")
        with self._lock:
            lease.is_opened = True
            self._not_unopened(lease)
            self._renew(lease)
        first_token_id, first_token_follows = None, False
        if end == request.end == lease.span.end:  # the same to its end
            first_token_id, first_token_follows = self._first_token(lease, request, identity)
        return Opened(
            request.transfer_id,
            end,
            self.admit(lease, end),
            self._epoch,
            is_computed,
            first_token_id=first_token_id,
            first_token_follows=first_token_follows,
        )

    def _first_token(self, lease: Lease, request: Open, identity: bytes) -> tuple[int | None, bool]:
        """The token, or whether it follows: neither where it would be sampled in another way."""
        if not lease.sampling_key or request.sampling_key != lease.sampling_key:
            return None, False
        with self._lock:
            if lease.state is not ProducerState.OPEN:
                return lease.first_token_id, False
            if len(lease.askers) == _MAX_ASKERS:
                return None, False
            lease.askers.append((identity, request))
            return None, True

    def take_askers(self, lease: Lease) -> list[tuple[bytes, Open]]:
        """Whoever was promised the first token of this prompt and has not been told it."""
        with self._lock:
            askers, lease.askers = lease.askers, []
            return askers

    def heartbeat(self, transfer_ids: Sequence[str], epoch: str) -> None:
        if epoch != self._epoch:
            return
        with self._lock:
            for transfer_id in transfer_ids:
                lease = self._leases.get(transfer_id)
                if lease is not None and lease.is_opened:
                    self._renew(lease)

    def release(self, transfer_id: str, epoch: str) -> bool:
        """An empty ``epoch`` is that of a consumer that was never answered (decode first); its
        request may have been quicker than the producer's.
        """
        with self._lock:
            lease = self._leases.get(transfer_id)
            if lease is None and not epoch:
                until = self._released_early[transfer_id] = self._clock() + self._lease_s
                self._next_look = min(self._next_look, until)
                if len(self._released_early) > _MAX_RELEASED_EARLY:
                    del self._released_early[next(iter(self._released_early))]
            if lease is None or (lease.state is ProducerState.OPEN and not lease.announced):
                return False
        return epoch in ("", self._epoch) and self._end(transfer_id, ProducerEvent.RELEASED)

    def expire(self) -> tuple[int, float | None]:
        """End what is over; (number of those, seconds until something may be or ``None``)."""
        now = self._clock()
        with self._lock:
            if now < self._next_look:
                return 0, None if self._next_look == math.inf else self._next_look - now
            leased = [x for x in self._leases.values() if x.state is ProducerState.LEASED]
            for transfer_id in [i for i, until in self._released_early.items() if until <= now]:
                del self._released_early[transfer_id]
            over = [x for x in leased if x.expires_at <= now]
            ends = [x.expires_at for x in leased if x.expires_at > now]
            self._next_look = min((*ends, *self._released_early.values()), default=math.inf)
        for lease in over:
            self._end(lease.transfer_id, ProducerEvent.EXPIRED)
            logger.warning("request %s: transfer %s expired: %s", *self._expired(lease))
        return len(over), min(ends) - now if ends else None

    def _expired(self, lease: Lease) -> tuple[str, str, str]:
        if not lease.is_opened:
            why = f"no consumer has come in {self._lease_s:g} s"
        elif lease.ends_at <= lease.expires_at:
            why = f"its consumer was not done in {self._max_lease_s:g} s"
        else:
            why = f"its consumer was not heard of for {self._lease_s:g} s"
        return lease.request_id, lease.transfer_id, why

    def _renew(self, lease: Lease) -> None:
        """Under the lock."""
        lease.expires_at = min(self._clock() + self._lease_s, lease.ends_at)
        self._next_look = min(self._next_look, lease.expires_at)

    def _not_unopened(self, lease: Lease) -> None:
        """Any more, if it was. Under the lock."""
        self._num_unopened_blocks -= self._unopened.pop(lease, 0)

    def _end(self, transfer_id: str, event: ProducerEvent) -> bool:
        with self._lock:
            lease = self._leases.get(transfer_id)
            if lease is None or not _advance(lease, event):
                return False
            lease.cause = event.name.lower()
            del self._leases[transfer_id]
            self._not_unopened(lease)
            self._closed.append(lease)
            return True


def _advance(lease: Lease, event: ProducerEvent) -> bool:
    """Whether it did not come too late. Under the lock."""
    before, lease.state = lease.state, PRODUCER_TRANSITIONS.after(lease.state, event)
    return lease.state is not before

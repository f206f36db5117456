# SPDX-License-Identifier: Apache-2.0
"""The producer's data side: packs pages that a consumer asks for and writes them to it."""

from __future__ import annotations

import math
import queue
import time
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_ascend_pd.backends.direct_placement import page_runs, plan_writes
from vllm_ascend_pd.backends.transfer_engine import (
    SupportsDirectPlacement,
    SupportsWindow,
    TransferEngine,
    TransferStatus,
)
from vllm_ascend_pd.backends.transports import SHARED_MEMORY
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.kv.span import NO_BLOCK
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.listener import Listener, listen
from vllm_ascend_pd.net.reactor import Reactor
from vllm_ascend_pd.net.trust import Reason
from vllm_ascend_pd.transfer.packing import RingPackers
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey, lease_of
from vllm_ascend_pd.transfer.watchers import Watchers
from vllm_ascend_pd.types import Cause, Endpoint, LeaseRef
from vllm_ascend_pd.wire import Fetch, Fetched, Packing, Progress, Watch, decode_data, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.backends.block_copy import Ids, PageLayout, WorkerPages
    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.backends.transfer_engine import TransferHandle
    from vllm_ascend_pd.backends.transports import Route, Transports
    from vllm_ascend_pd.net.trust import Trust
    from vllm_ascend_pd.transfer.grants import Grant, Grants

logger = limited_logger(__name__)

_MAX_WRITES_PER_PEER = 4
_MAX_QUEUED = 4096
_MAX_QUEUED_BYTES = 128 << 20
"""Of their messages, each of which may be as long as one can be."""
_POLL_S = 100e-6
_SLOW_POLL_S = 1e-3
_SLOW_AFTER_S = 0.02
_MAX_RING_BYTES = 1 << 30
_CAUSES = {
    TransferStatus.DONE: "",
    TransferStatus.FAILED: Cause.TRANSFER_FAILED.value,
    TransferStatus.RUNNING: Cause.DEADLINE.value,
}


class _Queued(NamedTuple):
    identity: bytes
    fetch: Fetch
    came_at: float
    num_bytes: int
    """Of its message."""


@dataclass(slots=True)
class _Write:
    identity: bytes
    fetch_id: int
    transfer_id: str
    route: Route
    slot: Slot | None
    handle: TransferHandle
    checksum: int
    deadline: float
    lease: LeaseRef | None = None
    """Of a write from live pages: it counts only if they are still those of this lease."""


class DataServer(Reactor):
    """Serves ``Fetch`` and ``Watch`` (worker process, own thread). Gathers and writes hold no GIL.

    While one piece is on the wire the next is packed. A peer whose memory is mapped here has its
    pieces packed right into it, through rings where both sides can.
    """

    def __init__(
        self,
        host: str,
        transports: Transports,
        pages: WorkerPages,
        pool: StagingPool,
        grants: Grants,
        allows_host: Callable[[str], bool],
        write_timeout_s: float,
        trust: Trust,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("pd-data-server")
        self._clock = clock
        self._transports = transports
        self._copier = pages.copier
        self._groups = pages.groups
        self._runs = [page_runs(group.layout) for group in pages.groups]
        self._staging = pool
        self._grants = grants
        self._allows_host = allows_host
        self.write_timeout_s = write_timeout_s
        self._queue: deque[_Queued] = deque()
        self._num_queued_bytes = 0
        self._writes: deque[_Write] = deque()
        self._rings = RingPackers(pages.copier, grants, write_timeout_s, self._reply, self.attempt)
        self._watchers = Watchers(grants, self._reply)
        self._trust = trust
        listening = listen(host, 0)
        port = listening.getsockname()[1]
        self.page_server = PageServer(Endpoint(host, port, trust.key), TicketKey(), pages.layers)
        self.listener = Listener(self, listening, trust, self._on_frame)
        self._progress_at = 0.0

    def counts(self) -> dict[str, int]:
        """What peers wait for; any thread."""
        return {
            "watches": len(self._watchers),
            "fetches": len(self._queue),
            "rings": len(self._rings),
        }

    def _on_frame(self, identity: bytes, payload: bytes) -> None:
        try:
            message = decode_data(payload)
        except TransferError as e:
            self._trust.note_refused(Reason.MALFORMED, f"a message of a peer ({e})")
            return
        if not isinstance(message, Fetch | Watch):
            return
        if not self._is_entitled(message):
            self._refuse(identity, message)
        elif isinstance(message, Watch):
            self._watchers.add(identity, message)
        elif self._has_room(len(payload)):
            self._queue.append(_Queued(identity, message, self._clock(), len(payload)))
            self._num_queued_bytes += len(payload)
        else:
            logger.warning("refused a fetch: %d others wait already", len(self._queue))
            failed = Cause.TRANSFER_FAILED.value
            self._reply(identity, Fetched(message.fetch_id, 0, failed))

    def _has_room(self, num_bytes: int) -> bool:
        """For one more that waits."""
        has_memory = self._num_queued_bytes + num_bytes <= _MAX_QUEUED_BYTES
        return len(self._queue) < _MAX_QUEUED and has_memory

    def _is_entitled(self, message: Fetch | Watch) -> bool:
        """Whether an open was accepted for what it asks for."""
        if not self.page_server.key.accepts(message.transfer_id, message.ticket):
            return False
        if isinstance(message, Watch):
            return True
        if not 0 <= message.group < len(self._groups):
            return False
        block_size = self._groups[message.group].block_size
        return all(index * block_size < message.ticket.end for index in message.block_indices)

    def _refuse(self, identity: bytes, message: Fetch | Watch) -> None:
        self._trust.note_refused(Reason.NO_TICKET, f"a consumer of {message.transfer_id[:64]!r}")
        cause = Cause.NO_TICKET.value
        answer: Fetched | Progress
        if isinstance(message, Fetch):
            answer = Fetched(message.fetch_id, 0, cause)
        else:
            answer = Progress(message.transfer_id, 0, 0, 0, cause)
        self._reply(identity, answer)

    def notify(self) -> None:
        """Grants have changed. Main thread; cheap when nobody watches."""
        if self._watchers:
            self.submit(self._watchers.tell)

    def notify_layer(self) -> None:
        """As ``notify``, for the prompts of the running step."""
        if self._watchers:
            self.submit(self._watchers.tell_layer)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no page is read any more, all grants being gone; whether that came true. Main
        thread.
        """
        deadline = self._clock() + timeout_s
        answers: queue.Queue[bool] = queue.Queue()

        def tell() -> None:
            answers.put(not self._rings and all(write.lease is None for write in self._writes))

        while (left_s := deadline - self._clock()) > 0:
            self.submit(tell)
            try:
                if answers.get(timeout=left_s):
                    return True
            except queue.Empty:
                break
            time.sleep(_SLOW_POLL_S)
        return False

    def on_tick(self) -> float | None:
        is_idle = not self._queue and not self._writes
        progress = self._poll_writes() | self._rings.go_on(may_wait=is_idle)
        while (ready := self._next_ready()) is not None:
            slot = self._staging.acquire()
            if slot is None:
                break
            progress = True
            identity, fetch, came_at, num_bytes = self._queue[ready]
            del self._queue[ready]
            self._num_queued_bytes -= num_bytes
            if fetch.live is not None and self._clock() >= came_at + TransferEngine.LATE_WRITE_S:
                # Its consumer may have given it up long since, and the pages be another's.
                with slot:
                    self._reply(identity, Fetched(fetch.fetch_id, 0, Cause.DEADLINE.value))
                continue
            self._serve(identity, fetch, slot)
            self._poll_writes()
        now = self._clock()
        if progress:
            self._progress_at = now
        if self._writes or self._rings:
            slow = now - self._progress_at > _SLOW_AFTER_S
            if not progress and (slow or self._writes):
                time.sleep(_SLOW_POLL_S if slow else _POLL_S)
            return 0.0
        return 0.001 if self._queue else None

    def _next_ready(self) -> int | None:
        """Place in the queue of the first fetch whose peer has not too many writes under way. The
        last slot is for a peer that has none: others may be gone, and theirs take long to fail.
        """
        busy = Counter(write.identity for write in self._writes)
        busy.update(self._rings.identities())
        most = _MAX_WRITES_PER_PEER if self._staging.num_free > 1 else 1
        for place, queued in enumerate(self._queue):
            if busy[queued.identity] < most:
                return place
        return None

    def _serve(self, identity: bytes, fetch: Fetch, slot: Slot) -> None:
        """Pack, and submit or answer; ``slot`` goes back unless a write of it is under way."""
        failed = Fetched(fetch.fetch_id, 0, Cause.TRANSFER_FAILED.value)
        with ExitStack() as held:
            held.enter_context(slot)
            started = self.attempt(partial(self._start, identity, fetch, slot), lambda: failed)
            if isinstance(started, _Write):
                self._writes.append(started)
                held.pop_all()
                return
        if started is not None:
            self._reply(identity, started)

    def _start(self, identity: bytes, fetch: Fetch, slot: Slot) -> _Write | Fetched | None:
        """A write that is under way, or the answer; ``None`` when a ring gives it."""
        grant, num_layers_done, _ = self._grants.look(lease_of(fetch))
        if refused := self._check(fetch, grant, num_layers_done):
            return Fetched(fetch.fetch_id, 0, refused.value)
        route = self._transports.route(fetch.sessions)
        if route is None:
            where = fetch.transfer_id, fetch.sessions
            logger.warning("transfer %s: no transport reaches the peer at %.300s", *where)
            return Fetched(fetch.fetch_id, 0, Cause.TRANSFER_FAILED.value)
        assert grant is not None
        if fetch.live is not None:
            return self._start_direct(identity, fetch, slot, grant, route)
        engine = route.engine
        layers = self._layers(fetch).share(fetch.share, fetch.num_shares)
        ids = _block_ids(fetch, grant)
        if self._rings.start(identity, fetch, route, layers, ids):
            return None
        if fetch.num_bytes > self._staging.slot_bytes:
            return Fetched(fetch.fetch_id, 0, Cause.BAD_PARAMS.value, route.name)
        window = None
        if isinstance(engine, SupportsWindow):
            window = engine.window(route.session, fetch.address, fetch.num_bytes)
        checksum = self._copier.gather(layers, ids, window or slot.region, 0, fetch.seed)
        if lease_of(fetch) not in self._grants:
            return Fetched(fetch.fetch_id, checksum, Cause.LEASE_EXPIRED.value, route.name)
        if window is not None:
            return Fetched(fetch.fetch_id, checksum, "", route.name)
        handle = engine.submit_write(route.session, slot.addr, fetch.address, fetch.num_bytes)
        deadline = self._clock() + self.write_timeout_s
        name = fetch.transfer_id
        return _Write(identity, fetch.fetch_id, name, route, slot, handle, checksum, deadline)

    def _start_direct(
        self, identity: bytes, fetch: Fetch, slot: Slot, grant: Grant, route: Route
    ) -> _Write | Fetched:
        """From our pages right into the consumer's. The slot only counts what is under way, and
        is where a checksum is made if one is wanted. The answer waits for the end of the write,
        however late: until then the consumer keeps its blocks.
        """
        engine = route.engine
        assert fetch.live is not None
        refused = Fetched(fetch.fetch_id, 0, Cause.BAD_PARAMS.value, route.name)
        if not isinstance(engine, SupportsDirectPlacement) or not engine.direct_placement:
            return refused
        ids = _block_ids(fetch, grant)
        checksum = 0
        try:
            runs = self._runs[fetch.group][fetch.first_layer :][: fetch.num_layers]
            writes = plan_writes(runs, ids.tolist(), fetch.live.layers, fetch.live.block_ids)
            self._copier.settle(ids)
            if fetch.seed:
                checksum = self._copier.gather(self._layers(fetch), ids, slot.region, 0, fetch.seed)
            handle = engine.submit_batch(route.session, *writes)
        except ValueError as e:
            logger.warning("a peer's pages do not fit ours: %s", e)
            return refused
        deadline = self._clock() + self.write_timeout_s
        lease = lease_of(fetch)
        name = fetch.transfer_id
        return _Write(
            identity, fetch.fetch_id, name, route, slot, handle, checksum, deadline, lease
        )

    def _check(self, fetch: Fetch, grant: Grant | None, num_layers_done: int) -> Cause | None:
        """Why this fetch may not be served."""
        if grant is None:
            return Cause.LEASE_EXPIRED
        if fetch.epoch != grant.epoch:
            return Cause.WRONG_EPOCH
        group, block_ids = self._groups[fetch.group], grant.block_ids[fetch.group]
        stop_layer = fetch.first_layer + fetch.num_layers
        if not 0 <= fetch.share < fetch.num_shares or not group.layout.divides(fetch.num_shares):
            return Cause.BAD_PARAMS
        page_bytes = group.layout.page_bytes // fetch.num_shares
        num_bytes = fetch.num_layers * len(fetch.block_indices) * page_bytes
        if (
            not 0 <= fetch.first_layer < stop_layer <= len(group.layers)
            or not all(0 <= index < len(block_ids) for index in fetch.block_indices)
            or num_bytes != fetch.num_bytes
            or not 0 < num_bytes <= self._max_bytes(fetch)
            or min(fetch.seed, fetch.address) < 0
            or max(fetch.seed, fetch.address) >= 1 << 63
            or not all(self._may_write_to(*session) for session in fetch.sessions.items())
        ):
            return Cause.BAD_PARAMS
        if any(block_ids[index] == NO_BLOCK for index in fetch.block_indices):
            return Cause.EVICTED
        is_done = stop_layer <= group.num_among(num_layers_done)
        num_computed = grant.num_coming if is_done else grant.num_ready
        # Of a tail, what its consumer may read.
        stop = (max(fetch.block_indices) + 1) * group.block_size
        end = min(stop, fetch.ticket.end)
        is_other = group.states and end != min(stop, num_computed)  # the state behind more tokens
        return Cause.NOT_COMPUTED if end > num_computed or is_other else None

    def _layers(self, fetch: Fetch) -> PageLayout:
        """The pages that it asks for, of every block."""
        layout = self._groups[fetch.group].layout
        return layout.for_layers(fetch.first_layer, fetch.first_layer + fetch.num_layers)

    def _max_bytes(self, fetch: Fetch) -> int:
        """Of one piece. Through a ring goes what any number of pages have."""
        return _MAX_RING_BYTES if fetch.ring_bytes and not fetch.live else self._staging.slot_bytes

    def _may_write_to(self, transport: str, session: str) -> bool:
        """A session of a network transport is ``host:port``; others do not leave this host."""
        if transport == SHARED_MEMORY:
            return True
        return self._allows_host(session.rpartition(":")[0].strip("[]"))

    def _poll_writes(self) -> bool:
        """Answer the writes that ended; a slot is free once its write is over."""
        ended = False
        now = self._clock()
        for write in list(self._writes):
            status = self.attempt(
                partial(write.route.engine.poll, write.handle), lambda: TransferStatus.FAILED
            )
            if status is TransferStatus.RUNNING and now < write.deadline:
                continue
            if status is TransferStatus.RUNNING and write.lease is not None:
                # Only its end is an answer, but others need not wait for it.
                self._take_back(write)
                write.deadline = math.inf
                where = write.transfer_id, write.route.session
                logger.warning("transfer %s: a write into the pages of %s does not end", *where)
                continue
            ended = True
            self._writes.remove(write)
            late_s = write.route.engine.LATE_WRITE_S if status is TransferStatus.RUNNING else 0.0
            self._take_back(write, late_s)
            cause = _CAUSES[status]
            if not cause and write.lease is not None and write.lease not in self._grants:
                cause = Cause.LEASE_EXPIRED.value
            if cause:
                where = write.transfer_id, write.route.session
                logger.warning("transfer %s: a write to %s ended with %s", *where, cause)
            self._reply(
                write.identity, Fetched(write.fetch_id, write.checksum, cause, write.route.name)
            )
        return ended

    def _take_back(self, write: _Write, late_s: float = 0.0) -> None:
        """The slot of a write, which may read it for ``late_s`` more."""
        slot, write.slot = write.slot, None
        if slot is not None:
            with slot:
                slot.quarantine(late_s)

    def _reply(self, identity: bytes, message: Fetched | Packing | Progress) -> None:
        self.listener.send(identity, encode(message))


def _block_ids(fetch: Fetch, grant: Grant) -> Ids:
    block_ids = grant.block_ids[fetch.group]
    return np.array([block_ids[index] for index in fetch.block_indices], dtype=np.int64)

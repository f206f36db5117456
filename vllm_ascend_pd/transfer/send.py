# SPDX-License-Identifier: Apache-2.0
"""The producer's data side: packs pages that a consumer asks for and writes them to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import zmq

from vllm_ascend_pd.backends.transfer_engine import TransferEngine, TransferHandle, TransferStatus
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.transfer.listener import Listener
from vllm_ascend_pd.transfer.reactor import Reactor
from vllm_ascend_pd.transfer.seal import Channel
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import Fetch, Fetched, decode_data, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.backends.block_copy import BlockCopier, PageLayout
    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.transfer.seal import Seals

logger = logging.getLogger(__name__)

_MAX_WRITES_PER_PEER = 4
_POLL_S = 100e-6
_SLOW_POLL_S = 1e-3
_SLOW_AFTER_S = 0.02
_CAUSES = {
    TransferStatus.DONE: "",
    TransferStatus.FAILED: Cause.TRANSFER_FAILED.value,
    TransferStatus.RUNNING: Cause.DEADLINE.value,
}


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Blocks that may be served, and the start of this engine in which that was said."""

    epoch: str
    block_ids: tuple[int, ...]


class Grants:
    """Which blocks may be served under which transfer id.

    Written by the worker's main thread at the begin and end of a step, read by the data server.
    A grant is given up before the forward that may reuse its blocks; the server looks again after
    it has packed, and drops what it packed when the grant is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[str, Grant] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._grants)

    def add(self, transfer_id: str, epoch: str, block_ids: tuple[int, ...]) -> None:
        with self._lock:
            self._grants[transfer_id] = Grant(epoch, block_ids)

    def discard(self, transfer_ids: Sequence[str]) -> None:
        with self._lock:
            for transfer_id in transfer_ids:
                self._grants.pop(transfer_id, None)

    def get(self, transfer_id: str) -> Grant | None:
        with self._lock:
            return self._grants.get(transfer_id)


@dataclass(slots=True)
class _Write:
    identity: bytes
    fetch_id: int
    session: str
    slot: Slot
    handle: TransferHandle
    checksum: int
    deadline: float


class DataServer(Reactor):
    """Serves ``Fetch`` (worker process, own thread). Gathers and writes hold no GIL.

    While one piece is on the wire the next is packed.
    """

    def __init__(
        self,
        host: str,
        engine: TransferEngine,
        copier: BlockCopier,
        layout: PageLayout,
        pool: StagingPool,
        grants: Grants,
        allows_host: Callable[[str], bool],
        write_timeout_s: float,
        seals: Seals,
    ) -> None:
        super().__init__("pd-data-server")
        self._engine = engine
        self._copier = copier
        self._layout = layout
        self._pool = pool
        self._grants = grants
        self._allows_host = allows_host
        self._write_timeout_s = write_timeout_s
        self._queue: deque[tuple[bytes, Fetch]] = deque()
        self._writes: deque[_Write] = deque()
        self._listener = Listener(self.context, seals, Channel.DATA)
        if ":" in host:
            self._listener.socket.setsockopt(zmq.IPV6, 1)
        port = self._listener.socket.bind_to_random_port(
            f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        )
        self.endpoint = Endpoint(host, port)
        self.watch(self._listener.socket, self._on_messages)
        self._progress_at = 0.0

    def _on_messages(self) -> None:
        for identity, payload in self._listener.receive():
            try:
                message = decode_data(payload)
            except TransferError as e:
                logger.warning("dropped a frame of a peer: %s", e)
                continue
            if isinstance(message, Fetch):
                self._queue.append((identity, message))

    def on_tick(self) -> float | None:
        progress = self._poll_writes()
        while (ready := self._next_ready()) is not None:
            slot = self._pool.acquire()
            if slot is None:
                break
            progress = True
            identity, fetch = self._queue[ready]
            del self._queue[ready]
            if refused := self._start(identity, fetch, slot):
                self._pool.release(slot)
                self._reply(identity, Fetched(fetch.fetch_id, 0, refused.value))
            self._poll_writes()
        now = time.monotonic()
        if progress:
            self._progress_at = now
        if self._writes:
            if not progress:
                slow = now - self._progress_at > _SLOW_AFTER_S
                time.sleep(_SLOW_POLL_S if slow else _POLL_S)
            return 0.0
        return 0.001 if self._queue else None

    def _next_ready(self) -> int | None:
        """Place in the queue of the first fetch whose peer has not too many writes under way."""
        busy = Counter(write.session for write in self._writes)
        for place, (_, fetch) in enumerate(self._queue):
            if busy[fetch.session] < _MAX_WRITES_PER_PEER:
                return place
        return None

    def _start(self, identity: bytes, fetch: Fetch, slot: Slot) -> Cause | None:
        """Pack and submit; the cause when it may not or cannot be served."""
        grant = self._grants.get(fetch.transfer_id)
        if grant is None:
            return Cause.LEASE_EXPIRED
        if fetch.epoch != grant.epoch:
            return Cause.WRONG_EPOCH
        block_ids = grant.block_ids
        num_layers = len(self._layout.layer_offsets)
        layers = self._layout.for_layers(fetch.first_layer, fetch.first_layer + fetch.num_layers)
        num_bytes = layers.num_bytes(len(fetch.block_indices))
        if (
            not 0 <= fetch.first_layer < fetch.first_layer + fetch.num_layers <= num_layers
            or not all(0 <= index < len(block_ids) for index in fetch.block_indices)
            or num_bytes != fetch.num_bytes
            or not 0 < num_bytes <= slot.num_bytes
            or min(fetch.seed, fetch.address) < 0
            or max(fetch.seed, fetch.address) >= 1 << 63
            or not self._allows_host(fetch.session.rpartition(":")[0].strip("[]"))
        ):
            return Cause.BAD_PARAMS
        ids = np.array([block_ids[index] for index in fetch.block_indices], dtype=np.int64)
        checksum = self._copier.gather(layers, ids, slot.region, 0, fetch.seed)
        if self._grants.get(fetch.transfer_id) is not grant:
            return Cause.LEASE_EXPIRED
        handle = self._engine.submit_write(fetch.session, slot.addr, fetch.address, num_bytes)
        deadline = time.monotonic() + self._write_timeout_s
        self._writes.append(
            _Write(identity, fetch.fetch_id, fetch.session, slot, handle, checksum, deadline)
        )
        return None

    def _poll_writes(self) -> bool:
        """Answer the writes that ended; a slot is free once its write is over."""
        ended = False
        now = time.monotonic()
        for write in list(self._writes):
            status = self._engine.poll(write.handle)
            if status is TransferStatus.RUNNING and now < write.deadline:
                continue
            ended = True
            self._writes.remove(write)
            cause = _CAUSES[status]
            if status is TransferStatus.RUNNING:
                self._pool.quarantine(write.slot, now + self._engine.LATE_WRITE_S)
            else:
                self._pool.release(write.slot)
            if cause:
                logger.warning("a write to a peer ended with %s", cause)
            self._reply(write.identity, Fetched(write.fetch_id, write.checksum, cause))
        return ended

    def _reply(self, identity: bytes, message: Fetched) -> None:
        self._listener.send(identity, encode(message))

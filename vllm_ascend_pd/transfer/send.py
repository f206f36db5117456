# SPDX-License-Identifier: Apache-2.0
"""The producer's data side: packs pages that a consumer asks for and writes them to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import zmq

from vllm_ascend_pd.backends.block_copy import BlockCopier, PageLayout
from vllm_ascend_pd.backends.staging import Slot, StagingPool
from vllm_ascend_pd.backends.transfer_engine import TransferEngine, TransferHandle, TransferStatus
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.transfer.reactor import Reactor
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import Fetch, Fetched, decode_data, encode

logger = logging.getLogger(__name__)

_MAX_WRITES = 4
_POLL_S = 50e-6
_MAX_FRAME_BYTES = 64 << 20


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
    slot: Slot
    handle: TransferHandle
    checksum: int
    deadline: float
    answered: bool = False


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
        self._socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_FRAME_BYTES)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        port = self._socket.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        self.endpoint = Endpoint(host, port)
        self.watch(self._socket, self._on_message)
        self.num_bytes_sent = 0

    def _on_message(self) -> None:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode_data(frame)
            except TransferError as e:
                logger.warning("dropped a frame of a peer: %s", e)
                continue
            if isinstance(message, Fetch):
                self._queue.append((identity, message))

    def on_tick(self) -> float | None:
        progress = self._poll_writes()
        while self._queue and len(self._writes) < _MAX_WRITES:
            slot = self._pool.acquire()
            if slot is None:
                break
            progress = True
            identity, fetch = self._queue.popleft()
            if refused := self._start(identity, fetch, slot):
                self._pool.release(slot)
                self._reply(identity, Fetched(fetch.fetch_id, 0, refused.value))
            self._poll_writes()
        if self._writes:
            if not progress:
                time.sleep(_POLL_S)
            return 0.0
        return 0.001 if self._queue else None

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
            or not self._allows_host(fetch.session.rpartition(":")[0].strip("[]"))
        ):
            return Cause.BAD_PARAMS
        ids = np.array([block_ids[index] for index in fetch.block_indices], dtype=np.int64)
        checksum = self._copier.gather(layers, ids, slot.region, 0, fetch.seed)
        if self._grants.get(fetch.transfer_id) is not grant:
            return Cause.LEASE_EXPIRED
        handle = self._engine.submit_write(fetch.session, slot.addr, fetch.address, num_bytes)
        self.num_bytes_sent += num_bytes
        deadline = time.monotonic() + self._write_timeout_s
        self._writes.append(_Write(identity, fetch.fetch_id, slot, handle, checksum, deadline))
        return None

    def _poll_writes(self) -> bool:
        """Answer writes that ended. A slot is free only when its write is over, also a late one."""
        ended = False
        now = time.monotonic()
        for write in list(self._writes):
            status = self._engine.poll(write.handle)
            if status is TransferStatus.RUNNING:
                if now >= write.deadline and not write.answered:
                    self._give_up(write, Cause.DEADLINE)
                continue
            ended = True
            self._writes.remove(write)
            self._pool.release(write.slot)
            if status is TransferStatus.DONE and not write.answered:
                self._reply(write.identity, Fetched(write.fetch_id, write.checksum))
            elif not write.answered:
                self._give_up(write, Cause.TRANSFER_FAILED)
        return ended

    def _give_up(self, write: _Write, cause: Cause) -> None:
        write.answered = True
        logger.warning("a write to a peer ended with %s", cause.value)
        self._reply(write.identity, Fetched(write.fetch_id, 0, cause.value))

    def _reply(self, identity: bytes, message: Fetched) -> None:
        self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)

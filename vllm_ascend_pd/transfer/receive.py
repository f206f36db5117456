# SPDX-License-Identifier: Apache-2.0
"""The consumer's data side: asks a producer for pages, verifies them, puts them in place."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.backends.direct_placement import page_runs
from vllm_ascend_pd.backends.transfer_engine import TransferEngine
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.transfer.dealers import Dealers
from vllm_ascend_pd.transfer.plan import Piece, plan_pieces, plan_ready
from vllm_ascend_pd.transfer.reactor import Reactor
from vllm_ascend_pd.transfer.seal import Channel
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import Cause, Endpoint, LoadId
from vllm_ascend_pd.wire import (
    Fetch,
    Fetched,
    LivePages,
    Progress,
    Watch,
    decode_data,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm_ascend_pd.backends.block_copy import BlockCopier, PageLayout
    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.transfer.seal import Seals
    from vllm_ascend_pd.transfer.shares import Share, Source
    from vllm_ascend_pd.wire import Ticket, Worker

logger = logging.getLogger(__name__)

_PIECE_OVERHEAD_S = 1e-3
_FIRST_BYTES_PER_S = 1e9
_SMOOTHING = 0.1

QUARANTINE_S = 5.0
"""A slot whose write may still land is not reused for so long. What lands even later spoils a
checksum, never a page."""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Blocks of one lease to load, scheduler to worker.

    ``block_indices[i]`` of the producer's lease goes to ``block_ids[i]`` of this engine. With
    ``has_tail`` the last one is a tail block, which must be in place before the forward.
    An ``in_step`` load ends within the step that carries it.

    ``peers`` are the producer's workers, by tensor-parallel rank; a worker loads from those that
    hold its pages.

    A load with ``num_awaited`` set begins while the producer still computes the prompt, and ends
    when it has everything and that many of the producer's blocks are computed.
    """

    load_id: LoadId
    peers: tuple[Worker, ...]
    transfer_id: str
    epoch: str
    block_indices: tuple[int, ...]
    block_ids: tuple[int, ...]
    has_tail: bool
    in_step: bool
    timeout_s: float
    num_awaited: int | None = None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended, worker to scheduler: ``cause`` is empty or a value of ``types.Cause``."""

    load_id: LoadId
    cause: str
    num_bytes: int
    elapsed_ms: float
    failed: tuple[int, ...] = ()
    """The block ids that a failed load has not filled; empty when it may be any of them."""
    transport: str = ""
    was_awaited: bool = False
    """Whether the time is mostly that of the producer's computing."""
    num_resting: int = 0
    """Workers in whose blocks a peer may still write, until they report that it is over."""


def merge_results(results: Sequence[LoadResult]) -> LoadResult:
    """One load's result of several parts that have all ended: failed if one of them is."""
    if len(results) == 1:
        return results[0]
    first_failed = next((result for result in results if result.cause), results[0])
    causes = [result for result in results if result.cause]
    knows = bool(causes) and all(result.failed for result in causes)
    return replace(
        first_failed,
        failed=tuple(sorted({b for r in causes for b in r.failed})) if knows else (),
        num_bytes=sum(result.num_bytes for result in results),
        elapsed_ms=max(result.elapsed_ms for result in results),
        num_resting=sum(result.num_resting for result in results),
        transport=next((result.transport for result in results if result.transport), ""),
    )


@dataclass(slots=True, eq=False)
class _Load:
    """What one load takes from one worker of the producer.

    A load from several ends as a whole: when one fails so do the ``others``.

    ``lock`` guards ``ended`` and the scatter into live pages: once ``ended`` is set, by any
    thread, not one byte more is written for this load.
    """

    spec: LoadSpec
    peer: Endpoint
    ticket: Ticket
    theirs: Share
    layout: PageLayout
    """Of this load's part of this worker's pages."""
    pieces: deque[Piece]
    pieces_of_layer: list[int]
    tail_pieces: int
    num_pieces: int
    started: float
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: LoadResult | None = None
    others: list[_Load] = field(default_factory=list)
    num_bytes: int = 0
    transport: str = ""
    num_planned: list[int] = field(default_factory=list)
    """Of an awaited load: how many leading blocks of each layer have been asked for."""
    is_complete: bool = True
    """Whether all pieces are known; an awaited load learns of them bit by bit."""
    watched_at: float = 0.0
    progress: Progress | None = None
    """What the producer said last; an answer that says the same again prolongs nothing."""
    num_unsettled: int = 0
    """Pieces that the producer writes right into the pages, and may still be writing. Under the
    lock, as what is asked for after the end would be written into somebody else's blocks."""

    def has_layer(self, layer: int) -> bool:
        """Whether every piece of it has landed."""
        return not self.pieces_of_layer[layer]

    def has_tails(self) -> bool:
        """Whether every tail block has landed."""
        return not self.tail_pieces

    def end(self, cause: str) -> bool:
        """Final, once; waits for a scatter that is under way (a memcpy)."""
        with self.lock:
            if self.ended is not None:
                return False
            elapsed_ms = (time.monotonic() - self.started) * 1000
            self.ended = LoadResult(
                self.spec.load_id,
                cause,
                self.num_bytes,
                elapsed_ms,
                transport=self.transport,
                was_awaited=self.spec.num_awaited is not None,
                num_resting=int(self.num_unsettled > 0),
            )
            return True


@dataclass(frozen=True, slots=True)
class DirectPlacement:
    """Parked loads are written by their producers right into this worker's pages."""

    verify: bool = False
    """Read them back and compare checksums, through host memory."""


@dataclass(slots=True)
class _InFlight:
    load: _Load
    piece: Piece
    slot: Slot
    seed: int
    sent_at: float
    is_live: bool


class Loader(Reactor):
    """Runs loads (worker process, own thread); the main thread starts, waits and takes results.

    A piece lands in a staging slot, is checked while it is copied into its pages, and only then
    counts. A load that fails, for whatever cause, has ended before its result can be taken.

    With direct placement the pieces of a parked load, whose blocks no request holds, are written
    by the producer itself; the slot then only counts what is under way. Such a load may end while
    a write goes on. Then its blocks rest until the producer has answered for each write, or is
    gone for ``LATE_WRITE_S``: `take_rested` says when.
    """

    def __init__(
        self,
        sessions: Mapping[str, str],
        copier: BlockCopier,
        layout: PageLayout,
        pool: StagingPool,
        seals: Seals,
        answer_timeout_s: float = 2.0,
        push_mode: PushMode = PushMode.AUTO,
        sharding: Sharding | None = None,
        placement: DirectPlacement | None = None,
    ) -> None:
        """``sessions``: where the pool's memory is reached, by transport. ``answer_timeout_s``: a
        producer that a step waits for and that says nothing so long is gone. ``placement``: with
        direct placement only.
        """
        super().__init__("pd-loader")
        self._answer_timeout_s = answer_timeout_s
        self._push_mode = push_mode
        self._sharding = sharding or Sharding()
        self._bytes_per_s = _FIRST_BYTES_PER_S
        # One silent producer must not hold every slot until its pieces are given up.
        self._slots_per_load = max(1, pool.num_slots - pool.num_slots // 4)
        self._sessions = dict(sessions)
        self._copier = copier
        self._layout = layout
        self._pool = pool
        self._num_layers = len(layout.layer_offsets)
        self._peers = Dealers(self, seals, Channel.DATA, self._on_frame, self._on_lost)
        self._active: list[_Load] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._placement = placement
        self._runs = page_runs(layout) if placement is not None else ()
        # Writes into live pages that nobody waits for any more: by fetch until they are answered,
        # or until a time, of peers that are gone.
        self._given_up: dict[int, _InFlight] = {}
        self._resting: list[tuple[float, _Load]] = []
        self._rested: deque[LoadId] = deque()
        self._heard_at: dict[Endpoint, float] = {}
        self._next_fetch_id = random.getrandbits(48)
        self._landed = threading.Condition()
        # Main thread only.
        self._loads: dict[LoadId, list[_Load]] = {}

    # Main thread.

    def start_load(self, spec: LoadSpec) -> None:
        """Begin a load; returns at once."""
        sources = self._sharding.sources(len(spec.peers))
        loads = [self._make_load(spec, source) for source in sources]
        for load in loads:
            load.others = [other for other in loads if other is not load]
        self._loads[spec.load_id] = loads

        def begin() -> None:
            self._active += loads

        self.submit(begin)

    def _make_load(self, spec: LoadSpec, source: Source) -> _Load:
        peer = spec.peers[source.rank]
        layout = self._layout.share(source.ours.index, source.ours.count)
        is_awaited = spec.num_awaited is not None
        pieces = []
        if not is_awaited:
            pieces = plan_pieces(
                self._num_layers,
                len(spec.block_ids),
                spec.has_tail,
                layout.page_bytes,
                self._pool.slot_bytes,
            )
        pieces_of_layer = [0] * self._num_layers
        for piece in pieces:
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                pieces_of_layer[layer] += 1
        now = time.monotonic()
        return _Load(
            spec=spec,
            peer=Endpoint(peer.host, peer.port),
            ticket=peer.ticket,
            theirs=source.theirs,
            layout=layout,
            pieces=deque(pieces),
            pieces_of_layer=pieces_of_layer,
            tail_pieces=sum(piece.tail for piece in pieces),
            num_pieces=len(pieces),
            started=now,
            deadline=now + spec.timeout_s,
            num_planned=[0] * self._num_layers if is_awaited else [],
            is_complete=not is_awaited,
        )

    def cancel(self, load_id: LoadId) -> None:
        """Give a load up; it ends at once unless it has ended already."""
        for load in self._loads.get(load_id, ()):
            self._end(load, Cause.CANCELLED.value)

    def wait_layer(self, layer: int) -> None:
        """Until this layer of every in-step load has landed, or that load has ended."""
        for load in self._each():
            if load.spec.in_step and load.pieces_of_layer[layer] and load.ended is None:
                self._wait(load, partial(load.has_layer, layer))

    def wait_tails(self) -> None:
        """Until every in-step tail block is in place."""
        for load in self._each():
            if load.spec.in_step and load.tail_pieces and load.ended is None:
                self._wait(load, load.has_tails)

    def wait_all(self) -> None:
        """Until every in-step load has ended."""
        for load in self._each():
            if load.spec.in_step and load.ended is None:
                self._wait(load, lambda: False)

    def in_step_under_way(self) -> bool:
        """Whether an in-step load has not ended yet."""
        return any(load.spec.in_step and load.ended is None for load in self._each())

    def take_results(self) -> list[LoadResult]:
        """The loads that ended since the last call."""
        if not self._loads:
            return []
        results = []
        for load_id, loads in list(self._loads.items()):
            ended = [load.ended for load in loads if load.ended is not None]
            if len(ended) == len(loads):
                results.append(merge_results(ended))
                del self._loads[load_id]
        return results

    def take_rested(self) -> list[LoadId]:
        """The loads in whose blocks nothing is written any more, since the last call. Each of
        them has ended before, with ``num_resting`` set.
        """
        return [self._rested.popleft() for _ in range(len(self._rested))]

    def num_loads(self) -> int:
        return len(self._loads)

    def _each(self) -> Iterator[_Load]:
        return chain.from_iterable(self._loads.values())

    def _wait(self, load: _Load, landed: Callable[[], bool]) -> None:
        with self._landed:
            self._landed.wait_for(
                lambda: load.ended is not None or landed(),
                timeout=max(0.0, load.deadline - time.monotonic()),
            )
        if load.ended is None and not landed():
            self._end(load, Cause.DEADLINE.value)

    def _end(self, load: _Load, cause: str) -> None:
        if load.end(cause):
            if cause:
                logger.warning(
                    "load %d of transfer %s from %s failed: %s",
                    load.spec.load_id,
                    load.spec.transfer_id,
                    load.peer,
                    cause,
                )
                for other in load.others:
                    other.end(cause)
            with self._landed:
                self._landed.notify_all()

    # Reactor thread.

    def on_tick(self) -> float | None:
        now = time.monotonic()
        for fetch_id, flight in list(self._in_flight.items()):
            if now >= self._flight_deadline(flight):
                del self._in_flight[fetch_id]
                self._give_up(fetch_id, flight)
                self._end(flight.load, Cause.DEADLINE.value)
        for load in list(self._active):
            if now >= load.deadline:
                self._end(load, Cause.DEADLINE.value)
            if load.ended is None and load.spec.num_awaited is not None:
                self._keep_watching(load, now)
            if load.ended is not None:
                self._active.remove(load)
        self._send_fetches()
        self._wake_rested(now)
        self._peers.close_idle({flight.load.peer for flight in self._given_up.values()})
        deadlines = [load.deadline for load in self._active]
        deadlines += [self._flight_deadline(flight) for flight in self._in_flight.values()]
        deadlines += [until for until, _ in self._resting]
        deadlines += [
            load.watched_at + self._answer_timeout_s / 2
            for load in self._active
            if load.spec.num_awaited is not None
        ]
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _keep_watching(self, load: _Load, now: float) -> None:
        """Ask how far the prompt is, at first and as a sign of life, which must come back to the
        end: the load's own term is that of computing a prompt.
        """
        spec = load.spec
        if load.watched_at:
            heard_at = self._heard_at.get(load.peer, 0.0)
            if now >= max(heard_at, load.started) + 2 * self._answer_timeout_s:
                self._end(load, Cause.PEER_UNREACHABLE.value)
                return
            if now < load.watched_at + self._answer_timeout_s / 2:
                return
        load.watched_at = now
        each_layer = self._push_mode in (PushMode.AUTO, PushMode.LAYER)
        watch = Watch(spec.transfer_id, spec.epoch, load.ticket, each_layer)
        if not self._peers.send(load.peer, encode(watch)):
            self._end(load, Cause.PEER_UNREACHABLE.value)

    def _on_progress(self, peer: Endpoint, progress: Progress) -> None:
        for load in self._active:
            spec = load.spec
            if spec.num_awaited is None or load.ended is not None:
                continue
            if (load.peer, spec.transfer_id) != (peer, progress.transfer_id):
                continue
            if progress.cause:
                self._end(load, progress.cause)
            elif not load.is_complete:
                self._plan_ready(load, progress)

    def _plan_ready(self, load: _Load, progress: Progress) -> None:
        """Ask for what is computed and worth a piece, or for the rest at the end."""
        spec = load.spec
        assert spec.num_awaited is not None
        now = time.monotonic()
        if progress != load.progress and (progress.num_ready or progress.num_layers_done):
            # It computes: from here on the term runs anew with every sign of that.
            load.deadline = max(load.deadline, now + spec.timeout_s)
        load.progress = progress
        num_ready = bisect_left(spec.block_indices, progress.num_ready)
        num_coming = bisect_left(spec.block_indices, progress.num_coming)
        ready = [
            max(planned, num_coming if layer < progress.num_layers_done else num_ready)
            for layer, planned in enumerate(load.num_planned)
        ]
        is_last = progress.num_ready >= spec.num_awaited
        num_new = sum(ready) - sum(load.num_planned)
        if not is_last and num_new * load.layout.page_bytes < self._min_push_bytes():
            return
        pages_per_piece = self._pool.slot_bytes // load.layout.page_bytes
        for piece in plan_ready(load.num_planned, ready, pages_per_piece):
            load.pieces.append(piece)
            load.num_pieces += 1
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                load.pieces_of_layer[layer] += 1
        load.num_planned = ready
        load.is_complete = is_last
        if is_last and not load.num_pieces:
            self._end(load, "")

    def _min_push_bytes(self) -> float:
        """What is not worth a piece of its own before the end of the prompt."""
        if self._push_mode is PushMode.AUTO:
            return self._bytes_per_s * _PIECE_OVERHEAD_S
        return math.inf if self._push_mode is PushMode.PROMPT else 1

    def _flight_deadline(self, flight: _InFlight) -> float:
        """A step waits only while its producer answers something; a parked load for its term,
        unless it has ended: then its slots are for others.
        """
        if not flight.load.spec.in_step and flight.load.ended is None:
            return flight.load.deadline
        heard_at = self._heard_at.get(flight.load.peer, 0.0)
        return max(flight.sent_at, heard_at) + self._answer_timeout_s

    def _send_fetches(self) -> None:
        for load in self._active:
            num_held = sum(flight.load.spec is load.spec for flight in self._in_flight.values())
            while load.pieces and load.ended is None and num_held < self._slots_per_load:
                slot = self._pool.acquire()
                if slot is None:
                    return
                self._send_fetch(load, load.pieces.popleft(), slot)
                num_held += 1

    def _send_fetch(self, load: _Load, piece: Piece, slot: Slot) -> None:
        spec = load.spec
        self._next_fetch_id += 1
        fetch_id = self._next_fetch_id
        live = None
        seed = random.getrandbits(63)
        if self._placement is not None and not spec.in_step:
            live = self._open_pages(load, piece)
            if live is None:
                self._pool.release(slot)
                return
            seed = seed | 1 if self._placement.verify else 0
        now = time.monotonic()
        flight = _InFlight(load, piece, slot, seed, now, live is not None)
        self._in_flight[fetch_id] = flight
        fetch = Fetch(
            fetch_id=fetch_id,
            transfer_id=spec.transfer_id,
            epoch=spec.epoch,
            ticket=load.ticket,
            first_layer=piece.first_layer,
            num_layers=piece.num_layers,
            block_indices=spec.block_indices[piece.start : piece.stop],
            sessions=self._sessions,
            address=slot.addr,
            num_bytes=piece.num_bytes(load.layout.page_bytes),
            seed=seed,
            share=load.theirs.index,
            num_shares=load.theirs.count,
            live=live,
        )
        if not self._peers.send(load.peer, encode(fetch)):
            if flight.is_live:  # it has not left this process
                del self._in_flight[fetch_id]
                self._pool.release(slot)
                self._settle(load)
            self._end(load, Cause.PEER_UNREACHABLE.value)

    def _open_pages(self, load: _Load, piece: Piece) -> LivePages | None:
        """Where a producer may write, from now on; ``None`` when the load has ended meanwhile.

        Waits for what the engine has launched on these blocks in their former life.
        """
        block_ids = load.spec.block_ids[piece.start : piece.stop]
        self._copier.settle(np.array(block_ids, dtype=np.int64))
        with load.lock:
            if load.ended is not None:
                return None
            load.num_unsettled += 1
        runs = self._runs[piece.first_layer : piece.first_layer + piece.num_layers]
        return LivePages(block_ids, runs)

    def _give_up(self, fetch_id: int, flight: _InFlight) -> None:
        """Nobody waits for this answer any more, but the write may still come."""
        if flight.is_live:
            self._pool.release(flight.slot)
            self._given_up[fetch_id] = flight
        else:
            self._pool.quarantine(flight.slot, time.monotonic() + QUARANTINE_S)

    def _settle(self, load: _Load) -> None:
        """One write into live pages is over; after the last one their blocks may be used again."""
        with load.lock:
            load.num_unsettled -= 1
            ended = load.ended
            is_over = ended is not None and ended.num_resting and not load.num_unsettled
        if is_over:
            logger.info(
                "nothing writes into the blocks of load %d any more: %.1f s after its end",
                load.spec.load_id,
                time.monotonic() - load.started - ended.elapsed_ms / 1000 if ended else 0,
            )
            self._rested.append(load.spec.load_id)

    def _wake_rested(self, now: float) -> None:
        over = [load for until, load in self._resting if until <= now]
        if over:
            self._resting = [entry for entry in self._resting if entry[0] > now]
            for load in over:
                self._settle(load)

    def _on_frame(self, peer: Endpoint, frame: bytes) -> None:
        try:
            message = decode_data(frame)
        except TransferError as e:
            logger.warning("dropped a frame of %s: %s", peer, e)
            return
        self._heard_at[peer] = time.monotonic()
        if isinstance(message, Progress):
            self._on_progress(peer, message)
        if not isinstance(message, Fetched):
            return
        if (late := self._given_up.pop(message.fetch_id, None)) is not None:
            self._settle_answered(late.load, message.cause)
        flight = self._in_flight.pop(message.fetch_id, None)
        if flight is None:
            return
        flight.load.transport = message.transport
        if flight.is_live:
            self._settle_answered(flight.load, message.cause)
        if not message.cause:
            self._place(flight, message.checksum)
            self._pool.release(flight.slot)
            return
        self._end(flight.load, message.cause)
        if not flight.is_live and message.cause in (
            Cause.TRANSFER_FAILED.value,
            Cause.DEADLINE.value,
        ):
            self._pool.quarantine(flight.slot, time.monotonic() + QUARANTINE_S)
        else:
            self._pool.release(flight.slot)

    def _settle_answered(self, load: _Load, cause: str) -> None:
        """A write that failed is over, by what the transport declares; it rests all the same."""
        if cause == Cause.TRANSFER_FAILED.value:
            self._resting.append((time.monotonic() + TransferEngine.LATE_WRITE_S, load))
        else:
            self._settle(load)

    def _on_lost(self, peer: Endpoint, cause: Cause, what: str) -> None:
        """The producer's process is gone: nobody will answer what is in flight to it."""
        lost = [load for load in self._active if load.peer == peer]
        if lost:
            logger.warning("%s %s", peer, what)
        for load in lost:
            self._end(load, cause.value)
        self._heard_at.pop(peer, None)
        for fetch_id, flight in list(self._in_flight.items()):
            if flight.load.peer == peer:
                del self._in_flight[fetch_id]
                self._give_up(fetch_id, flight)
        until = time.monotonic() + TransferEngine.LATE_WRITE_S
        for fetch_id, flight in list(self._given_up.items()):
            if flight.load.peer == peer:
                del self._given_up[fetch_id]
                self._resting.append((until, flight.load))

    def _place(self, flight: _InFlight, expected: int) -> None:
        """Copy a piece into its pages and count it if it is what the producer packed."""
        load, piece = flight.load, flight.piece
        layers = load.layout.for_layers(piece.first_layer, piece.first_layer + piece.num_layers)
        ids = np.array(load.spec.block_ids[piece.start : piece.stop], dtype=np.int64)
        with load.lock:
            if load.ended is not None:
                return
            if not flight.is_live:
                checksum = self._copier.scatter(layers, ids, flight.slot.region, 0, flight.seed)
            elif flight.seed:
                checksum = self._copier.gather(layers, ids, flight.slot.region, 0, flight.seed)
            else:
                checksum = expected
            if checksum == expected:
                load.num_bytes += piece.num_bytes(load.layout.page_bytes)
        if checksum != expected:
            self._end(load, Cause.CHECKSUM.value)
            return
        with self._landed:
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                load.pieces_of_layer[layer] -= 1
            load.tail_pieces -= piece.tail
            load.num_pieces -= 1
            self._landed.notify_all()
        elapsed = time.monotonic() - flight.sent_at
        measured = piece.num_bytes(load.layout.page_bytes) / max(elapsed, 1e-6)
        self._bytes_per_s += _SMOOTHING * (measured - self._bytes_per_s)
        if load.is_complete and not load.num_pieces:
            self._end(load, "")

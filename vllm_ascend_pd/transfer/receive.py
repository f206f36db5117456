# SPDX-License-Identifier: Apache-2.0
"""The consumer's data side: asks a producer for pages, verifies them, puts them in place."""

from __future__ import annotations

import math
import random
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd.backends.transports import SHARED_MEMORY
from vllm_ascend_pd.config import PushMode
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.kv.cost import Speed
from vllm_ascend_pd.kv.load import QUARANTINE_S
from vllm_ascend_pd.kv.loader import Loader
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.peers import Peers
from vllm_ascend_pd.net.reactor import Reactor
from vllm_ascend_pd.transfer.live_pages import LivePageWrites
from vllm_ascend_pd.transfer.load import InFlight, LoadSpec, PeerLoad
from vllm_ascend_pd.transfer.rings import PIECE_BYTES, Rings, end_rings
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import Cause, Endpoint, Layers, LoadId
from vllm_ascend_pd.wire import (
    Fetch,
    Fetched,
    Packing,
    Progress,
    Watch,
    decode_data,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_ascend_pd.backends.block_copy import WorkerPages
    from vllm_ascend_pd.backends.staging import Slot, StagingPool
    from vllm_ascend_pd.net.trust import Trust
    from vllm_ascend_pd.transfer.live_pages import DirectPlacement
    from vllm_ascend_pd.transfer.pieces import Piece

logger = limited_logger(__name__)

_PIECE_OVERHEAD_MS = 1.0
_FIRST_BYTES_PER_MS = 1e6
_SMOOTHING = 0.1
"""Of pieces, of which a load has many."""


class PeerLoader(Reactor, Loader[LoadSpec, PeerLoad]):
    """Runs loads from peers, on a thread of its own.

    A piece lands in a staging slot, is checked while it is copied into its pages, and only then
    counts.

    A slot may be a ring instead: then its piece is checked and copied while it is packed, and
    counts once the producer has confirmed it.

    With direct placement the pieces of a parked load, whose blocks no request holds, are written
    by the producer itself; the slot then only counts what is under way. When such a load ends
    while a write goes on, its blocks rest: `take_rested` says until when.
    """

    overdue_s = 1.0  # else its thread reads first what has come in time

    def __init__(
        self,
        sessions: Mapping[str, str],
        pages: WorkerPages,
        pool: StagingPool,
        trust: Trust,
        answer_timeout_s: float = 2.0,
        push_mode: PushMode = PushMode.AUTO,
        sharding: Sharding | None = None,
        placement: DirectPlacement | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``sessions``: where the pool's memory is reached, by transport. ``answer_timeout_s``: a
        producer that a step waits for and that says nothing so long is gone. ``placement``: with
        direct placement only.
        """
        Reactor.__init__(self, "pd-loader")
        Loader.__init__(self, clock)
        self.answer_timeout_s = answer_timeout_s
        self._push_mode = push_mode
        self._sharding = sharding or Sharding()
        self._speed = Speed(_FIRST_BYTES_PER_MS, _SMOOTHING)
        # One silent producer must not hold every slot until its pieces are given up.
        self._slots_per_load = max(1, pool.num_slots - pool.num_slots // 4)
        self._sessions = dict(sessions)
        self._copier = pages.copier
        self._groups = pages.groups
        num_layers = sum(len(group.layers) for group in pages.groups)
        self._layers = pages.layers or Layers(0, num_layers)
        self._staging = pool
        self.peers = Peers(self, trust, self._on_frame, self._on_lost)
        self._active: list[PeerLoad] = []
        self._awaited: dict[tuple[Endpoint, str], list[PeerLoad]] = {}
        """Those of prompts that their producers compute, by peer and transfer id."""
        self._must_look = False
        """A load has begun or ended. Any thread sets it."""
        self._look_at = math.inf
        """When the next of them is to be watched or over, at the earliest."""
        self._in_flight: dict[int, InFlight] = {}
        self._placement = placement
        rest_s = placement.rest_s if placement is not None else 0.0
        self._live_pages = LivePageWrites(pages, rest_s, clock)
        self._rings = Rings(sessions, pages.copier, self._in_flight, self.attempt, self._fail)
        self._heard_at: dict[Endpoint, float] = {}
        self._next_fetch_id = random.getrandbits(48)

    # Main thread.

    def start_load(self, spec: LoadSpec) -> None:
        """Begin a load; returns at once."""
        loads = [
            PeerLoad.of(
                spec,
                blocks,
                source,
                self._groups[blocks.group],
                self._piece_bytes(spec.peers[source.rank].endpoint),
                self._clock,
            )
            for source in self._sharding.loads_from(
                self._layers, [peer.layers for peer in spec.peers]
            )
            for blocks in spec.blocks
        ]
        for load in loads:
            load.others = [other for other in loads if other is not load]
        self._add(spec.load_id, loads)

        def begin() -> None:
            self._active += loads
            if spec.num_awaited is not None:
                for load in loads:
                    self._awaited.setdefault((load.peer, spec.transfer_id), []).append(load)
            self._must_look = True

        self.submit(begin)

    def _piece_bytes(self, peer: Endpoint) -> int:
        """What goes through a ring need not fit in it."""
        return max(self._staging.slot_bytes, PIECE_BYTES if self._rings.takes(peer) else 0)

    def take_rested(self) -> list[LoadId]:
        return self._live_pages.take_rested()

    @property
    def is_idle(self) -> bool:
        return not self._loads and not self._live_pages.has_rested

    def _fail(self, load: PeerLoad) -> None:
        """Something raised."""
        self._end(load, Cause.TRANSFER_FAILED.value)

    # Reactor thread.

    def on_tick(self) -> float | None:
        now = self._clock()
        if any(now >= self._flight_deadline(flight) for flight in self._in_flight.values()):
            self.peers.receive()
            for fetch_id, flight in list(self._in_flight.items()):
                if now >= self._flight_deadline(flight):
                    self._give_up(fetch_id)
                    self._end(flight.load, Cause.DEADLINE.value)
        if self._must_look or now >= self._look_at:
            self._look(now)
        self._send_fetches()
        confirmed, is_busy = self._rings.follow()
        for fetch_id in confirmed:
            self._on_confirmed(fetch_id)
        if is_busy:
            return 0.0
        next_rested = self._live_pages.wake(now)
        next_end = self.peers.tidy(self._live_pages.awaited_peers())
        if len(self._heard_at) > len(self.peers):
            for peer in self._heard_at.keys() - self.peers.connections.keys():
                del self._heard_at[peer]
                self._rings.forget(peer)
        deadlines = [now if self._must_look else self._look_at]
        deadlines += [now + next_end] if next_end is not None else []
        deadlines += [self._flight_deadline(flight) for flight in self._in_flight.values()]
        deadlines += [next_rested] if next_rested is not None else []
        next_turn = min(deadlines)
        return max(0.0, next_turn - now) if next_turn < math.inf else None

    def _look(self, now: float) -> None:
        """At all loads. Hundreds may wait for their prompts, and each frame is a turn."""
        self._must_look = False
        self._look_at = now  # should this raise
        look_at = math.inf
        left = []
        for load in self._active:
            if now >= load.deadline:
                self._end(load, Cause.DEADLINE.value)
            if load.ended is None and not load.spec.in_step:
                self._keep_watching(load, now)
            if load.ended is not None:
                self._rings.end(load)
                if load.spec.num_awaited is not None:
                    self._await_no_more(load)
                continue
            left.append(load)
            look_at = min(look_at, load.deadline)
            if not load.spec.in_step:
                look_at = min(look_at, load.watched_at + self.answer_timeout_s / 2)
        self._active, self._look_at = left, look_at

    def _await_no_more(self, load: PeerLoad) -> None:
        key = load.peer, load.spec.transfer_id
        others = [one for one in self._awaited.pop(key, ()) if one is not load]
        if others:
            self._awaited[key] = others

    def _end(self, load: PeerLoad, cause: str) -> None:
        super()._end(load, cause)
        self._must_look = True

    def _keep_watching(self, load: PeerLoad, now: float) -> None:
        """Ask how far the prompt is, if it is awaited, and for a sign of life, which must come back
        to the end: the load's own term is that of computing a prompt, or of a slow link.
        """
        spec = load.spec
        if self._is_silent(load, now):
            self.peers.receive()  # what has come while this thread, or its process, had no turn
            if self._is_silent(load, now):
                self._end(load, Cause.PEER_UNREACHABLE.value)
                return
        if load.watched_at and now < load.watched_at + self.answer_timeout_s / 2:
            return
        load.watched_at = now
        if self._heard_at.get(load.peer, 0.0) >= load.unanswered_at:
            load.unanswered_at = now
        is_awaited = spec.num_awaited is not None
        each_layer = is_awaited and self._push_mode in (PushMode.AUTO, PushMode.LAYER)
        watch = Watch(spec.transfer_id, spec.epoch, load.ticket, each_layer)
        if not self.peers.send(load.peer, encode(watch)):
            self._end(load, Cause.PEER_UNREACHABLE.value)

    def _is_silent(self, load: PeerLoad, now: float) -> bool:
        """Whether its producer has said nothing for too long, though it was asked."""
        heard_at = self._heard_at.get(load.peer, 0.0)
        return heard_at < load.unanswered_at <= now - 2 * self.answer_timeout_s

    def _on_progress(self, peer: Endpoint, progress: Progress) -> None:
        for load in self._awaited.get((peer, progress.transfer_id), ()):
            if load.ended is not None:
                continue
            if progress.cause:
                self._end(load, progress.cause)
            elif not load.is_complete:
                load.plan_ready(progress, self._piece_bytes(peer), self._min_push_bytes())
                if load.is_done:
                    self._end(load, "")

    def _min_push_bytes(self) -> float:
        """What is not worth a piece of its own before the end of the prompt."""
        if self._push_mode is PushMode.AUTO:
            return self._speed.per_ms * _PIECE_OVERHEAD_MS
        return math.inf if self._push_mode is PushMode.PROMPT else 1

    def _flight_deadline(self, flight: InFlight) -> float:
        """A step waits only while its producer answers something; a parked load for its term,
        unless it has ended: then its slots are for others, whatever else its producer says.
        """
        load = flight.load
        if not load.spec.in_step and load.ended is None:
            return load.deadline
        heard_at = self._heard_at.get(load.peer, 0.0)
        if load.ended is not None:
            heard_at = min(heard_at, load.started + load.ended.elapsed_ms / 1000)
        return max(flight.sent_at, heard_at) + self.answer_timeout_s

    def _send_fetches(self) -> None:
        """A step waits for its loads, so those are first. All parked ones together leave slots for
        them, and one of several pieces leaves one for another.
        """
        asking = [load for load in self._active if load.pieces and load.ended is None]
        if not asking:
            return
        flights = self._in_flight.values()
        num_parked = sum(not flight.load.spec.in_step for flight in flights)
        for load in sorted(asking, key=lambda load: not load.spec.in_step):
            num_held = sum(flight.load.spec is load.spec for flight in flights)
            while load.pieces and load.ended is None:
                num_counted = num_held if load.spec.in_step else num_parked + (num_held > 0)
                if num_counted >= self._slots_per_load:
                    break
                slot = self._staging.acquire()
                if slot is None:
                    return
                ask = partial(self._send_fetch, load, load.pieces.popleft(), slot)
                self.attempt(ask, partial(self._fail, load))
                num_held += 1
                num_parked += not load.spec.in_step

    def _send_fetch(self, load: PeerLoad, piece: Piece, slot: Slot) -> None:
        """Ask for a piece: from then on it is in flight, and its slot with it."""
        spec = load.spec
        with ExitStack() as undo:
            undo.enter_context(slot)
            self._next_fetch_id += 1
            fetch_id = self._next_fetch_id
            live = None
            seed = random.getrandbits(63) | 1
            if self._placement is not None and not spec.in_step:
                live = self._live_pages.open(load, piece)
                if live is None:
                    return
                undo.callback(self._live_pages.settle, load)
                seed = seed if self._placement.verify else 0
            flight = InFlight(load, piece, slot, seed, self._clock(), live is not None)
            flight.placer = self._rings.offer(flight)
            fetch = Fetch(
                fetch_id=fetch_id,
                transfer_id=spec.transfer_id,
                epoch=spec.epoch,
                ticket=load.ticket,
                group=load.blocks.group,
                first_layer=load.source.skip + piece.first_layer,
                num_layers=piece.num_layers,
                block_indices=load.blocks.indices[piece.start : piece.stop],
                sessions=self._sessions,
                address=slot.addr,
                num_bytes=flight.num_bytes(),
                seed=seed,
                share=load.source.theirs.index,
                num_shares=load.source.theirs.count,
                live=live,
                ring_bytes=0 if flight.placer is None else slot.num_bytes,
            )
            has_left = self.peers.send(load.peer, encode(fetch))
            if has_left:
                undo.pop_all()
                self._in_flight[fetch_id] = flight
        if not has_left:
            self._end(load, Cause.PEER_UNREACHABLE.value)

    def _give_up(self, fetch_id: int) -> None:
        """Nobody waits for this answer any more, but the write may still come."""
        flight = self._in_flight.pop(fetch_id)
        with flight.slot as slot:
            if flight.is_live:
                self._live_pages.give_up(fetch_id, flight)
            else:
                slot.quarantine(QUARANTINE_S)
                end_rings([flight])

    def _on_frame(self, peer: Endpoint, frame: bytes) -> None:
        try:
            message = decode_data(frame)
        except TransferError as e:
            logger.warning("dropped a frame of %s: %s", peer, e)
            return
        self._heard_at[peer] = self._clock()
        if isinstance(message, Progress):
            self._on_progress(peer, message)
        if isinstance(message, Packing):
            self._rings.on_packing(peer, message.fetch_id)
        if not isinstance(message, Fetched):
            return
        self._live_pages.on_late_answer(peer, message.fetch_id, message.cause)
        flight = self._in_flight.get(message.fetch_id)
        if flight is None or flight.load.peer != peer:
            return
        if message.transport in self._sessions:  # it becomes a label of a metric
            flight.load.transport = message.transport
        if message.transport:
            self._rings.note_answer(peer, message.by_ring)
        if flight.is_live:
            self._live_pages.settle_answered(flight.load, message.cause)
        if message.cause:
            self._end(flight.load, message.cause)
        else:
            self.attempt(partial(self._place, flight, message), partial(self._fail, flight.load))
        self._land(message)

    def _land(self, answer: Fetched) -> None:
        """It is not in flight any more."""
        flight = self._in_flight.pop(answer.fetch_id)
        is_staged = not flight.is_live and not answer.by_ring
        with flight.slot as slot:
            # Without a transport nothing was written.
            failed = answer.cause in (Cause.TRANSFER_FAILED.value, Cause.DEADLINE.value)
            if is_staged and failed and answer.transport:
                slot.quarantine(QUARANTINE_S)

    def _on_lost(self, peer: Endpoint, cause: Cause, what: str) -> None:
        """The producer's process is gone: nobody will answer what is in flight to it."""
        lost = [load for load in self._active if load.peer == peer]
        if lost:
            logger.warning("%s %s", peer, what)
        for load in lost:
            self._end(load, cause.value)
        self._heard_at.pop(peer, None)
        self._rings.forget(peer)
        for fetch_id, flight in list(self._in_flight.items()):
            if flight.load.peer == peer:
                self._give_up(fetch_id)
        self._live_pages.on_lost(peer)

    def _on_confirmed(self, fetch_id: int) -> None:
        """A piece came through a ring, and its producer stands by it; its answer is on the way."""
        flight = self._in_flight.pop(fetch_id)
        with flight.slot:
            flight.load.transport = SHARED_MEMORY
            self._count(flight)

    def _place(self, flight: InFlight, answer: Fetched) -> None:
        """Copy a piece into its pages and count it if it is what the producer packed. Under the
        load's lock, so that its end waits for the copy: not one byte comes after it.
        """
        load = flight.load
        checksum: int | None = answer.checksum
        with load.lock:
            if load.ended is not None:
                return
            if answer.by_ring and flight.placer is not None:
                checksum = flight.placer.checksum if flight.placer.run(0.0) else None
            elif not flight.is_live:
                region = flight.slot.region
                checksum = self._copier.scatter(*flight.pages(), region, 0, flight.seed)
            elif flight.seed:
                region = flight.slot.region
                checksum = self._copier.gather(*flight.pages(), region, 0, flight.seed)
        if checksum == answer.checksum:
            self._count(flight)
        else:
            self._end(load, Cause.CHECKSUM.value)

    def _count(self, flight: InFlight) -> None:
        """A piece that is in its pages and verified."""
        load = flight.load
        with load.lock:
            if load.ended is not None:
                return
            load.num_bytes += flight.num_bytes()
        with self._landed:
            load.note_landed(flight.piece)
            self._landed.notify_all()
        elapsed = self._clock() - flight.sent_at
        self._speed.note(flight.num_bytes(), max(elapsed, 1e-6) * 1000)
        if load.is_done:
            self._end(load, "")

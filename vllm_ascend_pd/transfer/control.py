# SPDX-License-Identifier: Apache-2.0
"""Control sockets between the scheduler processes of two engines: open, heartbeat, release."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import queue
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from vllm_ascend_pd.config import DEFAULT_KV_PORT
from vllm_ascend_pd.errors import ConfigError, TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.listener import Listener, listen
from vllm_ascend_pd.net.peers import Peers
from vllm_ascend_pd.net.reactor import Reactor
from vllm_ascend_pd.net.trust import Reason
from vllm_ascend_pd.transfer.early_opens import EarlyOpens, num_hashes
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import (
    Answer,
    Ask,
    AskOfRunning,
    ControlMessage,
    Extend,
    Extended,
    FirstToken,
    Go,
    Heartbeat,
    More,
    Open,
    Opened,
    Ready,
    Refused,
    Release,
    Take,
    Told,
    Waiting,
    decode_control,
    encode,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Hashable

    from vllm_ascend_pd.net.trust import Trust
    from vllm_ascend_pd.transfer.leases import Lease, LeaseBook

logger = limited_logger(__name__)

_MAX_WAITING = 4096
_MAX_WAITING_HASHES = 1 << 20


class ControlServer(Reactor):
    """Answers consumers out of the lease book (producer, EngineCore process, own thread).

    What is asked of running requests goes to the scheduler thread, by ``of_running``, and comes
    back with ``answer``.
    """

    def __init__(
        self,
        book: LeaseBook,
        wake_scheduler: Callable[[], None],
        trust: Trust,
        arrival_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("pd-control-server")
        self.listener: Listener
        self._book = book
        self._wake_scheduler = wake_scheduler
        self._trust = trust
        self._arrival_timeout_s = arrival_timeout_s
        self._clock = clock
        self.of_running: queue.SimpleQueue[tuple[bytes, AskOfRunning]] = queue.SimpleQueue()
        """With the identity of the connection that it came by."""
        self.of_guests: queue.SimpleQueue[tuple[bytes, Take | More | Release]] = queue.SimpleQueue()
        """What is asked of requests of other engines' clients; answered as those."""
        self.guests: set[str] = set()
        """Transfer ids of these. Added to here, discarded from by the scheduler thread."""
        self._waiting = EarlyOpens()
        """Of prompts that no request has brought yet."""

    def listen(self, host: str, port: int) -> Endpoint:
        """Where consumers reach it from now on. Before ``start``.

        Raises:
            ConfigError: ``port`` is in use and was chosen by the user.
        """
        listening = _listen(host, port)
        self.listener = Listener(self, listening, self._trust, self._on_frame)
        return Endpoint(host, listening.getsockname()[1], self._trust.key)

    def _on_frame(self, identity: bytes, payload: bytes) -> None:
        try:
            message = decode_control(payload)
        except TransferError as e:
            self._trust.note_refused(Reason.MALFORMED, f"a message of a peer ({e})")
            return
        if isinstance(message, Extend | Ready) or (isinstance(message, Open) and message.running):
            if self.of_running.qsize() < _MAX_WAITING:
                self.of_running.put((identity, message))
                self._wake_scheduler()
        elif isinstance(message, Take | More):
            self._to_guests(identity, message)
        elif isinstance(message, Open):
            self._on_open(identity, message)
        elif isinstance(message, Heartbeat):
            self._book.heartbeat(message.transfer_ids, message.epoch)
        elif isinstance(message, Release):
            self._waiting.release(identity, message.transfer_id)
            if self._book.release(message.transfer_id, message.epoch):
                self._wake_scheduler()
            elif message.transfer_id in self.guests:
                self._to_guests(identity, message)

    def _to_guests(self, identity: bytes, message: Take | More | Release) -> None:
        if self.of_guests.qsize() < _MAX_WAITING:
            if isinstance(message, Take):
                self.guests.add(message.transfer_id)
            self.of_guests.put((identity, message))
            self._wake_scheduler()

    def _ask_book(self, identity: bytes, request: Open) -> Opened | Waiting | Refused:
        failed = Refused(request.transfer_id, Cause.TRANSFER_FAILED.value, "see the producer's log")
        return self.attempt(partial(self._book.open, request, identity), lambda: failed)

    def _on_open(self, identity: bytes, request: Open) -> None:
        answer = self._ask_book(identity, request)
        if isinstance(answer, Waiting):
            in_all = self._waiting.num_hashes + num_hashes(request)
            if len(self._waiting) < _MAX_WAITING and in_all <= _MAX_WAITING_HASHES:
                until = self._clock() + self._arrival_timeout_s
                number = self._waiting.add(identity, request, until)
                # Its prompt may have been announced before it was seen to wait.
                answer = self._ask_book(identity, request)
                if not isinstance(answer, Waiting):
                    self._waiting.remove(number)
            else:
                answer = self._refuse(request, "too many others wait for theirs already")
        self._send(identity, request, answer)

    def answer(self, identity: bytes, asked: Ask, answer: Answer) -> None:
        """One of ``of_running``. Any thread."""
        self.submit(lambda: self._send(identity, asked, answer))

    def tell_first_token(self, lease: Lease) -> None:
        """Its prompt is computed: tell the consumers that were promised the token. Any thread."""
        self.submit(lambda: self._tell_first_token(lease))

    def _tell_first_token(self, lease: Lease) -> None:
        if (token_id := lease.first_token_id) is None:
            return
        for identity, request in self._book.take_askers(lease):
            message = FirstToken(lease.transfer_id, token_id, request.open_id)
            self.listener.send(identity, encode(message))

    @property
    def num_waiting(self) -> int:
        """Opens that came before their prompt; any thread."""
        return len(self._waiting)

    def answer_waiting(self, transfer_id: str | None = None) -> None:
        """This lease was announced, or any can be opened by now: look again at the opens that came
        too early. Any thread."""
        if self._waiting:
            self.submit(lambda: self._answer_waiting(transfer_id))

    def _answer_waiting(self, transfer_id: str | None) -> None:
        waiting = self._waiting
        for number, early in waiting.all() if transfer_id is None else waiting.of(transfer_id):
            answer = self._ask_book(early.identity, early.request)
            if not isinstance(answer, Waiting):
                waiting.remove(number)
                self._send(early.identity, early.request, answer)

    def _refuse_late(self) -> None:
        """Opens whose prompt has not come in time."""
        for number, early in self._waiting.over(self._clock()):
            self._waiting.remove(number)
            answer = self._ask_book(early.identity, early.request)
            if isinstance(answer, Waiting):
                why = f"none came within {self._arrival_timeout_s:g} s"
                answer = self._refuse(early.request, why)
            self._send(early.identity, early.request, answer)

    def _refuse(self, request: Open, why: str) -> Refused:
        detail = f"no request has brought this transfer id: {why}"
        logger.warning("refused transfer %s: %s", request.transfer_id, detail)
        return Refused(request.transfer_id, Cause.NOT_ARRIVED.value, detail)

    def _send(self, identity: bytes, request: Ask, answer: Answer) -> None:
        numbered = msgspec.structs.replace(answer, open_id=request.open_id)
        self.listener.send(identity, encode(numbered))

    def on_tick(self) -> float | None:
        num_expired, next_expiry = self._book.expire()
        if num_expired:
            self._wake_scheduler()
        self._refuse_late()
        # A lease granted meanwhile has a whole term to run, so a turn a second is soon enough.
        next_end = self._waiting.next_end
        until_end = 1.0 if next_end is None else min(1.0, next_end - self._clock())
        return until_end if next_expiry is None else min(until_end, next_expiry)


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as e:
        if e.errno != errno.EADDRINUSE or port != DEFAULT_KV_PORT:
            raise ConfigError(
                f"kv_port {port} on kv_ip {host} cannot be used ({e}); choose another kv_port, or"
                " leave it out to have a free one chosen"
            ) from e
        return listen(host, 0)


@dataclass(frozen=True, slots=True)
class _Pending:
    key: Hashable
    peer: Endpoint
    transfer_id: str
    epoch: str
    deadline: float
    outcomes: Outcomes
    is_put_off: bool = False
    """The producer waits itself, and has said so."""


@dataclass(frozen=True, slots=True)
class OpenOutcome:
    """What became of one ``open`` or ``ask``; ``key`` is the caller's.

    Where ``Opened`` says so, ``FirstToken`` follows, or ``None`` when before that the producer is
    lost or given the prompt back.
    """

    key: Any
    answer: Opened | Refused | Extended | Go | Told | FirstToken | None


Outcomes: TypeAlias = "queue.SimpleQueue[OpenOutcome] | queue.Queue[OpenOutcome]"
"""The latter if somebody waits for what comes: a ``SimpleQueue`` of CPython 3.11 forgets how long
when a signal comes meanwhile whose handler takes longer, and waits for ever."""


class ControlClient(Reactor):
    """Asks producers (consumer, EngineCore process, own thread).

    ``outcomes`` is read by the scheduler thread; every ``open`` is answered there exactly once, at
    the latest after ``peer_timeout_s``, or ``arrival_timeout_s`` more when the producer waits
    itself for the request. ``FirstToken`` may come after an ``Opened``.
    """

    def __init__(
        self,
        peer_timeout_s: float,
        heartbeat_s: float,
        trust: Trust,
        arrival_timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("pd-control-client")
        self._arrival_timeout_s = arrival_timeout_s
        self.outcomes: queue.SimpleQueue[OpenOutcome] = queue.SimpleQueue()
        self._peer_timeout_s = peer_timeout_s
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self.peers = Peers(self, trust, self._on_frame, self._on_lost)
        self._pending: dict[int, _Pending] = {}
        # Opened prompts whose first token follows.
        self._following: dict[int, _Pending] = {}
        self._open_ids = itertools.count(1)
        self._kept: dict[tuple[Endpoint, str], set[str]] = {}
        self._next_heartbeat = 0.0

    def open(self, key: Hashable, peer: Endpoint, request: Open) -> None:
        """Ask; the answer comes as an ``OpenOutcome``, and an opened lease is kept alive."""
        self.ask(key, peer, request, self.outcomes)

    def ask(
        self,
        key: Hashable,
        peer: Endpoint,
        request: Ask,
        outcomes: Outcomes,
        more_s: float = 0.0,
    ) -> None:
        """The answer comes in ``outcomes``; the peer has ``more_s`` beside ``peer_timeout_s``."""
        deadline = self._clock() + self._peer_timeout_s + more_s

        def send() -> None:
            numbered = msgspec.structs.replace(request, open_id=next(self._open_ids))
            pending = _Pending(key, peer, request.transfer_id, request.epoch, deadline, outcomes)
            self._pending[numbered.open_id] = pending
            if not self._send(peer, numbered):
                self._refuse(numbered.open_id, Cause.PEER_UNREACHABLE, "cannot be asked so much")

        self.submit(send)

    def release(self, peer: Endpoint, transfer_id: str, epoch: str) -> None:
        """Tell the producer that nothing more is needed, and stop the heartbeat."""

        def send() -> None:
            if kept := self._kept.get((peer, epoch)):
                kept.discard(transfer_id)
            for open_id, pending in list(self._pending.items()):
                if (pending.peer, pending.transfer_id, pending.epoch) == (peer, transfer_id, epoch):
                    self._refuse(open_id, Cause.CANCELLED, "was given the prompt back")
            for open_id, opened in list(self._following.items()):
                if (opened.peer, opened.transfer_id) == (peer, transfer_id):
                    self.outcomes.put(OpenOutcome(self._following.pop(open_id).key, None))
            self._send(peer, Release(transfer_id, epoch))

        self.submit(send)

    def keep(self, peer: Endpoint, transfer_id: str, epoch: str) -> None:
        """Renew this lease until it is released."""
        self.submit(lambda: self._kept.setdefault((peer, epoch), set()).add(transfer_id))

    def counts(self) -> dict[str, int]:
        """What is under way; any thread."""
        return {"opens": len(self._pending), "kept": sum(map(len, list(self._kept.values())))}

    def on_tick(self) -> float | None:
        now = self._clock()
        if any(pending.deadline <= now for pending in self._pending.values()):
            self.peers.receive()
            for open_id, pending in list(self._pending.items()):
                if pending.deadline <= now:
                    what = "did not answer in time"
                    self._refuse(open_id, Cause.PEER_UNREACHABLE, what)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            for (peer, epoch), transfer_ids in list(self._kept.items()):
                if transfer_ids:
                    self._send(peer, Heartbeat(tuple(transfer_ids), epoch))
                else:
                    del self._kept[peer, epoch]
        next_end = self.peers.tidy()
        deadlines = [pending.deadline for pending in self._pending.values()]
        deadlines += [now + next_end] if next_end is not None else []
        if self._kept or self.peers:
            deadlines.append(self._next_heartbeat)
        return max(0.0, min(deadlines) - now) if deadlines else None

    def _send(self, peer: Endpoint, message: ControlMessage) -> bool:
        frame = encode(message)
        has_left = self.peers.send(peer, frame)
        if not has_left:
            what = f"{type(message).__name__} of {len(frame)} bytes"
            logger.warning("%s takes no more messages; dropped %s", peer, what)
        return has_left

    def _on_frame(self, peer: Endpoint, frame: bytes) -> None:
        try:
            message = decode_control(frame)
        except TransferError as e:
            logger.warning("dropped a frame of %s: %s", peer, e)
            return
        if isinstance(message, FirstToken):
            opened = self._following.get(message.open_id)
            if opened is not None and opened.peer == peer:
                del self._following[message.open_id]
                self.outcomes.put(OpenOutcome(opened.key, message))
            return
        if not isinstance(message, Answer):
            return
        pending = self._pending.get(message.open_id)
        if pending is None or pending.peer != peer:
            return
        if isinstance(message, Waiting):
            if not pending.is_put_off:
                later = self._clock() + self._arrival_timeout_s + self._peer_timeout_s
                put_off = dataclasses.replace(pending, deadline=later, is_put_off=True)
                self._pending[message.open_id] = put_off
            return
        del self._pending[message.open_id]
        is_open = pending.outcomes is self.outcomes
        if is_open and isinstance(message, Opened) and message.first_token_follows:
            self._following[message.open_id] = pending
        pending.outcomes.put(OpenOutcome(pending.key, message))

    def _on_lost(self, peer: Endpoint, cause: Cause, what: str) -> None:
        for open_id in [i for i, pending in self._pending.items() if pending.peer == peer]:
            self._refuse(open_id, cause, what)
        for open_id in [i for i, opened in self._following.items() if opened.peer == peer]:
            self.outcomes.put(OpenOutcome(self._following.pop(open_id).key, None))

    def _refuse(self, open_id: int, cause: Cause, what: str) -> None:
        pending = self._pending.pop(open_id)
        refused = Refused(pending.transfer_id, cause.value, f"{pending.peer} {what}")
        pending.outcomes.put(OpenOutcome(pending.key, refused))

# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt a peer has computed: open, decide, load, release."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_ascend_pd.config import LoadMode, SecurityConfig, TransferConfig
from vllm_ascend_pd.engine.scheduler.producer import tail_extra_keys
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.transfer.leases import tail_digest
from vllm_ascend_pd.transfer.session import ConsumerEvent, ConsumerState
from vllm_ascend_pd.transfer.shares import Source
from vllm_ascend_pd.types import Cause, Endpoint
from vllm_ascend_pd.wire import WIRE_VERSION, FirstToken, Open, Opened, Refused, RemotePrefill

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.metrics import Provenance, Stats
    from vllm_ascend_pd.transfer.control import ControlClient
    from vllm_ascend_pd.transfer.shares import Sharding

logger = limited_logger(__name__)

_FIRST_BYTES_PER_MS = 300_000.0
_SMOOTHING = 0.3


class Consumer:
    """Scheduler thread. What crosses to the control client's thread goes through its queues."""

    def __init__(
        self,
        client: ControlClient,
        phantoms: PhantomBlocks,
        fingerprint: str,
        block_size: int,
        bytes_per_block: int,
        transfer: TransferConfig,
        security: SecurityConfig,
        stats: Stats,
        others_wait: Callable[[], bool],
        sharding: Sharding,
        divides_pages: bool,
        sampling_key: Callable[[Request], bytes],
        vocab_size: int,
    ) -> None:
        self._sampling_key = sampling_key
        self._vocab_size = vocab_size
        self._sharding = sharding
        self._divides_pages = divides_pages
        self._client = client
        self._phantoms = phantoms
        self.fingerprint = fingerprint
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._transfer = transfer
        self._security = security
        self._stats = stats
        self._others_wait = others_wait
        self.sessions: dict[str, RemotePrompt] = {}
        """By request id; only this class changes it."""
        self._numbers = itertools.count()
        self._first_tokens: list[RemotePrompt] = []
        self._users: dict[tuple[Endpoint, str, str], int] = {}
        self._kept_epochs: dict[tuple[Endpoint, str, str], str] = {}
        """Under which the client keeps a lease: the last user may never have been answered."""
        self._bytes_per_ms = _FIRST_BYTES_PER_MS

    def __len__(self) -> int:
        return len(self.sessions)

    def get(self, request: Request) -> RemotePrompt | None:
        return self.sessions.get(request.request_id)

    def add(self, request: Request, params: dict[str, Any]) -> tuple[Cause, str] | None:
        """Check what the client sent and ask the producer; the request waits for the answer.

        Returns why it is not asked, or ``None``.
        """
        try:
            remote = RemotePrefill.from_params(params)
        except TransferError as e:
            return Cause.BAD_PARAMS, str(e)
        if not self._security.allows(remote.remote_host):
            return Cause.PEER_NOT_ALLOWED, (
                f"kv_transfer_params.remote_host {remote.remote_host!r} is neither a loopback"
                " address nor in security.allowed_peers"
            )
        if not remote.remote_key and self._security.secret_file is None:
            return Cause.BAD_PARAMS, (
                "kv_transfer_params.remote_key is missing: the router must pass on all that the"
                " producer returned, or security.secret_file be set on all engines"
            )
        number = next(self._numbers)
        session = RemotePrompt(request, remote, self._transfer, self._block_size, number)
        self.sessions[request.request_id] = session
        self._users[session.lease] = self._users.get(session.lease, 0) + 1
        if request.num_tokens < 2 or request.skip_reading_prefix_cache:
            # One token is computed in any case; prompt logprobs need the whole prompt computed.
            session.provenance.outcome = Cause.NOT_NEEDED.value
            session.advance(ConsumerEvent.ABORT)
            self._release(session)
            return None
        num_full = (request.num_tokens - 1) // self._block_size
        tail_start = num_full * self._block_size
        sampling_key = self._sampling_key(request)
        num_tail = request.num_tokens - tail_start - (not sampling_key)
        parent = request.block_hashes[num_full - 1] if num_full else b""
        tokens = request.all_token_ids[tail_start : tail_start + num_tail]
        extra_keys = tail_extra_keys(request, tail_start, request.num_tokens)
        self._client.open(
            session.key,
            session.control,
            Open(
                version=WIRE_VERSION,
                fingerprint=self.fingerprint,
                transfer_id=remote.transfer_id,
                epoch=remote.remote_epoch,
                block_hashes=tuple(request.block_hashes[:num_full]),
                num_tail_tokens=num_tail,
                tail_digest=tail_digest(parent, extra_keys, tokens),
                sampling_key=sampling_key,
            ),
        )
        request.status = RequestStatus.WAITING_FOR_KV
        return None

    def collect_outcomes(self) -> None:
        """Fold in what producers have answered."""
        while not self._client.outcomes.empty():
            outcome = self._client.outcomes.get_nowait()
            request_id = outcome.key[0]
            session = self.sessions.get(request_id)
            if session is None or session.key != outcome.key:
                continue
            if isinstance(outcome.answer, FirstToken):
                self._note_first_token(session, outcome.answer.token_id)
                continue
            if outcome.answer is None:
                session.lose_first_token()
                continue
            if session.state is not ConsumerState.OPENING:
                continue
            answer = self._check_workers(outcome.answer)
            if isinstance(answer, Refused):
                session.advance(ConsumerEvent.REFUSED)
                session.provenance.outcome = answer.cause
                logger.warning(
                    "request %s: its prompt will be computed here: %s (%s)",
                    request_id,
                    answer.cause,
                    answer.detail,
                )
                self._release(session)
                continue
            session.opened(answer)
            session.advance(ConsumerEvent.OPENED)
            self._kept_epochs[session.lease] = session.epoch
            self._client.keep(session.control, session.remote.transfer_id, session.epoch)
            if answer.first_token_id is not None:
                self._note_first_token(session, answer.first_token_id)

    def _note_first_token(self, session: RemotePrompt, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            logger.error(
                "request %s: %s sent a first token that is none: %d",
                session.request.request_id,
                session.control,
                token_id,
            )
            return
        session.first_token_id = token_id
        self._first_tokens.append(session)

    def take_first_tokens(self) -> list[RemotePrompt]:
        """Requests whose first token is to be delivered now."""
        if not self._first_tokens:
            return []
        sessions, self._first_tokens = self._first_tokens, []
        return [
            session
            for session in sessions
            if session.has_first_token and not session.request.is_finished()
        ]

    def _check_workers(self, answer: Opened | Refused) -> Opened | Refused:
        """Refuse a producer whose workers are where this engine must not connect to, or divide
        pages in a way that it cannot load.
        """
        if isinstance(answer, Refused):
            return answer
        for worker in answer.workers:
            if not self._security.allows(worker.host):
                detail = f"its worker at {worker.host!r} is neither on a loopback address nor in"
                detail += " security.allowed_peers"
                return Refused(answer.transfer_id, Cause.PEER_NOT_ALLOWED.value, detail)
        ours, num_peers = self._sharding, len(answer.workers)
        detail = ""
        try:
            sources = ours.sources(num_peers)
        except TransferError as e:
            detail = str(e)
        else:
            if sources != (Source(sources[0].rank),) and not self._divides_pages:
                detail = (
                    f"tensor parallel size {num_peers} there and {ours.num_workers} here: parts of"
                    " pages are moved on CPU only, and with the KV heads outermost"
                    " (VLLM_KV_CACHE_LAYOUT=LBHNC); use equal sizes"
                )
        return Refused(answer.transfer_id, Cause.INCOMPATIBLE.value, detail) if detail else answer

    def wants_parking(self, session: RemotePrompt, num_missing: int) -> bool:
        """Whether this load is so long that the rest of the batch should not wait for it."""
        if not session.is_computed or self._transfer.places_directly:
            # Only blocks that no request holds yet may be written by a peer itself.
            return True
        mode = self._transfer.load_mode
        if mode is not LoadMode.AUTO:
            return mode is LoadMode.PARK
        expected_ms = num_missing * self._bytes_per_block / self._bytes_per_ms
        if expected_ms <= self._transfer.max_step_load_ms:
            return False
        return self._others_wait() or expected_ms > self._transfer.step_load_timeout_s * 500

    def give_up(self, session: RemotePrompt, cause: Cause) -> None:
        """The request goes on without what its peer has."""
        if session.advance(ConsumerEvent.LOAD_FAILED):
            session.provenance.outcome = cause.value
            level = logging.DEBUG if cause is Cause.NOT_NEEDED else logging.WARNING
            logger.log(
                level,
                "request %s: the rest of its prompt is computed here: %s",
                session.request.request_id,
                cause.value,
            )
            self._release(session)

    def forsake(self, session: RemotePrompt) -> None:
        """What its peer has is not what would be computed here any more."""
        session.is_stale = True
        event = ConsumerEvent.REFUSED if session.pending else ConsumerEvent.LOAD_FAILED
        if session.advance(event):
            session.provenance.outcome = Cause.INCOMPATIBLE.value
            if not session.num_loads:
                self._release(session)

    def admitted(self, session: RemotePrompt, num_local: int, num_peer: int) -> None:
        """The request is scheduled; with nothing on its way the session is over."""
        session.admitted = True
        prompt = session.provenance
        prompt.num_local_tokens = num_local
        prompt.num_peer_tokens = num_peer
        prompt.num_computed_tokens = prompt.num_prompt_tokens - num_local - num_peer
        prompt.num_peer_blocks = -(-num_peer // self._block_size)
        if session.state is ConsumerState.READY:
            self._done(session)

    def load_ended(self, session: RemotePrompt, result: LoadResult) -> None:
        """A load of this session ended; release the producer as soon as nothing more is needed."""
        if result.num_bytes and result.elapsed_ms > 0 and not result.was_awaited:
            measured = result.num_bytes / result.elapsed_ms
            self._bytes_per_ms += _SMOOTHING * (measured - self._bytes_per_ms)
        if session.num_loads:
            return
        if session.state.final:
            if session.state is ConsumerState.FAILED:
                prompt = session.provenance
                # What a parked load brought in before stays in the prefix cache.
                kept = min(prompt.num_peer_tokens, session.num_parked_tokens)
                prompt.num_computed_tokens += prompt.num_peer_tokens - kept
                prompt.num_peer_tokens = kept
                prompt.num_peer_blocks = kept // self._block_size
            self._release(session)
        elif session.state is ConsumerState.READY and session.admitted:
            self._done(session)

    def finish(self, request: Request) -> Provenance | None:
        """The request ended, by whatever cause."""
        session = self.sessions.pop(request.request_id, None)
        if session is None:
            return None
        if session.advance(ConsumerEvent.ABORT):
            is_answered = session.has_delivered and request.status != RequestStatus.FINISHED_ABORTED
            outcome = "first_token" if is_answered else Cause.CANCELLED.value
            session.provenance.outcome = session.provenance.outcome or outcome
            if not session.num_loads:
                self._release(session)
        self._phantoms.withdraw(session)
        self._count(session)
        return session.provenance

    def _done(self, session: RemotePrompt) -> None:
        session.advance(ConsumerEvent.DONE)
        session.provenance.outcome = "loaded" if session.provenance.num_peer_tokens else "local"
        self._release(session)

    def _release(self, session: RemotePrompt) -> None:
        """Nothing more is read from this lease by this request; the last one gives it back."""
        if session.released:
            return
        session.released = True
        left = self._users.get(session.lease, 0) - 1
        if left > 0:
            self._users[session.lease] = left
            return
        if self._users.pop(session.lease, None) is not None:
            epoch = self._kept_epochs.pop(session.lease, session.epoch)
            self._client.release(session.control, session.remote.transfer_id, epoch)

    def _count(self, session: RemotePrompt) -> None:
        prompt = session.provenance
        self._stats.add("requests", label=prompt.outcome or "unknown")
        self._stats.add("first_tokens", label=prompt.first_token)
        for source, count in (
            ("local", prompt.num_local_tokens),
            ("peer", prompt.num_peer_tokens),
            ("computed", prompt.num_computed_tokens),
        ):
            if count:
                self._stats.add("prompt_tokens", count, source)
        logger.debug("request %s: %s", session.request.request_id, prompt)

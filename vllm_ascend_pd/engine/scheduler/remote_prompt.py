# SPDX-License-Identifier: Apache-2.0
"""One request whose prompt a peer has computed, or computes."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import LoadFromPeer
from vllm_ascend_pd.engine.scheduler.sources import BlockSource, SourceEvent, SourceState
from vllm_ascend_pd.engine.vllm_api.status import is_aborted
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause, Endpoint, LoadId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.scheduler.consumer import Consumer
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.kv.cost import LoadPlan
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
    from vllm_ascend_pd.metrics import Provenance
    from vllm_ascend_pd.wire import Opened, RemotePrefill, Worker


logger = limited_logger(__name__)

_FIRST_TOKEN_S = 1.0
"""Longest wait for a first token that was promised, once all KV is in place. It comes right behind
the KV unless the producer has stopped; one that has gone is noticed at once."""
_BEFORE_ADMISSION = (
    *(SourceState.ASKED, SourceState.READY, SourceState.PARKED, SourceState.PLACED),
)


class PeerSource(BlockSource):
    """What is loaded from a peer."""

    def __init__(
        self,
        request: Request,
        peers: Consumer,
        control: Endpoint,
        provenance: Provenance | None = None,
    ) -> None:
        """``control``: where its peer is asked."""
        super().__init__(request, provenance)
        self._peers = peers
        self.control = control
        self.peer = peers.known.of(control)

    def load_ms(self, places: Sequence[Wanted]) -> list[float]:
        of_group = [self._peers.load_ms(self.peer, group.id) for group in self._peers.groups]
        return [of_group[place.group] for place in places]

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        origin = self.provenance
        origin.num_peer_bytes += result.num_bytes
        origin.transfer_ms += result.elapsed_ms
        origin.transport = result.transport or origin.transport
        origin.outcome = result.cause or origin.outcome
        self._peers.load_ended(self.peer, self.control, result, was_parked)
        super().load_ended(result, places, was_parked)

    def count(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        origin = self.provenance
        origin.num_local_tokens = num_local
        origin.num_peer_tokens = num_external
        origin.num_computed_tokens = origin.num_prompt_tokens - num_local - num_external
        origin.num_peer_blocks = -(-num_external // self._peers.groups[0].unit_size)


class RemotePrompt(PeerSource):
    """One request's session with its producer."""

    def __init__(
        self, request: Request, remote: RemotePrefill, peers: Consumer, key: tuple[str, int]
    ) -> None:
        """``key``: unlike the request's id it is not used again."""
        control = Endpoint(remote.remote_host, remote.remote_port, remote.remote_key)
        super().__init__(request, peers, control)
        self.key = key
        self.remote = remote
        self.epoch = remote.remote_epoch
        self.first_token_id: int | None = None
        """What the producer has sampled after the prompt."""
        self._num_local_then: int | None = None
        """Tokens of the prompt that were cached here when that was delivered."""
        self._transfer = peers.transfer
        self._groups = peers.groups
        # States are copied on before the forward, whose layers wait for what a step loads.
        self.parked_only = peers.transfer.places_directly or peers.has_states
        self._unit_size = peers.groups[0].unit_size
        self._workers: tuple[Worker, ...] = ()
        self._num_tail_tokens = 0
        """Of the tail of what the producer has, perhaps with its last token, perhaps all."""
        self._num_kept_tokens = 0
        """Of those counted as the peer's: what stays if its loads fail after all."""
        self._first_token_follows = False
        self._first_token_until = math.inf
        self._admit_until = math.inf
        """When it is given up to find memory for the request; its peer holds blocks meanwhile."""

    @property
    def whence(self) -> str:
        """For the log: its producer, as that one's ``engine_info`` says where it is, and the
        transfer, as both logs name it."""
        return f"{self.control}, transfer {self.remote.transfer_id}"

    @property
    def lease(self) -> tuple[Endpoint, str, str]:
        """What several requests may share: all of it, since a client may mix them up."""
        return self.control, self.remote.transfer_id, self.remote.remote_epoch

    def advance(self, event: SourceEvent) -> None:
        super().advance(event)
        self._admit_until = time.monotonic() + self._transfer.admission_timeout_s
        if event is SourceEvent.DONE:
            self.provenance.outcome = "loaded" if self.provenance.num_peer_tokens else "local"
            self._peers.is_over(self)

    # What the producer says.

    def opened(self, answer: Opened) -> None:
        num_before_tail = self._groups[0].tail_unit(self.end)
        self._num_blocks = min(answer.end // self._unit_size, num_before_tail)
        tail_start = num_before_tail * self._unit_size
        self._num_tail_tokens = max(0, min(answer.end, self.end) - tail_start)
        self._first_token_follows = answer.first_token_follows
        self._workers = answer.workers
        self.epoch = answer.epoch
        self.set_complete(answer.is_computed)
        self.place_until = time.monotonic() + self._transfer.load_timeout_s
        self.advance(SourceEvent.FOUND)

    def load_beside_steps(self) -> None:
        """Whatever is expected of its load."""
        self.parked_only = self.always_parks = True

    def set_complete(self, is_complete: bool) -> None:
        """Whether the producer has computed all of it."""
        self.is_complete = is_complete
        self.always_parks = not is_complete or self.parked_only

    def refused(self, cause: str) -> None:
        self.provenance.outcome = cause
        self.advance(SourceEvent.NOTHING)
        self._peers.is_over(self)

    @property
    def has_first_token(self) -> bool:
        """Whether the first token is there and has not been delivered yet."""
        return (
            self.first_token_id is not None
            and self.state in _BEFORE_ADMISSION
            and not self.is_continued
        )

    def holds_back(self) -> bool:
        return super().holds_back() or self.has_first_token

    def delays(self) -> bool:
        """For its first token."""
        if not self._first_token_follows or self.first_token_id is not None or self.state.final:
            return False
        now = time.monotonic()
        self._first_token_until = min(self._first_token_until, now + _FIRST_TOKEN_S)
        waits = now < self._first_token_until
        if not waits:
            logger.warning(
                "request %s: the first token, promised by %s, did not come; it is computed here",
                self.request.request_id,
                self.whence,
            )
        return waits

    def first_token_delivered(self, num_local: int) -> None:
        """Its client has it. What is not cached here, the ``num_local`` first, is the producer's if
        the request ends before it is admitted."""
        self.provenance.first_token = "peer"
        self._num_local_then = num_local

    def lose_first_token(self) -> None:
        """If it has not come yet, it does not come any more."""
        self._first_token_until = -math.inf

    # What it has.

    @property
    def is_continued(self) -> bool:
        """Whether a token after the span is known."""
        return self.request.num_tokens > self.end

    @property
    def is_tail_cacheable(self) -> bool:
        """Whether the tail is full, and no token of it is computed."""
        return self._num_tail_tokens == self._unit_size and self.is_continued and not self.is_stale

    @property
    def num_blocks(self) -> int:
        return self._num_blocks + self.is_tail_cacheable

    @property
    def num_tail_tokens(self) -> int:
        """The last known token is computed in any case: the span's or the first after it. A state
        is that behind the whole tail.
        """
        num_tokens = self._num_tail_tokens
        num_known = (self.request.num_tokens - 1) % self._unit_size
        if self._peers.has_states and num_known < num_tokens:
            return 0
        return min(num_tokens, num_known)

    @property
    def max_tail_tokens(self) -> int:
        return self._num_tail_tokens

    def has_block(self, index: int, group: int = 0) -> bool:
        """Its peer keeps what whoever goes on behind the span needs."""
        # Asked for each block: all but the last one can be told at once.
        kv_group = self._groups[group]
        unit = index // kv_group.blocks_per_unit
        is_there = unit < self._num_blocks or unit < self.num_blocks
        return is_there and kv_group.is_kept(index, self.end)

    def has_tail(self, index: int) -> bool:
        follows = self._first_token_follows and not self.is_continued
        num_tokens = self._num_tail_tokens if follows else self.num_tail_tokens
        return num_tokens > 0 and self.num_blocks == index

    @property
    def compute_ms(self) -> float:
        # Of windows and states there is only what the end of the span needs.
        has_all = all(group.keeps_all for group in self._groups)
        if self._transfer.load is LoadFromPeer.ALL or not self.is_complete or not has_all:
            return 0.0
        return self._peers.prefill.ms(self._unit_size)

    def use(self, plan: LoadPlan, num_offered: int) -> None:
        super().use(plan, num_offered)
        if plan.num_blocks < num_offered:
            self.peer.speed.relax()
            self._num_tail_tokens = 0

    # What becomes of it.

    @property
    def offers(self) -> bool:
        """Also to a request that was preempted while its load is under way, and is loaded again."""
        return super().offers or self.state is SourceState.ADMITTED

    @property
    def is_under_way(self) -> bool:
        """Whether something of it is loaded, or may be."""
        return self.num_loads > 0 or not self.state.final

    @property
    def has_begun_nothing(self) -> bool:
        """Whether it is decided, or about to be, how it is loaded, and nothing has been."""
        return self._waits_for_its_load and not self.num_parked_tokens

    @property
    def _waits_for_its_load(self) -> bool:
        return self.state in (SourceState.READY, SourceState.PLACED) and not self.num_loads

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited too long for memory, with nothing on its way."""
        return self._waits_for_its_load and now >= self._admit_until

    def give_up(self, cause: Cause) -> None:
        if self.state.final:
            return
        super().give_up(cause)
        self.provenance.outcome = cause.value
        level = logging.DEBUG if cause is Cause.NOT_NEEDED else logging.WARNING
        logger.log(
            level,
            "request %s: the rest of its prompt is computed here: %s (from %s)",
            self.request.request_id,
            cause.value,
            self.whence,
        )
        if not self.num_loads:
            self._peers.is_over(self)

    @property
    def hands_on(self) -> bool:
        return super().hands_on and self.provenance.outcome != Cause.NOT_NEEDED.value

    def aborted(self) -> None:
        """The request has ended."""
        if not self.state.final:
            is_answered = (
                self.is_continued
                and self.state in _BEFORE_ADMISSION
                and not is_aborted(self.request)
            )
            self.advance(SourceEvent.ABORT)
            outcome = "first_token" if is_answered else Cause.CANCELLED.value
            self.provenance.outcome = self.provenance.outcome or outcome
            if self._num_local_then is not None and not self._is_counted:
                self.provenance.num_local_tokens = self._num_local_then
                self.provenance.num_peer_tokens = self.end - self._num_local_then
            if not self.num_loads:
                self._peers.is_over(self)

    # Loads and admission.

    def make_load(
        self,
        load_id: LoadId,
        blocks: tuple[LoadBlocks, ...],
        in_step: bool,
    ) -> LoadSpec:
        assert self._workers
        num_awaited = None
        timeout_s = self._transfer.step_load_timeout_s
        if not in_step:
            timeout_s = self._transfer.load_timeout_s
            if not self.is_complete:
                timeout_s = self._transfer.prefill_timeout_s
                num_awaited = self.num_blocks * self._unit_size
                num_awaited += self._num_tail_tokens if blocks[0].has_tail else 0
        return LoadSpec(
            load_id=load_id,
            peers=self._workers,
            transfer_id=self.remote.transfer_id,
            epoch=self.epoch,
            blocks=blocks,
            in_step=in_step,
            timeout_s=timeout_s,
            num_awaited=num_awaited,
        )

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        if result.cause and result.cause != Cause.CANCELLED.value:
            logger.warning(
                "request %s: a load from %s has failed: %s",
                self.request.request_id,
                self.whence,
                result.cause,
            )
        # A load that waited for the prompt has ended: from now on all of it can be read.
        self.set_complete(True)
        super().load_ended(result, places, was_parked)
        self._admit_until = time.monotonic() + self._transfer.admission_timeout_s
        if self.num_loads or not self.state.final:
            return
        if self.state is SourceState.FAILED:
            # What a parked load brought in before stays in the prefix cache.
            prompt = self.provenance
            kept = min(prompt.num_peer_tokens, self._num_kept_tokens)
            prompt.num_computed_tokens += prompt.num_peer_tokens - kept
            prompt.num_peer_tokens = kept
            prompt.num_peer_blocks = kept // self._unit_size
        self._peers.is_over(self)

    def count(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        super().count(num_local, num_external, indices)
        self._num_kept_tokens = self.num_parked_tokens

# SPDX-License-Identifier: Apache-2.0
"""One request whose prompt a peer has computed, or computes."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.metrics import Provenance
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.session import ConsumerEvent, ConsumerState, next_consumer_state
from vllm_ascend_pd.types import Endpoint, LoadId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_ascend_pd.config import TransferConfig
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.wire import Opened, RemotePrefill, Worker

logger = logging.getLogger(__name__)

_FIRST_TOKEN_S = 1.0
"""Longest wait for a first token that was promised, once all KV is in place. It comes right behind
the KV unless the producer has stopped; one that has gone is noticed at once."""


class RemotePrompt:
    """One request's session with its producer; a ``BlockSource`` once it is opened."""

    def __init__(
        self,
        request: Request,
        remote: RemotePrefill,
        transfer: TransferConfig,
        block_size: int,
        number: int,
    ) -> None:
        self.request = request
        self.key = request.request_id, number
        """Unlike the request's id it is not used again."""
        self.remote = remote
        self.control = Endpoint(remote.remote_host, remote.remote_port, remote.remote_key)
        self.state = ConsumerState.OPENING
        self.queued_status = request.status
        """The status to return to when nothing is pending any more."""
        self.num_loads = 0
        self.placed = False
        """Whether it has been decided to load in a step or parked."""
        self.parked = False
        """Whether a parked load is under way; the request waits for it."""
        self.is_stale = False
        """Whether the request is hashed anew: what loads bring in has other hashes."""
        self.num_parked_tokens = 0
        """Tokens that a parked load has brought into the prefix cache."""
        self.held_tail: KVCacheBlock | None = None
        """The prompt's tail block, loaded by a parked load; the request's own from admission on."""
        self.epoch = remote.remote_epoch
        self.is_computed = True
        """Whether the producer had the whole prompt when it was opened."""
        self.place_until = math.inf
        """When it is given up to find memory for a prompt that is still computed."""
        self.admit_until = math.inf
        """When it is given up to find memory for the request; its peer holds blocks meanwhile."""
        self.first_token_id: int | None = None
        """What the producer has sampled after the prompt."""
        self.admitted = False
        self.released = False
        self.provenance = Provenance(request.num_prompt_tokens)
        self._transfer = transfer
        self._block_size = block_size
        self._workers: tuple[Worker, ...] = ()
        self._num_blocks = 0
        self._num_tail_tokens = 0
        """Of the block that holds the prompt's last token, perhaps with it, perhaps all."""
        self._first_token_follows = False
        self._first_token_until = math.inf

    def advance(self, event: ConsumerEvent) -> bool:
        """Whether the event had an effect."""
        state = next_consumer_state(self.state, event)
        if state is None:
            return False
        self.state = state
        self.admit_until = time.monotonic() + self._transfer.admission_timeout_s
        return True

    def is_overdue(self, now: float) -> bool:
        """Whether it has waited too long for memory, with nothing on its way."""
        waits = self.state is ConsumerState.READY and not self.admitted
        return waits and not self.num_loads and now >= self.admit_until

    @property
    def lease(self) -> tuple[Endpoint, str, str]:
        """What several requests may share: all of it, since a client may mix them up."""
        return self.control, self.remote.transfer_id, self.remote.remote_epoch

    @property
    def pending(self) -> bool:
        """Whether the producer has not answered yet."""
        return self.state is ConsumerState.OPENING

    @property
    def offers(self) -> bool:
        """Whether the lookup of the waiting request may count on this source."""
        return self.state in (ConsumerState.READY, ConsumerState.LOADING) and not self.parked

    @property
    def is_tail_cacheable(self) -> bool:
        """Whether the block of the prompt's last token is full, and no token of it is computed."""
        return (
            self._num_tail_tokens == self._block_size
            and self.request.num_output_tokens > 0
            and not self.is_stale
        )

    @property
    def num_blocks(self) -> int:
        return self._num_blocks + self.is_tail_cacheable

    @property
    def num_tail_tokens(self) -> int:
        """The last token is computed in any case: that is the prompt's or the first after it."""
        return min(self._num_tail_tokens, (self.request.num_tokens - 1) % self._block_size)

    @property
    def has_first_token(self) -> bool:
        """Whether the first token is there and has not been delivered yet."""
        return (
            self.first_token_id is not None
            and not self.admitted
            and not self.state.final
            and not self.request.num_output_tokens
        )

    @property
    def has_delivered(self) -> bool:
        """Whether the request has an output token before it is scheduled."""
        return self.request.num_output_tokens > 0 and not self.admitted

    def waits_for_first_token(self) -> bool:
        """Whether the request, whose KV is in place, should wait a little more."""
        if not self._first_token_follows or self.first_token_id is not None or self.state.final:
            return False
        now = time.monotonic()
        self._first_token_until = min(self._first_token_until, now + _FIRST_TOKEN_S)
        waits = now < self._first_token_until
        if not waits:
            logger.warning(
                "request %s: the first token, promised by %s, did not come; it is computed here",
                self.request.request_id,
                self.control,
            )
        return waits

    def lose_first_token(self) -> None:
        """If it has not come yet, it does not come any more."""
        self._first_token_until = -math.inf

    def opened(self, answer: Opened) -> None:
        self._num_blocks = answer.num_blocks
        self._num_tail_tokens = answer.num_tail_tokens
        self._first_token_follows = answer.first_token_follows
        self._workers = answer.workers
        self.epoch = answer.epoch
        self.is_computed = answer.is_computed
        self.place_until = time.monotonic() + self._transfer.load_timeout_s

    def has_tail(self, index: int) -> bool:
        follows = self._first_token_follows and not self.request.num_output_tokens
        num_tokens = self._num_tail_tokens if follows else self.num_tail_tokens
        return num_tokens > 0 and self.num_blocks == index

    def make_load(
        self,
        load_id: LoadId,
        block_indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        has_tail: bool,
        in_step: bool,
    ) -> LoadSpec:
        assert self._workers
        num_awaited = None
        timeout_s = self._transfer.step_load_timeout_s
        if not in_step:
            timeout_s = self._transfer.load_timeout_s
            if not self.is_computed:
                timeout_s = self._transfer.prefill_timeout_s
                num_awaited = self.num_blocks + has_tail
        return LoadSpec(
            load_id=load_id,
            peers=self._workers,
            transfer_id=self.remote.transfer_id,
            epoch=self.epoch,
            block_indices=block_indices,
            block_ids=block_ids,
            has_tail=has_tail,
            in_step=in_step,
            timeout_s=timeout_s,
            num_awaited=num_awaited,
        )

    def load_started(self) -> None:
        self.num_loads += 1
        self.advance(ConsumerEvent.LOAD)

    def has_block(self, index: int) -> bool:
        return index < self.num_blocks

    def load_ended(self, result: LoadResult) -> None:
        self.num_loads -= 1
        # A load that waited for the prompt has ended: from now on all of it can be read.
        self.is_computed = True
        self.provenance.num_peer_bytes += result.num_bytes
        self.provenance.transfer_ms += result.elapsed_ms
        self.provenance.transport = result.transport or self.provenance.transport
        if result.cause:
            self.provenance.outcome = result.cause
            self.advance(ConsumerEvent.LOAD_FAILED)
        elif not self.num_loads:
            self.advance(ConsumerEvent.LOADED)

# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt a peer has computed: open, decide, load, release."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ascend_pd.config import NOT_ALLOWED
from vllm_ascend_pd.engine.scheduler.first_token import deliver
from vllm_ascend_pd.engine.scheduler.known_peers import KnownPeer, KnownPeers
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.scheduler.producer import tail_extra_keys
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.vllm_api.groups import block_hashes
from vllm_ascend_pd.engine.vllm_api.status import wait_for_kv
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.metrics import OpenLabel
from vllm_ascend_pd.transfer.leases import tail_digest
from vllm_ascend_pd.types import Cause, Endpoint, Layers
from vllm_ascend_pd.wire import (
    WIRE_VERSION,
    Extended,
    FirstToken,
    GroupHashes,
    Open,
    Opened,
    Refused,
    RemotePrefill,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.vllm_api.types import Request, SchedulerOutput
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.metrics import Provenance
    from vllm_ascend_pd.transfer.control import ControlClient


logger = limited_logger(__name__)

A = TypeVar("A", Opened, Extended)
_HAVE_NOT_FAILED = frozenset({"loaded", "local", "first_token", "not_needed", "cancelled"})
"""Outcomes of requests whose KV came, or that did without."""
_OVERDUE_S = 0.25
"""Who waits for memory too long is looked for so often."""


class Consumer(Part):
    """Scheduler thread. What crosses to the control client's thread goes through its queues."""

    has_blocks = True

    def __init__(
        self,
        common: Common,
        client: ControlClient,
        fingerprint: str,
        sampling_key: Callable[[Request], bytes],
        divides_pages: bool,
        vocab_size: int,
    ) -> None:
        """``sampling_key``: see ``first_token``. ``divides_pages``: whether parts of pages can be
        loaded.
        """
        self.transfer = common.config.transfer
        self.groups = common.groups
        self.has_states = common.has_states
        self.known = KnownPeers(self.transfer.breaker_failures)
        self.prefill = common.prefill
        self._common = common
        self._stats = common.stats
        self._security = common.config.security
        self.client = client
        self._fingerprint = fingerprint
        self._sampling_key = sampling_key
        self._divides_pages = divides_pages
        self._vocab_size = vocab_size
        self.num_layers = sum(len(group.layers) for group in common.groups)
        """Of the model; with pipeline stages a scheduler knows only those of the first."""
        self.open: dict[str, RemotePrompt] = {}
        """By request id; only this class changes it."""
        self._numbers = itertools.count()
        self._first_tokens: list[RemotePrompt] = []
        self._users: dict[tuple[Endpoint, str, str], set[RemotePrompt]] = {}
        """By lease."""
        self._kept_epochs: dict[tuple[Endpoint, str, str], str] = {}
        """Under which the client keeps a lease: the last user may never have been answered."""
        self._overdue_at = 0.0
        self._failed_peers = OpenLabel()

    def load_ms(self, peer: KnownPeer, group: int) -> float:
        """Of a block of this group, of all workers together."""
        return peer.speed.ms(self._common.bytes_per_block(group))

    def add(self, request: Request, params: dict[str, Any]) -> tuple[Cause, str] | None:
        """Check what the client sent and ask the producer; the request waits for the answer.

        Returns why it is not asked, or ``None``.
        """
        try:
            remote = RemotePrefill.from_params(params)
        except TransferError as e:
            return Cause.BAD_PARAMS, str(e)
        if not self.allows(remote.remote_host):
            detail = f"kv_transfer_params.remote_host {remote.remote_host!r} {NOT_ALLOWED}"
            return Cause.PEER_NOT_ALLOWED, detail
        if not remote.remote_key and self._security.secret_file is None:
            return Cause.BAD_PARAMS, (
                "kv_transfer_params.remote_key is missing: the router must pass on all that the"
                " producer returned, or security.secret_file be set on all engines"
            )
        prompt = RemotePrompt(request, remote, self, (request.request_id, next(self._numbers)))
        self.open[request.request_id] = prompt
        self._users.setdefault(prompt.lease, set()).add(prompt)
        if request.num_tokens < 2 or request.skip_reading_prefix_cache:
            # One token is computed in any case; prompt logprobs need the whole prompt computed.
            prompt.provenance.outcome = Cause.NOT_NEEDED.value
            prompt.aborted()
            return None
        if not prompt.peer.may_be_asked(prompt):
            wait_for_kv(request)  # another source may be asked
            self._refused(prompt, prompt.peer.cause, "its KV did not come for others")
            return None
        sampling_key = self._sampling_key(request)
        end = prompt.end - (not sampling_key)
        self.client.open(
            prompt.key,
            prompt.control,
            Open(
                version=WIRE_VERSION,
                fingerprint=self._fingerprint,
                transfer_id=remote.transfer_id,
                epoch=remote.remote_epoch,
                end=end,
                groups=tuple(
                    group_hashes(request, group, prompt.end, end) for group in self._common.groups
                ),
                sampling_key=sampling_key,
            ),
        )
        wait_for_kv(request)
        return None

    def collect(self) -> None:
        while not self.client.outcomes.empty():
            outcome = self.client.outcomes.get_nowait()
            request_id = outcome.key[0]
            prompt = self.open.get(request_id)
            if prompt is None or prompt.key != outcome.key:
                continue
            if isinstance(outcome.answer, FirstToken):
                # It was sampled behind the prompt.
                prompt.set_complete(True)
                self._note_first_token(prompt, outcome.answer.token_id)
                continue
            if outcome.answer is None:
                prompt.lose_first_token()
                continue
            if not prompt.pending:
                continue
            answer = outcome.answer
            if isinstance(answer, Opened):
                answer = self.check_workers(answer)
            if not isinstance(answer, Opened):
                if not isinstance(answer, Refused):
                    answer = Refused("", Cause.BAD_PARAMS.value, f"answered {answer!r:.64}")
                self._refused(prompt, answer.cause, answer.detail)
                if answer.cause == Cause.PEER_UNREACHABLE.value and prompt.peer.failed(
                    answer.cause
                ):
                    self._leave_alone(prompt.peer, prompt.control)
                continue
            prompt.opened(answer)
            self._kept_epochs[prompt.lease] = prompt.epoch
            self.client.keep(prompt.control, prompt.remote.transfer_id, prompt.epoch)
            if answer.first_token_id is not None:
                self._note_first_token(prompt, answer.first_token_id)

    def _refused(self, prompt: RemotePrompt, cause: str, detail: str) -> None:
        prompt.refused(cause)
        logger.warning(
            "request %s: its prompt will be computed here: %s (%s; from %s)",
            *(prompt.request.request_id, cause, detail, prompt.whence),
        )

    def _leave_alone(self, peer: KnownPeer, endpoint: Endpoint) -> None:
        """It has failed for the last time: who has not begun to load from it computes."""
        logger.warning(
            "KV of %s does not come (%s): its prompts are computed here, but for one at a time"
            " that tries it, the first in %.0f s",
            *(endpoint, peer.cause, peer.backoff_s),
        )
        for prompt in self.open.values():
            if prompt.peer is peer and prompt.has_begun_nothing:
                self._give_up(prompt, Cause(peer.cause))

    def _note_first_token(self, prompt: RemotePrompt, token_id: int) -> None:
        if not 0 <= token_id < self._vocab_size:
            logger.error(
                "request %s: %s sent a first token that is none: %d",
                prompt.request.request_id,
                prompt.control,
                token_id,
            )
            return
        prompt.first_token_id = token_id
        self._first_tokens.append(prompt)

    def origin_of(self, request: Request) -> Provenance | None:
        """Of a request that has, or had, a peer."""
        prompt = self.find(request)
        return prompt.provenance if prompt is not None else None

    def take_first_tokens(self) -> list[RemotePrompt]:
        """Requests whose first token is to be delivered now."""
        prompts, self._first_tokens = self._first_tokens, []
        return [
            prompt
            for prompt in prompts
            if prompt.has_first_token and not prompt.request.is_finished()
        ]

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        self.collect()
        for prompt in self.take_first_tokens():
            request, common = prompt.request, self._common
            block_size = common.block_size
            num_full = prompt.end // block_size
            num_cached = common.phantoms.num_leading_hits(request, num_full) * block_size
            num_local = max(0, num_cached - prompt.num_parked_tokens)
            assert prompt.first_token_id is not None
            prompt.first_token_delivered(num_local)
            output = deliver(common.scheduler, request, prompt.first_token_id, num_local)
            outputs[request.client_index].append(output)
            common.parking.cache_full_tail(prompt)

    def settle(self) -> bool:
        self.collect()
        return False

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        if self.open and (now := time.monotonic()) >= self._overdue_at:
            self._give_up_overdue(now)

    def _give_up_overdue(self, now: float) -> None:
        """A request that found no memory in time computes its prompt when it does, and its producer
        gets the blocks back: else two engines could wait for each other's for ever.
        """
        self._overdue_at = now + _OVERDUE_S
        for prompt in [x for x in self.open.values() if x.is_overdue(now)]:
            self._give_up(prompt, Cause.DEADLINE)

    def _give_up(self, prompt: RemotePrompt, cause: Cause) -> None:
        self._common.parking.drop_tail(prompt)
        self._common.phantoms.withdraw(prompt)
        prompt.give_up(cause)

    def end_step(self) -> None:
        self._stats.add_errors(self.client.take_errors())

    def forsake(self, request: Request) -> None:
        if (prompt := self.find(request)) is not None:
            prompt.forsake()

    def identify(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def stop(self) -> None:
        self.client.stop()

    def counts(self) -> dict[str, int]:
        used = self._users.keys() | self._kept_epochs.keys()
        return {"remote_prompts": len(self.open), "used_leases": len(used)}

    def allows(self, host: str) -> bool:
        """Whether this engine may connect to it."""
        return self._security.allows(host)

    def check_workers(self, answer: A) -> A | Refused:
        """Refuse a producer whose workers are where this engine must not connect to, or divide
        pages in a way that it cannot load.
        """
        for worker in answer.workers:
            if not self.allows(worker.host):
                detail = f"its worker at {worker.host!r} {NOT_ALLOWED}"
                return Refused(answer.transfer_id, Cause.PEER_NOT_ALLOWED.value, detail)
        ours = self._common.sharding
        detail = ""
        try:
            sources = ours.loads_from(
                Layers(0, self.num_layers), [worker.layers for worker in answer.workers]
            )
        except TransferError as e:
            detail = str(e)
        else:
            if not all(source.is_whole for source in sources) and not self._divides_pages:
                detail = (
                    f"tensor parallel size {ours.tp_size} here and another one there: parts of"
                    " pages are moved on CPU only, and with the KV heads outermost"
                    " (VLLM_KV_CACHE_LAYOUT=LBHNC); use equal sizes"
                )
        return Refused(answer.transfer_id, Cause.INCOMPATIBLE.value, detail) if detail else answer

    def load_ended(
        self, peer: KnownPeer, endpoint: Endpoint, result: LoadResult, was_parked: bool
    ) -> None:
        """A load of any prompt has, from this peer."""
        self._stats.add("loads", label=result.cause or "ok")
        if result.num_bytes:
            self._stats.add("load_bytes", result.num_bytes, result.transport)
        self._stats.add("load_ms", result.elapsed_ms)
        if not result.was_awaited:
            self.known.speed.note(result.num_bytes, result.elapsed_ms)
        if not peer.load_ended(result, None if was_parked else self.transfer.max_step_load_ms):
            return
        if peer.is_well:
            logger.info("KV of %s has come: its prompts are loaded again", endpoint)
        else:
            self._leave_alone(peer, endpoint)

    def is_over(self, prompt: RemotePrompt) -> None:
        """Nothing more is read from this lease by this request; the last one gives it back."""
        users = self._users.get(prompt.lease, set())
        if prompt not in users:
            return
        users.remove(prompt)
        if not users:
            del self._users[prompt.lease]
            epoch = self._kept_epochs.pop(prompt.lease, prompt.epoch)
            self.client.release(prompt.control, prompt.remote.transfer_id, epoch)

    def finish(self, request: Request, ending: Ending) -> None:
        prompt = self.open.pop(request.request_id, None)
        if prompt is None:
            return
        prompt.aborted()
        self._common.phantoms.withdraw(prompt)
        self._count(prompt)
        ending.provenance = prompt.provenance

    def _count(self, prompt: RemotePrompt) -> None:
        origin = prompt.provenance
        self._stats.add("requests", label=origin.outcome or "unknown")
        if origin.outcome not in _HAVE_NOT_FAILED:
            self._stats.add("peer_failures", label=self._failed_peers.of(str(prompt.control)))
        self._stats.add("first_tokens", label=origin.first_token)
        for source, count in (
            ("local", origin.num_local_tokens),
            ("peer", origin.num_peer_tokens),
            ("computed", origin.num_computed_tokens),
        ):
            if count:
                self._stats.add("prompt_tokens", count, source)
        logger.debug("request %s: %s", prompt.request.request_id, origin)


def group_hashes(request: Request, group: KVGroup, known: int, end: int) -> GroupHashes:
    """Of the span [0, ``end``) of ``known`` tokens, all of them or all but the last."""
    start = group.tail_unit(known) * group.unit_size
    hashes = block_hashes(request, group, start)
    parent = hashes[-1] if hashes else b""
    extra_keys = tail_extra_keys(request, start, known)
    return GroupHashes(hashes, tail_digest(parent, extra_keys, request.all_token_ids[start:end]))

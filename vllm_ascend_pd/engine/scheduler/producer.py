# SPDX-License-Identifier: Apache-2.0
"""Prompts that this engine computes for a consumer: grants, pins, leases."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_ascend_pd.engine.scheduler.first_token import parent_id
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.vllm_api.groups import (
    block_hashes,
    block_ids,
    known_end,
    lasting_blocks,
    movable_blocks,
)
from vllm_ascend_pd.engine.vllm_api.hashes import extra_keys
from vllm_ascend_pd.engine.vllm_api.requests import tell_none
from vllm_ascend_pd.engine.vllm_api.status import is_completed, is_queued, waits_for_kv
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.kv.span import GroupBlocks, Span
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.lease_states import ProducerState
from vllm_ascend_pd.transfer.leases import Lease, LeaseBook, Tail
from vllm_ascend_pd.types import Cause, Endpoint, Epoch, LeaseRef, TransferId
from vllm_ascend_pd.wire import RemotePrefill, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, Request, SchedulerOutput
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.transfer.control import ControlServer
    from vllm_ascend_pd.transfer.tickets import PageServer


logger = limited_logger(__name__)

_Key: TypeAlias = "str | tuple[TransferId]"
"""The id of a request for a prompt; of what is lent the transfer id, which its peer has chosen."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt under a lease: the samples of one ``n > 1`` request share it."""

    lease: Lease
    owner: Request | None = None
    """The sample whose blocks the lease names, from its first step on; the others' are their own.
    Several samples may hold other blocks, and be computed long after the owner has ended."""
    pinned: list[KVCacheBlock] = field(default_factory=list)
    """In the order of groups, each pinned at once: those that the request gives up while it goes on
    as soon as they are all computed, the others when it has ended."""
    num_held: int = 0
    """Tokens that are computed, and not granted yet, as a load below them may still fail."""


class Producer(Part):
    """Scheduler thread. The lease book is shared with the control server's thread.

    The worker is told which blocks it may serve in the step that completes the prompt, so a
    consumer that comes right after the response is served at once. When the request ends, its
    blocks are pinned with a reference of their own and the request is freed as usual.

    A request that comes with a transfer id (decode first) is announced on arrival, and its blocks
    are granted step by step as they are computed, but never on top of a load that may still fail.
    """

    def __init__(
        self,
        common: Common,
        book: LeaseBook,
        server: ControlServer,
        epoch: Epoch,
        endpoint: Endpoint,
        sampling_key: Callable[[Request], bytes],
    ) -> None:
        """``sampling_key``: see ``first_token``."""
        self._common = common
        self._stats = common.stats
        self._manager = common.manager
        unopened_share = common.config.transfer.unopened_share
        self._max_unopened_blocks = int(unopened_share * self._manager.block_pool.num_gpu_blocks)
        self.server = server
        self.book = book
        self.epoch = epoch
        self.endpoint = endpoint
        self._sampling_key = sampling_key
        self.busy = False
        """Whether there may be something to tell the worker with a step."""
        self._expected: dict[str, Request] = {}
        self._prompts: dict[_Key, _Prompt] = {}
        self._keys: dict[Lease, _Key] = {}
        """Of ``_prompts``."""
        self._unwanted: set[str] = set()
        """Prompts that were given back, of requests that may still queue."""
        self._held: set[_Prompt] = set()
        self._extended: dict[Lease, Grant] = {}
        """Of running requests; the next step tells the worker."""
        self._page_servers: dict[int, PageServer] = {}
        self._revokes: list[LeaseRef] = []

    def expect(self, request: Request) -> tuple[Cause, str] | None:
        """This request asks for its KV to be kept for a consumer; why it is not, or ``None``."""
        if self._common.has_states and request.max_tokens > 1:
            return Cause.BAD_PARAMS, (
                "the model has layers that keep a state, which is written over as a request goes"
                " on: send the producer max_tokens 1"
            )
        if (transfer_id := _chosen_id(request)) is not None:
            key = _prompt_key(request.request_id)
            try:
                check_name("transfer_id", transfer_id)
            except TransferError as e:
                return Cause.BAD_PARAMS, str(e)
            if key not in self._prompts:
                if transfer_id in self.book:
                    return Cause.BAD_PARAMS, "kv_transfer_params.transfer_id is in use already"
                self._keep(key, self._make_lease(request, TransferId(transfer_id), True))
                self.server.answer_waiting(transfer_id)
        self._expected[request.request_id] = request
        self.busy = True
        return None

    def release(self, transfer_id: object) -> None:
        """Who knows this id says that no consumer comes; the prompt itself may come later still."""
        try:
            self.book.release(check_name("release_transfer_id", transfer_id), "")
        except TransferError as e:
            logger.warning("%s", e)
        self.collect_closed()

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        """What the worker must not serve from this step on, and what it may, which this step
        computes.
        """
        if self.busy:
            meta.grants = (*self.build_grants(output), *self._extended.values())
            self._extended.clear()
            meta.revokes = self.take_revokes()
            self.busy = bool(self._expected or self._prompts)

    def settle(self) -> bool:
        """A step tells the worker what it may no longer serve, or what it may by now."""
        self.collect_closed()
        return bool(self._revokes or self._held or self._extended)

    def end_step(self) -> None:
        self._stats.add_errors(self.server.take_errors())

    def take_report(self, report: StepReport) -> None:
        """Prompts can be opened once it is known where each worker, by rank, serves its pages."""
        self._page_servers |= report.page_servers
        ranks = range(self._common.sharding.num_workers)
        if report.page_servers and len(self._page_servers) == len(ranks):
            self.book.page_servers = tuple(self._page_servers[rank] for rank in ranks)
            self.server.answer_waiting()

    def identify(self, fingerprint: str) -> None:
        self.revoke_all()
        self.book.identify(fingerprint)

    def reset(self, reset_connector: bool) -> None:
        self.revoke_all()

    def stop(self) -> None:
        self.server.stop()

    def counts(self) -> dict[str, int]:
        return {
            "prompts": len(self._expected) + len(self._prompts) + len(self._held),
            "leases": len(self.book),
            "pinned_blocks": sum(len(prompt.pinned) for prompt in self._prompts.values()),
        }

    def build_grants(self, output: SchedulerOutput) -> list[Grant]:
        """Grants of the prompts that this step computes."""
        if not self._expected and not self._prompts:
            return []
        for request_id in output.preempted_req_ids or ():
            if (request := self._expected.get(request_id)) is not None:
                self._give_up(request)
        grants = self._build_held()
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self._expected.get(request_id)
            if request is not None and (grant := self._build_grant(request, num_scheduled)):
                grants.append(grant)
        return grants

    def _build_grant(self, request: Request, num_scheduled: int) -> Grant | None:
        """What consumers may read of this request's prompt that they could not before."""
        num_before = request.num_computed_tokens
        num_after = num_before + num_scheduled
        key = _prompt_key(request.request_id)
        prompt = self._prompts.get(key)
        if prompt is None:
            if _chosen_id(request) is not None or num_after < known_end(request):
                return None  # announced on arrival, and given up since; or not computed yet
            if self._has_slid_on(request):
                return None  # its lease was given up while it went on
            transfer_id = TransferId(secrets.token_hex(16))
            prompt = self._keep(key, self._make_lease(request, transfer_id, False))
            num_before = 0
        lease = prompt.lease
        is_admitted = prompt.owner is None
        if is_admitted and lease.state is ProducerState.OPEN:
            prompt.owner = request
        if num_before >= lease.span.end or prompt.owner is not request:
            return None
        lease.span = self._hold(lease.span, request)
        if num_after >= lease.span.end:
            self._pin(prompt, request, (g for g in self._common.groups if not g.keeps_all))
        if lease.announced and self._common.loads.is_under(request):
            prompt.num_held = num_after
            self._held.add(prompt)
            return None
        self._held.discard(prompt)
        # Its first hits may be blocks that another request computes in this very step.
        return self._grant(lease, 0 if is_admitted else num_before, num_after)

    def _has_slid_on(self, request: Request) -> bool:
        """Whether a window has left the end of the prompt behind."""
        end = known_end(request)
        return any(
            block.is_null
            for group in self._common.groups
            if group.window or group.chunk
            for block in self._lasting(request, group, end)[group.first_kept(end) :]
        )

    def _build_held(self) -> list[Grant]:
        """What was held back and stands on good KV now."""
        grants = []
        for prompt in list(self._held):
            assert prompt.owner is not None
            if not self._common.loads.is_under(prompt.owner):
                self._held.discard(prompt)
                grants.append(self._grant(prompt.lease, prompt.num_held, prompt.num_held))
        return grants

    def _grant(self, lease: Lease, num_ready: int, num_coming: int) -> Grant:
        tables = tuple(group.block_ids for group in lease.span.groups)
        return Grant(lease.ref, self.epoch, tables, num_ready, num_coming)

    def _keep(self, key: _Key, lease: Lease) -> _Prompt:
        prompt = self._prompts[key] = _Prompt(lease)
        self._keys[lease] = key
        self.book.grant(lease)
        self._stats.add("leases_granted")
        return prompt

    def _make_way(self) -> None:
        """Prompts for consumers that may never come leave blocks for others."""
        if num_displaced := self.book.make_way(self._max_unopened_blocks):
            self.collect_closed()
            logger.warning(
                "%d prompts that no consumer has asked for give way: such prompts may hold %d"
                " blocks (transfer.unopened_share)",
                num_displaced,
                self._max_unopened_blocks,
            )

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        """Nobody reads what was given back while it queued, as by consumers whose patience was
        shorter than the queue: without that, each prompt that is computed is one of those.
        """
        for key in list(self._unwanted):
            request = self._expected.get(key)
            if request is not None and is_queued(request) and request.max_tokens == 1:
                outputs[request.client_index].append(tell_none(self._common.scheduler, request))
            elif request is not None and waits_for_kv(request):
                continue  # for what the pool has of it
            self._unwanted.discard(key)

    def finish(self, request: Request, ending: Ending) -> None:
        ending.params = self._finish(request)

    def _finish(self, request: Request) -> dict[str, Any] | None:
        """Pin and lease its prompt, or take the grant back."""
        if self._expected.pop(request.request_id, None) is None:
            return None
        prompt = self._prompts.get(_prompt_key(request.request_id))
        chosen_id = _chosen_id(request)
        if not is_completed(request) or (prompt is None and chosen_id is None):
            self._give_up(request)
            return None
        if prompt is None:  # given back before it was computed; whoever comes all the same is told
            prompt = _Prompt(self._make_lease(request, TransferId(chosen_id), True))
            prompt.lease.span = self._hold(prompt.lease.span, request)
        lease = prompt.lease
        is_owner = prompt.owner is request
        if is_owner and self.book.finish(lease, _first_token(request, lease)):
            self.server.tell_first_token(lease)
            self._pin(prompt, request, (g for g in self._common.groups if g.keeps_all))
            self._make_way()
        return RemotePrefill(
            remote_engine_id=self._common.config.engine_id,
            remote_host=self.endpoint.host,
            remote_port=self.endpoint.port,
            remote_key=self.endpoint.key,
            remote_block_ids=lease.span.block_ids,
            tp_size=self._common.sharding.tp_size,
            transfer_id=lease.transfer_id,
            remote_epoch=self.epoch,
            remote_num_tokens=lease.span.end,
            remote_data_parallel_rank=self._common.rank,
        ).to_params()

    def _hold(self, span: Span, request: Request) -> Span:
        """In the blocks that the request has of it until all of it is computed."""
        return span.holding(
            [block_ids(self._lasting(request, group, span.end)) for group in self._common.groups]
        )

    def _pin(self, prompt: _Prompt, request: Request, groups: Iterable[KVGroup]) -> None:
        """What it has in these groups, which is complete."""
        blocks = [
            block
            for group in groups
            for block in self._lasting(request, group, prompt.lease.span.end)
            if not block.is_null
        ]
        self._manager.block_pool.touch(blocks)
        prompt.pinned += blocks

    # Of a running request.

    def lend(self, request: Request, transfer_id: TransferId) -> Lease:
        """A lease of what it has so far. It ends before the request's blocks go, so only those are
        pinned that it gives up itself while it goes on, see ``extend``.
        """
        lease = self._make_lease(request, transfer_id, False)
        self._keep((transfer_id,), lease)
        self.book.finish(lease)
        self.busy = True
        return lease

    def extend(self, lease: Lease, request: Request, end: int) -> None:
        """Its first ``end`` tokens are computed and not written any more. What could be read of it
        before and was given up since, nobody reads by now.
        """
        blocks = (
            GroupBlocks(group.block_size, (), block_hashes(request, group, end))
            for group in self._common.groups
        )
        tables = [
            movable_blocks(self._manager, request, group, end, partial(self._is_whole, request))
            for group in self._common.groups
        ]
        lease.span = Span(0, end, tuple(blocks)).holding([block_ids(table) for table in tables])
        self._extended[lease] = self._grant(lease, end, end)
        sliding = [
            block
            for group, table in zip(self._common.groups, tables, strict=True)
            if not group.keeps_all
            for block in table
            if not block.is_null
        ]
        prompt = self._prompts[self._keys[lease]]
        self._manager.block_pool.touch(sliding)
        self._manager.block_pool.free_blocks(reversed(prompt.pinned))
        prompt.pinned = sliding

    def _lasting(self, request: Request, group: KVGroup, end: int) -> list[KVCacheBlock]:
        is_whole = partial(self._is_whole, request)
        return lasting_blocks(self._manager, request, group, end, is_whole)

    def _is_whole(self, request: Request, block: KVCacheBlock) -> bool:
        """Whether a cached block holds what its hash says, and not what a load has yet to bring.
        The end of those that the request is computed on is waited for.
        """
        common = self._common
        return block not in common.phantoms and not common.loads.may_spoil(block, request)

    def take_back(self, lease: Lease) -> None:
        """Nothing of it may be read from the next step on."""
        self.book.revoke(lease)
        self.collect_closed()

    def collect_closed(self) -> None:
        """Unpin what was released, expired or revoked."""
        for lease in self.book.take_closed():
            self._revokes.append(lease.ref)
            self._stats.add("leases_closed", label=lease.cause)
            prompt = self._prompts.pop(key := self._keys.pop(lease))
            if isinstance(key, str) and lease.announced and lease.cause == "released":
                self._unwanted.add(key)
            self._held.discard(prompt)
            self._extended.pop(lease, None)
            self._manager.block_pool.free_blocks(reversed(prompt.pinned))

    def take_revokes(self) -> tuple[LeaseRef, ...]:
        """Leases that the worker must not serve from this step on."""
        revokes, self._revokes = tuple(self._revokes), []
        return revokes

    def recovered(self, bad_block_ids: set[int]) -> None:
        """Give up every lease that holds one of these blocks."""
        for prompt in self._prompts.values():
            if bad_block_ids.intersection(prompt.lease.span.block_ids):
                self.book.revoke(prompt.lease)
        self.collect_closed()

    def revoke_all(self) -> None:
        self.book.revoke_all()
        self.collect_closed()

    def forsake(self, request: Request) -> None:
        """What was promised of the prompt that it is still to compute, or computes."""
        prompt = self._prompts.get(_prompt_key(request.request_id))
        if prompt is not None and prompt.lease.state is ProducerState.OPEN:
            self.book.revoke(prompt.lease)
            self.collect_closed()

    def _give_up(self, request: Request) -> None:
        """Its blocks go. Those of another sample stay, and a prompt that one may still compute."""
        key = _prompt_key(request.request_id)
        prompt = self._prompts.get(key)
        if prompt is None or prompt.lease.state is not ProducerState.OPEN:
            return
        is_last = not any(_prompt_key(request_id) == key for request_id in self._expected)
        if prompt.owner is request or (prompt.owner is None and is_last):
            self.book.revoke(prompt.lease)
            self.collect_closed()

    def _make_lease(self, request: Request, transfer_id: TransferId, announced: bool) -> Lease:
        groups, end = self._common.groups, known_end(request)
        blocks = (GroupBlocks(g.block_size, (), block_hashes(request, g, end)) for g in groups)
        span = Span(0, end, tuple(blocks))
        start = span.unit_start
        return Lease(
            transfer_id=transfer_id,
            span=span,
            tails=tuple(
                Tail(
                    tuple(request.all_token_ids[start:end]),
                    tail_extra_keys(request, start, end),
                    is_whole=bool(group.state),
                )
                for group in groups
            ),
            announced=announced,
            request_id=request.request_id,
            sampling_key=self._sampling_key(request),
        )


def tail_extra_keys(request: Request, start: int, stop: int) -> bytes:
    """What vLLM would hash beside the tokens ``[start, stop)``: salt, LoRA, images, embeddings."""
    return repr(extra_keys(request, start, stop)).encode()


def _chosen_id(request: Request) -> Any:
    """The transfer id that the router chose. Of a request that also takes a peer's KV it names
    that one.
    """
    params = request.kv_transfer_params
    assert params is not None
    return None if params.get("do_remote_prefill") else params.get("transfer_id")


def _prompt_key(request_id: str) -> str:
    """The samples of one ``n > 1`` request (``0_id``, ``1_id``, …) share one lease."""
    return parent_id(request_id) or request_id


def _first_token(request: Request, lease: Lease) -> int | None:
    """What was sampled after the span, if a consumer may take it."""
    end = lease.span.end
    return request.all_token_ids[end] if lease.sampling_key and request.num_tokens > end else None

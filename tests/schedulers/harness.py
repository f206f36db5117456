# SPDX-License-Identifier: Apache-2.0
"""The scheduler side in the real patched schedulers. No model is run: a worker is simulated.

The simulated worker knows, for each slot of each KV block, the tokens that the slot's KV stands
for. A request's next token is right only if every slot below it is, and no slot behind it in its
last block holds what is no number (below zero here); else it is ``WRONG_TOKEN``. So a stale block,
a load into the wrong block or a token computed on bad KV shows in the output.
At the end of each test every cached block holds what its hash says and nothing has leaked.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import torch
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.vllm_api.outputs import output_without_forward
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import NO_BLOCK, KVGroup
from vllm_ascend_pd.metrics import COUNTERS, split_key
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, LeaseRef, LoadId

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_LAYERS = 2
WRONG_TOKEN = 7
POLL_LIMIT_S = 60.0
TURN_S = 0.0002
"""Left to the control threads where there is nothing to compute."""
LONG_TURN_S = 0.001
"""The same after ``MANY_TURNS`` of them: time itself is waited for."""
MANY_TURNS = 60
SLOWLY = 8
"""A source that computes slowly makes one step in so many turns, so that messages come first."""
PAGE_SERVER = PageServer(Endpoint("127.0.0.1", 1), TicketKey())

init_none_hash(sha256)
hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=32
)
STATE = MambaSpec(
    block_size=BLOCK_SIZE,
    shapes=((8,),),
    dtypes=(torch.float32,),
    page_size_padded=SPEC.page_size_bytes,
    mamba_cache_mode="align",
)

CHOSEN = {"do_remote_decode": True, "transfer_id": "chosen"}
"""Both requests are sent at once: the router has chosen the transfer id."""


def right_token(position: int) -> int:
    """What the simulated model says at ``position``, whatever came before."""
    return 100 + position % 1900


def prompt_of(num_tokens: int, start: int = 1000) -> list[int]:
    return list(range(start, start + num_tokens))


@dataclass
class SimulatedRequest:
    """A request in the worker's persistent batch."""

    prompt: list[int]
    tables: list[list[int]]
    """By KV cache group."""
    num_computed: int = 0
    num_known: int = 0
    """Tokens that the worker has been told or has sampled."""
    drafts: list[int] = field(default_factory=list)
    """Of the tokens that follow."""
    state_at: tuple[int, int] | None = None
    """The column of its tables with its states, and how many drafts were accepted behind it;
    unless it has just come or come back.
    """
    _contents: list[int] = field(default_factory=list)

    def contents(self, num_tokens: int) -> list[int]:
        """Stand for the KV of so many tokens, or more; each depends on all tokens up to it."""
        while len(self._contents) < num_tokens:
            at = len(self._contents)
            token = self.prompt[at] if at < len(self.prompt) else right_token(at)
            self._contents.append(abs(hash((self._contents[-1] if at else 0, token))))
        return self._contents

    def content(self, position: int) -> int:
        return self.contents(position + 1)[position]


class SimulatedWorker:
    """Executes scheduler outputs in order, as Model Runner V1 and the worker side do."""

    def __init__(
        self, groups: Sequence[KVGroup], num_drafts: int = 0, has_checkpoints: bool = False
    ) -> None:
        """``num_drafts`` follow each token that it samples; about half are right.
        ``has_checkpoints``: a step leaves a state within a prompt, too.
        """
        self.groups = groups
        self.num_drafts = num_drafts
        self.num_accepted = 0
        self.has_checkpoints = has_checkpoints
        self.num_checkpoints = 0
        self._draw = Random(num_drafts)
        self._num_slots = max(group.block_size for group in groups)
        self.blocks: defaultdict[int, list[int]] = defaultdict(lambda: [0] * self._num_slots)
        """What is in their slots: contents of requests, or garbage, which is negative. Of a group
        whose blocks have fewer tokens than those of others each token has several."""
        self.grants: dict[LeaseRef, Grant] = {}
        self.requests: dict[str, SimulatedRequest] = {}
        self.parked: dict[LoadId, LoadSpec] = {}
        self.cause_of: Callable[[LoadSpec], str] = lambda spec: ""
        self.peers: list[SimulatedWorker] = []
        self.rested: list[LoadId] = []
        self._results: list[LoadResult] = []
        self._servers: dict[int, PageServer] = {0: PAGE_SERVER}
        self._garbage = count(1)

    def execute(self, output: SchedulerOutput, samples: set[str]) -> ModelRunnerOutput:
        meta = output.pd_metadata
        new_grants: dict[LeaseRef, Grant] = {}
        if meta is not None:
            assert isinstance(meta, StepMeta)
            for lease in meta.revokes:
                self.grants.pop(lease, None)
            new_grants = {grant.lease: grant for grant in meta.grants}
            for load_id in meta.cancels:
                if load_id in self.parked:
                    self.end_parked(load_id, Cause.CANCELLED.value)
            for load in meta.loads:
                if load.in_step:
                    self._results.append(self.run(load, self.cause_of(load)))
                else:
                    self.parked[load.load_id] = load
        filling = {i for load in self.parked.values() for i in load.block_ids}
        assert filling.isdisjoint(output.new_block_ids_to_zero or ()), "zeroed while it is loaded"
        self._update_states(output)
        drafts = output.scheduled_spec_decode_tokens
        tokens = [
            self._compute(
                request_id, num_tokens, request_id in samples, len(drafts.get(request_id, ()))
            )
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        self.grants.update(new_grants)
        report = None
        if self._results or self._servers or self.rested:
            report = StepReport(tuple(self._results), self._servers, rested=tuple(self.rested))
        self._results, self._servers, self.rested = [], {}, []
        if not output.num_scheduled_tokens:
            return output_without_forward(report)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
        )

    def end_parked(self, load_id: LoadId, cause: str = "", num_resting: int = 0) -> LoadSpec:
        """The parked load ends now; the next step's output reports it."""
        load = self.parked.pop(load_id)
        self._results.append(self.run(load, cause, num_resting))
        return load

    def spoil(self, load: LoadSpec) -> None:
        """A peer that was given up writes into the blocks of a load."""
        for block_id in load.block_ids:
            self.blocks[block_id] = self._spoilt()

    def _spoilt(self) -> list[int]:
        return [-next(self._garbage) for _ in range(self._num_slots)]

    def _source_of(self, load: LoadSpec) -> SimulatedWorker | None:
        return next((peer for peer in self.peers if _lease_of(load) in peer.grants), None)

    def grant_of(self, load: LoadSpec) -> Grant | None:
        """What may be read of the prompt by now."""
        source = self._source_of(load)
        return source.grants[_lease_of(load)] if source is not None else None

    def run(self, load: LoadSpec, cause: str, num_resting: int = 0) -> LoadResult:
        source = self._source_of(load)
        if source is None and not cause:
            cause = Cause.LEASE_EXPIRED.value
        if source is not None and not cause:
            tables = source.grants[_lease_of(load)].block_ids
            lacking = {
                b.group for b in load.blocks for i in b.indices if tables[b.group][i] == NO_BLOCK
            }
            # An early stop of a prompt is given up before its end, and short of memory evicted.
            early = {group.id for group in self.groups if group.stops_early}
            assert lacking <= early, "its producer would refuse to send this block"
            cause = Cause.EVICTED.value if lacking else ""
        for blocks in load.blocks:
            for index, block_id in zip(blocks.indices, blocks.block_ids, strict=True):
                if cause or source is None:
                    self.blocks[block_id] = self._spoilt()
                else:
                    self.blocks[block_id] = list(source.blocks[tables[blocks.group][index]])
        num_bytes = 0 if cause else 1024 * len(load.block_ids)
        return LoadResult(load.load_id, cause, num_bytes, 1.0, num_resting=num_resting)

    def _update_states(self, output: SchedulerOutput) -> None:
        for block_id in output.new_block_ids_to_zero or ():
            self.blocks.pop(block_id, None)
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids or ())
            tokens = new.prefill_token_ids or prompt
            assert tokens[: len(prompt)] == prompt
            self.requests[new.req_id] = SimulatedRequest(
                prompt, list(map(list, new.block_ids)), new.num_computed_tokens, len(tokens)
            )
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self.requests[request_id]
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None
                request.tables = list(map(list, new_blocks))
                request.num_known = max(
                    request.num_known, len(cached.all_token_ids.get(request_id, ()))
                )
                request.state_at = None
            elif new_blocks is not None:
                for table, more in zip(request.tables, new_blocks, strict=True):
                    table += more
            request.num_computed = cached.num_computed_tokens[i]

    def _compute(
        self, request_id: str, num_tokens: int, samples: bool, num_drafts: int
    ) -> list[int]:
        request = self.requests[request_id]
        start = request.num_computed
        if self.num_drafts:  # a scheduler that runs ahead takes all drafts for accepted
            start = min(start, request.num_known - 1)
        end = start + num_tokens - num_drafts
        right = end <= request.num_known
        for group in self.groups:
            if group.state:
                right = right and self._holds_state(request, start, group.id)
                continue
            first = max(0, start - group.window + 1) if group.window else 0
            right = right and self.holds(request, range(first, start), group.id)
            right = right and self._is_clear(request, start + num_tokens, group.id)
        accepted = [right_token(end + i) for i in range(num_drafts) if right]
        while accepted and accepted != request.drafts[: len(accepted)]:
            accepted.pop()
        self.num_accepted += len(accepted)
        for position in range(start, start + num_tokens):
            content = request.content(position) if right else -next(self._garbage)
            if right and position >= end + len(accepted):
                content = next(self._garbage)
            for group, table in zip(self.groups, request.tables, strict=True):
                if not group.state:
                    index, slot = divmod(position, group.block_size)
                    assert table[index], "a block that is written was given up"
                    width = self._num_slots // group.block_size
                    self.blocks[table[index]][slot * width : (slot + 1) * width] = [content] * width
        for group in self.groups:
            if group.state:
                self._write_states(request, right, end, num_drafts, len(accepted), group.id)
        if self.num_drafts:
            request.state_at = self._next_state(end, num_drafts, len(accepted))
        if not samples:
            return []
        end += len(accepted)
        request.num_known = end + 1
        draw = self._draw.random
        request.drafts = [
            right_token(end + 1 + i) if draw() < 0.6 else WRONG_TOKEN
            for i in range(self.num_drafts)
        ]
        return [*accepted, right_token(end) if right else WRONG_TOKEN]

    def draft(self, request_ids: Iterable[str]) -> DraftTokenIds:
        known = {r: self.requests[r].drafts for r in request_ids if r in self.requests}
        return DraftTokenIds(list(known), list(known.values()))

    def _holds_state(self, request: SimulatedRequest, end: int, group: int) -> bool:
        """Whether it has the state behind its first ``end`` tokens."""
        if not end:
            return True
        column, bias = request.state_at or ((end - 1) // BLOCK_SIZE, 0)
        return self._state(request, column + bias, group) == request.content(end - 1)

    def _state(self, request: SimulatedRequest, column: int, group: int) -> int | None:
        block_id = request.tables[group][column]
        assert block_id, "the state was given up"
        found = set(self.blocks[block_id])
        return found.pop() if len(found) == 1 else None

    def _write_states(
        self,
        request: SimulatedRequest,
        right: bool,
        end: int,
        num_drafts: int,
        num_accepted: int,
        group: int,
    ) -> None:
        """Those behind ``end`` and each draft are in as many columns, and the one at a boundary of
        blocks that was passed in its own.
        """
        column = (end + num_drafts - 1) // BLOCK_SIZE
        boundary = (end + num_accepted) // BLOCK_SIZE * BLOCK_SIZE
        ends = [(column + i, end + i) for i in range(num_drafts + 1)]
        if boundary >= end:
            ends.append((boundary // BLOCK_SIZE - 1, boundary))
        if self.has_checkpoints:
            ends += self._checkpoints(request.num_computed, end + num_drafts)
        for at, behind in ends:
            content = request.content(behind - 1) if right else -next(self._garbage)
            if right and behind > end + num_accepted:
                content = next(self._garbage)
            block_id = request.tables[group][at]
            assert block_id, "the state was given up"
            self.blocks[block_id] = [content] * BLOCK_SIZE

    def _checkpoints(self, start: int, end: int) -> list[tuple[int, int]]:
        """The column of that within a step, and behind how many tokens it is."""
        at = get_mamba_prefill_checkpoint_position(end, BLOCK_SIZE, bool(self.num_drafts))
        if not is_mamba_prefill_checkpoint_valid(start, end, at, BLOCK_SIZE, BLOCK_SIZE, 1):
            return []
        self.num_checkpoints += 1
        return [((end - 1) // BLOCK_SIZE - 1, at)]

    def _next_state(self, end: int, num_drafts: int, num_accepted: int) -> tuple[int, int]:
        column = (end + num_drafts - 1) // BLOCK_SIZE
        boundary = (end + num_accepted) // BLOCK_SIZE * BLOCK_SIZE
        is_moved = boundary >= end and boundary // BLOCK_SIZE - 1 == column
        return column, 0 if is_moved else num_accepted

    def _is_clear(self, request: SimulatedRequest, end: int, group: int) -> bool:
        """Whether the last block holds numbers behind the last token: attention meets them."""
        size = self.groups[group].block_size
        block_id = request.tables[group][(end - 1) // size]
        behind = self.blocks[block_id][(end % size or size) * self._num_slots // size :]
        return all(content >= 0 for content in behind)

    def tokens_in(self, block_id: int, group: int) -> list[int]:
        """What it holds of each token that a block of this group has."""
        return self.blocks[block_id][:: self._num_slots // self.groups[group].block_size]

    def holds(self, request: SimulatedRequest, positions: range, group: int = 0) -> bool:
        """Whether the KV at all of them is that of the request's tokens."""
        contents, size = request.contents(positions.stop), self.groups[group].block_size
        at = positions.start
        while at < positions.stop:
            first = at - at % size
            end = min(first + size, positions.stop)
            block = self.tokens_in(request.tables[group][first // size], group)
            if block[at - first : end - first] != contents[at:end]:
                return False
            at = end
        return True


def _lease_of(load: LoadSpec) -> LeaseRef:
    return LeaseRef(load.transfer_id, load.peers[0].ticket.generation)


@dataclass
class Step:
    """A scheduled step that has not been executed yet."""

    output: SchedulerOutput
    samples: set[str]

    @property
    def meta(self) -> StepMeta:
        meta = self.output.pd_metadata
        assert isinstance(meta, StepMeta), "this step carries nothing for the worker"
        return meta

    @property
    def loads(self) -> tuple[LoadSpec, ...]:
        meta = self.output.pd_metadata
        return meta.loads if isinstance(meta, StepMeta) else ()


class Engine:
    """A real scheduler, a simulated worker, and the engine core's loop over both."""

    def __init__(self, scheduler: Scheduler, runs_ahead: bool) -> None:
        self.scheduler = scheduler
        self.worker = SimulatedWorker(
            scheduler.pd.common.groups,
            scheduler.num_spec_tokens,
            scheduler.mamba_has_prefill_checkpoint_blocks,
        )
        self.runs_ahead = runs_ahead
        self.in_flight: deque[Step] = deque()
        self._num_idle_turns = 0
        self.tokens: dict[str, list[int]] = {}
        self.params: dict[str, dict[str, Any] | None] = {}
        self.counted: Counter[str] = Counter()
        """What the front end has been told, as ``Stats.take`` names it."""
        self.num_for_a_peer = 0
        """Requests that have asked for a peer's KV."""
        self.requests: dict[str, Request] = {}
        self.counts_at_start = self.counts()
        self.before_pass: Callable[[], object] = lambda: None
        """When the scheduler has settled what came meanwhile, and nothing more comes."""

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self.scheduler.pd.counts()
        return counts

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 1,
        lora_request: LoRARequest | None = None,
        **sampling: Any,
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling
            ),
            pooling_params=None,
            lora_request=lora_request,
            block_hasher=get_request_block_hasher(self.scheduler.hash_block_size, sha256),
        )
        self.requests[request_id] = request
        self.num_for_a_peer += bool(params and params.get("do_remote_prefill"))
        self.tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Step:
        self.scheduler.has_requests()  # the engine core asks before each pass
        self.before_pass()
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        samples = {r for r in output.num_scheduled_tokens if not requests[r].is_prefill_chunk}
        step = Step(output, samples)
        self.in_flight.append(step)
        return step

    def finish_step(self) -> Step:
        """Execute the oldest step in flight and fold its output in."""
        step = self.in_flight.popleft()
        runner_output = self.worker.execute(step.output, step.samples)
        per_client = self.scheduler.update_from_output(step.output, runner_output)
        if self.worker.num_drafts and not self.runs_ahead:
            drafts = self.worker.draft(step.output.num_scheduled_tokens)
            self.scheduler.update_draft_token_ids(drafts)
        for outputs in per_client.values():
            if outputs.scheduler_stats is not None:
                self.counted.update(outputs.scheduler_stats.kv_connector_stats or {})
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.kv_transfer_params is not None:
                    self.params[output.request_id] = output.kv_transfer_params
                    if self.tokens[output.request_id]:  # else none may have been computed
                        expect_all_tokens(output.kv_transfer_params.get("provenance"))
        return step

    def num_counted(self, name: str) -> float:
        """By all labels of a counter, told or yet to be told."""
        counts = self.counted, self.scheduler.pd.common.stats.values
        return sum(n for each in counts for key, n in each.items() if split_key(key)[0] == name)

    def step(self) -> Step:
        """One turn of the loop; an engine that runs ahead keeps a second step in flight."""
        step = self.schedule()
        while self.in_flight and (len(self.in_flight) > self.runs_ahead or not step.samples):
            self.finish_step()
        self._num_idle_turns += 1
        if step.output.num_scheduled_tokens:
            self._num_idle_turns = 0
        else:
            time.sleep(LONG_TURN_S if self._num_idle_turns > MANY_TURNS else TURN_S)
        return step

    def run(self, until: Callable[[], bool]) -> list[Step]:
        """Turn the loop until something holds; fails when it does not in time."""
        steps = []
        deadline = time.monotonic() + POLL_LIMIT_S
        while not until():
            assert time.monotonic() < deadline, f"still waiting: {self.counts()}"
            steps.append(self.step())
        return steps

    def run_to_end(self) -> list[Step]:
        steps = self.run(lambda: not self.scheduler.has_requests())
        while self.in_flight:
            self.finish_step()
        return steps

    def schedule_until_admitted(self, request: Request) -> Step:
        """Poll for the producer's answer; the step that first schedules the request."""
        deadline = time.monotonic() + POLL_LIMIT_S
        while True:
            assert time.monotonic() < deadline, f"never admitted: {request.status.name}"
            step = self.schedule()
            if request.request_id in step.output.num_scheduled_tokens:
                return step
            self.finish_step()

    def poll(self, until: Callable[[], bool]) -> None:
        """Wait for the control threads, without a step."""
        deadline = time.monotonic() + POLL_LIMIT_S
        while not until():
            assert time.monotonic() < deadline, f"still waiting: {self.counts()}"
            time.sleep(TURN_S)

    def wait_for_answer(self) -> None:
        """A producer has answered; the scheduler has not looked yet."""
        self.poll(lambda: not self.scheduler.pd.part(Consumer).client.outcomes.empty())

    def prefill(self, request_id: str, prompt: list[int], **sampling: Any) -> dict[str, Any]:
        """Compute a prompt for a consumer; the response's ``kv_transfer_params``."""
        self.add(request_id, prompt, {"do_remote_decode": True}, **sampling)
        self.run(lambda: request_id in self.params)
        params = self.params[request_id]
        assert params is not None
        return params

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, request: Request) -> None:
        """As vLLM does to a running request when memory is short."""
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic())

    def warm(self, request_id: str, prompt: list[int]) -> None:
        """Compute a prompt here, so that its full blocks are cached."""
        self.add(request_id, prompt)
        self.run_to_end()

    def cached_block(self, request: Request, index: int) -> Any:
        blocks = self.pool.get_cached_block(request.block_hashes[index], [0])
        return blocks[0] if blocks else None

    def evict(self, request: Request, *indices: int) -> None:
        """Make holes in what is cached of a prompt."""
        self.pool.evict_blocks({self.cached_block(request, i).block_id for i in indices})

    def expect_tokens(self, request_id: str, num_tokens: int) -> None:
        start = self.requests[request_id].num_prompt_tokens
        assert self.tokens[request_id] == [right_token(start + i) for i in range(num_tokens)]

    def expect_nothing_leaked(self) -> None:
        self.run_to_end()
        self.poll(lambda: self.counts() == self.counts_at_start)
        self.schedule()  # what is not to be met is cleared with the next step
        self.finish_step()
        assert self.num_counted("leases_granted") == self.num_counted("leases_closed")
        assert min(self.counted.values(), default=0) >= 0
        if self.scheduler.log_stats:
            waiting = {split_key(key)[0] for key in self.scheduler.pd.common.stats.values}
            assert waiting.isdisjoint(COUNTERS), "counted, and not told"
        for tables in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not tables.req_to_blocks, "blocks are kept of requests that have ended"
        assert min(map(min, self.worker.blocks.values()), default=0) >= 0
        contents = {}
        for request in self.requests.values():
            simulated = SimulatedRequest(list(request.prompt_token_ids or ()), [])
            for group in self.worker.groups:
                size = group.block_size
                for index in range(len(request.block_hashes) // group.hashes_per_block):
                    held = [simulated.content(index * size + i) for i in range(size)]
                    content = request.block_hashes[group.last_hash(index)], group.id
                    contents[content] = held[-1:] * size if group.state else held
        for block in self.pool.blocks:
            if block.block_hash is not None:
                group_id = get_group_id(block.block_hash)
                held = self.worker.tokens_in(block.block_id, group_id)
                expected = contents[get_block_hash(block.block_hash), group_id]
                assert held == expected, f"block {block.block_id} is cached with KV of other tokens"


def expect_all_tokens(provenance: dict[str, Any] | None) -> None:
    if provenance is not None:
        places = "local", "peer", "dram", "remote", "ssd", "computed"
        numbers = [provenance[f"num_{place}_tokens"] for place in places]
        assert min(numbers) >= 0, provenance
        assert sum(numbers) == provenance["num_prompt_tokens"], provenance


def session_of(engine: Engine, request: Request) -> RemotePrompt:
    session: RemotePrompt | None = engine.scheduler.pd.part(Consumer).find(request)
    assert session is not None
    return session


def tails_of(engine: Engine) -> dict[Any, Any]:
    """Tail blocks that parked loads have brought in, and no request has taken yet."""
    tails: dict[Any, Any] = engine.scheduler.pd.common.parking.tails
    return tails


def kv_cache_config_of(num_blocks: int, *specs: Any) -> KVCacheConfig:
    page = SPEC.page_size_bytes
    names = [f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS)]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(page * num_blocks * NUM_LAYERS, names, page * num_blocks, page)
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec) for spec in specs or (SPEC,)],
        kv_cache_layout="LBHNC",
    )


class Engines:
    """Makes engines of one scheduler class, and ends them all."""

    specs: Sequence[Any] = ()
    """Of the KV cache groups of those that are made without: one of full attention unless set."""

    def __init__(self, scheduler_class: type[Scheduler], base: VllmConfig) -> None:
        self.scheduler_class = scheduler_class
        self.base = base
        self.made: list[Engine] = []

    @property
    def runs_ahead(self) -> bool:
        return self.scheduler_class is AsyncScheduler

    def config(self, role: str, transfer: dict[str, Any], **scheduler_fields: Any) -> VllmConfig:
        config = copy.copy(self.base)
        config.scheduler_config = copy.copy(self.base.scheduler_config)
        config.cache_config = copy.copy(self.base.cache_config)
        config.model_config = copy.copy(self.base.model_config)
        config.parallel_config = copy.copy(self.base.parallel_config)
        # The CPU platform switches it off; two batches in flight is what the other ones have.
        config.scheduler_config.async_scheduling = self.runs_ahead
        for name, value in scheduler_fields.items():
            setattr(config.scheduler_config, name, value)
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="InEngine",
            kv_role=role,
            kv_port=0,
            kv_connector_extra_config={"transfer": transfer},
        )
        return config

    def make(
        self,
        role: str,
        num_blocks: int = NUM_BLOCKS,
        scheduler_fields: dict[str, Any] | None = None,
        pool: dict[str, Any] | None = None,
        router: dict[str, Any] | None = None,
        forward: dict[str, Any] | None = None,
        secret_file: str | None = None,
        at: str = "127.0.0.1",
        specs: Sequence[Any] = (),
        num_drafts: int = 0,
        hash_block_size: int = 0,
        **transfer: Any,
    ) -> Engine:
        """``specs`` are of its KV cache groups. With ``num_drafts`` it has an EAGLE drafter."""
        transfer = {"load_mode": "step", "first_token": "compute", **transfer}
        config = self.config(role, transfer, **(scheduler_fields or {}))
        config.kv_transfer_config.kv_ip = at
        config.shutdown_timeout = 60
        if num_drafts:
            config.speculative_config = self._drafting(config, num_drafts)
        security = {"allow_non_loopback": True, "secret_file": secret_file}
        if secret_file is None:
            del security["secret_file"]
        config.kv_transfer_config.kv_connector_extra_config["security"] = security
        for name, section in ("pool", pool), ("router", router), ("forward", forward):
            if section is not None:
                config.kv_transfer_config.kv_connector_extra_config[name] = section
        kv_cache_config = kv_cache_config_of(num_blocks, *(specs or self.specs))
        sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        scheduler = self.scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*sizes),
            hash_block_size=hash_block_size or math.gcd(*sizes),
        )
        engine = Engine(scheduler, self.runs_ahead)
        for other in self.made:
            engine.worker.peers.append(other.worker)
        self.made.append(engine)
        return engine

    def _drafting(self, config: VllmConfig, num_drafts: int) -> SpeculativeConfig:
        speculative = SpeculativeConfig(
            method="draft_model",
            model=config.model_config.model,
            num_speculative_tokens=num_drafts,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        speculative.method = "eagle"
        return speculative

    def end(self) -> None:
        try:
            # The last made first: a consumer's end is what releases its producer.
            for engine in reversed(self.made):
                engine.expect_nothing_leaked()
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        for engine in self.made:
            engine.scheduler.shutdown()


def fail_all(spec: LoadSpec) -> str:
    return Cause.CHECKSUM.value

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
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
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
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.unit.engine.test_registrar import Web
from tests.unit.engine.test_registrar import until as wait_until
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.scheduler.supported import check_supported
from vllm_ascend_pd.engine.vllm_api.queues import remove_waiting
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import NO_BLOCK, KVGroup
from vllm_ascend_pd.pool.link import PoolLink
from vllm_ascend_pd.pool.messages import Found, Lookup
from vllm_ascend_pd.testing.tiny_model import make_tiny_model
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, LeaseRef, LoadId

BLOCK_SIZE = 16
NUM_BLOCKS = 64
NUM_LAYERS = 2
WRONG_TOKEN = 7
POLL_LIMIT_S = 60.0
PAGE_SERVER = PageServer(Endpoint("127.0.0.1", 1), TicketKey())

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)


def right_token(position: int) -> int:
    """What the simulated model says at ``position``, whatever came before."""
    return 100 + position


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
    _contents: list[int] = field(default_factory=list)

    def content(self, position: int) -> int:
        """Stands for the KV at ``position``, which depends on all tokens up to it."""
        while len(self._contents) <= position:
            at = len(self._contents)
            token = self.prompt[at] if at < len(self.prompt) else right_token(at)
            self._contents.append(abs(hash((self._contents[-1] if at else 0, token))))
        return self._contents[position]


class SimulatedWorker:
    """Executes scheduler outputs in order, as Model Runner V1 and the worker side do."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = groups
        self.slots: dict[tuple[int, int], int] = {}
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
        tokens = [self._compute(r, n, r in samples) for r, n in output.num_scheduled_tokens.items()]
        self.grants.update(new_grants)
        report = None
        if self._results or self._servers or self.rested:
            report = StepReport(tuple(self._results), self._servers, rested=tuple(self.rested))
        self._results, self._servers, self.rested = [], {}, []
        kv_output = KVConnectorOutput(kv_connector_worker_meta=report)
        if not output.num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(kv_output)
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=kv_output,
        )

    def end_parked(self, load_id: LoadId, cause: str = "", num_resting: int = 0) -> LoadSpec:
        """The parked load ends now; the next step's output reports it."""
        load = self.parked.pop(load_id)
        self._results.append(self.run(load, cause, num_resting))
        return load

    def spoil(self, load: LoadSpec) -> None:
        """A peer that was given up writes into the blocks of a load."""
        for block_id in load.block_ids:
            for offset in range(BLOCK_SIZE):
                self.slots[block_id, offset] = -next(self._garbage)

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
        for blocks in load.blocks:
            for index, block_id in zip(blocks.indices, blocks.block_ids, strict=True):
                for offset in range(BLOCK_SIZE):
                    content = -next(self._garbage)
                    if not cause and source is not None:
                        theirs = source.grants[_lease_of(load)].block_ids[blocks.group][index]
                        assert theirs != NO_BLOCK, "its producer would refuse to send this block"
                        content = source.slots.get((theirs, offset), 0)
                    self.slots[block_id, offset] = content
        num_bytes = 0 if cause else 1024 * len(load.block_ids)
        return LoadResult(load.load_id, cause, num_bytes, 1.0, num_resting=num_resting)

    def _update_states(self, output: SchedulerOutput) -> None:
        for block_id in output.new_block_ids_to_zero or ():
            self.slots.update({(block_id, offset): 0 for offset in range(BLOCK_SIZE)})
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
            elif new_blocks is not None:
                for table, more in zip(request.tables, new_blocks, strict=True):
                    table += more
            request.num_computed = cached.num_computed_tokens[i]

    def _compute(self, request_id: str, num_tokens: int, samples: bool) -> list[int]:
        request = self.requests[request_id]
        start = request.num_computed
        right = start + num_tokens <= request.num_known
        for group in self.groups:
            if group.state:
                right = right and self._holds_state(request, start, group.id)
                continue
            first = max(0, start - group.window + 1) if group.window else 0
            read = range(first, start)
            right = right and all(self.holds(request, p, group.id) for p in read)
            right = right and self._is_clear(request, start + num_tokens, group.id)
        for position in range(start, start + num_tokens):
            content = request.content(position) if right else -next(self._garbage)
            for group, table in zip(self.groups, request.tables, strict=True):
                if not group.state:
                    self.slots[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = content
        for group in self.groups:
            if group.state:
                block_id = self._state_block(request, start + num_tokens, group.id)
                self.slots.update({(block_id, offset): content for offset in range(BLOCK_SIZE)})
        if not samples:
            return []
        request.num_known = start + num_tokens + 1
        return [right_token(start + num_tokens) if right else WRONG_TOKEN]

    def _holds_state(self, request: SimulatedRequest, end: int, group: int) -> bool:
        """Whether it has the state behind its first ``end`` tokens."""
        if not end:
            return True
        block_id, content = self._state_block(request, end, group), request.content(end - 1)
        return all(self.slots.get((block_id, offset)) == content for offset in range(BLOCK_SIZE))

    def _state_block(self, request: SimulatedRequest, end: int, group: int) -> int:
        block_id = request.tables[group][(end - 1) // BLOCK_SIZE]
        assert block_id, "the state was given up"
        return block_id

    def _is_clear(self, request: SimulatedRequest, end: int, group: int) -> bool:
        """Whether the last block holds numbers behind the last token: attention meets them."""
        block_id = request.tables[group][(end - 1) // BLOCK_SIZE]
        behind = range(end % BLOCK_SIZE or BLOCK_SIZE, BLOCK_SIZE)
        return all(self.slots.get((block_id, offset), 0) >= 0 for offset in behind)

    def holds(self, request: SimulatedRequest, position: int, group: int = 0) -> bool:
        slot = request.tables[group][position // BLOCK_SIZE], position % BLOCK_SIZE
        return self.slots.get(slot) == request.content(position)


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
        self.worker = SimulatedWorker(scheduler.pd.common.groups)
        self.runs_ahead = runs_ahead
        self.in_flight: deque[Step] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.params: dict[str, dict[str, Any] | None] = {}
        self.requests: dict[str, Request] = {}
        self.counts_at_start = self.counts()

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
            block_hasher=_hasher,
        )
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Step:
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
        for outputs in per_client.values():
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.kv_transfer_params is not None:
                    self.params[output.request_id] = output.kv_transfer_params
        return step

    def step(self) -> Step:
        """One turn of the loop; an engine that runs ahead keeps a second step in flight."""
        step = self.schedule()
        while self.in_flight and (len(self.in_flight) > self.runs_ahead or not step.samples):
            self.finish_step()
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
        for tables in self.scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not tables.req_to_blocks, "blocks are kept of requests that have ended"
        assert min(self.worker.slots.values(), default=0) >= 0
        contents = {}
        for request in self.requests.values():
            simulated = SimulatedRequest(list(request.prompt_token_ids or ()), [])
            for index, block_hash in enumerate(request.block_hashes):
                first = index * BLOCK_SIZE
                held = [simulated.content(first + i) for i in range(BLOCK_SIZE)]
                contents[block_hash] = {False: held, True: held[-1:] * BLOCK_SIZE}
        for block in self.pool.blocks:
            if block.block_hash is not None:
                held = [self.worker.slots.get((block.block_id, i)) for i in range(BLOCK_SIZE)]
                keeps_state = bool(self.worker.groups[get_group_id(block.block_hash)].state)
                expected = contents[get_block_hash(block.block_hash)][keeps_state]
                assert held == expected, f"block {block.block_id} is cached with KV of other tokens"


def session_of(engine: Engine, request: Request) -> RemotePrompt:
    session: RemotePrompt | None = engine.scheduler.pd.part(Consumer).find(request)
    assert session is not None
    return session


def tails_of(engine: Engine) -> dict[Any, Any]:
    """Tail blocks that parked loads have brought in, and no request has taken yet."""
    tails: dict[Any, Any] = engine.scheduler.pd.common.parking.tails
    return tails


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    folder: Path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(folder)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", seed=0, max_model_len=2048),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=2048,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    return config


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
        **transfer: Any,
    ) -> Engine:
        """``specs`` are of its KV cache groups."""
        transfer = {"load_mode": "step", "first_token": "compute", **transfer}
        config = self.config(role, transfer, **(scheduler_fields or {}))
        config.kv_transfer_config.kv_ip = at
        config.shutdown_timeout = 60
        security = {"allow_non_loopback": True, "secret_file": secret_file}
        if secret_file is None:
            del security["secret_file"]
        config.kv_transfer_config.kv_connector_extra_config["security"] = security
        for name, section in ("pool", pool), ("router", router), ("forward", forward):
            if section is not None:
                config.kv_transfer_config.kv_connector_extra_config[name] = section
        scheduler = self.scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_cache_config_of(num_blocks, *(specs or self.specs)),
            log_stats=True,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
        )
        engine = Engine(scheduler, self.runs_ahead)
        for other in self.made:
            engine.worker.peers.append(other.worker)
        self.made.append(engine)
        return engine

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


@pytest.fixture(params=[Scheduler, AsyncScheduler], ids=["sync", "async"])
def engines(request: pytest.FixtureRequest, base_config: VllmConfig) -> Iterator[Engines]:
    engines = Engines(request.param, base_config)
    num_failed = request.session.testsfailed
    yield engines
    if request.session.testsfailed > num_failed:
        engines.shutdown()
    else:
        engines.end()


@pytest.fixture
def producer(engines: Engines) -> Engine:
    return engines.make("kv_producer")


@pytest.fixture
def consumer(producer: Engine, engines: Engines) -> Engine:
    return engines.make("kv_consumer")


def fail_all(spec: LoadSpec) -> str:
    return Cause.CHECKSUM.value


# The producer.

CHOSEN = {"do_remote_decode": True, "transfer_id": "chosen"}
"""Both requests are sent at once: the router has chosen the transfer id."""


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 96, 100])
def test_grant_is_in_the_step_that_completes_the_prompt(producer: Engine, num_tokens: int) -> None:
    producer.add("p", prompt_of(num_tokens), {"do_remote_decode": True})
    step = producer.schedule()
    (grant,) = step.meta.grants
    table = producer.scheduler.kv_cache_manager.get_block_ids("p")[0]
    assert grant.block_ids == (tuple(table[: (num_tokens - 1) // BLOCK_SIZE + 1]),)
    assert grant.num_coming == num_tokens
    producer.finish_step()
    params = producer.params["p"]
    assert params is not None
    assert params["transfer_id"] == grant.lease.transfer_id
    producer.scheduler.reset_prefix_cache()


def test_hits_that_another_request_computes_in_the_same_step_cannot_be_read_before_its_end(
    producer: Engine,
) -> None:
    prompt = prompt_of(2 * BLOCK_SIZE + 5)
    producer.add("first", prompt)
    producer.add("second", prompt, CHOSEN)
    step = producer.schedule()
    assert step.output.num_scheduled_tokens == {"first": len(prompt), "second": 5}
    (grant,) = step.meta.grants
    assert (grant.num_ready, grant.num_coming) == (0, len(prompt))
    producer.finish_step()
    producer.scheduler.reset_prefix_cache()


def test_blocks_of_earlier_steps_can_be_read_while_the_next_chunk_is_computed(
    engines: Engines,
) -> None:
    producer = engines.make("kv_producer", scheduler_fields={"max_num_batched_tokens": 40})
    producer.scheduler.max_num_scheduled_tokens = 40
    producer.add("p", prompt_of(100), CHOSEN)
    grants = []
    for _ in range(3):
        grants += producer.schedule().meta.grants
        producer.finish_step()
    assert [(grant.num_ready, grant.num_coming) for grant in grants] == [
        (0, 40),
        (40, 80),
        (80, 100),
    ]
    producer.scheduler.reset_prefix_cache()


def test_chunked_prompt_is_granted_with_its_last_chunk(engines: Engines) -> None:
    producer = engines.make("kv_producer", scheduler_fields={"max_num_batched_tokens": 40})
    producer.scheduler.max_num_scheduled_tokens = 40
    producer.add("p", prompt_of(100), {"do_remote_decode": True})
    grants = []
    for num_expected in (40, 40, 20):
        step = producer.schedule()
        producer.finish_step()
        assert step.output.num_scheduled_tokens == {"p": num_expected}
        meta = step.output.pd_metadata
        grants.append(len(meta.grants) if isinstance(meta, StepMeta) else 0)
    assert grants == [0, 0, 1]
    assert producer.params["p"] is not None
    producer.scheduler.reset_prefix_cache()


def test_response_carries_upstreams_names(producer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_host"] == "127.0.0.1"
    assert 0 < params["remote_port"] <= 65535
    assert params["remote_engine_id"]
    assert len(params["remote_block_ids"]) == 7
    assert params["tp_size"] == 1
    assert params["remote_num_tokens"] == 100
    producer.scheduler.reset_prefix_cache()


def test_finishing_pins_the_prompts_blocks_until_they_are_released(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100), max_tokens=3)
    counts = producer.counts()
    assert counts["pinned_blocks"] == 7
    assert counts["leases"] == 1
    assert counts["free_blocks"] == producer.counts_at_start["free_blocks"] - 7
    consumer.add("c", prompt_of(100), params)
    consumer.run_to_end()
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_expired_lease_frees_its_blocks_without_a_request(engines: Engines) -> None:
    producer = engines.make("kv_producer", lease_s=1.0)
    producer.prefill("p", prompt_of(100))
    assert producer.counts()["pinned_blocks"] == 7
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


@pytest.mark.parametrize("max_tokens", [1, 50], ids=["computed", "still decoding"])
def test_prompt_is_given_back_by_a_request_that_names_it(producer: Engine, max_tokens: int) -> None:
    other = producer.prefill("q", prompt_of(100, start=3000))
    producer.add("p", prompt_of(100), CHOSEN, max_tokens)
    producer.run(lambda: bool(producer.tokens["p"]))
    producer.add("r", [5], {"release_transfer_id": CHOSEN["transfer_id"]})
    producer.run_to_end()
    assert producer.counts()["pinned_blocks"] == 7
    assert [lease.transfer_id for lease in producer.worker.grants] == [other["transfer_id"]]
    producer.scheduler.reset_prefix_cache()


def test_prompt_that_was_given_back_before_it_came_is_not_kept(producer: Engine) -> None:
    producer.add("r", [5], {"release_transfer_id": CHOSEN["transfer_id"]})
    producer.run_to_end()
    producer.add("p", prompt_of(100), CHOSEN)
    producer.run_to_end()
    assert producer.counts()["leases"] == 0
    # That a consumer does not need it is no fault of this engine.
    assert producer.params["p"]["transfer_id"] == CHOSEN["transfer_id"]


@pytest.mark.parametrize("transfer_id", ["unknown", "", None, 5, "x" * 10_000])
def test_who_knows_no_transfer_id_gives_nothing_back(producer: Engine, transfer_id: object) -> None:
    producer.prefill("p", prompt_of(100))
    producer.add("r", [5], {"release_transfer_id": transfer_id})
    producer.run_to_end()
    assert producer.counts()["pinned_blocks"] == 7
    producer.scheduler.reset_prefix_cache()


def test_reset_of_the_prefix_cache_gives_up_leases(producer: Engine) -> None:
    producer.prefill("p", prompt_of(100))
    assert producer.scheduler.reset_prefix_cache()
    assert producer.counts() == producer.counts_at_start
    producer.add("q", prompt_of(20))
    assert len(producer.schedule().meta.revokes) == 1
    producer.finish_step()


def test_abort_before_the_end_revokes(producer: Engine) -> None:
    producer.add("p", prompt_of(100), {"do_remote_decode": True}, max_tokens=5)
    (grant,) = producer.step().meta.grants
    producer.abort("p")
    producer.add("q", prompt_of(20, start=3000))
    assert producer.schedule().meta.revokes == (grant.lease,)
    producer.run_to_end()
    assert "p" not in producer.params
    assert grant.lease not in producer.worker.grants


def test_preempted_prompt_is_revoked_and_granted_again(producer: Engine) -> None:
    producer.add("p", prompt_of(100), {"do_remote_decode": True}, max_tokens=3)
    step = producer.schedule()
    (first,) = step.meta.grants
    request = producer.scheduler.running.pop()
    producer.scheduler._preempt_request(request, time.monotonic())
    producer.finish_step()
    steps = producer.run_to_end()
    metas = [s.output.pd_metadata for s in steps if isinstance(s.output.pd_metadata, StepMeta)]
    assert first.lease in [i for meta in metas for i in meta.revokes]
    grants = [grant for meta in metas for grant in meta.grants]
    assert len(grants) == 1
    assert grants[0].lease.transfer_id != first.lease.transfer_id
    params = producer.params["p"]
    assert params is not None
    assert params["transfer_id"] == grants[0].lease.transfer_id
    producer.expect_tokens("p", 3)
    producer.scheduler.reset_prefix_cache()


def test_samples_of_one_request_share_one_lease(producer: Engine) -> None:
    for i in range(3):
        producer.add(f"{i}_p", prompt_of(100), {"do_remote_decode": True})
    producer.run_to_end()
    params = [producer.params[f"{i}_p"] for i in range(3)]
    assert len({p["transfer_id"] for p in params if p}) == 1
    assert None not in params
    assert producer.counts()["leases"] == 1
    assert producer.counts()["pinned_blocks"] == 7
    producer.scheduler.reset_prefix_cache()


def test_sample_that_ends_first_keeps_the_shared_lease(producer: Engine) -> None:
    """The lease is of the first sample's blocks, and the second one ends before it."""
    producer.add("0_p", prompt_of(100), {"do_remote_decode": True}, max_tokens=4)
    producer.add("1_p", prompt_of(100), {"do_remote_decode": True}, max_tokens=1)
    producer.run_to_end()
    assert producer.params.get("0_p") is not None
    producer.scheduler.reset_prefix_cache()


def add_samples(producer: Engine, params: dict[str, Any], *max_tokens: int) -> None:
    """Samples of one prompt, each computed in a step of its own."""
    producer.scheduler.max_num_scheduled_tokens = 32
    for i, num_tokens in enumerate(max_tokens):
        producer.add(f"{i}_p", prompt_of(32), params, num_tokens)


def reuse_blocks(producer: Engine) -> None:
    """Other prompts are computed in every block that nothing holds."""
    for number in range(12):
        producer.warm(f"other {number}", prompt_of(200, start=3000 + 500 * number))


def expect_readable(producer: Engine) -> None:
    """What consumers may read is the prompt's KV, and stays it."""
    reuse_blocks(producer)
    (grant,) = producer.worker.grants.values()
    (block_ids,) = grant.block_ids
    assert len(block_ids) == producer.counts()["pinned_blocks"] == 2
    simulated = SimulatedRequest(prompt_of(32), [list(block_ids)])
    assert all(producer.worker.holds(simulated, position) for position in range(32))
    producer.scheduler.reset_prefix_cache()


def lease_params(producer: Engine, name: str) -> dict[str, Any]:
    """What a consumer is told, less what vLLM itself adds from 0.31 on, which is of one sample."""
    params = producer.params[name]
    assert params is not None
    return {key: value for key, value in params.items() if key != "remote_prefill_cached_tokens"}


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
@pytest.mark.parametrize("max_tokens", [(1, 1), (1, 5), (5, 1), (5, 5)])
def test_lease_is_of_one_samples_blocks(
    producer: Engine, params: dict[str, Any], max_tokens: tuple[int, int]
) -> None:
    add_samples(producer, params, *max_tokens)
    producer.run_to_end()
    assert lease_params(producer, "0_p") == lease_params(producer, "1_p")
    expect_readable(producer)


def test_sample_that_comes_after_the_first_has_ended_changes_nothing(producer: Engine) -> None:
    add_samples(producer, CHOSEN, 1)
    producer.run_to_end()
    producer.add("1_p", prompt_of(32), CHOSEN)
    producer.run_to_end()
    assert lease_params(producer, "0_p") == lease_params(producer, "1_p")
    expect_readable(producer)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
def test_sample_that_is_preempted_after_the_first_has_ended_changes_nothing(
    producer: Engine, params: dict[str, Any]
) -> None:
    add_samples(producer, params, 1, 5)
    producer.run(lambda: "0_p" in producer.params and len(producer.scheduler.running) == 1)
    while producer.in_flight:
        producer.finish_step()
    second = producer.scheduler.running.pop()
    producer.scheduler._preempt_request(second, time.monotonic())
    reuse_blocks(producer)
    producer.run_to_end()
    producer.expect_tokens("1_p", 5)
    expect_readable(producer)


@pytest.mark.parametrize("params", [{"do_remote_decode": True}, CHOSEN], ids=["later", "at once"])
def test_abort_of_another_sample_keeps_the_lease(producer: Engine, params: dict[str, Any]) -> None:
    add_samples(producer, params, 9, 9)
    producer.run(lambda: len(producer.tokens["1_p"]) > 1)
    producer.abort("1_p")
    producer.run_to_end()
    assert producer.params["0_p"]
    expect_readable(producer)


def test_sample_takes_over_when_the_leased_one_is_aborted(producer: Engine) -> None:
    add_samples(producer, {"do_remote_decode": True}, 9, 9)
    producer.run(lambda: len(producer.tokens["1_p"]) > 1)
    producer.abort("0_p")
    producer.run_to_end()
    assert producer.params["1_p"]
    expect_readable(producer)


def test_sample_that_is_aborted_before_its_first_step_leaves_the_prompt_to_the_other(
    producer: Engine,
) -> None:
    add_samples(producer, CHOSEN, 1, 1)
    producer.abort("0_p")
    producer.run_to_end()
    assert producer.params["1_p"]
    expect_readable(producer)


def test_prompt_whose_samples_are_all_aborted_before_their_first_step_is_given_up(
    producer: Engine,
) -> None:
    add_samples(producer, CHOSEN, 1, 1)
    assert producer.counts()["leases"] == 1
    for request_id in ("0_p", "1_p"):
        producer.abort(request_id)
    assert producer.counts()["leases"] == 0


def test_consumer_role_ignores_do_remote_decode(consumer: Engine) -> None:
    consumer.add("c", prompt_of(40), {"do_remote_decode": True})
    consumer.run_to_end()
    assert "c" not in consumer.params
    consumer.expect_tokens("c", 1)


# The consumer.


@pytest.mark.parametrize("num_tokens", [2, 15, 16, 17, 33, 96, 97, 100])
def test_remote_prompt_is_loaded_and_one_token_computed(
    producer: Engine, consumer: Engine, num_tokens: int
) -> None:
    params = producer.prefill("p", prompt_of(num_tokens))
    request = consumer.add("c", prompt_of(num_tokens), params, max_tokens=4)
    assert request.status is RequestStatus.WAITING_FOR_KV
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    num_full = (num_tokens - 1) // BLOCK_SIZE
    num_tail = (num_tokens - 1) % BLOCK_SIZE
    (load,) = step.loads
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert load.blocks[0].indices == tuple(range(num_full + bool(num_tail)))
    assert load.block_ids == tuple(table[: num_full + bool(num_tail)])
    assert load.blocks[0].has_tail is bool(num_tail)
    assert load.in_step
    (peer,) = load.peers
    assert Endpoint(peer.host, peer.port) == PAGE_SERVER.endpoint
    assert PAGE_SERVER.key.accepts(load.transfer_id, peer.ticket)
    assert load.transfer_id == params["transfer_id"]
    assert load.epoch == params["remote_epoch"]
    consumer.run_to_end()
    consumer.expect_tokens("c", 4)


def test_request_waits_without_holding_up_others(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", peer_timeout_s=1.0)
    params = producer.prefill("p", prompt_of(100))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        waits = consumer.add("c", prompt_of(100), {**params, "remote_port": port})
        consumer.add("other", prompt_of(40, start=500))
        step = consumer.step()
        assert step.output.num_scheduled_tokens == {"other": 40}
        assert waits.status is RequestStatus.WAITING_FOR_KV
        consumer.run_to_end()
    consumer.expect_tokens("other", 1)
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_unreachable_producer_means_compute_here(engines: Engines, producer: Engine) -> None:
    consumer = engines.make("kv_consumer", peer_timeout_s=0.2)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), {**params, "remote_port": 9})
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_second_request_of_the_step_shares_the_load(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    second = consumer.add("d", [*prompt_of(96), 5, 6, 8], max_tokens=3)
    step = consumer.schedule_until_admitted(first)
    assert step.output.num_scheduled_tokens == {"c": 1, "d": 3}
    assert len(step.loads) == 1
    tables = [
        consumer.scheduler.kv_cache_manager.get_block_ids(r.request_id)[0] for r in (first, second)
    ]
    assert tables[0][:6] == tables[1][:6]
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)
    consumer.expect_tokens("d", 3)


def test_lookup_is_idempotent_while_the_request_cannot_be_scheduled(
    producer: Engine, engines: Engines
) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer = engines.make("kv_consumer", num_blocks=12)
    consumer.add("long", prompt_of(70, start=500), max_tokens=30)
    consumer.step()
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    counts = [consumer.counts() for _ in range(4) if consumer.step()]
    assert request.status is RequestStatus.WAITING
    assert {c["phantoms"] for c in counts} == {6}
    assert {c["free_blocks"] for c in counts} == {6}
    assert {c["loads"] for c in counts} == {0}
    consumer.run_to_end()
    consumer.expect_tokens("long", 30)
    consumer.expect_tokens("c", 1)


def test_abort_after_the_lookup_withdraws_phantoms(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(request)
    _, num_tokens, _ = consumer.scheduler.kv_cache_manager.get_computed_blocks(request)
    assert num_tokens == 99
    assert consumer.counts()["phantoms"] == 6
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"]
    consumer.abort("c")
    assert consumer.counts()["phantoms"] == 0
    assert consumer.cached_block(request, 0) is None


def test_abort_while_the_peer_is_asked_leaves_nothing(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_hole_is_filled_and_later_local_blocks_are_used(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    warm = consumer.requests["w"]
    kept = [consumer.cached_block(warm, i).block_id for i in (0, 1, 4, 5)]
    consumer.evict(warm, 2, 3)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    (load,) = step.loads
    assert load.blocks[0].indices == (2, 3, 6)
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert [table[i] for i in (0, 1, 4, 5)] == kept
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_local_blocks_beyond_what_the_peer_has_are_used(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 0, 1)
    params = producer.prefill("p", prompt_of(50))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 4}
    (load,) = step.loads
    assert load.blocks[0].indices == (0, 1)
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_only_the_tail_is_loaded_when_all_blocks_are_cached(
    producer: Engine, consumer: Engine
) -> None:
    consumer.warm("w", prompt_of(100))
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    step = consumer.schedule_until_admitted(request)
    (load,) = step.loads
    assert load.blocks[0].indices == (6,)
    assert load.blocks[0].has_tail
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_nothing_is_loaded_when_all_is_cached(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(97))
    params = producer.prefill("p", prompt_of(97))
    request = consumer.add("c", prompt_of(97), {**params, "return_provenance": True})
    step = consumer.schedule_until_admitted(request)
    assert not step.loads
    consumer.run_to_end()
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == "local"
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_longer_prompt_loads_what_the_peer_has(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(50))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 52}
    (load,) = step.loads
    assert load.blocks[0].indices == (0, 1, 2)
    assert not load.blocks[0].has_tail
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_reference_to_another_prompt_is_refused(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100, start=700), {**params, "return_provenance": True})
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == Cause.HASH_MISMATCH.value
    assert returned["provenance"]["num_computed_tokens"] == 100


def test_each_request_of_a_lease_gets_the_answer_to_its_own_prompt(
    producer: Engine, consumer: Engine
) -> None:
    """The same reference twice, once with another prompt, asked at the same time."""
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.add("d", prompt_of(100, start=700), params)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    consumer.expect_tokens("d", 1)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        pytest.param(prompt_of(1), {}, id="one token is computed in any case"),
        pytest.param(prompt_of(100), {"prompt_logprobs": 1}, id="prompt logprobs"),
    ],
)
def test_kv_that_is_not_needed_is_given_back(
    producer: Engine, consumer: Engine, prompt: list[int], sampling: dict[str, Any]
) -> None:
    params = producer.prefill("p", prompt)
    request = consumer.add("c", prompt, params, **sampling)
    assert request.status is RequestStatus.WAITING
    step = consumer.step()
    assert step.output.num_scheduled_tokens == {"c": len(prompt)}
    assert not step.loads
    consumer.run_to_end()
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_port": "x"},
        {"remote_port": 0},
        {"transfer_id": ""},
        {"remote_host": None},
        {"remote_host": "192.0.2.1"},
        {"remote_epoch": 5},
    ],
    ids=str,
)
def test_bad_params_mean_compute_here(
    producer: Engine, consumer: Engine, wrong: dict[str, Any]
) -> None:
    params = producer.prefill("p", prompt_of(40))
    request = consumer.add("c", prompt_of(40), {**params, **wrong})
    assert request.status is RequestStatus.WAITING
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    producer.scheduler.reset_prefix_cache()


def test_provenance_adds_up_to_the_prompt(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), {**params, "return_provenance": True})
    consumer.run_to_end()
    returned = consumer.params["c"]
    assert returned is not None
    provenance = returned["provenance"]
    assert provenance["num_prompt_tokens"] == 100
    assert provenance["num_local_tokens"] == 32
    assert provenance["num_peer_tokens"] == 67
    assert provenance["num_computed_tokens"] == 1
    assert provenance["num_peer_blocks"] == 5
    assert provenance["outcome"] == "loaded"


def test_prefill_stats_count_peer_tokens_as_external(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(40))
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.schedule_until_admitted(request)
    stats = request.prefill_stats
    assert stats is not None
    assert stats.num_local_cached_tokens == 32
    assert stats.num_external_cached_tokens == 67
    assert stats.num_computed_tokens == 1


# Parked loads.


def test_parked_load_holds_its_blocks_and_ends_cached(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.run(lambda: bool(consumer.worker.parked))
    ((load_id, load),) = consumer.worker.parked.items()
    assert load.blocks[0].indices == tuple(range(7))
    assert not load.in_step
    assert load.blocks[0].has_tail
    assert request.status is RequestStatus.WAITING_FOR_KV
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"] - 7
    assert consumer.cached_block(request, 0) is None
    consumer.step()
    assert request.status is RequestStatus.WAITING_FOR_KV
    consumer.worker.end_parked(load_id)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 1}
    table = consumer.scheduler.kv_cache_manager.get_block_ids("c")[0]
    assert tuple(table) == load.block_ids
    assert not step.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_other_requests_run_beside_a_parked_load(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.add("other", prompt_of(40, start=500), max_tokens=3)
    consumer.run(lambda: len(consumer.tokens["other"]) == 3)
    consumer.expect_tokens("other", 3)
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_failed_parked_load_frees_its_blocks(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), {**params, "return_provenance": True})
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)), Cause.TRANSFER_FAILED.value)
    step = consumer.schedule_until_admitted(request)
    assert step.output.num_scheduled_tokens == {"c": 100}
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)
    returned = consumer.params["c"]
    assert returned is not None
    assert returned["provenance"]["outcome"] == Cause.TRANSFER_FAILED.value
    assert returned["provenance"]["num_computed_tokens"] == 100


def test_abort_of_a_parked_request_frees_after_the_report(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.abort("c")
    assert consumer.counts()["free_blocks"] == consumer.counts_at_start["free_blocks"] - 7
    assert consumer.scheduler.has_requests()
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_abort_before_the_parked_load_left_frees_after_the_report(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    assert not consumer.scheduler.pd.try_promote(request)
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


@pytest.mark.parametrize(("num_blocks", "parks"), [(13, False), (15, True)])
def test_load_is_not_parked_into_the_last_free_blocks(
    producer: Engine, engines: Engines, num_blocks: int, parks: bool
) -> None:
    """Six blocks are in use; six and the tail are missing; a tenth of all has to stay free."""
    params = producer.prefill("p", prompt_of(100))
    consumer = engines.make("kv_consumer", num_blocks=num_blocks, load_mode="park")
    consumer.add("long", prompt_of(90, start=500), max_tokens=4)
    consumer.step()
    request = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.step()
    assert request.status is (RequestStatus.WAITING_FOR_KV if parks else RequestStatus.WAITING)
    assert consumer.counts()["loads"] == parks
    if parks:
        consumer.run(lambda: bool(consumer.worker.parked))
        consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.run_to_end()
    consumer.expect_tokens("long", 4)
    consumer.expect_tokens("c", 1)


def test_parked_load_brings_only_what_is_missing(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 1, 4)
    params = producer.prefill("p", prompt_of(100))
    consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    ((load_id, load),) = consumer.worker.parked.items()
    assert load.blocks[0].indices == (1, 4, 6)
    consumer.worker.end_parked(load_id)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


def test_tail_of_a_parked_load_goes_back_with_a_request_that_is_not_admitted(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    consumer.step()
    consumer.run(lambda: session_of(consumer, request) in tails_of(consumer))
    consumer.abort("c")
    consumer.run_to_end()
    assert consumer.counts() == consumer.counts_at_start


def test_tails_of_loads_that_wait_are_not_held_against_what_runs(
    producer: Engine, engines: Engines
) -> None:
    """A request grows into all of the memory, and others wait behind it."""
    consumer = engines.make("kv_consumer", num_blocks=17, load_mode="park")
    consumer.add("grows", prompt_of(16), max_tokens=200)
    consumer.step()
    names = [f"c{number}" for number in range(6)]
    for number, name in enumerate(names):
        prompt = prompt_of(20, start=3000 + 100 * number)
        consumer.add(name, prompt, producer.prefill(f"p{number}", prompt), max_tokens=2)
    consumer.poll(
        lambda: consumer.scheduler.pd.part(Consumer).client.outcomes.qsize() == len(names)
    )
    consumer.run(lambda: len(consumer.worker.parked) == len(names))
    scheduler = consumer.scheduler
    has_limit_of_its_own = hasattr(scheduler, "max_num_active_reqs")  # from 0.31 on
    limit = "max_num_active_reqs" if has_limit_of_its_own else "max_num_running_reqs"
    setattr(scheduler, limit, 1)
    for load_id in list(consumer.worker.parked):
        consumer.worker.end_parked(load_id)
    assert len(consumer.tokens["grows"]) < 20
    consumer.run_to_end()
    consumer.expect_tokens("grows", 200)
    for name in names:
        consumer.expect_tokens(name, 2)


def test_engines_that_wait_for_each_others_memory_go_on(engines: Engines) -> None:
    """Each keeps a prompt of 10 of its 16 blocks for the other, and has no room for the other's."""
    pair = [engines.make("kv_both", num_blocks=17, admission_timeout_s=0.3) for _ in range(2)]
    for number, engine in enumerate(pair):
        prompt = prompt_of(160, start=3000 * number)
        params = engine.prefill("p", prompt)
        pair[1 - number].add("c", prompt, {**params, "return_provenance": True}, max_tokens=4)
    deadline = time.monotonic() + POLL_LIMIT_S
    while any(len(engine.tokens["c"]) < 4 for engine in pair):
        assert time.monotonic() < deadline, [engine.counts() for engine in pair]
        for engine in pair:
            if engine.scheduler.has_requests():
                engine.step()
    for engine in pair:
        engine.run_to_end()
        engine.expect_tokens("c", 4)
    outcomes = {(engine.params["c"] or {})["provenance"]["outcome"] for engine in pair}
    assert Cause.DEADLINE.value in outcomes


def test_reset_gives_the_tail_of_a_parked_load_back(producer: Engine, engines: Engines) -> None:
    consumer = engines.make("kv_consumer", load_mode="park")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params)
    consumer.run(lambda: bool(consumer.worker.parked))
    consumer.worker.end_parked(next(iter(consumer.worker.parked)))
    session = session_of(consumer, request)
    consumer.run(lambda: session in tails_of(consumer))
    assert consumer.scheduler.reset_prefix_cache()
    assert session not in tails_of(consumer)
    consumer.run_to_end()
    consumer.expect_tokens("c", 1)


# Load or compute.


@pytest.fixture
def weighing(engines: Engines) -> Engine:
    """A consumer that computes a prompt where that is sooner."""
    return engines.make("kv_consumer", load="auto")


def measure(consumer: Engine, load_ms: float) -> None:
    """It computes a token in 1 ms, and loads a block in ``load_ms``."""
    peers = consumer.scheduler.pd.part(Consumer)
    for _ in range(100):
        peers.speed.note(peers._common.bytes_per_block(), load_ms)
        peers.prefill.note(1, 1.0)


def test_prompt_is_computed_where_that_is_sooner(producer: Engine, weighing: Engine) -> None:
    measure(weighing, 1.1 * BLOCK_SIZE)
    params = {**producer.prefill("p", prompt_of(100)), "return_provenance": True}
    weighing.add("c", prompt_of(100), params)
    steps = weighing.run_to_end()
    assert not any(step.loads for step in steps)
    weighing.expect_tokens("c", 1)
    provenance = (weighing.params["c"] or {})["provenance"]
    assert provenance["outcome"] == Cause.NOT_NEEDED.value
    assert provenance["num_computed_tokens"] == 100


def test_prompt_is_loaded_where_that_is_sooner(producer: Engine, weighing: Engine) -> None:
    measure(weighing, 0.9 * BLOCK_SIZE)
    params = producer.prefill("p", prompt_of(100))
    request = weighing.add("c", prompt_of(100), params)
    (load,) = weighing.schedule_until_admitted(request).loads
    assert load.blocks[0].indices == tuple(range(7))
    weighing.run_to_end()
    weighing.expect_tokens("c", 1)


def test_part_is_loaded_for_what_it_makes_usable(producer: Engine, weighing: Engine) -> None:
    """Blocks 2 to 5 are cached here, and the last one would take longer than to compute it."""
    weighing.warm("w", prompt_of(96))
    weighing.evict(weighing.requests["w"], 1)
    measure(weighing, 1.1 * BLOCK_SIZE)
    params = producer.prefill("p", prompt_of(130))
    request = weighing.add("c", prompt_of(130), params)
    (load,) = weighing.schedule_until_admitted(request).loads
    assert load.blocks[0].indices == (1,)
    weighing.run_to_end()
    weighing.expect_tokens("c", 1)


# Failed loads.


def test_no_token_of_a_failed_load_is_delivered(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=5)
    step = consumer.schedule_until_admitted(request)
    hashes = [consumer.pool.blocks[i].block_hash for i in step.loads[0].block_ids[:6]]
    assert None not in hashes
    if consumer.runs_ahead:
        ahead = consumer.schedule()
        assert "c" in ahead.output.num_scheduled_tokens
    consumer.finish_step()
    assert consumer.tokens["c"] == []
    assert request.status is RequestStatus.PREEMPTED
    assert all(consumer.pool.blocks[i].block_hash is None for i in step.loads[0].block_ids)
    again = consumer.schedule()
    assert again.output.num_scheduled_tokens == {"c": 100}
    assert not again.loads
    consumer.run_to_end()
    consumer.expect_tokens("c", 5)


def test_blocks_computed_on_a_failed_load_are_evicted(producer: Engine, consumer: Engine) -> None:
    params = producer.prefill("p", prompt_of(50))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.schedule_until_admitted(request)
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_request_that_shares_a_bad_block_is_preempted_too(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.worker.cause_of = fail_all
    first = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    second = consumer.add("d", [*prompt_of(96), 5, 6, 8], max_tokens=3)
    other = consumer.add("other", prompt_of(40, start=500), max_tokens=3)
    step = consumer.schedule_until_admitted(first)
    assert set(step.output.num_scheduled_tokens) == {"c", "d", "other"}
    consumer.finish_step()
    assert first.status is RequestStatus.PREEMPTED
    assert second.status is RequestStatus.PREEMPTED
    assert other.status is RequestStatus.RUNNING
    assert consumer.tokens == {"c": [], "d": [], "other": [right_token(40)]}
    consumer.run_to_end()
    for request_id in ("c", "d", "other"):
        consumer.expect_tokens(request_id, 3)


def test_request_preempted_during_its_own_load_is_loaded_again(
    producer: Engine, consumer: Engine
) -> None:
    """It shares blocks of another's load, which fails while its own is under way."""
    failing = consumer.add(
        "d", [*prompt_of(64), 5, 6, 8], producer.prefill("q", [*prompt_of(64), 5, 6, 8])
    )
    consumer.wait_for_answer()
    consumer.worker.cause_of = fail_all
    consumer.schedule_until_admitted(failing)
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.wait_for_answer()
    if consumer.runs_ahead:
        step = consumer.schedule()
        assert step.output.num_scheduled_tokens["c"] == 1
        consumer.finish_step()
        assert request.status is RequestStatus.PREEMPTED
        assert consumer.in_flight
    consumer.worker.cause_of = lambda spec: ""
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)
    consumer.expect_tokens("d", 1)


def test_failed_hole_evicts_the_local_blocks_after_it(producer: Engine, consumer: Engine) -> None:
    consumer.warm("w", prompt_of(100))
    consumer.evict(consumer.requests["w"], 2)
    params = producer.prefill("p", prompt_of(100))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.schedule_until_admitted(request)
    consumer.finish_step()
    assert consumer.cached_block(request, 1) is not None
    assert consumer.cached_block(request, 2) is None
    again = consumer.schedule()
    assert again.output.num_scheduled_tokens == {"c": 68}
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)


def test_request_preempted_before_the_report_delivers_no_stale_token(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.scheduler.running.remove(request)
    consumer.scheduler._preempt_request(request, time.monotonic())
    consumer.finish_step()
    assert consumer.tokens["c"] == []
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)


def test_request_preempted_before_the_report_leaves_no_bad_block_cached(
    producer: Engine, consumer: Engine
) -> None:
    """Blocks 3 to 5 are computed on the blocks that fail to load, and their table is gone."""
    params = producer.prefill("p", prompt_of(50))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.scheduler.running.remove(request)
    consumer.scheduler._preempt_request(request, time.monotonic())
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    consumer.run_to_end()
    consumer.expect_tokens("c", 3)


def test_request_aborted_before_the_report_leaves_no_bad_block_cached(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(50))
    consumer.worker.cause_of = fail_all
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.abort("c")
    consumer.finish_step()
    assert [consumer.cached_block(request, i) for i in range(6)] == [None] * 6
    # The holes before such blocks are filled, and then they would be hits.
    consumer.worker.cause_of = lambda spec: ""
    consumer.add("d", prompt_of(100), producer.prefill("q", prompt_of(50)), max_tokens=3)
    consumer.run_to_end()
    consumer.expect_tokens("d", 3)


def test_abort_during_a_load_that_succeeds_keeps_its_blocks(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.abort("c")
    consumer.finish_step()
    assert consumer.cached_block(request, 5) is not None
    consumer.add("d", prompt_of(100), max_tokens=2)
    assert consumer.step().output.num_scheduled_tokens == {"d": 4}
    consumer.run_to_end()
    consumer.expect_tokens("d", 2)
    producer.poll(lambda: producer.counts() == producer.counts_at_start)


def test_request_that_ends_under_its_load_leaves_no_table(
    producer: Engine, engines: Engines
) -> None:
    consumer = engines.make("kv_consumer")
    params = producer.prefill("p", prompt_of(100))
    request = consumer.add("c", prompt_of(100), params, max_tokens=3)
    consumer.schedule_until_admitted(request)
    consumer.abort("c")
    consumer.schedule()  # before the load's end is known
    consumer.finish_step()


def test_phantoms_of_a_failed_source_are_withdrawn(producer: Engine, engines: Engines) -> None:
    """The second half of the prompt is published, but no request has committed to it yet."""
    consumer = engines.make("kv_consumer")
    params = producer.prefill("p", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    consumer.scheduler.kv_cache_manager.get_computed_blocks(first)
    assert consumer.counts()["phantoms"] == 6
    remove_waiting(consumer.scheduler, first)
    # A short request commits to the first blocks only, and their load fails.
    short = consumer.add("d", [*prompt_of(32), 5, 6], max_tokens=2)
    consumer.worker.cause_of = fail_all
    step = consumer.schedule_until_admitted(short)
    assert step.loads[0].blocks[0].indices == (0, 1)
    assert consumer.counts()["phantoms"] == 4
    consumer.finish_step()
    assert consumer.counts()["phantoms"] == 0
    assert consumer.cached_block(first, 5) is None
    consumer.scheduler.waiting.add_request(first)
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)
    consumer.expect_tokens("d", 2)


def test_leases_on_bad_blocks_are_revoked(producer: Engine, engines: Engines) -> None:
    """A kv_both engine passes on what it loads; when the load fails, so does the lease."""
    both = engines.make("kv_both")
    params = producer.prefill("p", prompt_of(100))
    both.worker.cause_of = fail_all
    request = both.add("b", prompt_of(100), {**params, "do_remote_decode": True}, max_tokens=2)
    step = both.schedule_until_admitted(request)
    (grant,) = step.meta.grants
    both.finish_step()
    both.run_to_end()
    both.expect_tokens("b", 2)
    assert grant.lease not in both.worker.grants
    returned = both.params["b"]
    assert returned is not None
    assert returned["transfer_id"] != grant.lease.transfer_id
    both.scheduler.reset_prefix_cache()


def test_second_source_serves_after_the_first_has_failed(
    producer: Engine, consumer: Engine
) -> None:
    """A request preempted because another's load failed loads from its own peer again."""
    params = producer.prefill("p", prompt_of(100))
    other_params = producer.prefill("q", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params, max_tokens=2)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    second = consumer.add("d", prompt_of(100), other_params, max_tokens=2)
    consumer.wait_for_answer()
    failed = params["transfer_id"]
    consumer.worker.cause_of = lambda s: fail_all(s) if s.transfer_id == failed else ""
    step = consumer.schedule_until_admitted(second)
    assert set(step.output.num_scheduled_tokens) == {"c", "d"}
    consumer.run_to_end()
    consumer.expect_tokens("c", 2)
    consumer.expect_tokens("d", 2)


def test_prefill_stats_stay_sane_when_a_recovered_request_loads_again(
    producer: Engine, consumer: Engine
) -> None:
    params = producer.prefill("p", prompt_of(100))
    other_params = producer.prefill("q", prompt_of(100))
    first = consumer.add("c", prompt_of(100), params)
    consumer.wait_for_answer()
    consumer.scheduler.pd.try_promote(first)
    second = consumer.add("d", prompt_of(100), other_params)
    consumer.wait_for_answer()
    failed = params["transfer_id"]
    consumer.worker.cause_of = lambda s: fail_all(s) if s.transfer_id == failed else ""
    consumer.schedule_until_admitted(second)
    stats = [first.prefill_stats, second.prefill_stats]
    consumer.finish_step()
    consumer.schedule()
    for one in stats:
        assert one is not None
        assert one.num_local_cached_tokens >= 0
        assert one.num_local_cached_tokens + one.num_external_cached_tokens <= 100


# What is refused.


def check(engines: Engines, spec: Any = SPEC, **changes: Any) -> None:
    """``check_supported`` of a scheduler built without the in-engine path, then reconfigured."""
    config = engines.config("kv_both", {})
    transfer, config.kv_transfer_config = config.kv_transfer_config, None
    scheduler = engines.scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config_of(NUM_BLOCKS),
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    assert scheduler.pd is None
    config.kv_transfer_config = transfer
    scheduler.kv_cache_config = (
        kv_cache_config_of(NUM_BLOCKS, *spec) if spec != SPEC else (scheduler.kv_cache_config)
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target: Any = scheduler
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    check_supported(scheduler)


@dataclass
class _Speculative:
    method: str
    parallel_drafting: bool = False
    num_modules: int = 1

    def use_multi_module_mtp(self) -> bool:
        return self.num_modules > 1


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


def test_an_engine_registers_with_each_of_its_routers(engines: Engines) -> None:
    routers = [Web(), Web()]
    try:
        link = {"url": ",".join(web.url for web in routers), "http_url": routers[0].url}
        engine = engines.make("kv_both", router=link)
        for web in routers:
            wait_until(lambda web=web: "ready" in web.states(), 20)
        engine.scheduler.shutdown()
        assert [web.states()[-1] for web in routers] == ["DELETE", "DELETE"]
    finally:
        for web in routers:
            web.close()


def test_what_was_opened_is_closed_where_the_rest_cannot_be_made(engines: Engines) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="http_url is missing"):
        engines.make("kv_both", router={"url": "http://127.0.0.1:1"})
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm_config__cache_config__enable_prefix_caching": False}, "prefix caching is off"),
        ({"spec": (WINDOW,)}, "windows or states in all layers"),
        ({"spec": (STATE,)}, "windows or states in all layers"),
        (
            {"spec": (SPEC, STATE), "vllm_config__speculative_config": _Speculative("mtp")},
            "KV cache groups with a drafter",
        ),
        (
            {
                "spec": (SPEC, STATE),
                "vllm_config__scheduler_config__long_prefill_token_threshold": BLOCK_SIZE - 1,
            },
            "raise --max-num-batched-tokens",
        ),
        ({"spec": (SPEC, replace(WINDOW, block_size=2 * BLOCK_SIZE))}, "of different sizes"),
        (
            {
                "spec": (SPEC, WINDOW),
                "vllm_config__speculative_config": _Speculative("eagle"),
            },
            "KV cache groups with a drafter",
        ),
        (
            {
                "spec": (SPEC, WINDOW),
                "vllm_config__parallel_config__pipeline_parallel_size": 2,
            },
            "several KV cache groups with pipeline",
        ),
        ({"vllm_config__parallel_config__world_size": 2}, "prefill context parallel"),
        ({"hash_block_size": 8}, "hash blocks smaller"),
        ({"vllm_config__speculative_config": _Speculative("medusa")}, "with the method medusa"),
        ({"vllm_config__speculative_config": _Speculative("eagle3", True)}, "parallel drafting"),
        (
            {"vllm_config__speculative_config": _Speculative("mtp", num_modules=2)},
            "MTP with several modules",
        ),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vllm_config__model_config__disable_cascade_attn": False}, "cascade attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_engine_is_refused_by_name(
    engines: Engines, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(engines, **changes)


def test_supported_engine_is_accepted(engines: Engines) -> None:
    check(engines)
    check(engines, (SPEC, WINDOW))
    check(engines, (SPEC, STATE, STATE, WINDOW))
    for method in ("ngram", "eagle", "eagle3", "mtp", "draft_model"):
        check(engines, vllm_config__speculative_config=_Speculative(method))
    assert engines.made == []


def test_request_without_a_transfer_is_counted_when_it_is_scheduled_first(
    producer: Engine,
) -> None:
    """Preempted, it finds more here than its prompt: what it has computed itself."""
    params = {"do_remote_prefill": True, "return_provenance": True}
    producer.add("c", prompt_of(20), params, max_tokens=40)
    producer.run(lambda: len(producer.tokens["c"]) == 30)
    while producer.in_flight:
        producer.finish_step()
    scheduler = producer.scheduler
    scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
    producer.run_to_end()
    producer.expect_tokens("c", 40)
    provenance = (producer.params["c"] or {})["provenance"]
    assert provenance["outcome"] == Cause.WRONG_ROLE.value
    assert (provenance["num_local_tokens"], provenance["num_computed_tokens"]) == (0, 20)


# The pool.


@pytest.fixture
def pooled(engines: Engines, tmp_path: Path) -> Iterator[tuple[Engine, Callable[[], None]]]:
    """An engine with a pool, and what answers its lookup: the pool has nothing."""
    engine = engines.make("kv_both", pool={"put": False})
    address = tmp_path / "pool"
    lookups: list[Any] = []
    worker = PoolLink("worker", lookups.append)
    worker.listen(str(address))
    worker.start()
    executor = SimpleNamespace(collective_rpc=lambda method: [(str(address), 4)])
    pd = engine.scheduler.pd
    core = SimpleNamespace(model_executor=executor, request_block_hasher=_hasher)
    pd.on_engine_started(core)

    def answer() -> None:
        engine.poll(lambda: bool(lookups))
        lookup = lookups.pop()
        assert isinstance(lookup, Lookup)
        num_blocks = len(lookup.hashes) // lookup.hash_bytes
        worker.send(Found(lookup.lookup_id, bytes(num_blocks), True, 0.1))
        engine.poll(lambda: not pd.part(PoolSide).source.answers.empty())

    yield engine, answer
    worker.stop()


def test_preempted_request_that_the_pool_has_nothing_for_is_resumed(
    pooled: tuple[Engine, Callable[[], None]],
) -> None:
    """Also when the answer is folded in by the very pass that comes to it."""
    engine, answer = pooled
    request = engine.add("p", prompt_of(100), max_tokens=3)
    answer()
    engine.schedule()
    engine.scheduler._preempt_request(engine.scheduler.running.pop(), time.monotonic())
    engine.finish_step()
    engine.scheduler.pd.part(PoolSide).source.add(request, admitted=True)
    assert request.status is RequestStatus.WAITING_FOR_KV
    answer()
    step = engine.schedule()
    assert step.output.scheduled_cached_reqs.resumed_req_ids == {"p"}
    engine.run_to_end()
    engine.expect_tokens("p", 3)


def test_request_that_the_pool_has_nothing_for_still_waits_for_its_grammar(
    pooled: tuple[Engine, Callable[[], None]],
) -> None:
    engine, answer = pooled
    constraint = StructuredOutputsParams(regex="a")
    request = engine.add("p", prompt_of(100), structured_outputs=constraint)
    assert request.status is RequestStatus.WAITING_FOR_KV
    answer()
    assert not engine.step().output.num_scheduled_tokens
    assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    engine.abort("p")


def test_prompt_whose_window_has_slid_on_is_not_lent_again(engines: Engines) -> None:
    """A reset ends the lease of a request that goes on, which has no more than its window."""
    producer = engines.make("kv_producer", specs=(SPEC, replace(WINDOW, sliding_window=2)))
    producer.add("p", prompt_of(30), {"do_remote_decode": True}, max_tokens=8)
    while len(producer.tokens["p"]) < 5:
        producer.step()
    assert producer.counts()["leases"] == 1
    assert not producer.scheduler.reset_prefix_cache()
    producer.run_to_end()
    assert producer.params.get("p") is None
    producer.scheduler.reset_prefix_cache()

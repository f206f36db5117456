# SPDX-License-Identifier: Apache-2.0
"""The scheduler's hooks: one object per engine, in the EngineCore process."""

from __future__ import annotations

import dataclasses
import secrets
import time
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.config import LoadMode, PDConfig, WeightReading
from vllm_ascend_pd.engine.ascend import ascend_facts, check_roles, is_ascend
from vllm_ascend_pd.engine.carrier import PDStats
from vllm_ascend_pd.engine.fingerprint import fingerprint
from vllm_ascend_pd.engine.logs import adopt_engine_logging
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.registration import Registrar, RegistrarState
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.first_token import deliver, make_sampling_key
from vllm_ascend_pd.engine.scheduler.identity import Identity
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.parking import Parking
from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
from vllm_ascend_pd.engine.scheduler.pool_prompt import PoolEvent, PoolPrompt
from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.scheduler.recovery import clear, recover
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.scheduler.supported import check_supported
from vllm_ascend_pd.engine.self_description import describe
from vllm_ascend_pd.engine.sharding import bytes_per_block, can_divide_pages, sharding
from vllm_ascend_pd.engine.suspension import resume, suspend
from vllm_ascend_pd.engine.threads import shorten_turns, sleep_where_cores_are_few
from vllm_ascend_pd.engine.vllm_api.queues import keep_order_of_arrival, waiting_queues
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.metrics import Provenance, Stats
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.control import ControlClient, ControlServer
from vllm_ascend_pd.transfer.leases import LeaseBook
from vllm_ascend_pd.transfer.session import ConsumerState
from vllm_ascend_pd.types import Cause, Epoch, LeaseRef, LoadId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.pool.messages import AheadSpec, Message, PoolLoadSpec
    from vllm_ascend_pd.transfer.grants import GrantSpec
    from vllm_ascend_pd.transfer.load import LoadSpec
    from vllm_ascend_pd.transfer.tickets import PageServer

logger = limited_logger(__name__)

_OVERDUE_S = 0.25
"""Who waits for memory too long is looked for so often."""
_COLLECT_S = 0.0002
"""What peers and the pool have said is looked at so often within a pass."""


def create(scheduler: Scheduler) -> SchedulerSide:
    """Check that this engine can take part, then open what its role needs."""
    adopt_engine_logging()
    config = PDConfig.from_kv_transfer_config(scheduler.vllm_config.kv_transfer_config)
    check_supported(scheduler)
    if is_ascend(scheduler.vllm_config):
        check_roles(ascend_facts(scheduler.vllm_config), config.role)
    shorten_turns()
    sleep_where_cores_are_few(scheduler.vllm_config.parallel_config.world_size)
    return SchedulerSide(scheduler, config)


class SchedulerSide:
    """Implements ``hooks.SchedulerHooks``. One thread, the scheduler's; decides, never blocks."""

    _identity: Identity | None = None  # from on_engine_started on
    _gauges_due = True
    """A step must carry gauges out. Scheduler and registrar set it, the scheduler clears it."""

    _spoiled: frozenset[int] = frozenset()
    """Blocks that the next step clears."""

    def __init__(self, scheduler: Scheduler, config: PDConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._manager = scheduler.kv_cache_manager
        self._pool = scheduler.kv_cache_manager.block_pool
        self._block_size = scheduler.block_size
        self._stats = Stats()
        self._engine_core: Any = None
        self._phantoms = PhantomBlocks(self._pool, self._block_size)
        self._sharding = sharding(scheduler.vllm_config)
        self._loads = Loads(self._sharding.num_workers)
        self._parking = Parking(scheduler.kv_cache_manager, self._phantoms, self._loads)
        self._page_servers: dict[int, PageServer] = {}
        self._kv_pool: PoolSide | None = None  # from on_engine_started on
        # By request id: what may come from peers, and from the pool.
        self._sessions: Mapping[str, RemotePrompt] = {}
        self._prompts: Mapping[str, PoolPrompt] = {}
        self._ignored: dict[str, Provenance] = {}
        self._collect_at = self._overdue_at = 0.0
        identity = fingerprint(scheduler.vllm_config, scheduler.kv_cache_config)
        epoch = Epoch(secrets.token_hex(8))
        transfer = config.transfer
        self._trust = Trust.load(config.security.secret_file)
        self._book = LeaseBook(
            epoch, identity, transfer.lease_s, time.monotonic, transfer.max_lease_s
        )
        sampling_key = make_sampling_key(scheduler.vllm_config, transfer.first_token)
        self._server: ControlServer | None = None
        self._producer: Producer | None = None
        self._client: ControlClient | None = None
        self._consumer: Consumer | None = None
        if config.role.produces:
            self._server = ControlServer(
                config.host,
                config.port,
                self._book,
                self._wake,
                self._trust,
                transfer.arrival_timeout_s,
            )
            self._producer = Producer(
                self._manager,
                self._book,
                config.engine_id,
                epoch,
                self._server.endpoint,
                self._stats,
                self._block_size,
                self._server.answer_waiting,
                self._loads.is_under,
                self._server.tell_first_token,
                sampling_key,
                self._sharding.num_workers,
                transfer.unopened_share,
            )
            self._server.start()
            logger.info(
                "in-engine transfers: consumers reach this engine at %s", self._server.endpoint
            )
        if config.role.consumes:
            self._client = ControlClient(
                transfer.peer_timeout_s,
                transfer.lease_s / 3,
                self._trust,
                transfer.arrival_timeout_s,
            )
            self._consumer = Consumer(
                client=self._client,
                phantoms=self._phantoms,
                fingerprint=identity,
                block_size=self._block_size,
                bytes_per_block=bytes_per_block(scheduler.kv_cache_config)
                * self._sharding.num_workers,
                transfer=transfer,
                security=config.security,
                stats=self._stats,
                others_wait=self._others_wait,
                sharding=self._sharding,
                divides_pages=can_divide_pages(scheduler.vllm_config, scheduler.kv_cache_config),
                sampling_key=sampling_key,
                vocab_size=scheduler.vllm_config.model_config.get_vocab_size(),
            )
            self._sessions = self._consumer.sessions
            self._client.start()
        # A parked load is not ordered against a step that is still writing freed blocks.
        has_loads = config.role.consumes or config.pool is not None
        if has_loads and scheduler.vllm_config.max_concurrent_batches > 1:
            scheduler.defer_block_free = True
        logger.debug("fingerprint: %s", identity)
        endpoint = self._server.endpoint if self._server is not None else None
        self._fingerprint = identity
        self._info = (
            *(config.engine_id, config.role.value, epoch, str(endpoint or ""), identity),
            (config.pool.master or "its own") if config.pool is not None else "",
        )
        self._stats.set("engine_info", 1, *self._info)
        self._told_state = RegistrarState.NEW
        self._registrar: Registrar | None = None
        if config.router.url:
            self._registrar = Registrar(
                config.router,
                describe(scheduler, config, epoch, identity, endpoint),
                self._is_draining,
                self._registration_changed,
            )
            self._registrar.start()

    # Arrival and waiting.

    def on_request_added(self, request: Request) -> None:
        if self._identity is not None:
            self._identity.check(request)
        self._add_transfer(request)
        if self._kv_pool is None:
            return
        if self._consumer is not None and self._consumer.get(request) is not None:
            # Its producer stores the prompt.
            self._kv_pool.saves.skip(request, request.num_prompt_tokens)
        else:
            self._kv_pool.source.add(request)

    def _add_transfer(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if not isinstance(params, dict):
            kind = type(params).__name__
            self._ignore(request, Cause.BAD_PARAMS, f"kv_transfer_params is {kind}, not an object")
            return
        if self._producer is not None and "release_transfer_id" in params:
            self._producer.release(params["release_transfer_id"])
            return
        if params.get("do_remote_prefill"):
            if self._consumer is None:
                self._wrong_role(request, "do_remote_prefill", "kv_consumer or kv_both")
            elif refusal := self._consumer.add(request, params):
                self._ignore(request, *refusal)
        if params.get("do_remote_decode"):
            if self._producer is None:
                self._wrong_role(request, "do_remote_decode", "kv_producer or kv_both")
            elif refusal := self._producer.expect(request):
                self._ignore(request, *refusal)

    def _wrong_role(self, request: Request, name: str, roles: str) -> None:
        role = self._config.role.value
        detail = f"kv_transfer_params.{name} needs kv_role {roles}, and it is {role} here"
        self._ignore(request, Cause.WRONG_ROLE, detail)

    def _ignore(self, request: Request, cause: Cause, detail: str) -> None:
        """No transfer for this request; said in the log, the metrics and the response."""
        self._stats.add("requests", label=cause.value)
        num_tokens = request.num_prompt_tokens
        self._ignored[request.request_id] = Provenance(
            num_tokens, num_computed_tokens=num_tokens, outcome=cause.value
        )
        logger.warning(
            "request %s is served without a transfer: %s (%s)",
            request.request_id,
            cause.value,
            detail,
        )

    def try_promote(self, request: Request) -> bool:
        # Called for every waiting request of a pass.
        now = time.monotonic()
        if now >= self._collect_at:
            self._collect(now)
        source = self._source_of(request)
        if source is not None and source.pending and not self._has_answer(source):
            return False
        self._turn_to_pool(request)
        source = self._source_of(request)
        if source is None:
            if request.status == RequestStatus.WAITING_FOR_KV:
                request.status = RequestStatus.WAITING
            return _can_be_scheduled(request)
        if source.pending or source.parked:
            return False
        if isinstance(source, RemotePrompt) and source.has_first_token:
            return False
        if source.offers and not source.placed:
            missing = self._phantoms.find_missing(request, source)
            if self._loads.is_parked_load_of(request, missing):
                # Another request's load brings these blocks in; then they are ordinary hits.
                return False
            if missing and self._wants_parking(source, missing):
                source.placed = self._parking.park(source, missing)
            if source.placed:
                return False
            if _is_awaited(source):
                # Given up, it may turn to the pool.
                return self._place_elsewhere(source, missing) and self.try_promote(request)
            source.placed = True
        if isinstance(source, RemotePrompt) and source.waits_for_first_token():
            return False
        request.status = source.queued_status
        return _can_be_scheduled(request)

    def _collect(self, now: float) -> None:
        self._collect_at = now + _COLLECT_S
        if self._consumer is not None:
            self._consumer.collect_outcomes()
        if self._kv_pool is not None:
            self._kv_pool.collect()

    def _has_answer(self, source: RemotePrompt | PoolPrompt) -> bool:
        return (
            isinstance(source, PoolPrompt)
            and self._kv_pool is not None
            and self._kv_pool.has_answer(source)
        )

    def _source_of(self, request: Request) -> RemotePrompt | PoolPrompt | None:
        """Where this request's missing blocks may come from: its peer, and after that the pool."""
        session = self._sessions.get(request.request_id)
        prompt = self._prompts.get(request.request_id)
        if session is not None and (prompt is None or not session.state.final):
            return session
        return prompt

    def _turn_to_pool(self, request: Request) -> None:
        """When its peer has failed, a request takes what the pool has before it computes the rest,
        and stores what nobody else may have stored.
        """
        if self._kv_pool is None or self._consumer is None:
            return
        session = self._consumer.get(request)
        if (
            session is None
            or session.parked
            or session.state is not ConsumerState.FAILED
            or session.provenance.outcome == Cause.NOT_NEEDED.value
            or self._kv_pool.source.find(request) is not None
        ):
            return
        if request.status == RequestStatus.WAITING_FOR_KV:
            request.status = session.queued_status
        self._kv_pool.saves.forget(request)
        self._kv_pool.source.add(request, session.provenance)

    def _origin_from_peer(self, request: Request) -> Provenance | None:
        session = self._consumer.get(request) if self._consumer is not None else None
        return session.provenance if session is not None else None

    def _others_wait(self) -> bool:
        """Whether an in-step load would hold up other requests."""
        return bool(self._scheduler.running) or len(self._scheduler.requests) > 1

    def _place_elsewhere(self, session: RemotePrompt, missing: list[int]) -> bool:
        """A prompt that is still computed is not parked: whether the request goes on without it.

        It does when only a tail is missing, which is computed sooner than it would come, or when
        memory for the rest has not been found in time.
        """
        assert self._consumer is not None
        if not missing:
            self._consumer.give_up(session, Cause.NOT_NEEDED)
            return True
        if time.monotonic() < session.place_until:
            return False
        self._consumer.give_up(session, Cause.DEADLINE)
        return True

    def _prefetch(self, queued: Sequence[PoolPrompt]) -> None:
        """What the pool has for requests to which no pass has come: load it while they queue."""
        if self._config.transfer.load_mode is LoadMode.STEP:
            return
        for prompt in queued:
            missing = self._phantoms.find_missing(prompt.request, prompt)
            if missing and not self._loads.is_parked_load_of(prompt.request, missing):
                prompt.placed = self._parking.park(prompt, missing)

    def _wants_parking(self, source: RemotePrompt | PoolPrompt, missing: list[int]) -> bool:
        if isinstance(source, PoolPrompt):
            assert self._kv_pool is not None
            return self._kv_pool.source.wants_parking(source, missing)
        assert self._consumer is not None
        return self._consumer.wants_parking(source, len(missing))

    # Lookup and allocation.

    def get_external_prefix_cache_blocks(
        self, request: Request, hit: tuple[Any, int, int]
    ) -> tuple[Any, int, int]:
        if not (self._sessions or self._prompts):  # no request has a source
            return hit
        source = self._source_of(request)
        if source is None or not source.offers:
            return hit
        blocks = self._phantoms.publish(request, hit[0][0], source)
        num_full = (request.num_tokens - 1) // self._block_size
        num_tail = source.num_tail_tokens if len(blocks) == num_full else 0
        return (blocks,), len(blocks) * self._block_size + num_tail, hit[2]

    def split_tail(
        self, request: Request, num_local_tokens: int, num_external_tokens: int
    ) -> tuple[int, int]:
        num_tail = num_local_tokens % self._block_size
        if not num_tail or self._source_of(request) is None:
            return num_local_tokens, num_external_tokens
        return num_local_tokens - num_tail, num_external_tokens + num_tail

    def on_slots_allocated(self, request: Request, new_computed_blocks: KVCacheBlocks) -> None:
        hits = new_computed_blocks.blocks[0]
        if not (hits or self._sessions or self._prompts or self._ignored):
            return
        if ignored := self._ignored.get(request.request_id):
            ignored.num_local_tokens = len(hits) * self._block_size
            ignored.num_computed_tokens = ignored.num_prompt_tokens - ignored.num_local_tokens
        source = self._source_of(request)
        if not hits and source is None:
            return
        phantoms = self._phantoms.claim(hits)
        for phantom in phantoms:
            self._loads.claim(request, phantom.source, [phantom], None)
        self._loads.note_user(request, hits)
        num_hit = len(hits) * self._block_size
        num_peer = len(phantoms) * self._block_size
        num_tail = 0
        if source is None and self._kv_pool is not None:
            source = self._kv_pool.source.find(request)
        if isinstance(source, PoolPrompt):
            assert self._kv_pool is not None
            num_tail = self._parking.take_tail(source, len(hits))
            num_peer = min(num_hit, num_peer + source.num_parked_tokens)
            claimed = [phantom.index for phantom in phantoms]
            if num_tail:
                claimed.append(len(hits))
            self._kv_pool.source.admitted(source, num_hit - num_peer, num_peer + num_tail, claimed)
        elif source is not None:
            assert self._consumer is not None
            # Again for one that was preempted while its load is under way, and still counts on it.
            num_tail = self._parking.take_tail(source, len(hits))
            if not source.admitted:
                num_peer = min(num_hit, num_peer + source.num_parked_tokens)
                self._consumer.admitted(source, num_hit - num_peer, num_peer + num_tail)
        stats = request.prefill_stats
        if stats is not None and num_peer + num_tail:
            if request.num_preemptions:  # of which the engine counts nothing anew
                stats.set(request.num_prompt_tokens, num_hit - num_peer, num_peer + num_tail)
            else:
                stats.num_local_cached_tokens -= num_peer + num_tail
                stats.num_external_cached_tokens += num_peer + num_tail

    # The step and its output.

    def build_step(self, scheduler_output: SchedulerOutput) -> StepMeta | None:
        meta = self._build_meta(scheduler_output)
        if self._spoiled:
            clear(scheduler_output, self._spoiled, meta)
            self._spoiled = frozenset()
        return meta

    def _build_meta(self, scheduler_output: SchedulerOutput) -> StepMeta | None:
        # Called in every pass of the scheduler: who has nothing to say is not even asked.
        revokes: tuple[LeaseRef, ...] = ()
        grants: tuple[GrantSpec, ...] = ()
        cancels: tuple[LoadId, ...] = ()
        loads: tuple[LoadSpec | PoolLoadSpec, ...] = ()
        saves: tuple[Message, ...] = ()
        ahead: tuple[AheadSpec, ...] = ()
        self._gauges_due = False
        scheduler, pool = self._scheduler, self._kv_pool
        if self._parking.holders:
            self._parking.relieve(self._is_stuck(scheduler_output))
        if self._sessions and (now := time.monotonic()) >= self._overdue_at:
            self._overdue_at = now + _OVERDUE_S
            self._give_up_overdue(now)
        if self._producer is not None and self._producer.busy:
            revokes, grants = self._producer.begin_step(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            request = scheduler.requests[new.req_id]
            if request.num_output_tokens:  # a peer has sampled the first one
                new.prefill_token_ids = list(request.all_token_ids)
        if self._loads.new or self._loads.running:
            cancels = self._loads.take_cancels()
            self._loads.note_computed(
                lambda request: self._manager.get_blocks(request.request_id).blocks[0]
            )
        if pool is not None:
            pool.has_saved = False
            ahead = pool.saves.note_step(scheduler_output, scheduler.requests)
            if scheduler_output.preempted_req_ids:
                pool.look_up_again(scheduler_output.preempted_req_ids, self._origin_from_peer)
            if pool.held:
                saves = pool.take_held()
            if pool.source.queued:
                self._prefetch(pool.source.take_queued())
        keep_order_of_arrival(scheduler)
        if self._loads.new:
            loads = self._loads.take_new()
        if not (revokes or cancels or grants or loads or saves or ahead):
            return None
        return StepMeta(revokes, cancels, grants, loads, saves, ahead)

    def _is_stuck(self, output: SchedulerOutput) -> bool:
        """Nothing runs, and a request that waits for nothing has found no memory."""
        scheduler = self._scheduler
        return not (output.num_scheduled_tokens or scheduler.running) and any(
            _can_be_scheduled(request)
            for requests in waiting_queues(scheduler)
            for request in requests
        )

    def _give_up_overdue(self, now: float) -> None:
        """A request that found no memory in time computes its prompt when it does, and its producer
        gets the blocks back: else two engines could wait for each other's for ever.
        """
        assert self._consumer is not None
        for session in [x for x in self._sessions.values() if x.is_overdue(now)]:
            self._parking.drop_tail(session)
            self._phantoms.withdraw(session)
            self._consumer.give_up(session, Cause.DEADLINE)

    def on_step_output(self, model_runner_output: ModelRunnerOutput) -> None:
        output = model_runner_output.kv_connector_output
        if output is None:
            if self._kv_pool is not None:
                self._kv_pool.saves.confirm()
            return
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            if report.page_servers:
                self._note_servers(report.page_servers)
            self._count_refused(report.refused_frames)
            self._count_errors(report.errors)
            bad_block_ids: set[int] = set()
            for result in filter(None, map(self._loads.fold, report.results)):
                bad_block_ids |= self._end_load(result)
            self._loads.note_rested(report.rested)
            self._pool.free_blocks(reversed(self._loads.take_rested()))
            if bad_block_ids:
                self._recover(bad_block_ids)
        self._count_refused(self._trust.take_refused())
        for thread in (self._server, self._client):
            if thread is not None:
                self._count_errors(thread.take_errors())
        if self._registrar is not None and self._registrar.state is not self._told_state:
            self._told_state = self._registrar.state
            self._stats.set("router_registered", int(self._told_state.registered))
        if self._kv_pool is not None:
            self._kv_pool.saves.confirm()
            self._kv_pool.set_gauges()
        if self._scheduler.log_stats and (values := self._stats.take()):
            output.kv_connector_stats = PDStats(data=values)

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        if self._consumer is None:
            return
        self._consumer.collect_outcomes()
        for session in self._consumer.take_first_tokens():
            request = session.request
            num_cached = self._phantoms.num_leading_hits(
                request, request.num_prompt_tokens // self._block_size
            )
            num_local = max(0, num_cached * self._block_size - session.num_parked_tokens)
            assert session.first_token_id is not None
            session.provenance.first_token = "peer"
            output = deliver(self._scheduler, request, session.first_token_id, num_local)
            outputs[request.client_index].append(output)
            self._parking.cache_full_tail(session)

    def _note_servers(self, servers: dict[int, PageServer]) -> None:
        """Prompts can be opened once it is known where each worker serves its pages."""
        self._page_servers |= servers
        if len(self._page_servers) == self._sharding.num_workers:
            ranks = range(self._sharding.num_workers)
            self._book.page_servers = tuple(self._page_servers[rank] for rank in ranks)
            if self._server is not None:
                self._server.answer_waiting()

    def _count_refused(self, refused: dict[str, int]) -> None:
        for reason, count in refused.items():
            self._stats.add("frames_refused", count, reason)

    def _count_errors(self, errors: dict[str, int]) -> None:
        for thread, count in errors.items():
            self._stats.add("internal_errors", count, thread)

    def _end_load(self, result: LoadResult) -> set[int]:
        """Fold one result in; the block ids that must be recovered from."""
        record = self._loads.end(result.load_id)
        source = record.source
        source.load_ended(result)
        if isinstance(source, PoolPrompt):
            assert self._kv_pool is not None
            self._kv_pool.source.load_ended(source, result, record.indices())
        else:
            self._stats.add("loads", label=result.cause or "ok")
            if result.num_bytes:
                self._stats.add("load_bytes", result.num_bytes, result.transport)
            self._stats.add("load_ms", result.elapsed_ms)
        bad = record.bad_block_ids(result.failed) if result.cause else set()
        if result.cause:
            self._spoil(record.spoiled_block_ids(result.failed))
            self._phantoms.withdraw(source)
            for request in record.users:
                if request.status == RequestStatus.PREEMPTED and request.num_stale_output_tokens:
                    request.drop_stale_output = True
        if record.parked_for is not None:
            self._parking.end(record, result)
        if isinstance(source, RemotePrompt) and self._consumer is not None:
            self._parking.cache_full_tail(source)
            self._consumer.load_ended(source, result)
        return bad

    def _recover(self, bad_block_ids: set[int]) -> None:
        preempted, bad = recover(self._scheduler, bad_block_ids)
        self._spoil(bad)
        if self._producer is not None:
            self._producer.revoke_blocks(bad)
        self._stats.add("recovered_requests", len(preempted))
        for request in preempted:
            logger.warning("request %s: recomputing after a failed load", request.request_id)
            if request.prefill_stats is not None:
                request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
            self._turn_to_pool(request)

    def _spoil(self, block_ids: set[int]) -> None:
        """Of a failed load: have the next step clear them, where that matters."""
        if self._scheduler.vllm_config.device_config.device_type == "cpu":
            self._spoiled |= block_ids

    # The end.

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        params: dict[str, Any] | None = None
        if self._producer is not None:
            params = self._producer.finish(request)
        provenance = None
        if self._consumer is not None:
            session = self._consumer.get(request)
            if session is not None:
                self._parking.drop_tail(session)
                if session.parked:
                    self._loads.cancel(request)
            provenance = self._consumer.finish(request)
        if self._kv_pool is not None:
            self._kv_pool.saves.forget(request)
            self._kv_pool.send_held_if_idle()
            prompt = self._prompts.get(request.request_id)
            if prompt is not None:
                self._parking.drop_tail(prompt)
                if prompt.parked:
                    self._loads.cancel(request)
            origin = self._kv_pool.source.finish(request)
            provenance = origin if provenance is None else provenance
        provenance = self._ignored.pop(request.request_id, provenance)
        if provenance is not None and _wants_provenance(request):
            params = {**(params or {}), "provenance": dataclasses.asdict(provenance)}
        return params

    def has_pending_work(self) -> bool:
        if self._kv_pool is not None:
            self._kv_pool.wait_if_nothing_else()
        self._collect(time.monotonic())
        if self._kv_pool is not None and self._kv_pool.held:
            self._kv_pool.send_held_if_idle()
        if self._producer is not None:
            self._producer.collect_closed()
        # A step tells the worker what it may no longer serve, and carries the counters out.
        has_news = self._producer is not None and self._producer.has_news
        gauges_due = self._gauges_due and self._scheduler.log_stats
        pool_has_news = self._kv_pool is not None and self._kv_pool.has_news
        loads_change = self._loads.num_parked > 0 or self._loads.num_resting > 0
        return loads_change or has_news or gauges_due or pool_has_news

    def on_engine_started(self, engine_core: object) -> None:
        self._engine_core = engine_core
        if self._sharding.num_workers > 1:
            # Else the engine hears of one worker only, as without a connector.
            executor: Any = engine_core.model_executor  # type: ignore[attr-defined]
            executor.kv_output_aggregator = KVOutputAggregator(self._sharding.num_workers)
        self._identity = Identity(
            self._scheduler,
            engine_core,
            self._config.identity is WeightReading.FULL,
            self._forsake,
            self._on_generation,
        )
        engine_core.model_executor.pd = self  # type: ignore[attr-defined]
        if self._config.pool is not None:
            self._kv_pool = PoolSide(
                self._scheduler,
                engine_core,
                self._config,
                self._phantoms,
                self._stats,
                self._others_wait,
                self._wake,
            )
            self._prompts = self._kv_pool.source.open

    # What the engine computes with has changed.

    def worker_call(
        self, method: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> AbstractContextManager[object]:
        assert self._identity is not None
        return self._identity.worker_call(method, args, kwargs or {})

    def on_lora_loaded(self, lora_request: LoRARequest) -> None:
        assert self._identity is not None
        self._identity.on_lora_loaded(lora_request)

    def before_sleep(self, level: int) -> None:
        if len(self._loads) or (self._kv_pool is not None and self._kv_pool.saves.num_pinned):
            raise TransferError("KV is still loaded or stored: no sleep; try again in a moment")
        if level > 1:
            assert self._identity is not None
            self._identity.weights_changed()
        self._engine_core.model_executor.collective_rpc(suspend)

    def after_wake_up(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            self._engine_core.model_executor.collective_rpc(resume)

    def _on_generation(self, generation: str) -> None:
        if self._producer is not None:
            self._producer.revoke_all()
        identity = f"{self._fingerprint} generation={generation}"
        logger.info("the weights have changed: %s", identity)
        self._book.identify(identity)
        if self._consumer is not None:
            self._consumer.fingerprint = identity
        if self._registrar is not None:
            self._registrar.identify(identity)
        self._stats.set("engine_info", 0, *self._info)
        self._info = (*self._info[:4], identity, *self._info[5:])
        self._stats.set("engine_info", 1, *self._info)
        self._gauges_due = True

    def _forsake(self, request: Request) -> None:
        """It is about to be hashed anew, so nothing that was meant for it fits any more."""
        if self._producer is not None:
            self._producer.revoke(request)
        session = self._consumer.get(request) if self._consumer is not None else None
        if session is not None:
            assert self._consumer is not None
            self._consumer.forsake(session)
        prompt = self._kv_pool.source.find(request) if self._kv_pool is not None else None
        if prompt is not None:
            prompt.is_stale = True
            prompt.advance(PoolEvent.ENDED)
        for source in (session, prompt):
            if source is not None:
                self._phantoms.withdraw(source)
                self._parking.drop_tail(source)
                if source.parked:
                    self._loads.cancel(request)
        if self._kv_pool is not None and request.num_computed_tokens:
            # Nobody else has a use for what it computes from now on.
            self._kv_pool.saves.skip(request, self._scheduler.max_model_len)

    def reset(self, reset_connector: bool) -> None:
        if self._producer is not None:
            self._producer.revoke_all()
        self._phantoms.withdraw_all()
        for session in self._sessions.values():
            self._parking.drop_tail(session)
        for prompt in self._prompts.values():
            self._parking.drop_tail(prompt)
        if self._kv_pool is not None:
            self._kv_pool.reset()
            if reset_connector:
                self._kv_pool.forget()

    def shutdown(self) -> None:
        for thread in (self._registrar, self._server, self._client):
            if thread is not None:
                thread.stop()
        if self._kv_pool is not None:
            self._kv_pool.stop()

    def counts(self) -> dict[str, int]:
        """What a leak check compares; all but ``free_blocks`` are zero when nothing goes on."""
        self.has_pending_work()
        return {
            "free_blocks": self._pool.get_num_free_blocks(),
            "phantoms": len(self._phantoms),
            "loads": len(self._loads),
            "sessions": len(self._consumer) if self._consumer else 0,
            "leases": len(self._book),
            "pinned_blocks": self._producer.num_pinned_blocks if self._producer else 0,
            "pool_prompts": len(self._kv_pool.source) if self._kv_pool else 0,
            "pool_saves": self._kv_pool.saves.num_under_way if self._kv_pool else 0,
            "pool_pins": self._kv_pool.saves.num_pinned if self._kv_pool else 0,
        }

    def _is_draining(self) -> bool:
        """Whether the engine was asked to end. Called by the registrar's thread."""
        return (
            self._engine_core is not None
            and not getattr(self._engine_core, "is_running", lambda: True)()
        )

    def _registration_changed(self) -> None:
        """Called by the registrar's thread."""
        self._gauges_due = True
        self._wake()

    def _wake(self) -> None:
        """Make the engine loop look at ``has_pending_work``. Called by the control thread."""
        input_queue = getattr(self._engine_core, "input_queue", None)
        if input_queue is not None:
            input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _can_be_scheduled(request: Request) -> bool:
    """Whether it waits for memory only; others wait for a grammar, say."""
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _is_awaited(source: RemotePrompt | PoolPrompt) -> TypeGuard[RemotePrompt]:
    return isinstance(source, RemotePrompt) and not source.is_computed


def _wants_provenance(request: Request) -> bool:
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("return_provenance"))

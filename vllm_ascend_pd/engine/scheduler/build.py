# SPDX-License-Identifier: Apache-2.0
"""The composition root of the scheduler's side: what an engine of some role is made of."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.config import LoadFromPeer, PDConfig, WeightReading
from vllm_ascend_pd.engine.ascend import ascend_facts, check_roles, is_ascend
from vllm_ascend_pd.engine.fingerprint import fingerprint, with_kernels
from vllm_ascend_pd.engine.logs import adopt_engine_logging
from vllm_ascend_pd.engine.nodes import check_workers, options_of_worker
from vllm_ascend_pd.engine.registrar import Registrar
from vllm_ascend_pd.engine.scheduler.arrivals import Arrivals
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.first_token import make_sampling_key
from vllm_ascend_pd.engine.scheduler.forwards_in import ForwardsIn
from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut
from vllm_ascend_pd.engine.scheduler.gauges import EngineInfo, RouterContact
from vllm_ascend_pd.engine.scheduler.identity import Identity
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.maker import Maker
from vllm_ascend_pd.engine.scheduler.moves_in import MovesIn
from vllm_ascend_pd.engine.scheduler.moves_out import MovesOut
from vllm_ascend_pd.engine.scheduler.parking import Parking
from vllm_ascend_pd.engine.scheduler.parts import Common, Part
from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
from vllm_ascend_pd.engine.scheduler.pool_side import PoolSide
from vllm_ascend_pd.engine.scheduler.prefill_meter import PrefillMeter
from vllm_ascend_pd.engine.scheduler.producer import Producer
from vllm_ascend_pd.engine.scheduler.queue_order import QueueOrder
from vllm_ascend_pd.engine.scheduler.resume import Resumes
from vllm_ascend_pd.engine.scheduler.side import SchedulerSide
from vllm_ascend_pd.engine.scheduler.supported import check_supported
from vllm_ascend_pd.engine.self_description import describe, name_at_router
from vllm_ascend_pd.engine.sharding import can_divide_pages, own_kernels, own_layers, sharding
from vllm_ascend_pd.engine.suspension import Suspension
from vllm_ascend_pd.engine.threads import shorten_turns, sleep_where_cores_are_few
from vllm_ascend_pd.engine.vllm_api.blocks import free_after_steps_under_way
from vllm_ascend_pd.engine.vllm_api.config import data_parallel_rank, rank_at_front_end
from vllm_ascend_pd.engine.vllm_api.engine import attach, is_ending, join_reports, wake
from vllm_ascend_pd.engine.vllm_api.groups import kv_groups
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.metrics import Stats
from vllm_ascend_pd.net.trust import Secret, Trust
from vllm_ascend_pd.pool.link import pool_address
from vllm_ascend_pd.resume import ResumeKey, RunningAt
from vllm_ascend_pd.transfer.control import ControlClient, ControlServer
from vllm_ascend_pd.transfer.leases import LeaseBook
from vllm_ascend_pd.types import Epoch

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, Scheduler
    from vllm_ascend_pd.types import Endpoint


logger = limited_logger(__name__)


def create(scheduler: Scheduler) -> SchedulerSide:
    """Check that this engine can take part, then open what its role needs."""
    adopt_engine_logging()
    assert scheduler.vllm_config.kv_transfer_config is not None
    config = PDConfig.from_kv_transfer_config(scheduler.vllm_config.kv_transfer_config)
    check_supported(scheduler)
    if is_ascend(scheduler.vllm_config):
        check_roles(ascend_facts(scheduler.vllm_config), config.role)
    shorten_turns()
    sleep_where_cores_are_few(scheduler.vllm_config.parallel_config.world_size)
    # A parked load is not ordered against a step that is still writing freed blocks.
    has_loads = config.role.consumes or config.pool is not None
    if has_loads and scheduler.vllm_config.max_concurrent_batches > 1:
        free_after_steps_under_way(scheduler)
    return _Builder(scheduler, config).build()


class _Builder:
    """Of one engine. What it makes keeps nothing of it but the loop that it wakes."""

    def __init__(self, scheduler: Scheduler, config: PDConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._engine_core: EngineCore | None = None
        self._opened = ExitStack()
        """Closed where a later part cannot be made."""
        self._epoch = Epoch(secrets.token_hex(8))
        path = config.security.secret_file
        secret = None if path is None else Secret.load(path)
        self._trust = Trust(secret)
        self._resume_key = ResumeKey(secret)
        vllm_config, manager = scheduler.vllm_config, scheduler.kv_cache_manager
        self._fingerprint = fingerprint(vllm_config, scheduler.kv_cache_config)
        self._maker = Maker(scheduler, self._fingerprint)
        self._sampling_key = make_sampling_key(vllm_config, config.transfer.first_token)
        shares = sharding(vllm_config)
        groups = kv_groups(
            scheduler.kv_cache_config, scheduler.use_eagle_block_drop, scheduler.hash_block_size
        )
        phantoms = PhantomBlocks(manager.block_pool, groups)
        loads = Loads(shares.num_workers, groups)
        self._common = Common(
            scheduler=scheduler,
            config=config,
            stats=Stats(),
            groups=groups,
            sharding=shares,
            phantoms=phantoms,
            loads=loads,
            parking=Parking(manager, groups, phantoms, loads),
            rank=rank_at_front_end(vllm_config),
        )

    def build(self) -> SchedulerSide:
        with self._opened:
            side = self._build()
            self._opened.pop_all()  # from now on it is the parts' to close
            return side

    def _build(self) -> SchedulerSide:
        config, parts = self._config, list[Part]()
        resumes = Resumes(self._common, self._resume_key, self._maker)
        producer = consumer = endpoint = forwards = None
        if config.role.produces:
            producer, moves_out, server, endpoint = self._producer()
            guests = ForwardsIn(
                self._common, server, resumes, lambda: self._engine_core, self._is_ending
            )
            parts += [guests, moves_out, producer]
        if config.role.consumes:
            consumer, resumes.moves, client = self._consumer(resumes)
            parts += [consumer, resumes.moves]
        if config.forward.peers:  # with both roles
            assert endpoint is not None
            source = RunningAt(endpoint.host, endpoint.port, endpoint.key, self._epoch)
            forwards = moves_out.forwards = ForwardsOut(
                self._common, client, resumes, self._resume_key, source, self._is_ending
            )
            parts.append(forwards)
        if config.pool is not None or config.transfer.load is LoadFromPeer.AUTO:
            parts.append(PrefillMeter(self._common.prefill))
        master = (config.pool.master or "its own") if config.pool is not None else ""
        is_at = (self._epoch, str(endpoint or ""))
        labels = (config.engine_id, config.role.value, *is_at, self._fingerprint, master)
        parts.append(EngineInfo(self._common, self._trust, labels, self._maker.sampling))
        parts += [self._router_contact(url, endpoint) for url in config.router.urls]
        logger.debug("fingerprint: %s", self._fingerprint)
        parts += [resumes, QueueOrder(self._scheduler)]
        arrivals = Arrivals(config.role, self._common.stats, resumes, producer, consumer)
        arrivals.forwards = forwards
        return SchedulerSide(self._common, parts, arrivals, self._complete)

    def _producer(self) -> tuple[Producer, MovesOut, ControlServer, Endpoint]:
        config, transfer = self._config, self._config.transfer
        book = LeaseBook(
            self._epoch, self._fingerprint, transfer.lease_s, time.monotonic, transfer.max_lease_s
        )
        server = ControlServer(book, self._wake, self._trust, transfer.arrival_timeout_s)
        self._opened.callback(server.stop)
        rank = data_parallel_rank(self._scheduler.vllm_config) or 0
        endpoint = server.listen(config.host, config.port_of(rank))
        producer = Producer(self._common, book, server, self._epoch, endpoint, self._sampling_key)
        moves_out = MovesOut(self._common, producer, book, server, self._maker)
        server.start()
        logger.info("in-engine transfers: consumers reach this engine at %s", endpoint)
        return producer, moves_out, server, endpoint

    def _consumer(self, resumes: Resumes) -> tuple[Consumer, MovesIn, ControlClient]:
        vllm_config, transfer = self._scheduler.vllm_config, self._config.transfer
        client = ControlClient(
            transfer.peer_timeout_s, transfer.lease_s / 3, self._trust, transfer.arrival_timeout_s
        )
        consumer = Consumer(
            common=self._common,
            client=client,
            fingerprint=self._fingerprint,
            sampling_key=self._sampling_key,
            divides_pages=can_divide_pages(vllm_config, self._scheduler.kv_cache_config),
            vocab_size=vllm_config.model_config.get_vocab_size(),
        )
        moves_in = MovesIn(self._common, consumer, client, resumes)
        self._opened.callback(client.stop)
        client.start()
        return consumer, moves_in, client

    def _router_contact(self, url: str, endpoint: Endpoint | None) -> RouterContact:
        """``endpoint`` is where consumers reach this engine."""
        link = msgspec.structs.replace(self._config.router, url=url)
        told = describe(self._scheduler, self._config, self._epoch, self._maker, endpoint)
        name = name_at_router(self._scheduler.vllm_config, link, told)
        link = msgspec.structs.replace(link, instance_id=name)
        registrar = Registrar(link, told, self._is_ending, self._wake)
        self._opened.callback(registrar.stop)
        registrar.start()
        return RouterContact(self._common, registrar)

    def _complete(self, side: SchedulerSide, engine_core: EngineCore) -> None:
        """Add what needs the engine's workers."""
        self._engine_core = engine_core
        num_workers = self._common.sharding.num_workers
        if num_workers > 1:
            told = engine_core.model_executor.collective_rpc(options_of_worker)
            check_workers(self._config, told)
        join_reports(engine_core, num_workers)
        if self._scheduler.vllm_config.device_config.device_type != "cpu":
            kernels = engine_core.model_executor.collective_rpc(own_kernels)[0]
            if kernels:
                self._fingerprint = with_kernels(self._fingerprint, kernels)
                side.identify(self._fingerprint)
        side.identity = Identity(
            self._scheduler,
            engine_core,
            self._config.identity is WeightReading.FULL,
            side.forsake,
            lambda generation: side.identify(f"{self._fingerprint} generation={generation}"),
            side.note_adapters,
        )
        self._maker.adapter_of = side.identity.adapter_digest
        side.suspension = Suspension(
            self._common.loads,
            self._common.parking,
            side.parts,
            side.identity,
            engine_core.model_executor,
        )
        if (guests := side.part(ForwardsIn)) is not None:
            guests.adapter = side.identity.adapter
        attach(engine_core, side)
        consumer = side.part(Consumer)
        if consumer is not None and self._common.sharding.num_stages > 1:
            layers = engine_core.model_executor.collective_rpc(own_layers)
            consumer.num_layers = max(stop for _, stop in layers)
        if self._config.pool is not None:
            workers = engine_core.model_executor.collective_rpc(pool_address)
            pool = PoolSide(
                self._common,
                min(num_blocks for _, num_blocks in workers),
                consumer.origin_of if consumer is not None else lambda request: None,
                self._wake,
            )
            side.add(pool)
            pool.connect([address for address, _ in workers])

    def _is_ending(self) -> bool:
        """Whether the engine was asked to end. Any thread."""
        return self._engine_core is not None and is_ending(self._engine_core)

    def _wake(self) -> None:
        """Make the engine loop look at ``has_pending_work``. Called by other threads."""
        if self._engine_core is not None:
            wake(self._engine_core)

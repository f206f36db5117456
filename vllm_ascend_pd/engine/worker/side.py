# SPDX-License-Identifier: Apache-2.0
"""Builds the worker side, once the KV caches exist."""

from __future__ import annotations

import ipaddress
import logging
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_pd import envs, hooks
from vllm_ascend_pd.backends.block_copy import WorkerPages
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.direct_placement import page_regions
from vllm_ascend_pd.backends.fake_engine import FaultyTransferEngine
from vllm_ascend_pd.backends.fault_script import FaultScript
from vllm_ascend_pd.backends.mooncake_engine import DIRECT_ALIGNMENT, MooncakeTransferEngine
from vllm_ascend_pd.backends.npu_links import HOST_MEMORY_HELP, host_memory_route, late_write_s
from vllm_ascend_pd.backends.shared_memory import (
    HostPinning,
    NoPinning,
    SharedMapping,
    SharedMemoryTransferEngine,
)
from vllm_ascend_pd.backends.staging import MakeStaging, StagingPool, Unregistered
from vllm_ascend_pd.backends.torch_device import make_copier
from vllm_ascend_pd.backends.transports import MOONCAKE, SHARED_MEMORY, Transports
from vllm_ascend_pd.config import PDConfig, Placement, Transport, WireProtocol
from vllm_ascend_pd.engine.ascend import in_super_node
from vllm_ascend_pd.engine.logs import adopt_engine_logging
from vllm_ascend_pd.engine.sharding import sharding, stage_layers
from vllm_ascend_pd.engine.threads import (
    default_copy_threads,
    on_any_core,
    shorten_turns,
    sleep_where_cores_are_few,
)
from vllm_ascend_pd.engine.vllm_api.config import has_drafter
from vllm_ascend_pd.engine.vllm_api.groups import hooked_layers, kv_groups, reads_early
from vllm_ascend_pd.engine.worker.device_step import DeviceWorkerSide
from vllm_ascend_pd.engine.worker.kv_caches import locate
from vllm_ascend_pd.engine.worker.pool_start import start_pool
from vllm_ascend_pd.engine.worker.step import WorkerLayers, WorkerMemory, WorkerSide
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.transfer.grants import Grants
from vllm_ascend_pd.transfer.live_pages import DirectPlacement
from vllm_ascend_pd.transfer.receive import PeerLoader
from vllm_ascend_pd.transfer.send import DataServer

if TYPE_CHECKING:
    import torch  # noqa: TID251 - tensors of the engine

    from vllm_ascend_pd.backends.block_copy import BlockCopier
    from vllm_ascend_pd.backends.staging import MemoryRegistry
    from vllm_ascend_pd.backends.transfer_engine import TransferEngine
    from vllm_ascend_pd.config import TransferConfig
    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig, VllmConfig
    from vllm_ascend_pd.engine.worker.kv_caches import KVCaches


logger = logging.getLogger(__name__)


def create(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> WorkerSide:
    """Open the transfer engine, register the staging memory, start the threads of the role.

    Raises:
        ConfigError: an option cannot be, or this process has a worker side already.
    """
    if hooks.active():  # what steps of either engine load and save would be that one's pages
        raise ConfigError(
            "this process has an engine with kv_connector InEngine already. Leave out"
            " VLLM_ENABLE_V1_MULTIPROCESSING=0, and each engine has a process of its own; or end"
            " the other one first, by llm.llm_engine.engine_core.shutdown()"
        )
    adopt_engine_logging()
    shorten_turns()
    sleep_where_cores_are_few(vllm_config.parallel_config.world_size)
    with on_any_core():
        return _create(vllm_config, kv_cache_config, kv_caches)


def _create(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]
) -> WorkerSide:
    assert vllm_config.kv_transfer_config is not None
    config = PDConfig.from_kv_transfer_config(vllm_config.kv_transfer_config)
    trust = Trust.load(config.security.secret_file)
    own = sharding(vllm_config)
    # First, as the workers of other stages wait for it.
    stage = stage_layers(own, sum(len(g.layers) for g in kv_groups(kv_cache_config)))
    caches = locate(kv_cache_config, kv_caches)
    groups = caches.by_group(kv_groups(kv_cache_config))
    transfer = config.transfer
    _check_caches(transfer, caches)
    copier = make_copier(
        caches.device,
        transfer.copy_threads or default_copy_threads(vllm_config.parallel_config.world_size),
    )
    pages = WorkerPages(copier, groups, stage, caches.kernels)
    mooncake = None
    if transfer.transport is not Transport.SHARED_MEMORY:
        mooncake = MooncakeTransferEngine(
            config.host,
            protocol=transfer.protocol.value,
            bind_thread=copier.bind_thread if isinstance(copier, DeviceBlockCopier) else None,
            direct_placement=transfer.places_directly,
        )
    pinning = copier if isinstance(copier, DeviceBlockCopier) else NoPinning()
    transports = _open_transports(config, mooncake, pinning)
    make_staging = _staging(config, copier, pinning)
    registry: MemoryRegistry = transports
    make_slots = make_staging
    placement = None
    live_regions: list[tuple[int, int]] = []
    if transfer.places_directly:
        placement = DirectPlacement(transfer.verify_placement, late_write_s())
        # Nothing goes through the slots; with them loads are counted, and pages verified.
        registry, make_slots = Unregistered(), StagingPool
        live_regions += page_regions(
            caches.layout, kv_cache_config.num_blocks, caches.layers, DIRECT_ALIGNMENT
        )
        for region in live_regions:
            transports.register(*region)
    grants = Grants()
    pools: list[StagingPool] = []

    def make_pool() -> StagingPool:
        pools.append(make_slots(registry, transfer.staging_slots, transfer.staging_slot_bytes))
        return pools[-1]

    server = loader = None
    if config.role.produces:
        server = DataServer(
            host=config.host,
            transports=transports,
            pages=pages,
            pool=make_pool(),
            grants=grants,
            allows_host=config.security.allows,
            write_timeout_s=transfer.load_timeout_s,
            trust=trust,
        )
        server.start()
    if config.role.consumes:
        loader = PeerLoader(
            transports.sessions,
            pages,
            make_pool(),
            trust,
            transfer.peer_timeout_s,
            transfer.push_mode,
            own,
            placement,
        )
        loader.start()
    pool = shared = None
    if config.pool is not None:
        # A process can open Mooncake for the links of the NPUs once, and for one protocol.
        if mooncake is not None and transfer.protocol is not WireProtocol.TCP:
            shared = mooncake.share()
        pool = start_pool(config, vllm_config, kv_cache_config, pages, pools, shared, make_staging)
    logger.info(
        "in-engine transfers: role %s, transports %s%s, %d layers, %d bytes per page, %s",
        config.role.value,
        transports.sessions,
        " (right into KV pages)" if placement is not None else "",
        len(caches.layout.layer_offsets),
        caches.layout.page_bytes,
        type(copier).__name__,
    )
    layers = WorkerLayers(
        caches.layers,
        stage,
        has_drafter(vllm_config),
        reads_early(vllm_config, kv_caches),
        hooked_layers(kv_cache_config),
        caches.kernels,
        caches.whole_blocks,
    )
    memory = WorkerMemory(transports, pools, live_regions)
    num_under_way = vllm_config.max_concurrent_batches
    parts = (layers, memory, grants, trust, server, loader, pool, own.rank, num_under_way)
    if isinstance(copier, DeviceBlockCopier):
        return DeviceWorkerSide(copier, *parts)
    return WorkerSide(*parts)


def _check_caches(transfer: TransferConfig, caches: KVCaches) -> None:
    """Before anything is opened.

    Raises:
        ConfigError: the configuration is not one for them.
    """
    if caches.layout.page_bytes > transfer.staging_slot_bytes:
        raise ConfigError(
            f"transfer.staging_slot_bytes {transfer.staging_slot_bytes} is less than one layer's"
            f" page of a block ({caches.layout.page_bytes} bytes); raise it"
        )
    if transfer.protocol is WireProtocol.ASCEND and caches.device.type != "npu":
        raise ConfigError(
            f"transfer.protocol ascend is for KV caches on NPUs; this worker's are on"
            f" {caches.device.type!r}: leave it out"
        )


def _staging(config: PDConfig, copier: BlockCopier, pinning: HostPinning) -> MakeStaging:
    """Of memory that peers reach, and that the device copies from and to without a detour if it
    can.
    """
    transfer = config.transfer
    if not isinstance(copier, DeviceBlockCopier) or transfer.protocol is not WireProtocol.ASCEND:
        return partial(StagingPool, memory=partial(SharedMapping, pinning=pinning))
    if not transfer.places_directly or config.pool is not None:
        _check_host_memory(config)
    return partial(StagingPool, alignment=DIRECT_ALIGNMENT, memory=copier.pinned_memory)


def _check_host_memory(config: PDConfig) -> None:
    """Before Mooncake is asked to reach memory of the host over the links of NPUs.

    Raises:
        ConfigError: all peers are on this host, or may be in its super node, and the link of its
            NPUs reaches none.
    """
    staged = config.transfer.placement is Placement.STAGED
    shared = config.pool is not None and config.pool.master is not None
    what = "transfer.placement staged" if staged else "pool.master" if shared else "pool"
    if (route := host_memory_route()) is not None:
        logger.info("%s reaches memory of hosts by %s", what, route)
    elif (staged or shared) and (ipaddress.ip_address(config.host).is_loopback or in_super_node()):
        raise ConfigError(f"{what} with transfer.protocol ascend: {HOST_MEMORY_HELP}")
    else:
        logger.warning("%s: %s, unless no other engine is as near as that", what, HOST_MEMORY_HELP)


def _open_transports(
    config: PDConfig, mooncake: MooncakeTransferEngine | None, pinning: HostPinning
) -> Transports:
    """The engines that the configuration allows; one fault script for all of them, if there is."""
    engines: dict[str, TransferEngine] = {}
    transfer = config.transfer
    if transfer.transport is not Transport.MOONCAKE and (
        transfer.protocol is not WireProtocol.ASCEND
    ):
        engines[SHARED_MEMORY] = SharedMemoryTransferEngine(pinning)
    if mooncake is not None:
        engines[MOONCAKE] = mooncake
    if text := envs.fault_script():
        logger.warning("%s is set: writes fail as scripted (%s)", envs.FAULTS, text)
        script = FaultScript.parse(text)
        engines = {name: FaultyTransferEngine(engine, script) for name, engine in engines.items()}
    return Transports(engines)

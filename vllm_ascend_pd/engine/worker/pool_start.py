# SPDX-License-Identifier: Apache-2.0
"""Opens the pool in the worker process: its tier, staging memory and threads."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ascend_pd import envs
from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier
from vllm_ascend_pd.backends.staging import MakeStaging, StagingPool
from vllm_ascend_pd.config import PoolSave
from vllm_ascend_pd.engine.fingerprint import fingerprint, with_kernels
from vllm_ascend_pd.engine.sharding import sharding
from vllm_ascend_pd.engine.vllm_api.config import data_parallel_rank
from vllm_ascend_pd.engine.vllm_api.groups import kv_groups
from vllm_ascend_pd.engine.vllm_api.process import from_first_worker
from vllm_ascend_pd.net.trust import Secret
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.io import PoolIO, PoolSlots
from vllm_ascend_pd.pool.keys import KeySpace
from vllm_ascend_pd.pool.registry import is_shared, open_tiers
from vllm_ascend_pd.pool.saver import Replica
from vllm_ascend_pd.pool.tier import Opening
from vllm_ascend_pd.pool.values import BlockValues

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.backends.block_copy import WorkerPages
    from vllm_ascend_pd.backends.mooncake_engine import SharedEngine
    from vllm_ascend_pd.config import PDConfig
    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig, VllmConfig
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.transfer.shares import Sharding


logger = logging.getLogger(__name__)

_WRITE_SLOTS = 2
_AHEAD_SLOTS = 8
"""So many groups of blocks can be packed while their step computes them."""


def as_stored(own: Sharding, groups: Sequence[KVGroup]) -> Sharding:
    """Which workers store the same: none where layers keep states, or have pages of another size,
    as a drafter does. These are divided among all of them, also among those that have the same KV
    heads of the model.
    """
    divides_all = any(group.state or group.cuts_pages for group in groups)
    return replace(own, num_kv_heads=own.tp_size) if divides_all else own


def start_pool(
    config: PDConfig,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    pages: WorkerPages,
    pools: list[StagingPool],
    shared: SharedEngine | None = None,
    make_staging: MakeStaging = StagingPool,
) -> PoolIO:
    """All workers of the engine call it at the same time. ``pools`` gets the staging memory, which
    its owner closes between ``stop`` and ``close``.

    With ``shared`` the pool's store has no transfer engine of its own; ``make_staging`` makes
    memory that it can reach.
    """
    assert config.pool is not None
    own = as_stored(sharding(vllm_config), kv_groups(kv_cache_config))
    secret = b""
    if (path := config.security.secret_file) is not None:
        secret = Secret.load(path).derive(b"pool checksum 1")
    identity = with_kernels(fingerprint(vllm_config, kv_cache_config), pages.kernels)
    share = own.share
    spaces = [
        KeySpace.of(identity, share.index, share.count, secret, group, pages.layers)
        for group in range(len(pages.groups))
    ]
    part = config.pool.for_rank(data_parallel_rank(vllm_config))
    part = part.for_worker(own.rank, own.num_workers)
    values = [BlockValues(pages.copier, *both) for both in zip(pages.groups, spaces, strict=True)]
    value_bytes = max(each.num_bytes for each in values)
    tier = open_tiers(
        Opening(
            part, config.host, own.rank, own.num_workers, from_first_worker, shared, value_bytes
        )
    )
    if script := envs.pool_fault_script():
        logger.warning("%s is set: the pool fails as scripted (%s)", envs.POOL_FAULTS, script)
        tier = FaultyTier(tier, TierScript(script))
    slot_bytes = max(config.pool.staging_slot_bytes, value_bytes)
    num_readers = config.pool.io_threads
    read_slots, write_slots = (
        make_staging(tier, num_slots, slot_bytes) for num_slots in (2 * num_readers, _WRITE_SLOTS)
    )
    pools += [read_slots, write_slots]
    ahead_slots = None
    on_device = isinstance(pages.copier, DeviceBlockCopier)
    # On an accelerator, launching copies layer by layer would cost the model's thread its turns.
    if config.pool.save is PoolSave.WRITE_THROUGH and not on_device:
        ahead_slots = make_staging(tier, _AHEAD_SLOTS, slot_bytes)
        pools.append(ahead_slots)
    pool = PoolIO(
        tier,
        values,
        PoolSlots(read_slots, write_slots, ahead_slots),
        num_readers,
        Replica(own.replica, own.num_replicas) if is_shared(part) else Replica(),
    )
    pool.start()
    for group, space, each in zip(pages.groups, spaces, values, strict=True):
        logger.info(
            "KV pool: keys %s*, %d bytes for each block of %d tokens",
            space.prefix,
            each.num_bytes,
            group.block_size,
        )
    return pool

# SPDX-License-Identifier: Apache-2.0
"""How this engine's tensor and pipeline parallelism divide the KV pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.vllm_api.groups import kv_groups
from vllm_ascend_pd.engine.vllm_api.process import from_each_stage
from vllm_ascend_pd.transfer.shares import Sharding
from vllm_ascend_pd.types import Layers

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig, VllmConfig


HEADS_OUTERMOST = ("LBHNC", "BLHNC")
"""Layouts of a page."""


def sharding(vllm_config: VllmConfig) -> Sharding:
    """This process's; the rank is 0 in the scheduler's process."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_kv_heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    return Sharding(
        parallel.rank,
        parallel.tensor_parallel_size,
        num_kv_heads,
        parallel.pipeline_parallel_size,
    )


def stage_layers(own: Sharding, num_layers: int) -> Layers | None:
    """Which layers this worker has, who has so many; ``None`` without stages. All workers call it
    at the same time.
    """
    if own.num_stages == 1:
        return None
    counts = from_each_stage(num_layers)
    first = sum(counts[: own.rank // own.tp_size])
    return Layers(first, first + num_layers)


def own_layers(worker: object) -> Layers:
    """Of an engine with stages. Runs in the worker processes."""
    side: Any = hooks.worker
    layers: Layers = side.layers.stage
    return layers


def own_kernels(worker: object) -> str:
    """See ``kv_caches.kernel_blocks``. Runs in the worker processes."""
    side: Any = hooks.worker
    kernels: str = side.layers.kernels
    return kernels


def can_divide_pages(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether the share of some KV heads is one run of bytes of a page, and is moved as such."""
    return (
        vllm_config.device_config.device_type == "cpu"
        and str(kv_cache_config.kv_cache_layout) in HEADS_OUTERMOST
        and not any(group.cuts_pages for group in kv_groups(kv_cache_config))
    )

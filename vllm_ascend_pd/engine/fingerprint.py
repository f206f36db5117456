# SPDX-License-Identifier: Apache-2.0
"""What two engines must have in common to exchange KV, as one readable string."""

from __future__ import annotations

import hashlib
import platform
import secrets
from typing import TYPE_CHECKING

from vllm_ascend_pd import envs
from vllm_ascend_pd.backends.npu_links import late_write_s
from vllm_ascend_pd.config import PDConfig, WireProtocol
from vllm_ascend_pd.engine.ascend import is_ascend
from vllm_ascend_pd.engine.model_identity import model_identity
from vllm_ascend_pd.engine.sharding import sharding
from vllm_ascend_pd.engine.vllm_api.config import built_with, cpu_page_isa, gpu_page_isa
from vllm_ascend_pd.engine.vllm_api.groups import kv_groups, page_slots
from vllm_ascend_pd.engine.vllm_api.process import vllm_version
from vllm_ascend_pd.transfer.shares import num_shares
from vllm_ascend_pd.wire import WIRE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_ascend_pd.engine.vllm_api.config_types import KVCacheConfig, VllmConfig
    from vllm_ascend_pd.kv.span import KVGroup


def fingerprint(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """E.g. ``vllm=0.30.0 config=3f0c… weights=81d2… … wire=1``; equal or no transfer."""
    groups = kv_groups(kv_cache_config)
    own = sharding(vllm_config)
    num_parts = num_shares(own.tp_size, own.num_kv_heads)
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    _, kv_dtype = built_with(vllm_config)
    kv_dtype = {dtype: "auto", "fp8_e4m3": "fp8"}.get(kv_dtype, kv_dtype)
    parts = {
        "vllm": vllm_version(),
        **model_identity(vllm_config),
        "dtype": dtype,
        "kv_dtype": "-".join([kv_dtype, *vllm_config.cache_config.kv_cache_dtype_skip_layers]),
        "layout": str(kv_cache_config.kv_cache_layout),
        "block": _each(group.block_size for group in groups),
        "page": _each(_page(group, num_parts) for group in groups),
        "isa": _each(_page_isa(vllm_config, group.block_size) for group in groups),
        "hash": vllm_config.cache_config.prefix_caching_hash_algo,
        "seed": _hash_seed(vllm_config.cache_config.prefix_caching_hash_algo),
        "wire": str(WIRE_VERSION),
    }
    if not all(group.keeps_all for group in groups):
        parts["reach"] = _each(_reach(group) for group in groups)
    if any(slots := page_slots(kv_cache_config)):
        parts["slots"] = _each(one or "heads" for one in slots)
    if vllm_config.kv_transfer_config is not None:
        transfer = PDConfig.from_kv_transfer_config(vllm_config.kv_transfer_config).transfer
        if transfer.protocol is not WireProtocol.TCP:
            # Both sides must agree how long a write that failed may come late.
            placement = f"-direct-{late_write_s():.0f}s" if transfer.places_directly else ""
            parts["via"] = f"{transfer.protocol.value}{placement}"
    return " ".join(f"{key}={value}" for key, value in parts.items())


def with_kernels(fingerprint: str, kernels: str) -> str:
    """Of an engine whose workers say ``kernels``, see ``kv_caches.kernel_blocks``."""
    return f"{fingerprint} kernel={kernels}" if kernels else fingerprint


def _page(group: KVGroup, num_parts: int) -> str:
    """How large a page of all workers is; where those in memory are cut into such pages, or joined,
    also how large they are.
    """
    sizes = "+".join(str(size * num_parts) for size in group.sizes)
    return f"{group.page_bytes * num_parts}" + (f":{sizes}" if sizes else "")


def _reach(group: KVGroup) -> str:
    """How far its layers look back, or what they keep instead. A state is of the shapes that a
    worker has, so only engines with equal tensor parallel sizes exchange it.
    """
    if group.state:
        return f"state-{group.state}"
    if group.window:
        return f"window-{group.window}"
    return f"chunk-{group.chunk}" if group.chunk else "all"


def _each(values: Iterable[object]) -> str:
    """Of the KV cache groups, in their order."""
    return ",".join(map(str, values))


def _hash_seed(algorithm: str) -> str:
    """What the first block's hash starts from, as far as equality goes.

    A seed of a hash that is not cryptographic must stay secret, and this string is shown: 16 bits
    tell different seeds apart, and leave a guesser as many candidates as he had.
    """
    if (seed := envs.hash_seed()) is not None:
        return hashlib.sha256(seed.encode()).hexdigest()[:4]
    return "default" if algorithm.startswith("sha256") else f"random-{secrets.token_hex(2)}"


def _page_isa(vllm_config: VllmConfig, block_size: int) -> str:
    """The CPU backend packs K as its instruction set likes it; of the two formats of pages that an
    NPU has one works; on GPUs most are plain.
    """
    if is_ascend(vllm_config):
        return "npu-nd"
    if vllm_config.device_config.device_type != "cpu":
        return gpu_page_isa(built_with(vllm_config)[1])
    return f"{platform.machine()}-{cpu_page_isa(vllm_config, block_size)}"

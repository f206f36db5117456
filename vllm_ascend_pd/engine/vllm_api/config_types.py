# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration, as far as this package reads it; see ``types``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm_ascend_pd.config import KVTransferConfigLike


class VllmConfig(Protocol):
    """Touches: vllm/config/vllm.py:VllmConfig"""

    shutdown_timeout: int
    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    compilation_config: CompilationConfig
    load_config: LoadConfig
    lora_config: LoRAConfig | None
    speculative_config: SpeculativeConfig | None
    kv_transfer_config: KVTransferConfigLike | None
    kv_events_config: KVEventsConfig | None
    quant_config: Any
    attention_config: Any
    watermark_config: Any

    @property
    def max_concurrent_batches(self) -> int: ...


class CompilationConfig(Protocol):
    """Touches: vllm/config/compilation.py:CompilationConfig"""

    static_forward_context: dict[str, Any]


class ModelConfig(Protocol):
    """Touches: vllm/config/model.py:ModelConfig"""

    model: str
    model_weights: str
    revision: str | None
    served_model_name: str | list[str] | None
    trust_remote_code: bool
    dtype: Any
    max_model_len: int
    quantization: Any
    quantization_config: Any
    model_class_overrides: dict[str, str]
    hf_config: Any
    hf_text_config: Any
    multimodal_config: Any
    disable_sliding_window: bool
    disable_cascade_attn: bool
    return_sampling_mask: bool
    logits_processors: list[Any] | None

    @property
    def architecture(self) -> str: ...
    @property
    def use_mla(self) -> bool: ...
    def get_total_num_kv_heads(self) -> int: ...
    def get_head_size(self) -> int: ...
    def get_vocab_size(self) -> int: ...


class CacheConfig(Protocol):
    """Touches: vllm/config/cache.py:CacheConfig"""

    cache_dtype: str
    kv_offloading_size: float | None
    kv_cache_dtype_skip_layers: list[str]
    enable_prefix_caching: bool
    mamba_cache_mode: str
    use_replayssm: bool
    prefix_caching_hash_algo: str
    prefix_cache_retention_interval: int | None


class ParallelConfig(Protocol):
    """Touches: vllm/config/parallel.py:ParallelConfig"""

    rank: int
    world_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    nnodes: int
    data_parallel_size: int
    data_parallel_size_local: int
    data_parallel_index: int
    data_parallel_rank_local: int | None
    data_parallel_backend: str
    data_parallel_external_lb: bool
    data_parallel_hybrid_lb: bool
    is_moe_model: bool | None
    decode_context_parallel_size: int
    distributed_executor_backend: Any
    enable_elastic_ep: bool
    enable_fault_tolerance: bool

    @property
    def use_ubatching(self) -> bool: ...


class SchedulerConfig(Protocol):
    """Touches: vllm/config/scheduler.py:SchedulerConfig"""

    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    disable_hybrid_kv_cache_manager: bool | None


class DeviceConfig(Protocol):
    """Touches: vllm/config/device.py:DeviceConfig"""

    device_type: str


class LoadConfig(Protocol):
    """Touches: vllm/config/load.py:LoadConfig"""

    load_format: Any
    download_dir: str | None
    model_loader_extra_config: Any


class LoRAConfig(Protocol):
    """Touches: vllm/config/lora.py:LoRAConfig"""

    lora_dtype: Any
    max_loras: int
    target_modules: list[str] | None
    enable_tower_connector_lora: bool


class SpeculativeConfig(Protocol):
    """Touches: vllm/config/speculative.py:SpeculativeConfig"""

    method: str | None
    parallel_drafting: bool
    draft_model_config: Any
    draft_load_config: Any
    kv_cache_dtype: str | None

    def use_multi_module_mtp(self) -> bool: ...


class KVEventsConfig(Protocol):
    """Touches: vllm/config/kv_events.py:KVEventsConfig"""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None
    topic: str


class KVCacheConfig(Protocol):
    """Touches: vllm/v1/kv_cache_interface.py:KVCacheConfig"""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_layout: Any


class KVCacheTensor(Protocol):
    """Touches: vllm/v1/kv_cache_interface.py:KVCacheTensor"""

    layers: list[str]
    offset: int
    layer_stride: int
    block_stride: int


class KVCacheGroupSpec(Protocol):
    """Touches: vllm/v1/kv_cache_interface.py:KVCacheGroupSpec"""

    kv_cache_spec: KVCacheSpec
    layer_names: list[str]


class KVCacheSpec(Protocol):
    """Touches: vllm/v1/kv_cache_interface.py:KVCacheSpec"""

    block_size: int

    @property
    def page_size_bytes(self) -> int: ...

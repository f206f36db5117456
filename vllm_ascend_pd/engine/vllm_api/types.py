# SPDX-License-Identifier: Apache-2.0
"""vLLM's objects, as far as this package reads and writes them.

For annotations only. mypy finds where another attribute is used than a class here declares, and
``tools/apply_patches.py check`` looks for each that is declared in vLLM's class of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_ascend_pd.config import KVTransferConfigLike

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)


# Requests.


class Request(Protocol):
    """Touches: vllm/v1/request.py:Request"""

    request_id: str
    client_index: int
    status: Any
    arrival_time: float
    sampling_params: SamplingParams | None
    lora_request: LoRARequest | None
    cache_salt: str | None
    kv_transfer_params: Any
    prompt_token_ids: list[int] | None
    prompt_embeds: Any
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    num_stale_output_tokens: int
    drop_stale_output: bool
    block_hashes: list[BlockHash]
    _block_hasher: Callable[[Request], list[BlockHash]] | None
    skip_reading_prefix_cache: bool
    prefill_stats: PrefillStats | None
    resumable: bool
    stop_reason: int | str | None
    trace_headers: Mapping[str, str] | None
    all_token_ids: Sequence[int]
    output_token_ids: Sequence[int]

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    def is_finished(self) -> bool: ...
    def get_finished_reason(self) -> Any: ...
    def update_block_hashes(self) -> None: ...
    def take_prefill_stats(self) -> PrefillStats | None: ...
    def record_event(self, event_type: Any, timestamp: float | None = None) -> None: ...
    def take_events(self) -> list[Any] | None: ...


class PrefillStats(Protocol):
    """Touches: vllm/v1/metrics/stats.py:PrefillStats"""

    num_local_cached_tokens: int
    num_external_cached_tokens: int

    def set(
        self, num_prompt_tokens: int, num_local_cached_tokens: int, num_external_cached_tokens: int
    ) -> None: ...


class SamplingParams(Protocol):
    """Touches: vllm/sampling_params.py:SamplingParams"""

    logit_bias: dict[int, float] | None
    min_tokens: int
    extra_args: dict[str, Any] | None

    @property
    def all_stop_token_ids(self) -> set[int]: ...
    @property
    def sampling_type(self) -> Any: ...


class LoRARequest(Protocol):
    """Touches: vllm/lora/request.py:LoRARequest"""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool


# The scheduler and its blocks.


class Scheduler(Protocol):
    """Touches: vllm/v1/core/sched/scheduler.py:Scheduler"""

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    scheduler_config: SchedulerConfig
    block_size: int
    hash_block_size: int
    max_model_len: int
    is_encoder_decoder: bool
    log_stats: bool
    defer_block_free: bool
    requests: dict[str, Request]
    running: list[Request]
    waiting: RequestQueue
    prev_step_scheduled_req_ids: set[str]
    structured_output_manager: Any

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]: ...
    def _free_request(self, request: Request) -> tuple[dict[str, Any] | None, Any]: ...
    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False
    ) -> None: ...
    def finish_requests(self, request_ids: str, finished_status: Any) -> list[Request]: ...


class RequestQueue(Protocol):
    """Touches: vllm/v1/core/sched/request_queue.py:RequestQueue"""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def remove_requests(self, requests: Iterable[Request]) -> None: ...


class KVCacheManager(Protocol):
    """Touches: vllm/v1/core/kv_cache_manager.py:KVCacheManager"""

    block_pool: BlockPool
    coordinator: KVCacheCoordinator

    def get_blocks(self, request_id: str) -> KVCacheBlocks: ...
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class KVCacheCoordinator(Protocol):
    """Touches: vllm/v1/core/kv_cache_coordinator.py:KVCacheCoordinator"""

    single_type_managers: tuple[BlockTables, ...]


class BlockTables(Protocol):
    """Of one KV group.

    Touches:
        vllm/v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager
    """

    block_size: int
    req_to_blocks: dict[str, list[KVCacheBlock]]


class KVCacheBlocks(Protocol):
    """Touches: vllm/v1/core/kv_cache_manager.py:KVCacheBlocks"""

    blocks: tuple[Sequence[KVCacheBlock], ...]


class KVCacheBlock(Protocol):
    """Touches: vllm/v1/core/kv_cache_utils.py:KVCacheBlock"""

    block_id: int
    ref_cnt: int
    is_null: bool
    next_free_block: KVCacheBlock | None

    @property
    def block_hash(self) -> BlockHashWithGroupId | None: ...


class BlockPool(Protocol):
    """Touches: vllm/v1/core/block_pool.py:BlockPool"""

    num_gpu_blocks: int
    null_block: KVCacheBlock
    cached_block_hash_to_block: BlockHashToBlockMap
    free_block_queue: FreeKVCacheBlockQueue
    enable_kv_cache_events: bool
    kv_event_queue: list[Any]

    def cache_full_blocks(
        self,
        request: Request,
        blocks: Sequence[KVCacheBlock | None],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None: ...
    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None: ...
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]: ...
    def get_num_free_blocks(self) -> int: ...
    def touch(self, blocks: Sequence[KVCacheBlock]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...


class BlockHashToBlockMap(Protocol):
    """Touches: vllm/v1/core/block_pool.py:BlockHashToBlockMap"""

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None: ...


class FreeKVCacheBlockQueue(Protocol):
    """Touches: vllm/v1/core/kv_cache_utils.py:FreeKVCacheBlockQueue"""

    fake_free_list_head: KVCacheBlock
    num_free_blocks: int

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None: ...


class BlockStored(Protocol):
    """Touches: vllm/distributed/kv_events.py:BlockStored"""

    medium: str | None


# Steps.


class SchedulerOutput(Protocol):
    """Touches: vllm/v1/core/sched/output.py:SchedulerOutput"""

    scheduled_new_reqs: list[NewRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None
    new_block_ids_to_zero: list[int] | None
    pd_metadata: Any


class NewRequestData(Protocol):
    """Touches: vllm/v1/core/sched/output.py:NewRequestData"""

    req_id: str
    prefill_token_ids: list[int] | None


class ModelRunnerOutput(Protocol):
    """Touches: vllm/v1/outputs.py:ModelRunnerOutput"""

    kv_connector_output: KVConnectorOutput | None


class KVConnectorOutput(Protocol):
    """Touches: vllm/v1/outputs.py:KVConnectorOutput"""

    kv_connector_worker_meta: Any
    kv_connector_stats: Any


# The engine core and its workers.


class EngineCore(Protocol):
    """Touches: vllm/v1/engine/core.py:EngineCore"""

    model_executor: Executor
    request_block_hasher: Callable[[Request], list[BlockHash]]


class Executor(Protocol):
    """Touches: vllm/v1/executor/abstract.py:Executor"""

    kv_output_aggregator: Any
    sleeping_tags: set[str]

    def collective_rpc(self, method: Any) -> list[Any]: ...
    def add_lora(self, lora_request: LoRARequest) -> bool: ...
    def list_loras(self) -> set[int]: ...


# The configuration.


class VllmConfig(Protocol):
    """Touches: vllm/config/vllm.py:VllmConfig"""

    model_config: ModelConfig
    cache_config: CacheConfig
    parallel_config: ParallelConfig
    scheduler_config: SchedulerConfig
    device_config: DeviceConfig
    load_config: LoadConfig
    lora_config: LoRAConfig | None
    speculative_config: SpeculativeConfig | None
    kv_transfer_config: KVTransferConfigLike | None
    kv_events_config: KVEventsConfig | None
    quant_config: Any

    @property
    def max_concurrent_batches(self) -> int: ...


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
    kv_cache_dtype_skip_layers: list[str]
    enable_prefix_caching: bool
    prefix_caching_hash_algo: str


class ParallelConfig(Protocol):
    """Touches: vllm/config/parallel.py:ParallelConfig"""

    rank: int
    world_size: int
    tensor_parallel_size: int
    data_parallel_size: int
    decode_context_parallel_size: int
    enable_elastic_ep: bool

    @property
    def use_ubatching(self) -> bool: ...


class SchedulerConfig(Protocol):
    """Touches: vllm/config/scheduler.py:SchedulerConfig"""

    max_num_seqs: int
    max_num_batched_tokens: int


class DeviceConfig(Protocol):
    """Touches: vllm/config/device.py:DeviceConfig"""

    device_type: str


class LoadConfig(Protocol):
    """Touches: vllm/config/load.py:LoadConfig"""

    load_format: Any
    download_dir: str | None


class LoRAConfig(Protocol):
    """Touches: vllm/config/lora.py:LoRAConfig"""

    lora_dtype: Any


class SpeculativeConfig(Protocol):
    """Touches: vllm/config/speculative.py:SpeculativeConfig"""

    method: str | None


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

# SPDX-License-Identifier: Apache-2.0
"""vLLM's objects, as far as this package reads and writes them.

For annotations only. mypy finds where another attribute is used than a class here declares, and
``tools/apply_patches.py check`` looks for each that is declared in vLLM's class of that name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from vllm_ascend_pd.engine.vllm_api.config_types import (
        KVCacheConfig,
        SchedulerConfig,
        VllmConfig,
    )

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
    mm_features: Any
    max_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
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
    spec_token_ids: list[int]

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
    watermarking: bool | None
    logprobs: int | None
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
    max_num_scheduled_tokens: int
    num_waiting_for_streaming_input: int
    is_encoder_decoder: bool
    use_eagle_block_drop: bool
    use_v2_model_runner: bool
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

    def evict_blocks(self, block_ids: set[int]) -> None: ...
    def free(self, request: Request) -> None: ...


class KVCacheCoordinator(Protocol):
    """Touches: vllm/v1/core/kv_cache_coordinator.py:KVCacheCoordinator"""

    single_type_managers: tuple[BlockTables, ...]


class BlockTables(Protocol):
    """Of one KV group.

    Touches:
        vllm/v1/core/single_type_kv_cache_manager.py:SingleTypeKVCacheManager
    """

    req_to_blocks: dict[str, list[KVCacheBlock]]
    num_cached_block: dict[str, int]


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
    scheduled_cached_reqs: CachedRequestData
    scheduled_spec_decode_tokens: dict[str, list[int]]
    preempted_req_ids: set[str] | None
    new_block_ids_to_zero: list[int] | None
    pd_metadata: Any


class CachedRequestData(Protocol):
    """Touches: vllm/v1/core/sched/output.py:CachedRequestData"""

    resumed_req_ids: set[str]


class NewRequestData(Protocol):
    """Touches: vllm/v1/core/sched/output.py:NewRequestData"""

    req_id: str
    prefill_token_ids: list[int] | None
    mm_features: Any


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
    scheduler: Scheduler
    request_block_hasher: Callable[[Request], list[BlockHash]]


class Executor(Protocol):
    """Touches: vllm/v1/executor/abstract.py:Executor"""

    kv_output_aggregator: Any
    sleeping_tags: set[str]

    def collective_rpc(self, method: Any) -> list[Any]: ...
    def add_lora(self, lora_request: LoRARequest) -> bool: ...
    def list_loras(self) -> set[int]: ...

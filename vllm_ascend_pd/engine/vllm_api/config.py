# SPDX-License-Identifier: Apache-2.0
"""The engine's configuration."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.digest import digest
from vllm_ascend_pd.engine.vllm_api.process import vllm_version

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.vllm_api.config_types import LoRAConfig, ModelConfig, VllmConfig


DRAFTERS = ("eagle", "eagle3", "mtp", "draft_model")
"""Methods of speculative decoding that run a model with KV of its own behind the engine's."""


_CONTENT, _STAMPS, _BUILT_WITH = "pd_content", "pd_stamps", "pd_built_with"
"""Of a ``ModelConfig``, which brings them along into other processes."""


_QUANTIZING = {
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_CPU_INT4_W4A8": True,
}
"""Variables, and their defaults, that decide to what weights or activations are rounded."""


def has_drafter(config: VllmConfig) -> bool:
    speculative = config.speculative_config
    return speculative is not None and speculative.method in DRAFTERS


def keep_contents(config: VllmConfig) -> None:
    """What the configurations of model and drafter say before these are built, and `built_with`.
    DeepSeek, EAGLE 3, models of Transformers' own and others write over theirs: in the scheduler's
    process, if its worker has none of its own, so that it would read another configuration than
    other schedulers.

    Touches:
        vllm/config/model.py:ModelConfig.hf_config
        vllm/config/vllm.py:VllmConfig.model_config
    """
    models = [config.model_config]
    if config.speculative_config is not None and has_drafter(config):
        models.append(config.speculative_config.draft_model_config)
    for model in models:
        if not hasattr(model, _CONTENT):
            setattr(model, _CONTENT, model.hf_config.to_dict())
    setattr(config.model_config, _BUILT_WITH, built_with(config))


def kept_content(model: ModelConfig) -> dict[str, Any]:
    """What it says now if nothing was kept."""
    kept: dict[str, Any] = getattr(model, _CONTENT, None) or model.hf_config.to_dict()
    return kept


def built_with(config: VllmConfig) -> tuple[int, str]:
    """``--max-model-len`` and ``--kv-cache-dtype`` as the model is built with them. Later an engine
    lowers the first to what it has memory for, if it was ``auto``, and the layers of sparse MLA
    name the format of their backend in place of the second: in the scheduler's process, too, if its
    worker has none of its own.

    Touches:
        vllm/config/model.py:ModelConfig.max_model_len
        vllm/config/cache.py:CacheConfig.cache_dtype
    """
    model = config.model_config
    now = (model.max_model_len, config.cache_config.cache_dtype)
    kept: tuple[int, str] = getattr(model, _BUILT_WITH, now)
    return kept


def keep_stamps(model: ModelConfig, look: Callable[[], dict[str, tuple[int, ...]]]) -> None:
    """Of its files, as they are before the first process of the engine reads them; later calls do
    not ``look``."""
    if not hasattr(model, _STAMPS):
        setattr(model, _STAMPS, look())


def kept_stamps(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """None if nothing was kept."""
    stamps: dict[str, tuple[int, ...]] = getattr(model, _STAMPS, {})
    return stamps


def drafter_may_have_two_groups(config: VllmConfig) -> bool:
    """Whether the drafter's layers may come to several KV cache groups, where vLLM's knows one: a
    drafter of one layer, as a module of MTP is, cannot.

    Touches:
        vllm/v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer.validate_same_kv_cache_group
    """
    speculative = config.speculative_config
    if speculative is None or not has_drafter(config) or speculative.method == "mtp":
        return False
    return bool(speculative.draft_model_config.hf_text_config.num_hidden_layers > 1)


def use_one_group(config: VllmConfig) -> None:
    """For all layers: windows keep the KV of the whole prompt."""
    config.scheduler_config.disable_hybrid_kv_cache_manager = True


def hash_whole_prompts(config: VllmConfig) -> None:
    """By default vLLM hashes of windows and states only what the end of a prompt needs; then a
    prompt that begins alike is no hit.
    """
    if config.cache_config.prefix_cache_retention_interval == 0:
        config.cache_config.prefix_cache_retention_interval = None


def data_parallel_rank(config: VllmConfig) -> int | None:
    """Of an engine core among several, whatever front end each has; ``None`` of one that is alone.

    A rank of a dense model is told that it is alone, but for its index and its engine's id.

    Touches:
        vllm/config/parallel.py:ParallelConfig.data_parallel_index
        vllm/v1/engine/core.py:EngineCoreProc.run_engine_core
    """
    transfer, rank = config.kv_transfer_config, config.parallel_config.data_parallel_index
    engine_id = transfer.engine_id if transfer is not None else None
    return rank if (engine_id or "").endswith(f"_dp{rank}") else None


def rank_at_front_end(config: VllmConfig) -> int | None:
    """As a request names it; ``None`` where the front end has no other one.

    Touches:
        vllm/v1/engine/input_processor.py:InputProcessor.process_inputs
        vllm/v1/engine/core.py:EngineCoreProc.run_engine_core
    """
    parallel = config.parallel_config
    if parallel.data_parallel_external_lb:
        return None
    if parallel.data_parallel_hybrid_lb:  # it counts its own ranks alone
        return parallel.data_parallel_rank_local
    return data_parallel_rank(config)


def computes_in_lock_step(config: VllmConfig) -> bool:
    """With the other data parallel ranks: each forward of one is one of all."""
    return config.parallel_config.data_parallel_size > 1


def returns_step_data(config: VllmConfig) -> bool:
    """Whether outputs carry what only the step that has sampled a token knows."""
    return returns_routed_experts(config) or config.model_config.return_sampling_mask


def returns_routed_experts(config: VllmConfig) -> bool:
    """Whether outputs carry what each layer has computed beside the KV of each token.

    Touches:
        vllm/config/vllm.py:VllmConfig.aux_output_config
            | vllm/config/model.py:ModelConfig.enable_return_routed_experts
    """
    if (aux := getattr(config, "aux_output_config", None)) is not None:
        return bool(aux.enabled)
    model: Any = config.model_config
    return bool(model.enable_return_routed_experts)


def sampling_parts(config: VllmConfig) -> dict[str, str]:
    """What decides at this engine how tokens are sampled, and when an answer ends, whatever its
    request says: values without blanks, of the names of ``resume.made_by``.

    Touches:
        vllm/config/model.py:ModelConfig.try_get_generation_config
        vllm/config/model.py:ModelConfig.get_diff_sampling_param
    """
    model: Any = config.model_config
    processors = [str(it) for it in model.logits_processors or ()]
    ends = model.try_get_generation_config().get("eos_token_id")  # which count in any case
    defaults = (model.get_diff_sampling_param(), ends)
    return {
        "processors": digest(processors) if processors else "none",
        "watermark": watermark(config) or "none",
        "defaults": digest(defaults),
        "length_limit": str(model.max_model_len),
        "draws": _draws(config),
    }


def _draws(config: VllmConfig) -> str:
    """What random numbers are of: the same seed gives others with another device, model runner,
    precision or version (0.30.0 and 0.32.0, for example).

    Touches:
        vllm/config/vllm.py:VllmConfig.use_v2_model_runner
        vllm/config/model.py:ModelConfig.use_fp64_gumbel
    """
    whole: Any = config
    runner = "v2" if whole.use_v2_model_runner else "v1"
    precision = "-fp64" if whole.model_config.use_fp64_gumbel else ""
    return f"{vllm_version()}-{config.device_config.device_type}-{runner}{precision}"


def logprobs_mode(config: VllmConfig) -> str:
    """Of what logprobs are told.

    Touches:
        vllm/config/model.py:ModelConfig.logprobs_mode
    """
    model: Any = config.model_config
    return str(model.logprobs_mode)


def watermark(config: VllmConfig) -> str:
    """How the engine marks the tokens that it samples; empty where it does not. This is shown and
    the key is a secret, so 16 bits of a hash tell keys apart.

    Touches:
        vllm/config/watermarking.py:WatermarkConfig.key
    """
    marks = config.watermark_config
    if marks is None:
        return ""
    names = (field.name for field in dataclasses.fields(marks) if field.name != "key")
    key = hashlib.sha256(str(marks.key).encode()).hexdigest()[:4]
    return f"{digest({name: getattr(marks, name) for name in names})}-{key}"


def uses_cascade_attention(config: VllmConfig) -> bool:
    """No engine on NPUs does: vllm-ascend sets ``disable_cascade_attn`` to false in each of them,
    and has no attention that would.
    """
    is_disabled = config.model_config.disable_cascade_attn
    return not is_disabled and config.device_config.device_type != "npu"


def uses_sparse_attention(config: VllmConfig) -> bool:
    """Whether an indexer chooses what attention reads, from a cache of its own."""
    return hasattr(config.model_config.hf_text_config, "index_topk")


def compresses_kv(config: VllmConfig) -> bool:
    """Whether layers attend to what stands for several tokens, as those of DeepSeek V4 do."""
    return hasattr(config.model_config.hf_text_config, "compress_ratios")


def decodes_by_diffusion(config: VllmConfig) -> bool:
    """Whether its steps denoise many tokens at once instead of sampling the next one.

    Touches:
        vllm/config/model.py:ModelConfig.is_diffusion
    """
    model: Any = config.model_config
    return bool(model.is_diffusion)


def runs_on_rocm() -> bool:
    """Whether the device is an AMD GPU, which is ``cuda`` to torch and to vLLM's configuration.

    Touches:
        vllm/platforms/interface.py:Platform.is_rocm
    """
    from vllm.platforms import current_platform

    return bool(current_platform.is_rocm())


def encoder_decides_positions(config: VllmConfig) -> bool:
    """Whether M-RoPE's positions behind a video are those of the tokens that its encoder leaves.

    Touches:
        vllm/config/multimodal.py:MultiModalConfig.is_multimodal_pruning_enabled
        vllm/config/model.py:ModelConfig.uses_mrope
    """
    model: Any = config.model_config
    media = model.multimodal_config
    return media is not None and bool(media.is_multimodal_pruning_enabled() and model.uses_mrope)


def keeps_kv_in_host_memory(config: VllmConfig) -> bool:
    """Whether KV is in the host's memory, and what an indexer chooses of it on the device.

    Touches:
        vllm/config/attention.py:AttentionConfig.hisparse_config
            | vllm/config/attention.py:AttentionConfig
    """
    return getattr(config.attention_config, "hisparse_config", None) is not None


def keeps_states(config: VllmConfig) -> bool:
    """Whether some layers keep a state in place of the KV of all tokens.

    Touches:
        vllm/config/model.py:ModelConfig.has_inner_state
    """
    model: Any = config.model_config
    return bool(model.has_inner_state)


def pipeline_runs_ahead(config: VllmConfig) -> bool:
    """Whether Model Runner V1 schedules steps of pipeline stages before it knows what is sampled.

    Touches:
        vllm/config/scheduler.py:SchedulerConfig.async_scheduling
        vllm/config/vllm.py:VllmConfig.use_v2_model_runner
    """
    whole: Any = config
    has_stages = config.parallel_config.pipeline_parallel_size > 1
    return has_stages and whole.scheduler_config.async_scheduling and not whole.use_v2_model_runner


def is_pooling_model(config: VllmConfig) -> bool:
    """Whether it decodes nothing.

    Touches:
        vllm/config/model.py:ModelConfig.runner_type
    """
    model: Any = config.model_config
    return bool(model.runner_type == "pooling")


def media_options(multimodal_config: Any) -> tuple[object, ...]:
    """What decides beside its bytes what a model computes of an image, a sound or a video, and is
    in no hash of vLLM's.

    Touches:
        vllm/config/multimodal.py:MultiModalConfig.media_io_kwargs
        vllm/config/multimodal.py:MultiModalConfig.mm_processor_kwargs
        vllm/config/multimodal.py:MultiModalConfig.mm_encoder_attn_dtype
        vllm/config/multimodal.py:MultiModalConfig.mm_encoder_fp8_scale_path
        vllm/config/multimodal.py:MultiModalConfig.video_pruning_rate
        vllm/config/multimodal.py:MultiModalConfig.video_pruning_method
    """
    media = multimodal_config
    processing = media.media_io_kwargs, media.mm_processor_kwargs, media.mm_encoder_attn_dtype
    pruning = (media.video_pruning_method, media.video_pruning_rate)
    scales = media.mm_encoder_fp8_scale_path
    return (
        *(*processing, pruning if media.video_pruning_rate else None),
        *((Path(scales).read_text(),) if scales else ()),
    )


def quantizing_variables() -> dict[str, Any]:
    """Of the environment, what has vLLM compute a quantized model otherwise than by default.

    Touches:
        vllm/envs.py:environment_variables
    """
    from vllm.envs import environment_variables

    told = {name: environment_variables[name]() for name in _QUANTIZING}
    return {name: value for name, value in told.items() if value != _QUANTIZING[name]}


def simulated_routing(config: VllmConfig) -> str:
    """How experts are chosen where a benchmark chooses them, and not the model; empty elsewhere.

    Touches:
        vllm/envs.py:environment_variables
        vllm/config/vllm.py:VllmConfig.additional_config
    """
    from vllm.envs import environment_variables

    whole: Any = config
    options = whole.additional_config
    is_forced = isinstance(options, dict) and options.get("enable_force_eplb")  # vllm-ascend's
    strategy = environment_variables["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"]()
    return str(strategy or ("forced" if is_forced else ""))


def tunes_attention(model: Any, by_default: bool) -> bool:
    """Whether Llama 4 scales by temperature far behind, as its model asks.

    Touches:
        vllm/config/model.py:ModelConfig.try_get_generation_config
        vllm/config/model.py:ModelConfig.override_generation_config
    """
    told = {**model.try_get_generation_config(), **model.override_generation_config}
    return bool(told.get("attn_temperature_tuning", by_default))


def lora_options(lora_config: LoRAConfig | None) -> tuple[object, ...]:
    """What decides beside its files what an adapter changes."""
    if lora_config is None:
        return ()
    modules = sorted(lora_config.target_modules or ())
    return str(lora_config.lora_dtype), modules, lora_config.enable_tower_connector_lora


def gpu_page_isa(kv_dtype: str) -> str:
    """How this GPU writes pages that are as large on others: on SM100 the scales of V in NVFP4 are
    in the order in which its kernels read them, below SM89 keys of 8 bits are another FP8.

    Touches:
        vllm/platforms/interface.py:Platform.get_device_capability
        vllm/v1/attention/ops/triton_turboquant_decode.py:_use_fp8_e4b15
            | vllm/v1/attention/ops/turboquant_soa/triton_turboquant_decode.py:_use_fp8_e4b15
    """
    from vllm.platforms import current_platform

    if kv_dtype.startswith("nvfp4"):
        return "sm100" if current_platform.get_device_capability()[0] == 10 else "plain"
    if kv_dtype == "turboquant_k8v4":
        return "e4b15" if current_platform.get_device_capability() < (8, 9) else "plain"
    return "plain"


def cpu_page_isa(config: VllmConfig, block_size: int) -> str:
    """The instruction set for which the CPU backend packs K in its pages.

    Touches:
        vllm/v1/attention/backends/cpu_attn.py:_get_attn_isa
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    model, cache = config.model_config, config.cache_config
    return str(_get_attn_isa(model.dtype, block_size, model.get_head_size(), cache.cache_dtype))


def uses_modelscope() -> bool:
    """Whether names of models are those of ModelScope."""
    from vllm.envs import VLLM_USE_MODELSCOPE

    return bool(VLLM_USE_MODELSCOPE)

# SPDX-License-Identifier: Apache-2.0
"""Which engines can take part; others are refused by name, because they would be silently wrong."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.engine.ascend import is_ascend
from vllm_ascend_pd.engine.front_end import options
from vllm_ascend_pd.engine.model_identity import note_weights
from vllm_ascend_pd.engine.vllm_api.config import (
    DRAFTERS,
    compresses_kv,
    decodes_by_diffusion,
    drafter_may_have_two_groups,
    encoder_decides_positions,
    hash_whole_prompts,
    is_pooling_model,
    keep_contents,
    keeps_kv_in_host_memory,
    keeps_states,
    returns_routed_experts,
    runs_on_rocm,
    use_one_group,
    uses_cascade_attention,
    uses_sparse_attention,
)
from vllm_ascend_pd.engine.vllm_api.groups import has_caches_beside, kv_groups
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.kv.span import has_states
from vllm_ascend_pd.patching import refuse_other_patches

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler

METHODS = ("ngram", *DRAFTERS)
"""Of speculative decoding."""
METHODS_WITH_STATES = ("eagle", "eagle3", "mtp")
_EACH_RANK = "start each with a `vllm serve` of its own that has --data-parallel-rank"
_SUPERVISED = ("--data-parallel-multi-port-external-lb", "-dpm")
KINDS = (
    *("FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec"),
    *("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec", "MambaSpec"),
)
"""Of the KV cache groups of a model."""


def check_config(config: VllmConfig) -> None:
    """Refuse what the configuration alone tells, before any process of the engine starts, and
    choose how vLLM groups layers. Refuse also patches that this package was not made for.

    vLLM gives each data parallel rank of a dense model a configuration of one rank, so an engine
    can no longer see what was asked for.
    """
    refuse_other_patches()
    keep_contents(config)
    note_weights(config)
    _refuse(
        (
            config.cache_config.kv_offloading_size is not None,
            (
                "--kv-offloading-size, which chooses another connector (leave it out:"
                " pool.dram_size keeps KV in host memory)"
            ),
        ),
    )
    if keeps_states(config):
        _check_states(config)
    elif drafter_may_have_two_groups(config):
        use_one_group(config)
    if _has("pool", config):
        # It stores what is hashed.
        hash_whole_prompts(config)
    parallel = config.parallel_config
    speculative = config.speculative_config
    method = "ngram" if speculative is None else speculative.method
    if parallel.data_parallel_size > 1:
        _check_data_parallel(config)
    _refuse(
        (
            runs_on_rocm(),
            (
                "ROCm, whose pages may be laid out and quantised otherwise than those of CUDA, from"
                " which nothing tells them here"
            ),
        ),
        (parallel.enable_elastic_ep, "elastic expert parallel (leave out --enable-elastic-ep)"),
        (
            parallel.enable_fault_tolerance,
            (
                "vLLM's fault tolerance (leave out --enable-fault-tolerance): an engine that goes"
                " on after a step that failed would wait for what that was to load and send"
            ),
        ),
        (
            parallel.use_ubatching,
            (
                "micro-batches (leave out --enable-dbo and --ubatch-size): a layer runs once for"
                " each of them, and its KV would be sent after the first"
            ),
        ),
        (
            parallel.distributed_executor_backend == "external_launcher"
            and parallel.world_size > 1,
            (
                "workers with schedulers of their own, which would have to decide alike whenever KV"
                " comes (leave out --distributed-executor-backend external_launcher)"
            ),
        ),
        (
            parallel.distributed_executor_backend == "ray" and parallel.world_size > 1,
            (
                "workers that Ray starts, which may be on hosts whose addresses they are not told"
                " (leave out --distributed-executor-backend ray; for several hosts give --nnodes)"
            ),
        ),
        (
            parallel.prefill_context_parallel_size > 1,
            "prefill context parallel sizes above 1",
        ),
        (
            _has("forward", config) and not config.shutdown_timeout,
            "forward.peers without --shutdown-timeout: no request would be left to forward",
        ),
        (
            parallel.pipeline_parallel_size > 1 and speculative is not None,
            "speculative decoding with pipeline parallel sizes above 1",
        ),
        (
            parallel.pipeline_parallel_size > 1 and parallel.data_parallel_size > 1,
            "data parallel ranks with pipeline parallel sizes above 1",
        ),
        (
            is_pooling_model(config),
            "pooling models, which decode nothing (leave out --kv-transfer-config)",
        ),
        (
            decodes_by_diffusion(config),
            "diffusion models, which denoise many tokens at once instead of sampling the next one",
        ),
        (
            compresses_kv(config) and is_ascend(config),
            "attention to compressed KV on NPUs (DeepSeek V4)",
        ),
        (
            compresses_kv(config) and method in DRAFTERS,
            f"speculative decoding with the method {method} beside compressed KV (DeepSeek V4)",
        ),
        (
            encoder_decides_positions(config),
            (
                "pruned videos with M-RoPE (leave out --video-pruning-rate): the positions of what"
                " follows a video come from its encoder, which does not run where its KV is loaded"
            ),
        ),
        (
            keeps_kv_in_host_memory(config),
            "HiSparse, which keeps KV in host memory (leave hisparse_config out)",
        ),
        (parallel.decode_context_parallel_size > 1, "decode context parallel sizes above 1"),
        (
            not config.cache_config.enable_prefix_caching,
            (
                "prefix caching is off (leave it on; models that vLLM itself switches it off for"
                " cannot take part)"
            ),
        ),
        (
            config.cache_config.cache_dtype in ("float16", "bfloat16")
            and str(config.model_config.dtype) != f"torch.{config.cache_config.cache_dtype}",
            "--kv-cache-dtype float16 or bfloat16 beside another --dtype, as which it is read",
        ),
        (
            method not in METHODS,
            f"speculative decoding with the method {method} ({', '.join(METHODS)} work)",
        ),
        (
            speculative is not None and speculative.parallel_drafting,
            "parallel drafting (leave out parallel_drafting of --speculative-config)",
        ),
        (
            speculative is not None and speculative.use_multi_module_mtp(),
            "MTP with several modules (num_speculative_tokens 1 uses one)",
        ),
        (
            uses_cascade_attention(config),
            "cascade attention, which counts block references (leave disable_cascade_attn on)",
        ),
        (
            returns_routed_experts(config),
            (
                "routed experts in outputs (leave out --enable-return-routed-experts): a token"
                " whose KV is loaded is routed here by no layer"
            ),
        ),
    )


def refuse_among_connectors() -> None:
    """It makes no connector object that another connector could call."""
    _refuse(
        (
            True,
            (
                "a place among the connectors of MultiConnector (make it the kv_connector itself,"
                " with its own kv_connector_extra_config: pool.* stores KV in host memory and on"
                " disks, in place of a second connector)"
            ),
        )
    )


def _check_data_parallel(config: VllmConfig) -> None:
    """All ranks of a front end are engine cores on its host."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    assert transfer is not None
    own = PDConfig.from_kv_transfer_config(transfer)
    pool, last_port = own.pool, own.port_of(parallel.data_parallel_size - 1)
    has_front_ends = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
    _refuse(
        (last_port > 65535, f"kv_port {own.port} and up to {last_port} (a port for each rank)"),
        (
            has_front_ends and not parallel.is_moe_model,
            (
                "front ends of their own for data parallel ranks of a model without experts (start"
                " engines without --data-parallel options: its ranks have nothing in common)"
            ),
        ),
        (
            not options(sys.argv).keys().isdisjoint(_SUPERVISED),
            (
                "front ends that one command starts (leave out"
                f" --data-parallel-multi-port-external-lb: {_EACH_RANK})"
            ),
        ),
        (
            parallel.nnodes > 1,
            f"data parallel ranks with --nnodes above 1 (leave it out: {_EACH_RANK})",
        ),
        (
            parallel.data_parallel_size_local < parallel.data_parallel_size and not has_front_ends,
            (
                "data parallel ranks on several hosts behind one front end, or without any (give"
                " each host one: --data-parallel-hybrid-lb, without --headless or VLLM_DP_RANK)"
            ),
        ),
        (
            parallel.data_parallel_backend != "mp",
            f"the data parallel backend {parallel.data_parallel_backend} (mp works)",
        ),
        (
            pool is not None and "mooncake" in pool.tiers and pool.master is None,
            (
                "a pool of each data parallel rank's own (start a mooncake_master for all and name"
                " it in pool.master)"
            ),
        ),
        (
            pool is not None and pool.dram_size is None,
            (
                "a share of the free memory for each data parallel rank's part of the pool (say in"
                " pool.dram_size how much each gives)"
            ),
        ),
    )


def _check_states(config: VllmConfig) -> None:
    """Of layers that keep a state: Mamba, Mamba2, GDN, short convolutions, linear attention."""
    cache, speculative = config.cache_config, config.speculative_config
    method = "mtp" if speculative is None else speculative.method
    _refuse(
        (
            is_ascend(config),
            (
                "layers that keep a state, on NPUs: behind a prefix that is computed already a"
                " consumer ends steps between blocks, and caches states of other tokens"
            ),
        ),
        (
            cache.mamba_cache_mode == "all",
            "states of all blocks (say --mamba-cache-mode align, or leave it out)",
        ),
        (cache.use_replayssm, "states with inputs beside them (leave out --use-replayssm)"),
        (
            method not in METHODS_WITH_STATES,
            (
                f"speculative decoding with the method {method} beside layers that keep a state"
                f" ({', '.join(METHODS_WITH_STATES)} work)"
            ),
        ),
        (
            drafter_may_have_two_groups(config),
            "a drafter of several layers beside layers that keep a state (one of one layer works)",
        ),
    )


def _has(section: str, config: VllmConfig) -> bool:
    """Of ``kv_connector_extra_config``."""
    transfer = config.kv_transfer_config
    return transfer is not None and section in transfer.kv_connector_extra_config


def check_supported(scheduler: Scheduler) -> None:
    """Refuse also what only the engine knows: the model's KV cache."""
    check_config(scheduler.vllm_config)
    groups = kv_groups(scheduler.kv_cache_config)
    kinds = [type(g.kv_cache_spec).__name__ for g in scheduler.kv_cache_config.kv_cache_groups]
    others = sorted(set(kinds).difference(KINDS))
    most = scheduler.max_num_scheduled_tokens
    most = min(most, scheduler.scheduler_config.long_prefill_token_threshold or most)
    _refuse(
        (
            not groups or bool(others),
            (
                f"the model needs {len(groups)} KV cache groups of {' and '.join(others)}; full"
                " attention, sliding windows, chunked local attention and states are supported"
            ),
        ),
        (
            has_states(groups) and not any(group.keeps_all for group in groups),
            "states without full attention beside them",
        ),
        (
            len({group.page_bytes for group in groups}) > 1,
            "KV cache groups with pages of different sizes",
        ),
        (
            has_caches_beside(scheduler.kv_cache_config)
            and not uses_sparse_attention(scheduler.vllm_config),
            "layers with a second cache beside their KV, but for indexers of sparse attention",
        ),
        (
            len(groups) > 1 and scheduler.vllm_config.parallel_config.pipeline_parallel_size > 1,
            (
                "several KV cache groups with pipeline parallel sizes above 1 (where they are of"
                " windows, --disable-hybrid-kv-cache-manager makes them one)"
            ),
        ),
        (
            has_states(groups) and scheduler.block_size > most,
            (
                f"blocks of {scheduler.block_size} tokens, at whose ends states are kept, where a"
                f" step computes {most} tokens of a prompt (raise --max-num-batched-tokens, and"
                " --max-num-scheduled-tokens and --long-prefill-token-threshold if they are set)"
            ),
        ),
        (
            has_states(groups) and scheduler.hash_block_size != scheduler.block_size,
            "hash blocks smaller than the blocks of states (leave out --prefix-match-unit)",
        ),
        (scheduler.is_encoder_decoder, "encoder-decoder models"),
    )


def _refuse(*rules: tuple[bool, str]) -> None:
    if problems := [message for wrong, message in rules if wrong]:
        raise ConfigError(f"kv_connector InEngine does not support: {'; '.join(problems)}")

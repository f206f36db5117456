# SPDX-License-Identifier: Apache-2.0
"""What is different on Ascend NPUs: settings that cannot work.

vllm-ascend changes what an engine does by its ``kv_role``: a consumer frees weights, its cache may
be in NZ format or quantised, a pure producer keeps the block that EAGLE would drop. `ascend_facts`
reads the settings out of vllm-ascend; what follows from them is decided here, and is pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.config import Role
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig


MLAPO_MAX_TOKENS = 1024
"""``MLAPO_MAX_SUPPORTED_TOKENS`` of vllm-ascend: up to here a pure consumer frees weights."""


@dataclass(frozen=True, slots=True)
class AscendFacts:
    """Settings of vllm-ascend and of the engine that a transfer depends on."""

    is_310p: bool = False
    uses_mla: bool = False
    uses_sparse_attention: bool = False
    enable_mlapo: bool = True
    keeps_prefill_weights: bool = False
    max_num_batched_tokens: int = 8192
    enable_kv_nz: bool = False
    enable_c8_quant: bool = False
    uses_c8_mxfp: bool = False
    quantizes_mla: bool = False
    """``enable_fa_quant`` of MLA, as a consumer has it."""
    recompute_scheduler: bool = False
    balances_alone: bool = False
    """``enable_balance_scheduling`` where no other rank computes in lock-step."""
    dyntra_lb: bool = False
    xlite_graph: bool = False
    sparse_kv_offload: bool = False
    pipeline_runs_ahead: bool = False
    """Model Runner V1 with pipeline stages and async scheduling."""


def is_ascend(vllm_config: VllmConfig) -> bool:
    """Whether this engine runs on NPUs."""
    return bool(vllm_config.device_config.device_type == "npu")


def ascend_facts(vllm_config: VllmConfig) -> AscendFacts:
    """Read once, in the EngineCore process, where vllm-ascend has parsed its configuration."""
    from vllm_ascend.ascend_config import get_ascend_config
    from vllm_ascend.device.device_config import is_310p
    from vllm_ascend.utils import is_c8_mxfp_kv_quant, model_uses_sfa_sparse

    from vllm_ascend_pd.engine.vllm_api.config import computes_in_lock_step, pipeline_runs_ahead

    ascend = get_ascend_config()
    model = vllm_config.model_config
    return AscendFacts(
        is_310p=is_310p(),
        uses_mla=model.use_mla,
        uses_sparse_attention=model_uses_sfa_sparse(model),
        enable_mlapo=ascend.enable_mlapo,
        keeps_prefill_weights=ascend.mlapo_keep_prefill_weights,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        enable_kv_nz=ascend.enable_kv_nz,
        enable_c8_quant=getattr(vllm_config.quant_config, "enable_c8_quant", False) is True,
        uses_c8_mxfp=is_c8_mxfp_kv_quant(vllm_config),
        quantizes_mla=model.use_mla
        and vllm_config.cache_config.cache_dtype in ("fp8", "int8")
        and getattr(vllm_config.quant_config, "enable_fa_quant", False) is True,
        recompute_scheduler=ascend.scheduler_config.recompute_scheduler_enable,
        balances_alone=ascend.scheduler_config.enable_balance_scheduling
        and not computes_in_lock_step(vllm_config),
        dyntra_lb=ascend.scheduler_config.dyntra_lb_config.enabled,
        xlite_graph=ascend.xlite_graph_config.enabled,
        sparse_kv_offload=ascend.sparse_kv_offload_config.enabled,
        pipeline_runs_ahead=pipeline_runs_ahead(vllm_config),
    )


def in_super_node() -> bool:
    """Whether HCCS joins the NPUs of several hosts, as on A3."""
    from vllm_ascend.device.device_config import get_ascend_device_type

    return bool(get_ascend_device_type().name == "A3")


def check_roles(facts: AscendFacts, role: Role) -> None:
    """Refuse at start what could only fail, or be wrong, once requests come.

    Raises:
        ConfigError: names every such setting and what to do.
    """
    if problems := list(_problems(facts, role)):
        raise ConfigError(f"InEngine with kv_role {role.value} on Ascend: " + "; ".join(problems))


def _problems(facts: AscendFacts, role: Role) -> Iterator[str]:
    if facts.is_310p:
        yield "Atlas 300I (310P) has model runners of its own, which are not patched"
    if facts.uses_sparse_attention:
        yield (
            "sparse attention: a consumer frees the weights that it needs to compute a prompt whose"
            " KV does not arrive"
        )
    elif (
        role is Role.CONSUMER
        and facts.uses_mla
        and facts.enable_mlapo
        and not facts.keeps_prefill_weights
        and facts.max_num_batched_tokens <= MLAPO_MAX_TOKENS
    ):
        yield (
            "MLAPO frees the weights that a consumer needs to compute a prompt whose KV does not"
            " arrive: set mlapo_keep_prefill_weights to true in --additional-config, or"
            f" --max-num-batched-tokens above {MLAPO_MAX_TOKENS}"
        )
    if facts.enable_kv_nz:
        yield (
            "enable_kv_nz: what a prompt computes, here or on a producer, is written into ND pages,"
            " and decoding takes them for NZ pages: turn it off"
        )
    if facts.enable_c8_quant:
        yield (
            "C8 quantisation of the KV cache: a producer keeps bfloat16 and a consumer int8; turn"
            " it off on both sides"
        )
    if facts.quantizes_mla:
        yield (
            "MLA with enable_fa_quant: a consumer's cache is int8 and a producer's bfloat16, and"
            " with kv_both only the cache's layout is that of int8; leave --kv-cache-dtype out on"
            " both sides"
        )
    if facts.uses_c8_mxfp:
        yield (
            "C8 MXFP caches have scales beside K and V, and vllm-ascend refuses every forward with"
            " them unless its own connector moves them: choose another --kv-cache-dtype"
        )
    if facts.recompute_scheduler and role is not Role.PRODUCER:  # which takes no notice of it
        yield (
            "recompute_scheduler_enable ends a preempted request and expects the proxy to send it"
            " to a producer again: turn it off, the request is computed or loaded again in place"
        )
    if facts.balances_alone:
        yield (
            "enable_balance_scheduling without data parallel ranks that compute in lock-step admits"
            " requests in place of those that have stopped to move, and the engine ends when one of"
            " these goes on: turn it off, it balances nothing here"
        )
    if facts.dyntra_lb:
        yield "dyntra_lb_config marks running requests as preempted although they keep their blocks"
    if facts.xlite_graph:
        yield "xlite_graph_config runs no layer hook, so attention would not wait for its KV"
    if role is Role.PRODUCER and facts.pipeline_runs_ahead:
        yield (
            "earlier pipeline stages of a producer are told no sampled token, so any answer of more"
            " than one token would be wrong: set --no-async-scheduling, or give kv_both"
        )
    if facts.sparse_kv_offload:
        yield "sparse_kv_offload_config keeps KV in host memory, where it is not looked for"

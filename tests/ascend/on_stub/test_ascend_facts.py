# SPDX-License-Identifier: Apache-2.0
"""The settings that decide about roles, read out of vllm-ascend's own configuration classes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_ascend import ascend_config
from vllm_ascend.attention.utils import MLAPO_MAX_SUPPORTED_TOKENS
from vllm_ascend.device import device_config
from vllm_ascend.device.hardware import AscendDeviceType
from vllm_ascend.quantization.configs.modelslim_config import AscendModelSlimConfig
from vllm_ascend.quantization.utils import enable_fa_quant

from vllm_ascend_pd.engine.ascend import MLAPO_MAX_TOKENS, AscendFacts, ascend_facts, in_super_node


def fields(owner: type) -> set[str]:
    return {field.name for field in dataclasses.fields(owner)}


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration with the attributes that the classes really have, and their defaults."""
    scheduler = SimpleNamespace(
        recompute_scheduler_enable=False,
        enable_balance_scheduling=False,
        dyntra_lb_config=SimpleNamespace(enabled=False),
    )
    config = SimpleNamespace(
        enable_mlapo=True,
        mlapo_keep_prefill_weights=False,
        enable_kv_nz=False,
        scheduler_config=scheduler,
        xlite_graph_config=SimpleNamespace(enabled=False),
        sparse_kv_offload_config=SimpleNamespace(enabled=False),
    )
    assert set(vars(config)) <= fields(ascend_config.AscendConfig)
    assert set(vars(scheduler)) <= fields(ascend_config.SchedulerConfig)
    for owner in ("DyntraLBConfig", "XliteGraphConfig", "SparseKVOffloadConfig"):
        assert "enabled" in fields(getattr(ascend_config, owner)), owner
    monkeypatch.setattr(ascend_config, "get_ascend_config", lambda: config)
    return config


def vllm_config(**model: Any) -> Any:
    hf = SimpleNamespace(model_type="llama")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{"use_mla": False, "hf_text_config": hf, "hf_config": hf, **model}
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, async_scheduling=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
        use_v2_model_runner=False,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        quant_config=None,
    )


def test_defaults(ascend: Any) -> None:
    assert ascend_facts(vllm_config()) == AscendFacts(max_num_batched_tokens=2048)


def test_what_is_set_is_read(ascend: Any) -> None:
    ascend.enable_kv_nz = ascend.mlapo_keep_prefill_weights = True
    ascend.scheduler_config.recompute_scheduler_enable = True
    config = vllm_config(use_mla=True, hf_text_config=SimpleNamespace(index_topk=2048))
    config.quant_config = SimpleNamespace(enable_c8_quant=True)
    facts = ascend_facts(config)
    assert facts.enable_kv_nz
    assert facts.keeps_prefill_weights
    assert facts.recompute_scheduler
    assert facts.uses_mla
    assert facts.uses_sparse_attention
    assert facts.enable_c8_quant


@pytest.mark.parametrize(
    ("cache_dtype", "use_mla", "quantizes"),
    [("int8", True, True), ("fp8", True, True), ("auto", True, False), ("int8", False, False)],
)
def test_quantized_mla_is_what_a_consumer_quantizes(
    ascend: Any, cache_dtype: str, use_mla: bool, quantizes: bool
) -> None:
    """Where vllm-ascend says so to a consumer, and not to a producer."""
    config = vllm_config(use_mla=use_mla)
    config.cache_config.cache_dtype = cache_dtype
    config.quant_config = SimpleNamespace(enable_fa_quant=True)
    assert ascend_facts(config).quantizes_mla is quantizes
    config.kv_transfer_config = SimpleNamespace(is_kv_consumer=True)
    assert enable_fa_quant(config) is quantizes


def test_engine_of_both_roles_divides_caches_that_no_layer_quantizes(ascend: Any) -> None:
    config = vllm_config(use_mla=True)
    config.cache_config.cache_dtype = "int8"
    config.kv_transfer_config = SimpleNamespace(is_kv_consumer=True, is_kv_producer=True)
    config.quant_config = quant = AscendModelSlimConfig.__new__(AscendModelSlimConfig)
    quant.enable_fa_quant, quant.kvcache_quant_layers = True, [0]
    model = SimpleNamespace(use_mla=True, dtype=torch.bfloat16)
    layer = "model.layers.0.self_attn.attn"
    assert not enable_fa_quant(config, layer)
    assert enable_fa_quant(config)
    assert quant.get_kv_quant_dtype(layer, torch.bfloat16, model) == (torch.int8, torch.bfloat16)
    # The latent part and that of RoPE, as many bytes as these types take, in neither one's pages.
    factors = quant.get_kv_quant_split_factor(layer, [512, 64])
    for page in (512 + 64, 2 * (512 + 64)):
        assert [page / factor for factor in factors] != [512, 2 * 64]


@pytest.mark.parametrize(
    ("num_stages", "is_async", "is_v2"),
    [(1, True, False), (2, False, False), (2, True, True), (2, True, False)],
)
def test_pipeline_runs_ahead_with_stages_and_async_scheduling_in_the_first_runner(
    ascend: Any, num_stages: int, is_async: bool, is_v2: bool
) -> None:
    config = vllm_config()
    config.parallel_config.pipeline_parallel_size = num_stages
    config.scheduler_config.async_scheduling = is_async
    config.use_v2_model_runner = is_v2
    expected = (num_stages, is_async, is_v2) == (2, True, False)
    assert ascend_facts(config).pipeline_runs_ahead is expected


@pytest.mark.parametrize(("num_ranks", "alone"), [(1, True), (2, False)])
def test_balance_without_ranks_in_lock_step_is_told(
    ascend: Any, num_ranks: int, alone: bool
) -> None:
    """Where there are some, no running request moves away."""
    config = vllm_config()
    config.parallel_config.data_parallel_size = num_ranks
    assert not ascend_facts(config).balances_alone
    ascend.scheduler_config.enable_balance_scheduling = True
    assert ascend_facts(config).balances_alone is alone


def test_limit_of_mlapo_is_that_of_vllm_ascend() -> None:
    assert MLAPO_MAX_TOKENS == MLAPO_MAX_SUPPORTED_TOKENS


@pytest.mark.parametrize("kind", AscendDeviceType)
def test_hosts_are_joined_on_a3_alone(
    monkeypatch: pytest.MonkeyPatch, kind: AscendDeviceType
) -> None:
    monkeypatch.setattr(device_config, "get_ascend_device_type", lambda: kind)
    assert in_super_node() is (kind is AscendDeviceType.A3)

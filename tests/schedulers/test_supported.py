# SPDX-License-Identifier: Apache-2.0
"""Which engines are refused at their start, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from vllm.config import VllmConfig
from vllm.v1.structured_output import StructuredOutputManager

from tests.schedulers.harness import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    STATE,
    WINDOW,
    Engines,
    kv_cache_config_of,
)
from vllm_ascend_pd.engine.scheduler.supported import check_supported
from vllm_ascend_pd.errors import ConfigError

LARGE = replace(WINDOW, block_size=2 * BLOCK_SIZE, head_size=4, head_size_v=4)
"""Blocks of more tokens, with pages as large."""


def check(engines: Engines, spec: Any = SPEC, **changes: Any) -> VllmConfig:
    """``check_supported`` of a scheduler built without the in-engine path, then reconfigured."""
    config = engines.config("kv_both", {})
    transfer, config.kv_transfer_config = config.kv_transfer_config, None
    scheduler = engines.scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_cache_config_of(NUM_BLOCKS),
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    assert scheduler.pd is None
    config.kv_transfer_config = transfer
    scheduler.kv_cache_config = (
        kv_cache_config_of(NUM_BLOCKS, *spec) if spec != SPEC else (scheduler.kv_cache_config)
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target: Any = scheduler
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    check_supported(scheduler)
    return scheduler.vllm_config


@dataclass
class _Speculative:
    method: str
    parallel_drafting: bool = False
    num_modules: int = 1
    num_layers: int = 1

    @property
    def draft_model_config(self) -> Any:
        layers = PretrainedConfig(num_hidden_layers=self.num_layers)
        return SimpleNamespace(hf_config=layers, hf_text_config=layers)

    def use_multi_module_mtp(self) -> bool:
        return self.num_modules > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vllm_config__cache_config__enable_prefix_caching": False}, "prefix caching is off"),
        ({"vllm_config__cache_config__cache_dtype": "bfloat16"}, "--kv-cache-dtype float16 or"),
        ({"spec": (STATE,)}, "states without full attention beside them"),
        ({"spec": (STATE, WINDOW)}, "states without full attention beside them"),
        (
            {
                "spec": (SPEC, STATE),
                "vllm_config__scheduler_config__long_prefill_token_threshold": BLOCK_SIZE - 1,
            },
            "raise --max-num-batched-tokens",
        ),
        (
            {"spec": (SPEC, STATE), "max_num_scheduled_tokens": BLOCK_SIZE - 1},
            "--max-num-scheduled-tokens",
        ),
        ({"spec": (SPEC, replace(WINDOW, block_size=2 * BLOCK_SIZE))}, "pages of different sizes"),
        (
            {
                "spec": (SPEC, WINDOW),
                "vllm_config__parallel_config__pipeline_parallel_size": 2,
            },
            "several KV cache groups with pipeline",
        ),
        (
            {"vllm_config__parallel_config__prefill_context_parallel_size": 2},
            "prefill context parallel",
        ),
        (
            {"vllm_config__parallel_config__enable_fault_tolerance": True},
            "fault tolerance",
        ),
        ({"spec": (SPEC, STATE), "hash_block_size": 8}, "hash blocks smaller"),
        ({"vllm_config__speculative_config": _Speculative("medusa")}, "with the method medusa"),
        ({"vllm_config__speculative_config": _Speculative("eagle3", True)}, "parallel drafting"),
        (
            {"vllm_config__speculative_config": _Speculative("mtp", num_modules=2)},
            "MTP with several modules",
        ),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vllm_config__model_config__disable_cascade_attn": False}, "cascade attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_engine_is_refused_by_name(
    engines: Engines, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(engines, **changes)


def test_second_cache_that_is_no_indexers_is_refused_by_name(engines: Engines) -> None:
    """Nobody knows when such a layer reads it."""
    config = kv_cache_config_of(NUM_BLOCKS)
    (tensor,) = config.kv_cache_tensors
    beside = [f"{name}.beside" for name in tensor.layers]
    page = tensor.block_stride // 2
    config.kv_cache_tensors.append(
        replace(tensor, layers=beside, layer_stride=page * NUM_BLOCKS, block_stride=page)
    )
    config.kv_cache_groups[0].layer_names = [*tensor.layers, *beside]
    with pytest.raises(ConfigError, match="a second cache beside their KV"):
        check(engines, kv_cache_config=config)


def test_supported_engine_is_accepted(engines: Engines) -> None:
    check(engines)
    check(engines, (SPEC, WINDOW))
    check(engines, (SPEC, LARGE))
    check(engines, (SPEC, WINDOW), hash_block_size=8)
    check(engines, (SPEC, STATE, STATE, WINDOW))
    for method in ("ngram", "eagle", "eagle3", "mtp", "draft_model"):
        check(engines, vllm_config__speculative_config=_Speculative(method))
        check(engines, (SPEC, WINDOW), vllm_config__speculative_config=_Speculative(method))
    assert engines.made == []


@pytest.mark.parametrize(
    ("method", "num_layers", "groups"),
    [
        ("ngram", 3, True),
        ("eagle", 1, True),
        ("eagle3", 2, False),
        ("draft_model", 1, True),
        ("draft_model", 3, False),
        ("mtp", 61, True),  # of the model, where the module is one
    ],
)
def test_windows_have_groups_of_their_own_unless_a_drafter_might_be_in_several(
    engines: Engines, method: str, num_layers: int, groups: bool
) -> None:
    drafter = _Speculative(method, num_layers=num_layers)
    config = check(engines, vllm_config__speculative_config=drafter)
    assert bool(config.scheduler_config.disable_hybrid_kv_cache_manager) is not groups

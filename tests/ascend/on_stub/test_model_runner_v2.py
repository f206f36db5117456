# SPDX-License-Identifier: Apache-2.0
"""What vllm-ascend puts in place of Model Runner V2's ``initialize_kv_cache``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.v1.worker.gpu import model_runner as upstream

from vllm_ascend_pd import hooks

CACHES: dict[str, Any] = {"model.layers.0.attn": ()}


@pytest.fixture
def patch_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file alone: its package imports what needs more than a stub."""
    for name in ("initialize_kv_cache", "_unused"):  # put back what the file replaces
        monkeypatch.setattr(upstream.GPUModelRunner, name, None, raising=False)
    for name in ("copy_kv_cache_blocks_inplace", "dispatch_cg_and_sync_dp"):
        monkeypatch.setattr(upstream, name, getattr(upstream, name))
    path = Path(os.environ["PD_ASCEND_TREE"])
    path /= "vllm_ascend/patch/worker/patch_v2/patch_model_runner.py"
    spec = importlib.util.spec_from_file_location("patch_model_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def initialize(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, is_profiling: bool
) -> tuple[list[str], Any]:
    order: list[str] = []
    for name in (
        *("init_attn_backend", "maybe_create_adaptive_verification_manager", "BlockTables"),
        *("get_max_chunk_logits", "pcp", "maybe_build_ubatch_runner", "has_compiled_submodule"),
        *("initialize_mamba_ssu_backend", "ModelCudaGraphManager", "envs"),
        "check_attention_cp_compatibility",
    ):
        monkeypatch.setattr(upstream, name, MagicMock())
    upstream.init_attn_backend.return_value = ([], MagicMock(), [])
    upstream.maybe_create_adaptive_verification_manager.return_value = None
    monkeypatch.setattr(upstream, "init_kv_cache", lambda *args, **kwargs: CACHES)
    monkeypatch.setattr(
        hooks, "install_worker", lambda *args: order.append("install") or handed.append(args)
    )
    monkeypatch.setattr(upstream, "get_kv_connector", lambda *args: order.append("connector"))
    handed: list[Any] = []
    runner = MagicMock()
    runner.speculator, runner.is_encoder_decoder = None, False
    runner.cache_config.kv_sharing_fast_prefill = False
    runner.max_model_len = 128
    config = SimpleNamespace(kv_cache_groups=[])
    module.initialize_kv_cache(runner, config, is_profiling=is_profiling)
    if handed:
        assert handed == [(runner.vllm_config, config, CACHES)]
    return order, runner


def test_worker_side_is_made_before_the_connector_that_drives_it(
    patch_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, _ = initialize(patch_module, monkeypatch, is_profiling=False)
    assert order == ["install", "connector"]


def test_profiling_run_makes_no_worker_side(
    patch_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, runner = initialize(patch_module, monkeypatch, is_profiling=True)
    assert order == []
    assert runner.kv_connector is upstream.NO_OP_KV_CONNECTOR


def test_vllm_ascend_uses_this_function(patch_module: ModuleType) -> None:
    assert upstream.GPUModelRunner.initialize_kv_cache is patch_module.initialize_kv_cache

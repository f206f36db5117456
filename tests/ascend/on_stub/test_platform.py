# SPDX-License-Identifier: Apache-2.0
"""What vllm-ascend's platform makes of an engine's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm_ascend import platform

from vllm_ascend_pd.engine.vllm_api.config import uses_cascade_attention


def test_engine_is_not_taken_for_one_with_cascade_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever its user says, the platform switches that on before InEngine looks."""
    monkeypatch.setattr(
        platform, "envs_vllm", SimpleNamespace(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=3000)
    )
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(disable_cascade_attn=True),
        device_config=SimpleNamespace(device_type="npu"),
        parallel_config=SimpleNamespace(enable_eplb=False),
        additional_config={},
    )
    for name in ("cache", "observability", "scheduler", "speculative", "kv_transfer"):
        setattr(config, f"{name}_config", None)
    config.attention_config = config.compilation_config = None
    platform._fix_incompatible_config(config)
    assert config.model_config.disable_cascade_attn is False
    assert not uses_cascade_attention(config)

# SPDX-License-Identifier: Apache-2.0
"""The engine's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def returns_step_data(config: VllmConfig) -> bool:
    """Whether outputs carry what only the step that has sampled a token knows.

    Touches:
        vllm/config/model.py:ModelConfig.return_sampling_mask
        vllm/config/vllm.py:VllmConfig.aux_output_config
            | vllm/config/model.py:ModelConfig.enable_return_routed_experts
    """
    model = config.model_config
    if (aux := getattr(config, "aux_output_config", None)) is not None:
        return aux.enabled or model.return_sampling_mask
    return model.enable_return_routed_experts or model.return_sampling_mask

# SPDX-License-Identifier: Apache-2.0
"""Engines of these tests on a GPU, all of them on one. Their kernels are the GPU's own, and so are
streams, AsyncScheduler and, where vLLM takes it by default, Model Runner V2.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "PD_TESTS_ON_GPU"
ENVIRONMENT = {
    VARIABLE: "1",
    # Whether there is a GPU is asked before engines are forked, which then could not use one.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
SHARE = 0.03
"""Of the GPU's memory, which must be free when an engine starts."""


def is_on() -> bool:
    return VARIABLE in os.environ


def options(llm_options: dict[str, Any], runs_ahead: bool) -> dict[str, Any]:
    """Those of an engine on a CPU, as a GPU takes them."""
    changed = {"gpu_memory_utilization": SHARE, "async_scheduling": runs_ahead, **llm_options}
    if changed["dtype"] == "float32":  # as for most of them: tokens are compared
        changed.setdefault("attention_config", {"backend": "TRITON_ATTN"})
    return changed

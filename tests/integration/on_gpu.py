# SPDX-License-Identifier: Apache-2.0
"""Engines of these tests on a GPU, all of them on one. Their kernels are the GPU's own, and so are
streams, AsyncScheduler and, where vLLM takes it by default, Model Runner V2.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "PD_TESTS_ON_GPU"
"""Which of ``GRAPHS`` engines there take."""
_GRAPHS = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
GRAPHS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "full": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", **_GRAPHS},
    "piecewise": {
        "mode": 3,
        "backend": "eager",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        **_GRAPHS,
    },
}
"""For steps of one token each; for all others too, cut at attention. Nothing is compiled."""
ENVIRONMENT = {
    # Whether there is a GPU is asked before engines are forked, which then could not use one.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Else Triton multiplies float32 as TF32, and tokens hang on how a prompt is cut into steps.
    "TRITON_F32_DEFAULT": "ieee",
}
SHARE = 0.03
"""Of the GPU's memory, which must be free when an engine starts."""


def is_on() -> bool:
    return VARIABLE in os.environ


def skip_what_takes_halves(model: str) -> None:
    if "kv_lora_rank" in json.loads((Path(model) / "config.json").read_text()):
        pytest.skip("vLLM has no MLA in float32 for GPUs")


def options(llm_options: dict[str, Any], runs_ahead: bool) -> dict[str, Any]:
    """Those of an engine on a CPU, as a GPU takes them."""
    changed = {"gpu_memory_utilization": SHARE, "async_scheduling": runs_ahead, **llm_options}
    if graphs := GRAPHS[os.environ[VARIABLE]]:
        changed |= {"enforce_eager": False, "compilation_config": graphs}
    changed.setdefault("attention_config", {"backend": "TRITON_ATTN"})
    changed.setdefault("gdn_prefill_backend", "triton")
    changed.setdefault("kernel_config", {"enable_jit_warmup": False})
    if changed.get("enable_lora"):  # whose kernels take no float32
        changed["dtype"] = "float16"
    return changed

# SPDX-License-Identifier: Apache-2.0
"""Random numbers of seeded requests. Worker process, main thread."""

from __future__ import annotations

from typing import Any

import torch


def draw_rows(runner: Any, generator: torch.Generator, num_rows: int) -> None:
    """What the first runner's sampler draws for so many tokens, without drafts: a row of the
    vocabulary's size for each.

    Touches:
        vllm/v1/worker/gpu_input_batch.py:InputBatch.vocab_size
        vllm/v1/sample/sampler.py:Sampler.use_fp64_gumbel
        vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.sampler
    """
    dtype = torch.float64 if runner.sampler.use_fp64_gumbel else torch.float32
    row = torch.empty(runner.input_batch.vocab_size, dtype=dtype, device=generator.device)
    for _ in range(num_rows):
        row.exponential_(generator=generator)

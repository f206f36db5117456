# SPDX-License-Identifier: Apache-2.0
"""Random numbers of seeded requests. Worker process, main thread."""

from __future__ import annotations

from typing import Any

import torch


def draw_rows(runner: Any, generator: torch.Generator, num_rows: int) -> None:
    """What the first runner's sampler draws for so many tokens, without drafts. It differs by
    device and version, so the sampler itself draws, for logits that nobody looks at.

    Touches:
        vllm/v1/worker/gpu_input_batch.py:InputBatch.vocab_size
        vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.sampler
        vllm/v1/sample/sampler.py:Sampler.topk_topp_sampler
    """
    sample, num_logits = runner.sampler.topk_topp_sampler, runner.input_batch.vocab_size
    for _ in range(num_rows):
        logits = torch.zeros(1, num_logits, dtype=torch.float32, device=generator.device)
        sample(logits, {0: generator}, None, None)

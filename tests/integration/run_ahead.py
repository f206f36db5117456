# SPDX-License-Identifier: Apache-2.0
"""``AsyncScheduler`` on the CPU platform, as engines on GPUs and NPUs have it.

The platform switches it off, because the runner orders its copies by CUDA streams. On a CPU every
copy and every forward has ended when its call returns, so streams and events have nothing to do.
What runs ahead all the same is the scheduler: it plans a step before it has seen the last one's
output.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Ordered:
    """A stream or an event of a device that does one thing after another."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


def let_engines_run_ahead() -> None:
    """Those that this process makes from now on."""
    from vllm.platforms.cpu import CpuPlatform

    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = torch.Event = _Ordered  # type: ignore[assignment,misc]
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.current_stream = lambda *_: _Ordered()
    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_run_ahead(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_run_ahead)  # type: ignore[assignment]
    _copy_after_the_batch_is_arranged()


def _copy_after_the_batch_is_arranged() -> None:
    """How many tokens were accepted is copied to the host for the rows that requests had in the
    step. On a GPU that ends when the step does, in which the next batch is arranged; vLLM's runner
    counts on it. Here it has ended before, and is done once more.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    update = GPUModelRunner._update_states

    def update_states(self: Any, *args: Any) -> Any:
        counts = self.input_batch.num_accepted_tokens_cpu
        accepted = counts.copy()
        answer = update(self, *args)
        num_rows = len(self.input_batch.prev_req_id_to_index or ())
        counts[:num_rows] = accepted[:num_rows]
        return answer

    GPUModelRunner._update_states = update_states

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

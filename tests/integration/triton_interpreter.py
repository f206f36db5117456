# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 on a CPU: Triton's interpreter runs its kernels, one program after another.

vLLM's CPU build has this runner, and takes Triton if it has a backend for CPUs. The released Triton
has none, but its interpreter asks for no backend: it needs a name only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

VARIABLE = "TRITON_INTERPRET"


ENVIRONMENT = {VARIABLE: "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Of engines; they find Triton by ``PYTHONPATH``, and no other process does."""


def let_vllm_take_it() -> None:
    """Before anybody imports vLLM."""
    from triton.backends import backends
    from triton.language import int1, tensor
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

    backends.clear()  # those for GPUs look for drivers
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

    def log1p(value: Any) -> Any:
        return tensor(TensorHandle(np.log1p(value.handle.data), value.handle.dtype), value.type)

    libdevice.log1p = log1p  # the interpreter has none of CUDA's functions
    splat = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, shape: Any, value: TensorHandle) -> TensorHandle:
        """What a comparison says is of the type that was compared, and would be no mask."""
        made = splat(self, shape, value)
        is_mask = value.data.dtype == np.bool_
        return TensorHandle(made.data.astype(np.bool_), int1) if is_mask else made

    InterpreterBuilder.create_splat = create_splat
    reduce = ReduceOps.min_max

    def min_max(self: ReduceOps, value: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        """What is sampled in a step whose load fails is dropped, but must be something first."""
        if np.isnan(value.handle.data).all():
            val_reduce_op = val_reduce_op and np.max
            idx_reduce_op = idx_reduce_op and np.argmax
        return reduce(self, value, val_reduce_op=val_reduce_op, idx_reduce_op=idx_reduce_op)

    ReduceOps.min_max = min_max

    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner

    # Its kernel sums up what the interpreter takes for numbers of Python's; there is one of torch.
    topk_topp_sampler.HAS_TRITON = False
    initialize = CPUModelRunner.initialize_kv_cache

    def initialize_kv_cache(self: CPUModelRunner, *args: Any, **kwargs: Any) -> None:
        """On a CPU blocks of failed loads are zeroed, by the first runner whatever the model is."""
        initialize(self, *args, **kwargs)
        self._init_kv_zero_meta()

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache

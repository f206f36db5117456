# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for two Triton kernels, of which vLLM's CPU build has none: they copy states where an
engine drafts. ``vllm/v1/worker/mamba_utils.py`` says what they do.

A state is that behind an accepted draft: with ``bias`` drafts accepted it is in the block so many
columns on, or, of a convolution, begins so many tokens on in its window.
"""

from __future__ import annotations

import ctypes
from typing import Any


class _Kernel:
    """Runs all programs of a grid."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._run


def _copy(layout: tuple[Any, ...], request: int, source: int, target: int, bias: int) -> None:
    tables, row_length, *states = layout
    for base, stride, element_bytes, inner, width, group in zip(
        *(column.tolist() for column in states[:6]), strict=True
    ):
        row = int(tables[group]) + 4 * row_length * request

        def page(column: int, row: int = row, base: int = base, stride: int = stride) -> int:
            return base + ctypes.c_int32.from_address(row + 4 * column).value * stride

        num_bytes = inner * element_bytes
        if width:
            start = page(source) + bias * num_bytes
            ctypes.memmove(page(target), start, (width - bias) * num_bytes)
        else:
            ctypes.memmove(page(target), page(source + bias), num_bytes)


def _before_the_forward(targets: Any, sources: Any, biases: Any, *layout: Any, **_: Any) -> None:
    num_requests = layout[-1]
    for request in range(num_requests):
        source, target = int(sources[request]), int(targets[request])
        if source >= 0 and source != target:
            _copy(layout, request, source, target, int(biases[request]))


def _behind_the_samples(
    accepted: Any,
    sources: Any,
    scheduled: Any,
    computed: Any,
    drafts: Any,
    *layout: Any,
    block_size: int,
    **_: Any,
) -> None:
    """What lies behind a boundary of blocks that was passed is kept there."""
    *_, left, _, num_requests = layout
    for request in range(num_requests):
        num_running = int(computed[request] + scheduled[request] - drafts[request])
        boundary = (num_running + int(accepted[request]) - 1) // block_size * block_size
        if boundary < num_running:
            continue
        source, target = int(sources[request]), boundary // block_size - 1
        bias = boundary - num_running
        if source == target:
            left[request] = 1
        if source != target or bias:
            _copy(layout, request, source, target, bias)


def install() -> None:
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.worker import mamba_utils

    if not HAS_TRITON:
        kernels: Any = mamba_utils
        kernels.precopy_mamba_align_fused_kernel = _Kernel(_before_the_forward)
        kernels.postprocess_mamba_fused_kernel = _Kernel(_behind_the_samples)

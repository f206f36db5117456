# SPDX-License-Identifier: Apache-2.0
"""What the patched attention wrapper leaves behind while no step is armed: nothing."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable

from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer

from vllm_ascend_pd import hooks

NUM_CALLS = 1000
SLACK = 50
"""Blocks that the interpreter itself may take or give back meanwhile; one a call would be more."""


def attention(query: object, layer_name: str) -> object:
    """Stands for a layer's attention."""
    return query


def call_often(function: Callable[[object, str], object]) -> None:
    query = object()
    for _ in range(NUM_CALLS):
        function(query, "model.layers.0.attn")


def num_blocks_kept(function: Callable[[object, str], object]) -> int:
    """Memory blocks that ``NUM_CALLS`` calls leave allocated."""
    call_often(function)  # what a first call caches
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        call_often(function)
        return sys.getallocatedblocks() - before
    finally:
        gc.enable()


def peak_bytes(function: Callable[[object, str], object]) -> int:
    """Most memory that is held at once during the calls: the least of several times, since other
    threads hold some, too."""
    call_often(function)
    peaks = []
    for _ in range(5):
        tracemalloc.start()
        try:
            call_often(function)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def test_attention_keeps_nothing_while_no_step_is_armed() -> None:
    assert hooks.current_step is None
    wrapped = maybe_transfer_kv_layer(attention)
    assert abs(num_blocks_kept(wrapped) - num_blocks_kept(attention)) <= SLACK


def test_attention_holds_no_more_than_its_arguments_while_no_step_is_armed() -> None:
    """The wrapper's own argument tuple lives for one call, so the peak does not grow with calls."""
    assert peak_bytes(maybe_transfer_kv_layer(attention)) - peak_bytes(attention) < NUM_CALLS

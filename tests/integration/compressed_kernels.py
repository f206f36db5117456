# SPDX-License-Identifier: Apache-2.0
"""Lets engines on CPUs run DeepSeek V4: stand-ins for the Triton kernels that make what its layers
are told of a step, of which vLLM's CPU build has none. What computes is vLLM's own. With at most
2,048 tokens its indexers choose all that is compressed, so what those are told is not made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch


class _Kernel:
    def __init__(self, run: Callable[..., None] = lambda *_, **__: None) -> None:
        self._run = run

    def register_warmup(self, *_: Any, **__: Any) -> None:
        pass

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._run

    def __call__(self, *args: Any, **options: Any) -> None:
        self._run(*args, **options)


def _request_of_tokens(
    starts: Any, out: Any, num_requests: int, num_mapped: int, num_tokens: int, **_: Any
) -> None:
    lengths = torch.diff(starts[: num_requests + 1]).long()
    out[:num_tokens] = 0
    out[:num_mapped] = torch.arange(num_requests, dtype=torch.int32).repeat_interleave(lengths)


def _compressed_slots(slots: Any, *args: Any) -> None:
    """Where what ends with a token is kept, if something does."""
    # vLLM 0.32 begins with the slots of the tokens themselves.
    starts, lengths, blocks, block_size, ratio = args if len(args) == 5 else args[1:6]
    for request, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if start < end and request < len(blocks):
            length = int(lengths[request])
            positions = torch.arange(length - (end - start), length)
            index, slot = positions // ratio // block_size, positions // ratio % block_size
            found = blocks[request][index].long() * block_size + slot
            slots[start:end] = torch.where((positions + 1) % ratio == 0, found, -1)


def _install_kernels() -> None:
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    replaced: list[tuple[Any, str, Callable[..., None] | None]] = [
        (metadata, "_token_request_mapping_kernel", _request_of_tokens),
        (compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL", _compressed_slots),
        # Read by the kernels of GPUs only.
        (sparse_swa, "_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", None),
        (sparse_swa, "_COMPUTE_PREFILL_METADATA_KERNEL", None),
        (indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", None),
        (indexer, "_PREPARE_UNIFORM_DECODE_KERNEL", None),
    ]
    for module, name, run in replaced:
        setattr(module, name, _Kernel() if run is None else _Kernel(run))
    # vLLM's own lacks kinds of layers that are asked for.
    builder: Any = cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder
    builder.build_tile_scheduler = lambda self, num_tokens: defaultdict(lambda: None)


def install() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__

    def check_config(cls: type, config: Any) -> None:
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        if model is None or model.architecture != "DeepseekV4ForCausalLM":
            check(cls, config)
            return
        has_prefix_caching = cache.enable_prefix_caching
        has_chunks, num_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        check(cls, config)
        # Not as for processors without AMX.
        cache.enable_prefix_caching = has_prefix_caching
        scheduler.enable_chunked_prefill = has_chunks
        scheduler.max_num_batched_tokens = num_tokens
        _install_kernels()

    platform.check_and_update_config = classmethod(check_config)

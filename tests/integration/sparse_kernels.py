# SPDX-License-Identifier: Apache-2.0
"""Lets engines on CPUs run DeepSeek V3.2's sparse attention, which vLLM refuses there. What they
compute it with is in ``sparse_attention``; no other model meets any of this.
"""

from __future__ import annotations

from typing import Any


def _is_sparse(config: Any) -> bool:
    model = config.model_config
    return model is not None and model.architecture == "DeepseekV32ForCausalLM"


def _check_config(check: Any, cls: type, config: Any) -> None:
    """Blocks, steps and prefix caching stay as asked for: what the platform makes of them is for
    its own kernels for MLA.
    """
    if not _is_sparse(config):
        check(cls, config)
        return
    cache, scheduler = config.cache_config, config.scheduler_config
    block_size = cache.block_size if cache.user_specified_block_size else None
    has_prefix_caching = cache.enable_prefix_caching
    has_chunks, num_tokens = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
    check(cls, config)
    cache.block_size = block_size or cache.block_size
    cache.enable_prefix_caching = has_prefix_caching
    scheduler.enable_chunked_prefill = has_chunks
    scheduler.max_num_batched_tokens = num_tokens

    # It imports the model, which takes a while.
    from tests.integration import sparse_attention

    sparse_attention.install()


def install() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.platforms.cpu import CpuPlatform

    platform: Any = CpuPlatform
    check = platform.check_and_update_config.__func__
    choose = platform.get_attn_backend_cls.__func__

    def check_config(cls: type, config: Any) -> None:
        _check_config(check, cls, config)

    def choose_backend(
        cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        if attn_selector_config.use_sparse:
            return "tests.integration.sparse_attention.SparseMLABackend"
        return choose(cls, selected_backend, attn_selector_config, num_heads)

    platform.check_and_update_config = classmethod(check_config)
    platform.get_attn_backend_cls = classmethod(choose_backend)

# SPDX-License-Identifier: Apache-2.0
"""Which engines can take part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def check_supported(scheduler: Scheduler) -> None:
    """Refuse by name what would be silently wrong."""
    config = scheduler.vllm_config
    parallel = config.parallel_config
    speculative = config.speculative_config
    method = "ngram" if speculative is None else speculative.method
    groups = scheduler.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    for wrong, message in (
        (not config.cache_config.enable_prefix_caching, "prefix caching is off (leave it on)"),
        (
            len(groups) != 1
            or type(spec).__name__
            not in ("FullAttentionSpec", "MLAAttentionSpec", "AscendMLAAttentionSpec"),
            (
                f"the model needs {len(groups)} KV cache groups of {type(spec).__name__}; one group"
                " of full attention is supported (sliding windows beside full attention are, unless"
                " --no-disable-hybrid-kv-cache-manager is given)"
            ),
        ),
        (
            parallel.world_size > parallel.tensor_parallel_size,
            "pipeline and context parallel sizes above 1 (tensor parallel works)",
        ),
        (parallel.decode_context_parallel_size > 1, "decode context parallel sizes above 1"),
        (parallel.data_parallel_size > 1, "data parallel sizes above 1"),
        (scheduler.hash_block_size != scheduler.block_size, "hash blocks smaller than KV blocks"),
        (method != "ngram", f"speculative decoding with the method {method} (ngram works)"),
        (scheduler.is_encoder_decoder, "encoder-decoder models"),
        (
            not config.model_config.disable_cascade_attn,
            "cascade attention, which counts block references (leave disable_cascade_attn on)",
        ),
    ):
        if wrong:
            raise ConfigError(f"kv_connector InEngine does not support: {message}")
    assert isinstance(spec, FullAttentionSpec)

# SPDX-License-Identifier: Apache-2.0
"""What the front end is told of where a prompt came from. Scheduler thread.

vLLM keeps it with a request until it is told, and counts what it finds cached itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheManager, Request


def count(request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
    """So many of its prompt are not computed, and no others."""
    if request.prefill_stats is not None:
        request.prefill_stats.set(request.num_prompt_tokens, num_local_tokens, num_external_tokens)


def count_external(
    manager: KVCacheManager, request: Request, num_cached_tokens: int, num_external_tokens: int
) -> None:
    """Of ``num_cached_tokens`` with which it is scheduled so many came from elsewhere. As hits of
    its own prefix cache the engine counts all of them, a moment later.

    Touches:
        vllm/v1/core/kv_cache_manager.py:KVCacheManager.prefix_cache_stats
        vllm/v1/metrics/stats.py:PrefixCacheStats.preempted_hits
    """
    any_version: Any = manager
    if (hits := any_version.prefix_cache_stats) is not None:
        if request.num_preemptions:
            hits.preempted_hits -= num_external_tokens
        else:
            hits.hits -= num_external_tokens
    stats = request.prefill_stats
    if request.num_preemptions:  # of which the engine counts nothing anew
        count(request, num_cached_tokens - num_external_tokens, num_external_tokens)
    elif stats is not None:
        stats.num_local_cached_tokens -= num_external_tokens
        stats.num_external_cached_tokens += num_external_tokens


def count_nothing(request: Request) -> None:
    """Its prompt is counted elsewhere."""
    request.prefill_stats = None

# SPDX-License-Identifier: Apache-2.0
"""Tiers by the names that ``pool.tiers`` gives them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.composite_tier import CompositeTier

if TYPE_CHECKING:
    from vllm_ascend_pd.config import PoolConfig
    from vllm_ascend_pd.pool.tier import Opening, Tier

_TIERS: dict[str, tuple[str, str]] = {}


def register_tier(name: str, module: str, class_name: str) -> None:
    """Have ``pool.tiers`` know ``name``; ``module`` is imported when it is first used. Somebody
    else's tier is registered by a general plugin of vLLM, which every process of an engine loads.
    """
    if _TIERS.get(name, (module, class_name)) != (module, class_name):
        raise ValueError(f"tier {name!r} is registered already")
    _TIERS[name] = module, class_name


def tier_class(name: str) -> type[Tier]:
    if name not in _TIERS:
        raise ConfigError(f"pool.tiers: {name!r} is none of {sorted(_TIERS)}")
    module, class_name = _TIERS[name]
    try:
        found: type[Tier] = getattr(importlib.import_module(module), class_name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"pool.tiers: {name!r} cannot be loaded: {e}") from e
    return found


def is_shared(config: PoolConfig) -> bool:
    """Whether all workers of an engine find what one of them has stored."""
    return all(tier_class(name).is_shared for name in config.tiers)


def open_tiers(opening: Opening) -> Tier:
    """Those of ``pool.tiers``, as one."""
    classes = [tier_class(name) for name in opening.config.tiers]
    tiers: list[Tier] = []
    try:
        for one in classes:
            tiers.append(one.open(opening))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers[0] if len(tiers) == 1 else CompositeTier(tiers)


register_tier("mooncake", "vllm_ascend_pd.pool.mooncake_tier", "MooncakeTier")
register_tier("dram", "vllm_ascend_pd.pool.memory_tier", "MemoryTier")
register_tier("fs", "vllm_ascend_pd.pool.fs_tier", "FileTier")

# SPDX-License-Identifier: Apache-2.0
"""How a prefill and a decode instance are chosen for a request: one policy a file."""

from __future__ import annotations

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.policies.power_of_two import PowerOfTwo
from vllm_ascend_pd.router.policies.prefix_aware import PrefixAware
from vllm_ascend_pd.router.policies.round_robin import RoundRobin
from vllm_ascend_pd.router.policies.session_affinity import SessionAffinity

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (LeastLoaded, PowerOfTwo, PrefixAware, RoundRobin, SessionAffinity)
}


def make_policy(name: str) -> Policy:
    """``ConfigError`` names the known ones."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r}: one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


__all__ = ["POLICIES", "Pair", "Policy", "Routed", "make_policy"]

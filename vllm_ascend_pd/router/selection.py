# SPDX-License-Identifier: Apache-2.0
"""Who may serve a request now, and the answer when nobody can."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, are_partners

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm_ascend_pd.router.instances import Instance, Registry

UNKNOWN_RETRY_AFTER_S = 5


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No pair; sent as 503."""

    message: str
    retry_after_s: int


class Labels(NamedTuple):
    """Values of the label ``model`` that a role's instances must have; empty: any."""

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()


class Selector:
    """Event loop thread."""

    def __init__(self, registry: Registry, policy: Policy, labels: Labels) -> None:
        self._registry = registry
        self.policy = policy
        self._labels = labels

    def pair(
        self, request: Routed, model: str | None, excluded: Collection[Instance]
    ) -> Pair | Unavailable:
        """For a request with both legs."""
        prefills = self._usable(self._registry.prefills, model, self._labels.prefill, excluded)
        decodes = self._usable(self._registry.decodes, model, self._labels.decode, excluded)
        if not prefills:
            return self._unavailable("prefill", self._registry.prefills, model)
        if not decodes:
            return self._unavailable("decode", self._registry.decodes, model)
        if any(instance.spec.fingerprint for instance in prefills):
            prefills = [p for p in prefills if any(are_partners(p, d) for d in decodes)]
            if not prefills:
                return Unavailable(
                    "no prefill instance can exchange KV with a decode instance: they differ in"
                    " model, dtype, block size or version, see /instances",
                    UNKNOWN_RETRY_AFTER_S,
                )
        return self.policy.choose(request, prefills, decodes)

    def decode(
        self, request: Routed, model: str | None, excluded: Collection[Instance]
    ) -> Instance | Unavailable:
        """For a request that one engine serves alone."""
        decodes = self._usable(self._registry.decodes, model, self._labels.decode, excluded)
        if not decodes:
            return self._unavailable("decode", self._registry.decodes, model)
        return self.policy.choose_decode(request, decodes)

    def _usable(
        self,
        instances: Sequence[Instance],
        model: str | None,
        labels: frozenset[str],
        excluded: Collection[Instance],
    ) -> list[Instance]:
        usable = [i for i in instances if i.is_available and i not in excluded]
        if labels:
            usable = [i for i in usable if dict(i.spec.labels).get("model") in labels]
        serving = [i for i in usable if i.serves(model)]
        # A name that nobody serves is the engine's to refuse; one that somebody serves is his.
        known = serving or any(model in i.models for i in instances)
        return serving if known else usable

    def _unavailable(
        self, role: str, instances: Sequence[Instance], model: str | None
    ) -> Unavailable:
        if not instances:
            return Unavailable(f"no {role} instance is known", UNKNOWN_RETRY_AFTER_S)
        waits = [i.breaker.backoff_s for i in instances if i.spec.state == "ready"]
        after = max(1, math.ceil(min(waits))) if waits else UNKNOWN_RETRY_AFTER_S
        what = f" for model {model!r}" if any(i.models for i in instances) else ""
        return Unavailable(
            f"no {role} instance{what} is available: {len(instances)} known,"
            f" {sum(i.spec.state == 'draining' for i in instances)} draining",
            after,
        )

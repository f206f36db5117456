# SPDX-License-Identifier: Apache-2.0
"""The instance with the fewest tokens in front of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.ranking import Others, Ranking, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance


class LeastLoaded(Policy):
    """P by queued prompt tokens, D by running tokens and by how full its KV cache is."""

    name = "least-loaded"

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        self.next_turn()
        prefill = self._least(prefills)
        return Pair(prefill, self._least(partners(prefill, decodes)))

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _least(self, instances: Sequence[Instance]) -> Instance:
        """Of equals, each in turn: else the first one would get every request of a quiet time."""
        if len(instances) == 1:
            return instances[0]
        if isinstance(instances, (Ranking, Others)):
            return instances.least(self._turn)
        start = self._turn % len(instances)
        return min((*instances[start:], *instances[:start]), key=load)

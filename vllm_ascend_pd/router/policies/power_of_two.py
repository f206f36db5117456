# SPDX-License-Identifier: Apache-2.0
"""The less loaded of two random instances."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.ranking import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance


class PowerOfTwo(Policy):
    """With many routers in front of many engines: they do not all choose the same one."""

    name = "power-of-two"

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        prefill = self._better_of_two(prefills)
        return Pair(prefill, self._better_of_two(partners(prefill, decodes)))

    def _better_of_two(self, instances: Sequence[Instance]) -> Instance:
        if len(instances) <= 2:
            return min(instances, key=load)
        return min((instances[i] for i in self._random.sample(range(len(instances)), 2)), key=load)

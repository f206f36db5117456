# SPDX-License-Identifier: Apache-2.0
"""Each instance in turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance


class RoundRobin(Policy):
    """For engines of equal speed and prompts of equal length."""

    name = "round-robin"

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        turn, self._turn = self._turn, self._turn + 1
        num_prefills = len(prefills)
        prefill = prefills[turn % num_prefills]
        found = partners(prefill, decodes)
        num_found = len(found)
        # Without the shift, as many P as D would always meet in the same pairs.
        shift = turn // math.lcm(num_prefills, num_found)
        return Pair(prefill, found[(turn + shift) % num_found])

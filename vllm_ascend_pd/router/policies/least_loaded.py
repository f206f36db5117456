# SPDX-License-Identifier: Apache-2.0
"""The instance with the fewest tokens in front of the request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.ranking import least

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
        turn = self.next_turn()
        prefill = least(prefills, turn)
        return Pair(prefill, least(partners(prefill, decodes), turn))

    def next_turn(self) -> int:
        self._turn += 1
        return self._turn

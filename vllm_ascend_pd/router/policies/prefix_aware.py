# SPDX-License-Identifier: Apache-2.0
"""The instances that already hold most of the prompt, unless they are too busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.prefix.index import IndexState
from vllm_ascend_pd.router.prefix.subscriber import Subscriber
from vllm_ascend_pd.router.ranking import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from vllm_ascend_pd.router.instances import Instance

TRANSFER_COST = 0.1
"""Moving a token's KV to D, against computing it: D's hits count for less than P's."""


class PrefixAware(Policy):
    """Everything is counted in tokens of work in front of the request's first token: what is
    queued, and what of the prompt is not cached there. Equal costs go to the least loaded."""

    name = "prefix-aware"
    needs_token_ids = True

    def __init__(self) -> None:
        self.subscriber = Subscriber()
        self._others = LeastLoaded()

    def watch(self, instance: Instance) -> None:
        self.subscriber.watch(instance)

    def forget(self, instance: Instance) -> None:
        self.subscriber.forget(instance)

    async def close(self) -> None:
        await self.subscriber.close()

    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        if request.token_ids is None or request.has_own_blocks:
            return self._others.choose(request, prefills, decodes)
        hits = self.subscriber.holders.num_hit_tokens(request.token_ids)
        turn = self._others.next_turn()
        prefill, request.num_prefill_hit_tokens = self._best(request, prefills, hits, 1.0, turn)
        decodes = partners(prefill, decodes)
        return Pair(prefill, self._decode(request, decodes, hits, TRANSFER_COST, turn))

    def choose_decode(self, request: Routed, decodes: Sequence[Instance]) -> Instance:
        if request.token_ids is None or request.has_own_blocks:
            return self._others.choose_decode(request, decodes)
        hits = self.subscriber.holders.num_hit_tokens(request.token_ids)
        return self._decode(request, decodes, hits, 1.0, self._others.next_turn())

    def _decode(
        self,
        request: Routed,
        decodes: Sequence[Instance],
        hits: npt.NDArray[np.int64],
        weight: float,
        turn: int,
    ) -> Instance:
        decode, num_hit_tokens = self._best(request, decodes, hits, weight, turn)
        index = decode.prefix_index
        exact = index is not None and index.state is IndexState.EXACT
        request.num_decode_hit_tokens = num_hit_tokens if exact else 0
        request.block_size = index.block_size if index is not None else None
        return decode

    def _best(
        self,
        request: Routed,
        instances: Sequence[Instance],
        hits: npt.NDArray[np.int64],
        weight: float,
        turn: int,
    ) -> tuple[Instance, int]:
        """``hits`` are by the slots of the instances' indexes."""
        import numpy as np

        found = rows(instances)
        hits = hits[found["slot"]]
        costs = found["queued"] + weight * (request.num_prompt_tokens - hits)
        equal = np.flatnonzero(costs == costs.min())
        at = int(equal[np.searchsorted(equal, turn % len(instances)) % len(equal)])
        return instances[at], int(hits[at])

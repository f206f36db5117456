# SPDX-License-Identifier: Apache-2.0
"""The instances that already hold most of the prompt, unless they are too busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.prefix.index import IndexState, chain
from vllm_ascend_pd.router.prefix.subscriber import Subscriber
from vllm_ascend_pd.router.ranking import queued_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        if request.token_ids is None or request.is_salted:
            return self._others.choose(request, prefills, decodes)
        hashes: dict[int, list[bytes]] = {}
        prefill, request.num_prefill_hit_tokens = self._best(request, prefills, hashes, 1.0)
        return Pair(
            prefill, self._decode(request, partners(prefill, decodes), hashes, TRANSFER_COST)
        )

    def choose_decode(self, request: Routed, decodes: Sequence[Instance]) -> Instance:
        if request.token_ids is None or request.is_salted:
            return self._others.choose_decode(request, decodes)
        return self._decode(request, decodes, {}, 1.0)

    def _decode(
        self,
        request: Routed,
        decodes: Sequence[Instance],
        hashes: dict[int, list[bytes]],
        weight: float,
    ) -> Instance:
        decode, hits = self._best(request, decodes, hashes, weight)
        index = decode.prefix_index
        exact = index is not None and index.state is IndexState.EXACT
        request.num_decode_hit_tokens = hits if exact else 0
        request.block_size = index.block_size if index is not None else None
        return decode

    def _best(
        self,
        request: Routed,
        instances: Sequence[Instance],
        hashes: dict[int, list[bytes]],
        weight: float,
    ) -> tuple[Instance, int]:
        hits = {i: self._num_hit_tokens(request, i, hashes) for i in instances}

        def cost(instance: Instance) -> float:
            return queued_tokens(instance) + weight * (request.num_prompt_tokens - hits[instance])

        start = self._others.next_turn() % len(instances)
        best = min((*instances[start:], *instances[:start]), key=cost)
        return best, hits[best]

    def _num_hit_tokens(
        self, request: Routed, instance: Instance, hashes: dict[int, list[bytes]]
    ) -> int:
        index = instance.prefix_index
        if index is None or index.block_size is None or request.token_ids is None:
            return 0
        if index.block_size not in hashes:
            hashes[index.block_size] = chain(request.token_ids, index.block_size)
        return index.num_hit_tokens(hashes[index.block_size])

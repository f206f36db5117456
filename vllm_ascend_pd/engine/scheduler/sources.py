# SPDX-License-Identifier: Apache-2.0
"""Where blocks of a prompt can be had beside this engine's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.pool.messages import PoolLoadSpec
    from vllm_ascend_pd.transfer.load import LoadSpec
    from vllm_ascend_pd.types import LoadId


class BlockSource(Protocol):
    """Blocks of one prompt that are held elsewhere: by a peer, or by the pool.

    Scheduler thread only. A load of blocks that are gone meanwhile fails; it never gets others.
    """

    request: Request

    held_tail: KVCacheBlock | None
    """That block, loaded by a parked load; the request's own from admission on."""

    parked: bool
    """Whether a parked load is under way; the request waits for it."""

    is_stale: bool
    """Whether the request is hashed anew: what loads bring in has other hashes."""

    num_parked_tokens: int
    """Tokens that a parked load has brought into the prefix cache."""

    @property
    def num_blocks(self) -> int:
        """Full blocks from the first that can be had to the last, counted from the start."""

    @property
    def num_tail_tokens(self) -> int:
        """Tokens that can be had of the block after the prompt's last cacheable one."""

    @property
    def offers(self) -> bool:
        """Whether the lookup of the waiting request may count on this source."""

    def has_tail(self, index: int) -> bool:
        """Whether the tail can be had once all full blocks before ``index``, its own, are there."""

    def has_block(self, index: int) -> bool:
        """Whether this full block of the prompt can be had."""

    def make_load(
        self,
        load_id: LoadId,
        block_indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        has_tail: bool,
        in_step: bool,
    ) -> LoadSpec | PoolLoadSpec:
        """What the worker needs to load ``block_indices`` into ``block_ids``."""

    def load_started(self) -> None:
        """A load that uses this source is about to be sent to the worker."""

    def load_ended(self, result: LoadResult) -> None:
        """It has ended; ``result.cause`` is empty when it succeeded."""

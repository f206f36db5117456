# SPDX-License-Identifier: Apache-2.0
"""Where blocks of a prompt can be had beside this engine's own prefix cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_ascend_pd.transfer.receive import LoadSpec
    from vllm_ascend_pd.types import LoadId


class BlockSource(Protocol):
    """Some leading blocks of one prompt, held elsewhere. A peer is one; a pool would be another.

    Scheduler thread only. The blocks stay readable while a load of them is under way.
    """

    num_blocks: int
    """Leading full blocks that can be had."""

    num_tail_tokens: int
    """Tokens that can be had of the block after the prompt's last cacheable one."""

    def make_load(
        self,
        load_id: LoadId,
        block_indices: tuple[int, ...],
        block_ids: tuple[int, ...],
        has_tail: bool,
        in_step: bool,
    ) -> LoadSpec:
        """What the worker needs to load ``block_indices`` into ``block_ids``."""

    def load_started(self) -> None:
        """A load that uses this source is about to be sent to the worker."""

    def load_ended(self, cause: str, num_bytes: int, elapsed_ms: float) -> None:
        """It has ended; ``cause`` is empty when it succeeded."""

# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side is made of: parts that an engine has or has not, by its role."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.kv.cost import Speed
from vllm_ascend_pd.kv.span import has_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.config import PDConfig
    from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
    from vllm_ascend_pd.engine.scheduler.loads import Loads
    from vllm_ascend_pd.engine.scheduler.parking import Parking
    from vllm_ascend_pd.engine.scheduler.phantom import PhantomBlocks
    from vllm_ascend_pd.engine.scheduler.sources import BlockSource
    from vllm_ascend_pd.engine.vllm_api.types import (
        KVCacheManager,
        Request,
        Scheduler,
        SchedulerOutput,
    )
    from vllm_ascend_pd.kv.span import KVGroup
    from vllm_ascend_pd.metrics import Provenance, Stats
    from vllm_ascend_pd.transfer.shares import Sharding

COUNTS = (
    "remote_prompts",
    "used_leases",
    "prompts",
    "leases",
    "pinned_blocks",
    "pool_prompts",
    "pool_saves",
    "pool_pins",
    "pool_waiting",
    "resumes",
    "moves_out",
    "moves_in",
    "forwards",
    "guests",
)
"""What parts count, see ``Part.counts``; 0 where an engine has not that part."""


@dataclass(frozen=True, slots=True, eq=False)
class Common:
    """What the parts of one engine's scheduler side share."""

    scheduler: Scheduler
    config: PDConfig
    stats: Stats
    groups: tuple[KVGroup, ...]
    sharding: Sharding
    phantoms: PhantomBlocks
    loads: Loads
    parking: Parking
    prefill: Speed = field(default_factory=Speed)
    """Tokens that a step computes, per millisecond."""
    rank: int | None = None
    """Of this engine core among several behind one front end."""

    @property
    def manager(self) -> KVCacheManager:
        return self.scheduler.kv_cache_manager

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state."""
        return has_states(self.groups)

    @property
    def block_size(self) -> int:
        """Of a unit, in tokens: of a block where those of all groups are of one size."""
        return self.groups[0].unit_size

    def bytes_per_block(self, group: int = 0) -> int:
        """Of all workers together, if their pipeline stages have as many layers each."""
        return self.groups[group].bytes_per_block * self.sharding.num_workers


@dataclass(slots=True)
class Ending:
    """What is said of a request that has ended."""

    params: dict[str, Any] | None = None
    """For who asks for its KV."""
    provenance: Provenance | None = None
    """Of the first source that was asked."""


class Part:
    """Scheduler thread. What a part has nothing to do with, it does not override."""

    has_blocks = False
    """Whether requests are asked for here, see ``open``."""
    open: Mapping[str, BlockSource] = {}
    """By request id: what this part has for requests that wait for it, or are computed on it."""

    def find(self, request: Request) -> BlockSource | None:
        """Of ``open``, and of those that nothing is to be done for."""
        return self.open.get(request.request_id)

    def arrived(self, request: Request, source: BlockSource | None) -> None:
        """A new request, and what it has been found so far to take its blocks from."""

    def take_over(self, request: Request, failed: BlockSource) -> None:
        """The source before this one has failed."""

    def collect(self) -> None:
        """Fold in what others have said. Often in a pass, so it takes little at a time."""

    def settle(self) -> bool:
        """Between passes: whether a step should go out although there is nothing to compute."""
        return False

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        """A step is about to go out, with ``meta``; ``num_computed_tokens`` are those before it."""

    def take_report(self, report: StepReport) -> None:
        """Of the workers; before ``end_step``."""

    def end_step(self) -> None:
        """The output of the oldest step is there, and what it left is right."""

    def take_prefetchable(self) -> Sequence[BlockSource]:
        """Sources with something to load that no pass of the scheduler has come to yet."""
        return ()

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        """Into the outputs of the step under way, by client."""

    def recovered(self, bad_block_ids: set[int]) -> None:
        """A load has failed, and these blocks hold nothing good."""

    def finish(self, request: Request, ending: Ending) -> None:
        """The request has ended, by whatever cause."""

    def forsake(self, request: Request) -> None:
        """It is about to be hashed anew, so nothing that was meant for it fits any more."""

    def identify(self, fingerprint: str) -> None:
        """What the engine is from now on: its weights are others, or its workers have told more."""

    def note_adapters(self, adapters: Mapping[str, str]) -> None:
        """What those are that the last requests have used, by name, when that is new."""

    @property
    def is_storing(self) -> bool:
        """Whether blocks are read at this moment for somebody else."""
        return False

    def reset(self, reset_connector: bool) -> None:
        """See ``hooks.SchedulerHooks.reset``."""

    def stop(self) -> None:
        """The engine ends."""

    def counts(self) -> dict[str, int]:
        """Some of ``COUNTS``, for a leak check; all zero when nothing goes on."""
        return {}

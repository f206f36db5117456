# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells its worker in a step, and what the worker reports back.

Plain and small: it is pickled over a shared-memory queue when the worker is another process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.engine.vllm_api.connector import KVConnectorWorkerMetadata
from vllm_ascend_pd.pool.messages import AheadSpec, Message, PoolLoadSpec
from vllm_ascend_pd.transfer.grants import Grant
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import LeaseRef, LoadId

if TYPE_CHECKING:
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.transfer.tickets import PageServer


class StepMeta(msgspec.Struct):
    """``SchedulerOutput.pd_metadata``; applied in the order of the fields, before the forward. The
    scheduler fills it in, and nobody changes it once it has gone out.
    """

    revokes: tuple[LeaseRef, ...] = ()
    cancels: tuple[LoadId, ...] = ()
    grants: tuple[Grant, ...] = ()
    loads: tuple[LoadSpec | PoolLoadSpec, ...] = ()
    saves: tuple[Message, ...] = ()
    """Of blocks that earlier steps have filled, and what goes with them (``PoolIO.handle``)."""
    ahead: tuple[AheadSpec, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not any(msgspec.structs.astuple(self))


@dataclass(frozen=True)
class StepReport(KVConnectorWorkerMetadata):
    """Rides on ``KVConnectorOutput.kv_connector_worker_meta``."""

    results: tuple[LoadResult, ...] = ()
    """Of each worker on its own; a load has ended when all of them say so."""
    page_servers: dict[int, PageServer] = field(default_factory=dict)
    """By tensor-parallel rank: in a worker's first report."""
    refused_frames: dict[str, int] = field(default_factory=dict)
    """Number by reason (``net.trust.Reason``) since the last report."""
    rested: tuple[LoadId, ...] = ()
    """Loads that ended with ``num_resting``: a worker for each entry has nothing more to fear."""
    errors: dict[str, int] = field(default_factory=dict)
    """What raised since the last report, number by thread."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """The reports of two sets of workers on the same step."""
        assert isinstance(other, StepReport)
        return StepReport(
            self.results + other.results,
            self.page_servers | other.page_servers,
            dict(Counter(self.refused_frames) + Counter(other.refused_frames)),
            self.rested + other.rested,
            dict(Counter(self.errors) + Counter(other.errors)),
        )

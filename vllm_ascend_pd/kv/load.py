# SPDX-License-Identifier: Apache-2.0
"""How loads end, wherever their KV comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.types import LoadId

QUARANTINE_S = 5.0
"""A slot whose write may still land is not reused for so long. What lands even later spoils a
checksum, never a page."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended, worker to scheduler: ``cause`` is empty or a value of ``types.Cause``."""

    load_id: LoadId
    cause: str
    num_bytes: int
    elapsed_ms: float
    failed: tuple[int, ...] = ()
    """The block ids that a failed load has not filled; empty when it may be any of them."""
    transport: str = ""
    was_awaited: bool = False
    """Whether the time is mostly that of the producer's computing."""
    num_resting: int = 0
    """Workers in whose blocks a peer may still write, until they report that it is over."""


def merge_results(results: Sequence[LoadResult]) -> LoadResult:
    """One load's result of several parts that have all ended: failed if one of them is."""
    if len(results) == 1:
        return results[0]
    first_failed = next((result for result in results if result.cause), results[0])
    causes = [result for result in results if result.cause]
    knows = bool(causes) and all(result.failed for result in causes)
    return replace(
        first_failed,
        failed=tuple(sorted({b for r in causes for b in r.failed})) if knows else (),
        num_bytes=sum(result.num_bytes for result in results),
        elapsed_ms=max(result.elapsed_ms for result in results),
        num_resting=sum(result.num_resting for result in results),
        transport=next((result.transport for result in results if result.transport), ""),
    )

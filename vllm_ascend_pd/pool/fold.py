# SPDX-License-Identifier: Apache-2.0
"""One answer out of those of all workers, each of which has a share of every block. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_pd.pool.messages import DROPPED, Found, Saved
from vllm_ascend_pd.pool.tier import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEVERITY = {
    status: rank
    for rank, status in enumerate(
        (Status.OK.value, DROPPED, Status.FULL.value, Status.FAILED.value)
    )
}


def fold_found(answers: Sequence[Found]) -> Found:
    """A block is there when every worker has found its share; its place is the slowest of them."""
    first = answers[0]
    if len(answers) == 1:
        return first
    length = min(len(answer.places) for answer in answers)
    shares = np.array([np.frombuffer(a.places, np.uint8, length) for a in answers])
    places = np.where(shares.all(axis=0), shares.max(axis=0), 0).astype(np.uint8)
    return Found(
        first.lookup_id,
        places.tobytes(),
        all(answer.healthy for answer in answers),
    )


def fold_saved(answers: Sequence[Saved]) -> Saved:
    """A block is stored when every worker has stored its share; else the worst says why not."""
    first = answers[0]
    if len(answers) == 1:
        return first
    return Saved(
        first.save_id,
        tuple(
            max(shares, key=_SEVERITY.__getitem__)
            for shares in zip(*(answer.statuses for answer in answers), strict=True)
        ),
        sum(answer.num_bytes for answer in answers),
        max(answer.elapsed_ms for answer in answers),
        max(answer.num_over_share for answer in answers),
        sum(answer.num_file_errors for answer in answers),
    )

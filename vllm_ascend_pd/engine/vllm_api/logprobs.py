# SPDX-License-Identifier: Apache-2.0
"""Logprobs of sampled tokens, between vLLM's arrays and plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.outputs import LogprobsLists

from vllm_ascend_pd.wire import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def read_logprobs(lists: Any, num_logprobs: int) -> Iterator[TokenLogprobs]:
    """Of each token; ``lists`` may have more columns, for other requests of the step.

    Touches:
        vllm/v1/outputs.py:LogprobsLists
    """
    width = num_logprobs + 1
    token_ids, logprobs, ranks = (column.tolist() for column in lists[:3])
    for ids, values, rank in zip(token_ids, logprobs, ranks, strict=True):
        yield TokenLogprobs(tuple(ids[:width]), tuple(values[:width]), rank)


def make_logprobs(tokens: Sequence[TokenLogprobs]) -> LogprobsLists:
    """All of them have as many entries."""
    return LogprobsLists(
        np.array([token.token_ids for token in tokens], np.int32),
        np.array([token.logprobs for token in tokens], np.float32),
        np.array([token.rank for token in tokens], np.int32),
    )

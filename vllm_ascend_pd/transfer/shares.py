# SPDX-License-Identifier: Apache-2.0
"""Which workers of a producer hold the pages of one worker of a consumer. Pure.

Tensor parallelism divides the KV heads of a page among the workers. With fewer KV heads than
workers (MQA, MLA's latent as one head) several workers hold the same share.

    4 KV heads       consumer, 1 worker          consumer, 4 workers
    producer         worker 0 ◄─ 0 (all of it)   worker 0 ◄─ 0 (first half of each page)
    of 2 workers              ◄─ 1 (all of it)   worker 1 ◄─ 0 (second half)
                                                 worker 2 ◄─ 1 (first half) …

A part of a page is a run of bytes, because heads are the outermost dimension of a page in the
layouts for which sizes may differ (see ``consumer.Consumer``). Head placement as in vLLM's
``QKVParallelLinear``: rank r of t holds share ``r * s // t`` of ``s = min(t, number of KV heads)``.

Pipeline parallelism divides the layers among stages, of so many workers each.

    6 layers         consumer, 1 stage           consumer, 3 stages
    producer         stage 0 ◄─ 0 (layers 0-2)   stage 0 ◄─ 0 (layers 0-1)
    of 2 stages              ◄─ 1 (layers 3-5)   stage 1 ◄─ 0 (layer 2), 1 (layer 3) …
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.types import Layers

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count`` equal parts of a page."""

    index: int = 0
    count: int = 1


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class PageSource:
    """``theirs`` of the pages of the producer's worker ``rank`` is ``ours`` of this worker's, in
    ``layers`` of this worker's, which are counted from its first one and come after ``skip`` others
    there. ``None`` are all of them.
    """

    rank: int
    theirs: Share = WHOLE
    ours: Share = WHOLE
    layers: Layers | None = None
    skip: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether pages are moved as a whole."""
        return self.theirs == self.ours == WHOLE


@dataclass(frozen=True, slots=True)
class Sharding:
    """This worker's place in its engine, and by how many KV heads the model's pages divide."""

    rank: int = 0
    """Among all workers: those of a pipeline stage follow each other."""
    tp_size: int = 1
    num_kv_heads: int = 1
    num_stages: int = 1

    @property
    def num_workers(self) -> int:
        """Of the engine."""
        return self.tp_size * self.num_stages

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def share(self) -> Share:
        """Which of the KV heads this worker holds."""
        count = num_shares(self.tp_size, self.num_kv_heads)
        return Share(self.tp_rank * count // self.tp_size, count)

    @property
    def num_replicas(self) -> int:
        """How many workers of a stage hold this worker's share."""
        return self.tp_size // num_shares(self.tp_size, self.num_kv_heads)

    @property
    def replica(self) -> int:
        """Which of them this one is."""
        return self.tp_rank % self.num_replicas

    def loads_from(self, layers: Layers, peers: Sequence[Layers | None]) -> tuple[PageSource, ...]:
        """Of a producer whose workers have layers of ``peers``, by rank: those that hold pages of
        ``layers``.

        Raises:
            TransferError: its stages have not each of these layers once, or the heads of the two do
                not divide evenly.
        """
        found: list[PageSource] = []
        first_rank, known = 0, layers.first
        for stage, workers in groupby(peers):
            num_workers = len(list(workers))
            theirs = stage or Layers(0, layers.stop)
            first, stop = max(theirs.first, layers.first), min(theirs.stop, layers.stop)
            if first < stop:
                if first != known:
                    known = -1
                    break
                known = stop
                ours = Layers(first - layers.first, stop - layers.first)
                found += (
                    replace(
                        source,
                        rank=first_rank + source.rank,
                        layers=ours,
                        skip=first - theirs.first,
                    )
                    for source in self.sources(num_workers)
                )
            first_rank += num_workers
        if known != layers.stop:
            raise TransferError(
                f"its pipeline stages have the layers {list(dict.fromkeys(peers))}, this engine's"
                f" are {layers}"
            )
        return tuple(found)

    def sources(self, num_peers: int) -> tuple[PageSource, ...]:
        """Of a producer's stage with ``num_peers`` workers: those that hold this worker's pages.

        Raises:
            TransferError: the heads of the two do not divide evenly.
        """
        ours = num_shares(self.tp_size, self.num_kv_heads)
        theirs = num_shares(num_peers, self.num_kv_heads)
        check_divides(self.tp_size, num_peers, self.num_kv_heads)
        share = self.share.index
        peers_per_share = num_peers // theirs
        same = self.replica % peers_per_share
        if theirs >= ours:
            count = theirs // ours
            return tuple(
                PageSource(
                    rank=(share * count + part) * peers_per_share + same, ours=Share(part, count)
                )
                for part in range(count)
            )
        count = ours // theirs
        peer_share, part = divmod(share, count)
        return (PageSource(rank=peer_share * peers_per_share + same, theirs=Share(part, count)),)


def num_shares(tp_size: int, num_kv_heads: int) -> int:
    """Into how many different shares a page of all heads is divided."""
    return min(tp_size, num_kv_heads)


def check_divides(tp_size: int, num_peers: int, num_kv_heads: int) -> None:
    """Raises ``TransferError`` unless one share is made of whole others."""
    ours, theirs = num_shares(tp_size, num_kv_heads), num_shares(num_peers, num_kv_heads)
    if not num_peers or max(ours, theirs) % min(ours, theirs) or num_peers % theirs:
        raise TransferError(
            f"tensor parallel sizes {num_peers} there and {tp_size} here do not divide"
            f" {num_kv_heads} KV heads evenly"
        )

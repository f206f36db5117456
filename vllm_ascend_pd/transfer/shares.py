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
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_pd.errors import TransferError


@dataclass(frozen=True, slots=True)
class Share:
    """Part ``index`` of ``count`` equal parts of a page."""

    index: int = 0
    count: int = 1


WHOLE = Share()


@dataclass(frozen=True, slots=True)
class Source:
    """``theirs`` of the pages of the producer's worker ``rank`` is ``ours`` of this worker's."""

    rank: int
    theirs: Share = WHOLE
    ours: Share = WHOLE


@dataclass(frozen=True, slots=True)
class Sharding:
    """This worker's place in its engine, and by how many KV heads the model's pages divide."""

    rank: int = 0
    num_workers: int = 1
    num_kv_heads: int = 1

    @property
    def share(self) -> Share:
        """Which of the KV heads this worker holds."""
        count = num_shares(self.num_workers, self.num_kv_heads)
        return Share(self.rank * count // self.num_workers, count)

    @property
    def num_replicas(self) -> int:
        """How many workers hold this worker's share."""
        return self.num_workers // num_shares(self.num_workers, self.num_kv_heads)

    @property
    def replica(self) -> int:
        """Which of them this one is."""
        return self.rank % self.num_replicas

    def sources(self, num_peers: int) -> tuple[Source, ...]:
        """Of a producer with ``num_peers`` workers: those that hold this worker's pages.

        Raises:
            TransferError: the heads of the two do not divide evenly.
        """
        ours = num_shares(self.num_workers, self.num_kv_heads)
        theirs = num_shares(num_peers, self.num_kv_heads)
        check_divides(self.num_workers, num_peers, self.num_kv_heads)
        share = self.share.index
        peers_per_share = num_peers // theirs
        same = self.replica % peers_per_share
        if theirs >= ours:
            count = theirs // ours
            return tuple(
                Source(
                    rank=(share * count + part) * peers_per_share + same, ours=Share(part, count)
                )
                for part in range(count)
            )
        count = ours // theirs
        peer_share, part = divmod(share, count)
        return (Source(rank=peer_share * peers_per_share + same, theirs=Share(part, count)),)


def num_shares(num_workers: int, num_kv_heads: int) -> int:
    """Into how many different shares a page of all heads is divided."""
    return min(num_workers, num_kv_heads)


def check_divides(num_workers: int, num_peers: int, num_kv_heads: int) -> None:
    """Raises ``TransferError`` unless one share is made of whole others."""
    ours, theirs = num_shares(num_workers, num_kv_heads), num_shares(num_peers, num_kv_heads)
    if not num_peers or max(ours, theirs) % min(ours, theirs) or num_peers % theirs:
        raise TransferError(
            f"tensor parallel sizes {num_peers} there and {num_workers} here do not divide"
            f" {num_kv_heads} KV heads evenly"
        )

# SPDX-License-Identifier: Apache-2.0
"""What a consumer knows of each of its producers: how fast KV comes from it, and whether it does.

A producer that answers may be one whose KV does not come: a port is blocked, a link is slow, its
worker hangs. Each request would wait for it anew, and in a step the whole batch with it. So one
that fails several times in a row, or for which a step has waited in vain, is left alone for a
while: its prompts are computed here, but for one at a time, which is loaded beside the steps.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm_ascend_pd.kv.breaker import Breaker
from vllm_ascend_pd.kv.cost import Speed
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.types import Endpoint

_FIRST_BYTES_PER_MS = 300_000.0
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 1.0, 10.0
_MAX_PEERS = 1024
"""Requests name peers, so their number is bounded: the one that was asked longest ago goes."""
_TOO_LONG = 10.0
"""So many times ``max_step_load_ms``, and a load in a step should have been parked."""
_FAULTS = frozenset(
    {
        Cause.PEER_UNREACHABLE.value,
        Cause.TRANSFER_FAILED.value,
        Cause.CHECKSUM.value,
        Cause.DEADLINE.value,
    }
)
"""Of a producer, or of the way to it; other causes are an answer of one that is well."""


class KnownPeer:
    """One producer, as its consumer has seen it. Scheduler thread."""

    def __init__(self, first_per_ms: float, max_failures: int, clock: Callable[[], float]) -> None:
        """``first_per_ms``: bytes, before anything has come from it."""
        self.speed = Speed(_FIRST_BYTES_PER_MS)
        self.speed.per_ms = first_per_ms
        self._breaker = Breaker(max_failures, _MIN_BACKOFF_S, _MAX_BACKOFF_S, clock=clock)
        self._tried: RemotePrompt | None = None
        """The last one that was asked for while others were computed here."""
        self.cause = ""
        """Of its last fault."""

    @property
    def is_well(self) -> bool:
        return self._breaker.closed

    @property
    def backoff_s(self) -> float:
        return self._breaker.backoff_s

    def may_be_asked(self, prompt: RemotePrompt) -> bool:
        """For this prompt; if it is left alone, for one at a time."""
        if self.is_well:
            return True
        self._breaker.take_probe()
        is_trying = self._tried is not None and self._tried.is_under_way
        if not self._breaker.allows(is_trying):
            return False
        prompt.load_beside_steps()
        self._tried = prompt
        return True

    def load_ended(self, result: LoadResult, max_step_ms: float | None) -> bool:
        """``max_step_ms``: of a load that a step has waited for. Whether the peer is well now and
        was not, or the other way round."""
        in_step = max_step_ms is not None
        if not result.was_awaited:
            self.speed.note(result.num_bytes, result.elapsed_ms)
        if max_step_ms is not None and result.elapsed_ms > _TOO_LONG * max_step_ms:
            self.speed.drop_to(result.num_bytes, result.elapsed_ms)
        if not result.cause:
            self._tried = None
            return self._breaker.succeeded()
        return self.failed(result.cause, outright=in_step and result.cause == Cause.DEADLINE.value)

    def failed(self, cause: str, *, outright: bool = False) -> bool:
        """It did not answer, or a load from it failed; whether it was well until now. ``outright``:
        every request of a step has waited in vain, and would for the next one."""
        if cause not in _FAULTS:
            return False
        self.cause = cause
        return self._breaker.failed(unreachable=outright)


class KnownPeers:
    """Scheduler thread."""

    def __init__(self, max_failures: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.speed = Speed(_FIRST_BYTES_PER_MS)
        """Of all of them: what is believed of one from which nothing has come."""
        self._max_failures = max_failures
        self._clock = clock
        self._peers: dict[Endpoint, KnownPeer] = {}

    def of(self, peer: Endpoint) -> KnownPeer:
        known = self._peers.pop(peer, None)
        if known is None:
            known = KnownPeer(self.speed.per_ms, self._max_failures, self._clock)
        self._peers[peer] = known
        if len(self._peers) > _MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        return known

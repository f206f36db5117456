# SPDX-License-Identifier: Apache-2.0
"""``--rebalance load``: answers move from the fullest engine to the emptiest one.

One look chooses a pair of engines and the shortest request, whose move must leave the fuller of the
two less full than it was. So for the same requests the moves come to an end. An engine takes part
in one move at a time, and in the next one when it has told how full it is since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.policies.base import are_partners
from vllm_ascend_pd.router.roles import EngineWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance, Registry
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.moves import Answering, Moves

REASON = "load"
FULL = 0.7
"""An engine with more room than that keeps what it has."""
MIN_GAP = 0.3
"""Between the two engines."""
REST_S = 30.0
"""Between two moves of one request."""
MAX_GAP_S = 1.0
"""Mean wait of a moved request's client, as measured, above which no more move."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Indices of the engines that are chosen."""

    source: int
    target: int


def choose_pair(fullness: Sequence[float]) -> Pair | None:
    """Of engines that can take requests of each other: how full each is, 0 to 1 and more where
    requests wait."""
    source = max(range(len(fullness)), key=lambda i: (fullness[i], -i), default=0)
    target = min(range(len(fullness)), key=lambda i: (fullness[i], i), default=0)
    if source == target or fullness[source] <= FULL:
        return None
    return Pair(source, target) if fullness[source] - fullness[target] > MIN_GAP else None


def choose_request(source: float, target: float, shares: Sequence[float]) -> int | None:
    """``shares``: of an engine's fullness, by request of the source. The shortest one, unless it
    would make the target as full as the source is."""
    at = min(range(len(shares)), key=lambda i: (shares[i], i), default=None)
    return None if at is None or target + shares[at] >= source else at


@dataclass(slots=True)
class Rebalancing:
    """Event loop thread."""

    registry: Registry
    moves: Moves
    metrics: Metrics
    _moved_at: dict[Instance, float] = field(default_factory=dict)
    """When a move from or to it was last seen; what it told before counts no more."""

    def look(self, now: float) -> None:
        """Called every second or so: begins one move for each model at most."""
        moving = [one.move for one in self.moves.running if one.move is not None]
        ends = {one for move in moving for one in (move.source.instance, move.target)}
        before = self._moved_at
        self._moved_at = {
            one: now if one in ends else before.get(one, 0.0) for one in self.registry
        }
        waits, num = self.metrics.move_gap, sum(self.metrics.move_gap.counts)
        if num and waits.total / num > MAX_GAP_S:
            return
        groups: dict[tuple[str, ...], list[Instance]] = {}
        for instance in self.registry.decodes:
            has_told = instance.load.read_at > self._moved_at[instance]
            if instance.is_available and instance.does("decode") and has_told:
                groups.setdefault(instance.models, []).append(instance)
        for engines in groups.values():
            self._balance(engines, now)

    def _balance(self, engines: list[Instance], now: float) -> None:
        engines = [one for one in engines if are_partners(engines[0], one)]
        fullness = [EngineWork.of(one).fullness for one in engines]
        pair = choose_pair(fullness)
        if pair is None:
            return
        source, target = engines[pair.source], engines[pair.target]
        there = [one for one in self.moves.running if one.instance is source]
        movable = [one for one in there if _may_move(one, now)]
        per_token = fullness[pair.source] / (sum(one.num_tokens for one in there) or 1)
        shares = [one.num_tokens * per_token for one in movable]
        at = choose_request(fullness[pair.source], fullness[pair.target], shares)
        if at is not None:
            self.moves.start(movable[at], target, REASON)


def _may_move(one: Answering, now: float) -> bool:
    has_rested = not one.job.trace.num_moves or now - one.since >= REST_S
    has_failed = one.failed_at is not None and now - one.failed_at < REST_S
    return has_rested and not has_failed and one.obstacle() is None

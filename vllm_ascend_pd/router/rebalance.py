# SPDX-License-Identifier: Apache-2.0
"""``--rebalance load``: answers move from the fullest engine to the emptiest one.

One look chooses a pair of engines and a request, whose move must leave the fuller of the two less
full than it was. So for the same requests the moves come to an end. An engine takes part in one
move at a time, and in the next one when it has told how full it is since. Each of a router's
workers looks at its own requests, and knows of no other one's moves.

A request that its engine has preempted waits there, without memory, until others end. Its stream
stands still while others of the engine go on, and so it moves first: the other engine is told its
tokens, and has their KV from a pool or computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.ranking import Group
from vllm_ascend_pd.router.roles import EngineWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance, Registry
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.moves import Answering, Moves

REASON = "load"
PREEMPTED = "preempted"
FULL = 0.7
"""An engine with more room than that keeps what it has."""
MIN_GAP = 0.3
"""Between the two engines."""
REST_S = 30.0
"""Between two moves of one request."""
STALLED_S = 2.0
"""A stream gives nothing, and others of an engine at which requests wait do: it was preempted."""
MAX_GAP_S = 1.0
"""Mean wait of moved requests' clients in the last minute, above which no more move."""


def choose_pair(fullness: Sequence[float]) -> tuple[int, int] | None:
    """Indices of source and target, of engines that can take requests of each other: how full each
    is, 0 to 1 and more where requests wait."""
    source = max(range(len(fullness)), key=lambda i: (fullness[i], -i), default=0)
    target = min(range(len(fullness)), key=lambda i: (fullness[i], i), default=0)
    if source == target or fullness[source] <= FULL:
        return None
    return (source, target) if fullness[source] - fullness[target] > MIN_GAP else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may move."""

    share: float
    """Of its engine's fullness."""
    importance: tuple[int, int] = (0, 0)
    is_stalled: bool = False


def choose_request(
    source: float, target: float, candidates: Sequence[Candidate], needed: float = 0.0
) -> int | None:
    """Of the source's; none that would make the target as full as the source is. First those that
    stand still; then the least important ones, and of these the shortest that makes the room that
    is ``needed``, or else the shortest."""
    fitting = [i for i, one in enumerate(candidates) if target + one.share < source]

    def order(i: int) -> tuple[object, ...]:
        one = candidates[i]
        return not one.is_stalled, one.importance, one.share < needed, one.share, i

    return min(fitting, key=order, default=None)


@dataclass(slots=True)
class _Seen:
    """Of a stream, by looks."""

    num_bytes: int
    since: float
    """When it had no more than that."""


@dataclass(slots=True)
class Rebalancing:
    """Event loop thread."""

    registry: Registry
    moves: Moves
    metrics: Metrics
    _moved_at: dict[Instance, float] = field(default_factory=dict)
    """When a move from or to it was last seen; what it told before counts no more."""
    _seen: dict[Answering, _Seen] = field(default_factory=dict)

    def look(self, now: float) -> None:
        """Called every second or so: begins one move at most among engines that are alike."""
        self._watch(now)
        moving = [one.move for one in self.moves.running if one.move is not None]
        ends = {one for move in moving for one in (move.source.instance, move.target)}
        before = self._moved_at
        self._moved_at = {
            one: now if one in ends else before.get(one, 0.0) for one in self.registry
        }
        num, total_s = self.metrics.recent_move_gaps.sums()
        if num and total_s / num > MAX_GAP_S:
            return
        groups: dict[Group, list[Instance]] = {}
        for instance in self.registry.decodes:
            has_told = instance.load.read_at > self._moved_at[instance]
            if instance.is_available and instance.does("decode") and has_told:
                group = Group(instance.told_fingerprint, instance.models)
                groups.setdefault(group, []).append(instance)
        for engines in groups.values():
            self._balance(engines, now)

    def _watch(self, now: float) -> None:
        before = self._seen
        self._seen = {}
        for one in self.moves.running:
            num_bytes, seen = one.job.trace.num_bytes, before.get(one)
            is_new = seen is None or seen.num_bytes != num_bytes
            self._seen[one] = _Seen(num_bytes, now) if is_new else before[one]

    def _balance(self, engines: list[Instance], now: float) -> None:
        fullness = [EngineWork.of(one).fullness for one in engines]
        pair = choose_pair(fullness)
        if pair is None:
            return
        full, empty = pair
        source, target = engines[full], engines[empty]
        there = [one for one in self.moves.running if one.instance is source]
        movable = [one for one in there if _may_move(one, now)]
        per_token = fullness[full] / (sum(one.num_tokens for one in there) or 1)
        latest = max((self._seen[one].since for one in there), default=now)
        candidates = [
            Candidate(one.num_tokens * per_token, one.importance, self._is_stalled(one, latest))
            for one in movable
        ]
        needed = _num_waiting_tokens(there) * per_token - (1 - source.load.kv_usage)
        at = choose_request(fullness[full], fullness[empty], candidates, needed)
        if at is not None:
            reason = PREEMPTED if candidates[at].is_stalled else REASON
            self.moves.start(movable[at], target, reason)

    def _is_stalled(self, one: Answering, latest: float) -> bool:
        """``latest``: when a stream of its engine was last seen to give something."""
        if one.response is None:  # of a whole answer nothing is seen
            return False
        return one.instance.load.num_waiting > 0 and self._seen[one].since + STALLED_S <= latest


def _num_waiting_tokens(there: Sequence[Answering]) -> int:
    """Of the first stream that its engine has not begun with."""
    waiting = (one for one in there if one.job.body.is_stream and one.response is None)
    return next((one.num_tokens for one in waiting), 0)


def _may_move(one: Answering, now: float) -> bool:
    has_rested = not one.job.trace.num_moves or now - one.since >= REST_S
    has_failed = one.failed_at is not None and now - one.failed_at < REST_S
    return has_rested and not has_failed and one.obstacle() is None

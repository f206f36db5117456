# SPDX-License-Identifier: Apache-2.0
"""Who may be sent to engines now, and who waits.

An instance has room for so many requests. One that needs a pair is admitted when both have room, so
that nobody holds one engine while waiting for another. Who finds no room waits in line, first come,
first served, or as ``tenants`` says; requests for different models, or for one engine alone, do not
wait for each other.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left, insort
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from heapq import merge
from operator import attrgetter
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm_ascend_pd.router import stored
from vllm_ascend_pd.router.selection import Full, Unavailable
from vllm_ascend_pd.router.turns import Turn, Turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.router.config import Queueing
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.policies.base import Pair, Routed
    from vllm_ascend_pd.router.selection import Selector
    from vllm_ascend_pd.router.serving import Servers
    from vllm_ascend_pd.router.tenants import Tenant

LOOK_EVERY_S = 0.25
"""While somebody waits: an engine may have come, or have come back."""
MAX_RETRY_AFTER_S = 60


@dataclass(frozen=True, slots=True)
class TooMany:
    """Too many wait, or one has waited too long; sent as 429."""

    message: str
    retry_after_s: int
    status: ClassVar = 429
    kind: ClassVar = "too_many_requests"
    outcome: ClassVar = "refused"


class Admitted:
    """Room on a pair's engines, held until the end of ``with``."""

    __slots__ = ("_admission", "_holds_prefill", "pair")

    def __init__(self, admission: Admission, pair: Pair) -> None:
        self._admission = admission
        self.pair = pair
        pair.decode.num_admitted += 1
        pair.decode.num_to_answer += 1
        self._holds_prefill = pair.prefill is not pair.decode
        if self._holds_prefill:
            pair.prefill.num_admitted += 1

    def __enter__(self) -> Admitted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.pair.decode.num_admitted -= 1
        self.pair.decode.num_to_answer -= 1
        self._leave_prefill()
        self._admission.look()

    def prefilled(self) -> None:
        """The prefill engine has done its part."""
        self._leave_prefill()
        self._admission.look()

    def _leave_prefill(self) -> None:
        if self._holds_prefill:
            self._holds_prefill = False
            self.pair.prefill.num_admitted -= 1


_turn = attrgetter("turn")
Outcome = Admitted | Unavailable | TooMany


class _Wish(NamedTuple):
    """Which engines a request in line waits for: none has room for another one with the same."""

    excluded: frozenset[Instance] = frozenset()
    target: Instance | None = None
    owner: Instance | str | None = None
    """Of the response that it goes on from; the response itself while nobody knows whose it is."""
    model: str | None = None
    """That no engine has told of yet, of a router that has just started."""


_ANY = _Wish()


@dataclass(eq=False, slots=True)
class _Waiter:
    """A request in line."""

    request: Routed
    turn: Turn
    again: bool
    wish: _Wish
    outcome: asyncio.Future[Outcome]
    since: float = field(default_factory=time.monotonic)


_Key = tuple[str | None, bool]
_Line = dict[_Wish, list[_Waiter]]
"""Who waits, by wish, and of one wish in order of their turns."""


class Admission:
    """Event loop thread."""

    def __init__(self, selector: Selector, queueing: Queueing, metrics: Metrics) -> None:
        self._selector = selector
        self._queueing = queueing
        self._metrics = metrics
        self._lines: dict[_Key, _Line] = {}
        """By model, and whether one engine alone is to do it."""
        self._num_waiting: Counter[Tenant] = Counter()
        """Requests in line."""
        self._turns = Turns()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_queued(self) -> int:
        return sum(len(waiters) for line in self._lines.values() for waiters in line.values())

    async def admit(self, request: Routed, *, again: bool = False) -> Outcome:
        """Room on a pair, at once or after a wait. ``again``: it was admitted before, and goes to
        the head of the line. A cancelled caller leaves the line."""
        turn = self._turns.next(request, again)
        outcome: Outcome | None = None
        try:
            outcome = await self._admit(request, turn, again)
            return outcome
        finally:
            if not isinstance(outcome, Admitted):
                self._turns.left(request, turn)

    async def _admit(self, request: Routed, turn: Turn, again: bool) -> Outcome:
        if again or not self._lines or self._key(request) not in self._lines:
            placed = self._place(request, turn)
            if not isinstance(placed, Full):
                return placed
        is_full = self.num_queued >= self._queueing.max_queued
        if is_full and not again and not self._make_room(request.tenant):
            self._metrics.add("refused", "full")
            return self._too_many(f"{self.num_queued} requests wait already")
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, turn, again, self._wish(request), outcome)
        return await self._wait(waiter, self._key(request))

    def _key(self, request: Routed) -> _Key:
        return self._selector.known(request.model), request.alone is not None

    def _make_room(self, tenant: Tenant | None) -> bool:
        """In a full line: of the tenants with the lowest priority the one that has most of it, by
        weight, loses its last place to a tenant that goes before it or has less, and will."""

        def share(one: Tenant, num_more: int = 0) -> float:
            return (self._num_waiting[one] + num_more) / one.quota.weight

        if tenant is None or not self._num_waiting:
            return False
        most = max(self._num_waiting, key=lambda one: (-one.quota.priority, share(one)))
        goes_before = tenant.quota.priority - most.quota.priority
        if goes_before < 0 or (goes_before == 0 and share(tenant, 1) >= share(most)):
            return False
        theirs = (
            waiter
            for line in self._lines.values()
            for waiters in line.values()
            for waiter in waiters
            if waiter.request.tenant is most and not waiter.again and not waiter.outcome.done()
        )
        last = max(theirs, key=_turn, default=None)
        if last is None:
            return False
        self._metrics.add("refused", "full")
        what = f"{self.num_queued} requests wait already, and another tenant's goes before this one"
        last.outcome.set_result(self._too_many(what))
        return True

    async def _wait(self, waiter: _Waiter, key: _Key) -> Outcome:
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._queueing.timeout_s, self._expire, waiter)
        line = self._lines.setdefault(key, {})
        insort(line.setdefault(waiter.wish, []), waiter, key=_turn)
        if waiter.request.tenant is not None:
            self._num_waiting[waiter.request.tenant] += 1
        try:
            self.look()
            self._look_later()
            outcome = await waiter.outcome
        except asyncio.CancelledError:
            given = waiter.outcome
            if given.done() and not given.cancelled() and given.exception() is None:
                admitted = given.result()
                with admitted if isinstance(admitted, Admitted) else nullcontext():
                    raise
            raise
        finally:
            deadline.cancel()
            self._leave(waiter, key)
            self._metrics.queue.observe(time.monotonic() - waiter.since)
        return outcome

    def look(self) -> None:
        """Admit those for whom there is room now. Lines for models of the same engines find none
        together."""
        if not self._lines:
            return
        none_at: set[tuple[Servers, bool]] = set()
        for key, line in sorted(self._lines.items(), key=lambda one: _first(one[1]).since):
            model, is_alone = key
            where = self._selector.registry.serving(model), is_alone
            full: set[_Wish] = set()
            for waiter in merge(*(_in_turn(*one, full) for one in line.items()), key=_turn):
                if waiter.wish == _ANY and where in none_at:
                    break
                try:
                    placed = self._place(waiter.request, waiter.turn)
                except Exception as e:  # noqa: BLE001 - the waiter's own, and raised where it waits
                    waiter.outcome.set_exception(e)
                    continue
                if not isinstance(placed, Full):
                    waiter.outcome.set_result(placed)
                elif waiter.wish == _ANY:
                    none_at.add(where)
                    break  # those behind it can use no other engines
                else:
                    full.add(waiter.wish)

    def _wish(self, request: Routed) -> _Wish:
        response = request.previous_response
        owner: Instance | str | None = None
        if response is not None:
            owner = stored.owner(response, self._selector.registry) or response
        excluded, model = frozenset(request.excluded), request.model
        if not self._selector.may_hear or self._selector.known(model) is not None:
            model = None
        return _Wish(excluded, request.target, owner, model)

    def _place(self, request: Routed, turn: Turn) -> Admitted | Unavailable | Full:
        found = self._selector.choose(request)
        if isinstance(found, Unavailable | Full):
            return found
        self._turns.admitted(turn)
        return Admitted(self, found)

    def _leave(self, waiter: _Waiter, key: _Key) -> None:
        line = self._lines[key]
        waiters = line[waiter.wish]
        del waiters[bisect_left(waiters, waiter.turn, key=_turn)]
        if waiter.request.tenant is not None:
            self._num_waiting[waiter.request.tenant] -= 1
            if not self._num_waiting[waiter.request.tenant]:
                del self._num_waiting[waiter.request.tenant]
        if not waiters:
            del line[waiter.wish]
        if not line:
            del self._lines[key]

    def _expire(self, waiter: _Waiter) -> None:
        if not waiter.outcome.done():
            if not waiter.again:  # else it has an engine yet, or another one's failure is told
                self._metrics.add("refused", "deadline")
            message = f"no engine had room within {self._queueing.timeout_s:g} s"
            waiter.outcome.set_result(self._too_many(message))

    def _too_many(self, message: str) -> TooMany:
        now = time.monotonic()
        longest_s = max((now - _first(line).since for line in self._lines.values()), default=0)
        after_s = min(max(1, math.ceil(longest_s)), MAX_RETRY_AFTER_S)
        return TooMany(f"too many requests: {message}", after_s)

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        if self._lines:
            self.look()
            self._look_later()


def _first(line: _Line) -> _Waiter:
    """Whose turn it is."""
    return min((waiters[0] for waiters in line.values()), key=_turn)


def _in_turn(wish: _Wish, waiters: list[_Waiter], full: set[_Wish]) -> Iterator[_Waiter]:
    """Those that still wait, until their wish is among ``full``."""
    for waiter in waiters:
        if wish in full:
            return
        if not waiter.outcome.done():
            yield waiter

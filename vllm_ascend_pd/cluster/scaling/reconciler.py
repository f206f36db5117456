# SPDX-License-Identifier: Apache-2.0
"""Brings a fleet of engines to its target, one small step after another.

A step looks at the fleet and at the router, and does what ``target`` decides of what it sees. It
keeps no plan: what is true is what the next look says. So an engine that died is one that is
missing, a node that came is room for one that waits, and a new target is only a new comparison.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from vllm_ascend_pd.cluster.operator import RouterAway
from vllm_ascend_pd.cluster.restart import LASTS_S
from vllm_ascend_pd.cluster.scaling.fleet import Fleet, Member, Phase
from vllm_ascend_pd.cluster.scaling.fleet_status import EngineStatus, FleetStatus
from vllm_ascend_pd.cluster.scaling.target import (
    Counts,
    Ratio,
    Target,
    next_role,
    next_stop,
    next_switch,
    split,
)
from vllm_ascend_pd.errors import ConfigError, PDError
from vllm_ascend_pd.registration import DrainOrder, InstanceStatus, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
RETURN_S = 60.0
"""A place that was given up is somebody else's when it is not found again within so long."""


class FirstStartError(PDError):
    """An engine ended before any was up: a wrong option or a missing file, which no other start
    mends."""


class RoleOperator(Protocol):
    """The part of ``RouterOperator`` that is used."""

    async def instances(self) -> list[InstanceStatus]: ...
    async def use_for(self, instance_id: str, role: Role) -> None: ...
    async def drain(self, instance_id: str, order: DrainOrder) -> None: ...
    async def undo_drain(self, instance_id: str) -> None: ...


@dataclass(slots=True)
class View:
    """One look at both."""

    members: dict[str, Member]
    known: dict[str, InstanceStatus] | None
    """By the router; ``None``: it is away."""
    leaving: dict[str, float]

    def staying(self) -> list[Member]:
        """Those that count."""
        return [
            one
            for one in self.members.values()
            if one.phase is not Phase.ENDING and one.name not in self.leaving
        ]

    def serving(self) -> list[InstanceStatus]:
        """Of them, those that get requests."""
        known = self.known or {}
        statuses = (known.get(one.name) for one in self.staying() if one.phase is Phase.READY)
        return [one for one in statuses if one and one.healthy and one.state == "ready"]

    def count(self) -> Counts:
        """Of those that serve and have a role."""
        return _count(self.serving())

    def num_starting(self) -> int:
        """Have their place, and do not serve yet."""
        placed = [one for one in self.staying() if one.phase is not Phase.WAITING]
        return len(placed) - len(self.serving())


def _count(serving: Iterable[InstanceStatus]) -> Counts:
    used_for = [one.used_for for one in serving]
    return Counts(used_for.count("prefill"), used_for.count("decode"))


def fill(have: Counts, num_more: int, ratio: Ratio) -> Counts:
    """The roles of so many that come to those that are there."""
    pending = Counts()
    for _ in range(num_more):
        job = next_role(have, pending, ratio, have.total + num_more)
        assert job is not None
        pending = pending.with_one(job)
    return pending


@dataclass(slots=True)
class Reconciler:
    """Event loop thread. ``step`` is called every second or so."""

    fleet: Fleet
    router: RoleOperator
    target: Target
    clock: Callable[[], float]
    say: Callable[[str], None]
    status: FleetStatus | None = None
    """As of the last step."""
    _names: Iterator[str] = field(
        default_factory=lambda: (f"engine-{number}" for number in itertools.count())
    )
    _leaving: dict[str, float] = field(default_factory=dict)
    """Drained, and since when; they end when they are empty."""
    _ending: set[str] = field(default_factory=set)
    """Told to end."""
    _generations: dict[str, int] = field(default_factory=dict)
    """Under which each was asked for, or has got its place."""
    _next_replaced: tuple[int, float] = (0, 0.0)
    """So many serve again, or it is so late, when the next of an old generation goes."""
    _held: str = ""
    """Why none of them goes while one is missing: an engine of the new generation ended before it
    had lasted."""
    _up_since: dict[str, float] = field(default_factory=dict)
    _lasting: set[str] = field(default_factory=set)
    """Up for ``LASTS_S``, and taken for good ones."""
    _told: dict[str, Member] = field(default_factory=dict)
    """What was said of each."""
    _was_up: bool = False
    """Any of them, ever."""
    _num_failures: int = 0
    """In a row, with no engine that came up between."""
    _starts_at: float = 0.0

    async def step(self) -> None:
        """Look, and do what is to be done now.

        Raises:
            FirstStartError: there is no use in going on.
        """
        view = await self._look()
        if view.known is not None:
            try:
                await self._assign(view)
                await self._stop(view)
            except RouterAway as e:
                logger.debug("%s", e)  # the next look says so
            except ConfigError as e:
                self.say(f"the router refuses: {e}")
        await self._start(view)
        self.status = self._describe(view)

    async def _look(self) -> View:
        members = {}
        for one in await self.fleet.look():
            self._tell(one)
            if not one.is_over:
                members[one.name] = one
                self._look_how_long(one)
                if one.phase is Phase.WAITING:  # what it is to be, it will be where it starts
                    self._generations[one.name] = self.target.generation
                continue
            if one.phase is Phase.ENDED and one.name not in self._lasting | self._ending:
                self._hold(one)
            del self._told[one.name]
            self._generations.pop(one.name, None)
            self._leaving.pop(one.name, None)
            self._up_since.pop(one.name, None)
            self._lasting.discard(one.name)
            if one.name in self._ending:
                self._ending.remove(one.name)
            else:
                self._failed(one)
        if not any(map(self._is_old, members)):
            self._held = ""
        try:
            known = {one.instance_id: one for one in await self.router.instances()}
        except ConfigError as e:
            logger.debug("%s", e)
            return View(members, None, self._leaving)
        return View(members, known, self._leaving)

    def _tell(self, one: Member) -> None:
        if self._told.get(one.name) == one:
            return
        self._told[one.name] = one
        where = f" on {one.node}" if one.node else ""
        note = f": {one.note}" if one.note else ""
        self.say(f"{one.name} {one.phase.value}{where}{note}")
        if one.phase is Phase.READY:
            self._was_up = True

    def _look_how_long(self, one: Member) -> None:
        """Who ends at its first requests is no better than who does not come up."""
        if one.phase is not Phase.READY or one.name in self._lasting:
            return
        if self.clock() - self._up_since.setdefault(one.name, self.clock()) >= LASTS_S:
            self._lasting.add(one.name)
            self._num_failures = 0
            if not self._is_old(one.name):
                self._held = ""

    def _hold(self, one: Member) -> None:
        """In a restart. What did not last once may not a second time: no other one is given up
        while it is missing, unless another one finds no place any more.
        """
        if self._is_old(one.name) or not any(map(self._is_old, self._generations)):
            return
        enough, _ = self._next_replaced
        self._next_replaced = enough, self.clock() + MAX_BACKOFF_S + RETURN_S
        if not self._held:
            what = "stay up" if one.name in self._up_since else "come up"
            self._held = (
                f"{one.name} did not {what} ({one.note}): engines of before stay until one does"
            )
            self.say(self._held)

    def _failed(self, one: Member) -> None:
        if one.phase is Phase.ENDED and not self._was_up:
            raise FirstStartError(f"{one.name} did not come up: {one.note}")
        self._num_failures += 1
        delay = min(2.0 ** min(self._num_failures - 1, 16), MAX_BACKOFF_S)
        self._starts_at = self.clock() + delay

    async def _assign(self, view: View) -> None:
        """Each engine that serves has its role; one alone does both."""
        serving, ratio, have = view.serving(), self.target.ratio, view.count()
        if len(serving) == 1:
            if serving[0].used_for != "both":
                await self._use(serving[0], "both")
            return
        free = sorted((s for s in serving if s.used_for == "both"), key=lambda s: s.num_decoding)
        while free:
            job = next_role(have, Counts(), ratio, have.total + 1)
            assert job is not None
            await self._use(free.pop(0 if job == "prefill" else -1), job)
            have = have.with_one(job)
        job = next_switch(have, fill(have, view.num_starting(), ratio), ratio)
        others = [one for one in serving if one.used_for not in (job, "both")]
        if job is not None and others:
            await self._use(self._least(others), job)

    async def _use(self, one: InstanceStatus, role: Role) -> None:
        await self.router.use_for(one.instance_id, role)
        self.say(f"{one.instance_id} is used for {role}")

    async def _stop(self, view: View) -> None:
        """Who is too many goes: first who waits, then who starts, then who serves."""
        have, maximum = view.count(), self.target.maximum
        drained_before = set(self._leaving)
        serving = {one.instance_id: one for one in view.serving()}
        idle = [one.name for one in view.staying() if one.name not in serving]
        idle.sort(key=lambda name: view.members[name].phase is Phase.WAITING)
        while idle and len(serving) + len(idle) > maximum:
            name = idle.pop()
            status = (view.known or {}).get(name)
            if status is not None and status.num_left:
                await self._drain(status, "to end")
            else:
                await self._end(name)
        while len(serving) > maximum and (job := next_stop(have, self.target.ratio, maximum)):
            of_job = [one for one in serving.values() if one.used_for == job]
            if not of_job:
                break  # it has its role from the next look on
            least = self._least(of_job)
            await self._drain(least, "to end")
            del serving[least.instance_id]
            have = _count(serving.values())
        old = [one for one in serving.values() if self._is_old(one.instance_id)]
        enough, late = self._next_replaced
        are_back = len(serving) >= min(enough, maximum)
        is_missed = not are_back and self.clock() < late
        is_tried = any(not self._is_old(n) and n not in self._lasting for n in self._up_since)
        if old and not (is_missed or is_tried or self._leaving or view.num_starting()):
            self._next_replaced = (len(serving), self.clock() + RETURN_S)
            await self._replace(min(old, key=lambda one: one.num_active), serving.values())
        for name, since in self._leaving.items():
            status = (view.known or {}).get(name)
            is_empty = status is None or (status.state == "draining" and not status.num_left)
            if is_empty or self.clock() - since >= self.target.drain_s:
                await self._end(name)
            elif name in drained_before - self._ending and status and status.state == "ready":
                await self.router.drain(name, DrainOrder(seconds=None))
                self.say(f"{name} is drained again: the router had forgotten it")

    def _least(self, candidates: Iterable[InstanceStatus]) -> InstanceStatus:
        """Who changes its role, or goes: where one has just changed it, that one goes."""
        return min(candidates, key=lambda one: (not self._is_old(one.instance_id), one.num_active))

    def _is_old(self, name: str) -> bool:
        return self._generations[name] < self.target.generation

    async def _replace(self, old: InstanceStatus, serving: Iterable[InstanceStatus]) -> None:
        """What it alone does, another one does from now on."""
        others = [one for one in serving if one is not old]
        if others and all(one.used_for != old.used_for for one in others):
            least = min(others, key=lambda one: one.num_active)
            await self._use(least, old.used_for if len(others) > 1 else "both")
        await self._drain(old, "to be replaced")

    async def _drain(self, one: InstanceStatus, why: str) -> None:
        self._leaving[one.instance_id] = self.clock()  # also where it is done and nobody hears so
        await self.router.drain(one.instance_id, DrainOrder(seconds=None))
        self.say(f"{one.instance_id} is drained, {why}")

    async def _end(self, name: str) -> None:
        if name not in self._ending:
            self._ending.add(name)
            await self.fleet.end(name)

    async def _start(self, view: View) -> None:
        """One at a time: who waits for a place says why, and the next one would wait as well."""
        have, ratio = view.count(), self.target.ratio
        staying = view.staying()
        pending = fill(have, len(staying) - have.total, ratio)
        job = next_role(have, pending, ratio, self.target.maximum)
        if job is None or any(one.phase is Phase.WAITING for one in staying):
            return
        stays = (n for n in self._leaving if n not in self._ending and not self._is_old(n))
        if back := next(stays, None):
            with contextlib.suppress(ConfigError):  # it is gone, or the router is away
                await self.router.undo_drain(back)
                del self._leaving[back]
                self.say(f"{back} stays")
        elif self.clock() >= self._starts_at:
            name = next(self._names)
            self.say(f"{name} asked for: {job}")
            self._generations[name] = self.target.generation
            await self.fleet.start(name)

    def _describe(self, view: View) -> FleetStatus:
        serving = {one.instance_id: one for one in view.serving()}
        engines = []
        for one in view.members.values():
            status = serving.get(one.name)
            state = one.phase.value if one.phase is not Phase.READY else "starting"
            known = (view.known or {}).get(one.name)
            is_drained = known is not None and known.state == "draining"
            if one.phase is Phase.READY and (is_drained or one.name in self._leaving):
                state = "draining"
            elif status:
                state = "serving"
            used_for = status.used_for if status else None
            engines.append(EngineStatus(one.name, state, used_for, one.node, one.note))
        waits = any(one.phase is Phase.WAITING for one in view.members.values())
        is_settled = (
            all(one.state == "serving" or (one.state == "waiting" and one.note) for one in engines)
            and (waits or len(serving) == self.target.maximum)
            and view.count() == split(len(serving), self.target.ratio)
            and not any(map(self._is_old, view.members))
        )
        step = self.status.step + 1 if self.status else 0
        return FleetStatus(self.target, tuple(engines), is_settled, step, self._held)

# SPDX-License-Identifier: Apache-2.0
"""Which engines compute prompts and which answer, where they can do both.

``decide`` says what one look at the engines asks for, and ``RolePatience`` when: what is asked
for steadily, and not soon after the last change. For the same work ``decide`` never asks for a
switch and later for the way back: by load it takes an engine only from a kind that is below ``LOW``
with one engine less, and gives it only to one that is above ``HIGH``, or above ``LOW`` if the other
one is idle. With a profile the planner's
model says which kind needs one more (``planned_roles``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from vllm_ascend_pd.registration import Role
    from vllm_ascend_pd.router.instances import Instance, Kind, Registry
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.planned_roles import PlannedRoles

    Needs = Callable[[Kind, float, float], bool]
    """Whether a kind with this load needs an engine more; the third: the other one's load with one
    less."""

KINDS: tuple[Kind, Kind] = ("prefill", "decode")
PROMPTS_AT_ONCE = 4
"""In progress on one engine: more of them wait for each other."""
HIGH = 1.0
LOW = 0.7
IDLE = 0.1
"""A kind that would have no more to do with one engine less gives it away sooner, at ``LOW``."""
HOLD_S = 8.0
"""So long the same is asked for, before it is done; seconds in which it is not are taken off."""
MAX_LOOK_S = 2.0
"""So long at most what a look asked for holds; the next one comes after a second or so."""
MAX_URGENCY = 3.0
"""By which seconds of much load count for more: every one costs requests."""
REST_S = 30.0
"""After a switch; what moves must move, and show in what engines tell of themselves."""
PLAN_S = 5.0
"""Between two looks of the planner's model."""


@dataclass(frozen=True, slots=True)
class EngineWork:
    """One engine that may be used now, as far as its role depends on it."""

    instance_id: str
    can: Role
    used_for: Role
    num_prompts: int
    """That it computes for others, or has in line."""
    fullness: float
    """Of its KV cache, 0 to 1; more where requests wait for it."""

    def does(self, kind: Kind) -> bool:
        return self.used_for in (kind, "both")

    def load(self, kind: Kind) -> float:
        return self.num_prompts / PROMPTS_AT_ONCE if kind == "prefill" else self.fullness

    @classmethod
    def of(cls, instance: Instance) -> EngineWork:
        role, told = instance.spec.role, instance.load
        # Who waits for a prompt that another engine computes does not wait for memory here.
        num_waiting = max(0.0, told.num_waiting - instance.num_awaiting)
        waiting = num_waiting / (told.num_running + num_waiting or 1)
        return cls(
            instance.instance_id,
            role,
            instance.used_for if role == "both" else role,
            instance.num_active - instance.num_decoding,
            told.kv_usage + waiting,
        )


@dataclass(frozen=True, slots=True)
class Switch:
    """An engine that is to be used for something else."""

    instance_id: str
    role: Role
    is_first: bool = False
    """It was used for both until now, so nothing is taken from anybody."""
    urgency: float = 1.0
    """How much there is to do, where an engine has enough with 1."""


def by_load(kind: Kind, load: float, left: float) -> bool:
    return left < LOW and load > (LOW if left < IDLE else HIGH)


def decide(engines: Sequence[EngineWork], needs: Needs = by_load) -> Switch | None:
    """One change that would help, of engines of one model."""
    for kind, other in (KINDS, KINDS[::-1]):
        spare = [one for one in engines if one.can == "both" and one.used_for == other]
        doing = [one for one in engines if one.does(kind)]
        giving = [one for one in engines if one.does(other)]
        if not spare or len(giving) < 2:
            continue
        least = min(spare, key=lambda one: (one.load(other), one.instance_id))
        if not doing:  # those who could do it do, see ``Selector``, until it is clear who shall
            return Switch(least.instance_id, kind)
        load = sum(one.load(kind) for one in doing) / len(doing)
        left = sum(one.load(other) for one in giving) / (len(giving) - 1)
        if needs(kind, load, left):
            return Switch(least.instance_id, kind, urgency=load / HIGH)
    undecided = sorted(one.instance_id for one in engines if one.used_for == "both")
    if len(engines) < 2 or not undecided:
        return None
    # Each does one thing only, so that prompts do not hold answers up.
    has_prefill = any(one.used_for == "prefill" for one in engines)
    return Switch(undecided[0], "decode" if has_prefill else "prefill", is_first=True)


@dataclass(slots=True)
class RolePatience:
    """Times are seconds of one clock."""

    before: Switch | None = None
    """What the last look asked for, which holds until this one."""
    role: Role | None = None
    asked_s: float = 0.0
    """So long that role has been asked for; ``HOLD_S`` is enough, however long a switch rests."""
    looked_at: float = 0.0
    rests_until: float = 0.0

    def take(self, switch: Switch | None, now: float) -> Switch | None:
        """What is to be done of what one look asks for."""
        passed_s, self.looked_at = min(now - self.looked_at, MAX_LOOK_S), now
        if self.before is None:
            self.asked_s = max(0.0, self.asked_s - passed_s)
        else:
            passed_s *= min(max(self.before.urgency, 1.0), MAX_URGENCY)
            self.asked_s = min(HOLD_S, self.asked_s + passed_s)
        self.before = None
        if switch is None or switch.is_first:
            return switch
        if switch.role != self.role:
            self.role, self.asked_s = switch.role, 0.0
        if now < self.rests_until or self.asked_s < HOLD_S:
            self.before = switch
            return None
        self.rests_until, self.role = now + REST_S, None
        return switch


def may_switch(instance: Instance) -> bool:
    """By itself: it can do both, and hands KV over. Who tells no fingerprint does not, as an engine
    of a pooling model does not."""
    return instance.spec.role == "both" and instance.told_fingerprint is not None


def role_obstacle(instances: Iterable[Instance], switching: Instance, role: Role) -> str | None:
    """Why an engine cannot be used for this role only."""
    name = switching.instance_id
    if role == "both":
        return None
    if switching.spec.role != "both":
        can = switching.spec.role
        return f"{name} can only {can}: start it with kv_role kv_both and router.role both"
    other: Kind = "decode" if role == "prefill" else "prefill"
    left = [one for one in instances if one is not switching and one.is_available]
    left = [one for one in left if EngineWork.of(one).does(other)]
    for model in switching.models or (None,):
        if not any(one.serves(model) for one in left):
            of_model = "" if model is None else f" of model {model!r}"
            return f"no engine for {other}{of_model} would be left without {name}"
    return None


@dataclass(slots=True)
class AutoRoles:
    """``--roles auto``. Event loop thread."""

    registry: Registry
    say: Callable[[str, str, dict[str, Any]], Awaitable[None]]
    """What an operator would say of an instance."""
    metrics: Metrics
    plan: PlannedRoles | None = None
    _planned: dict[tuple[str, ...], Needs] = field(default_factory=dict)
    _plans_at: float = 0.0
    _patience: dict[tuple[str, ...], RolePatience] = field(default_factory=dict)
    """By the models that engines serve."""

    async def look(self, now: float) -> None:
        """Called every second or so."""
        if self.plan is not None and now >= self._plans_at:
            self._planned = await self._look_ahead(self.plan, now)
            self._plans_at = now + PLAN_S
        engines = self._engines()
        self._patience = {models: self._patience.get(models, RolePatience()) for models in engines}
        for models, patience in self._patience.items():
            switch = patience.take(decide(engines[models], self._planned.get(models, by_load)), now)
            if switch is not None and (known := self.registry.get(switch.instance_id)) is not None:
                await self.say(switch.instance_id, known.spec.epoch, {"role": switch.role})
                self.metrics.add("role_switches", switch.role)

    def _engines(self) -> dict[tuple[str, ...], list[EngineWork]]:
        """That may be used now, by the models that they serve; of those that can do both, who may
        switch."""
        engines: dict[tuple[str, ...], list[EngineWork]] = {}
        for instance in self.registry:
            has_part = instance.spec.role != "both" or may_switch(instance)
            if instance.is_available and has_part:
                engines.setdefault(instance.models, []).append(EngineWork.of(instance))
        return engines

    async def _look_ahead(self, plan: PlannedRoles, now: float) -> dict[tuple[str, ...], Needs]:
        """For engines of the profile's model, if enough was asked of them lately."""
        asked = plan.requests(now)
        planned: dict[tuple[str, ...], Needs] = {}
        for models, works in self._engines().items():
            if asked is None or plan.model not in models:
                continue
            doing = {kind: [one for one in works if one.does(kind)] for kind in KINDS}
            does = {kind: len(doing[kind]) for kind in KINDS}
            movable = {kind: any(one.can == "both" for one in doing[kind]) for kind in KINDS}
            if min(does.values()) and sum(does.values()) == len(works):
                wanted = await asyncio.to_thread(plan.wanted, asked, does, movable)
                planned[models] = lambda kind, *_, wanted=wanted: kind == wanted
        return planned

# SPDX-License-Identifier: Apache-2.0
"""Which engines compute prompts and which answer, where they can do both.

``decide`` says what one look at the engines asks for, and ``Patience`` when to do it: what is asked
for steadily, and not soon after the last change. For the same work ``decide`` never asks for a
switch and later for the way back: it takes an engine only from a kind that is below ``LOW`` with
one engine less, and gives it only to one that is above ``HIGH``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from vllm_ascend_pd.registration import Role
    from vllm_ascend_pd.router.instances import Instance, Kind, Registry, Word
    from vllm_ascend_pd.router.metrics import Metrics

PROMPTS_AT_ONCE = 4
"""In progress on one engine: more of them wait for each other."""
HIGH = 1.0
LOW = 0.7
HOLD_S = 10.0
"""So long the same is asked for, before it is done."""
REST_S = 30.0
"""After a switch; what moves must move, and show in what engines tell of themselves."""


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
        waiting = told.num_waiting / (told.num_running + told.num_waiting or 1)
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


def decide(engines: Sequence[EngineWork]) -> Switch | None:
    """One change that would help, of engines of one model."""
    kinds: tuple[Kind, Kind] = ("prefill", "decode")
    for kind, other in (kinds, kinds[::-1]):
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
        if load > HIGH and left < LOW:
            return Switch(least.instance_id, kind)
    undecided = sorted(one.instance_id for one in engines if one.used_for == "both")
    if len(engines) < 2 or not undecided:
        return None
    # Each does one thing only, so that prompts do not hold answers up.
    has_prefill = any(one.used_for == "prefill" for one in engines)
    return Switch(undecided[0], "decode" if has_prefill else "prefill", is_first=True)


@dataclass(slots=True)
class Patience:
    """Times are seconds of one clock."""

    asked: Switch | None = None
    since: float = 0.0
    rests_until: float = 0.0

    def take(self, switch: Switch | None, now: float) -> Switch | None:
        """What is to be done of what one look asks for."""
        wanted = None if switch is None else switch.role
        if wanted != (self.asked.role if self.asked else None):
            self.since = now
        self.asked = switch
        if switch is None or switch.is_first:
            return switch
        if now < max(self.rests_until, self.since + HOLD_S):
            return None
        self.rests_until, self.asked = now + REST_S, None
        return switch


def role_obstacle(instances: Iterable[Instance], switching: Instance, role: Role) -> str | None:
    """Why an engine cannot be used for this role only."""
    name = switching.instance_id
    if role == "both":
        return None
    if switching.spec.role != "both":
        return f"{name} can only {switching.spec.role}: start it with kv_role kv_both"
    other: Kind = "decode" if role == "prefill" else "prefill"
    works = [EngineWork.of(one) for one in instances if one is not switching and one.is_available]
    if any(one.does(other) for one in works):
        return None
    return f"no engine for {other} would be left without {name}"


@dataclass(slots=True)
class AutoRoles:
    """``--roles auto``. Event loop thread."""

    registry: Registry
    say: Callable[[str, Word], Awaitable[None]]
    """What an operator would say of an instance."""
    metrics: Metrics
    _patience: dict[tuple[str, ...], Patience] = field(default_factory=dict)
    """By the models that engines serve."""

    async def look(self, now: float) -> None:
        """Called every second or so."""
        engines: dict[tuple[str, ...], list[EngineWork]] = {}
        for instance in self.registry:
            if instance.is_available:
                engines.setdefault(instance.models, []).append(EngineWork.of(instance))
        self._patience = {models: self._patience.get(models, Patience()) for models in engines}
        for models, patience in self._patience.items():
            switch = patience.take(decide(engines[models]), now)
            if switch is not None:
                word = self.registry.word(switch.instance_id)
                await self.say(switch.instance_id, replace(word, role=switch.role))
                self.metrics.add("role_switches", switch.role)

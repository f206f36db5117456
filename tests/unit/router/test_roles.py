# SPDX-License-Identifier: Apache-2.0
"""How many engines compute prompts and how many answer: over all small deployments and loads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.unit.router.test_many import registered, spec
from vllm_ascend_pd.registration import Role
from vllm_ascend_pd.router.metrics import Metrics
from vllm_ascend_pd.router.roles import (
    HIGH,
    HOLD_S,
    IDLE,
    LOW,
    MAX_URGENCY,
    PROMPTS_AT_ONCE,
    REST_S,
    AutoRoles,
    EngineWork,
    RolePatience,
    Switch,
    decide,
)

MAX_ENGINES = 5
WORK = (0.0, 0.3, 0.6, 0.9, 1.2, 2.0, 3.5, 6.0)
"""Of all engines together, in units of one engine that has just enough to do."""


def deployment(
    roles: tuple[Role, ...], prompts: float, answers: float, can: Role = "both"
) -> list[EngineWork]:
    """Work that is spread evenly over those who do it."""
    num_p = sum(role in ("prefill", "both") for role in roles) or 1
    num_d = sum(role in ("decode", "both") for role in roles) or 1
    return [
        EngineWork(
            f"e{i}",
            can,
            role,
            round(prompts * PROMPTS_AT_ONCE / num_p) if role != "decode" else 0,
            answers / num_d if role != "prefill" else 0.0,
        )
        for i, role in enumerate(roles)
    ]


def deployments() -> Iterator[tuple[tuple[Role, ...], float, float]]:
    kinds: tuple[Role, ...] = ("prefill", "decode", "both")
    for num in range(1, MAX_ENGINES + 1):
        for roles in itertools.combinations_with_replacement(kinds, num):
            for prompts, answers in itertools.product(WORK, WORK):
                yield roles, prompts, answers


def settled(roles: tuple[Role, ...], prompts: float, answers: float) -> tuple[Role, ...]:
    """After all switches that the same work asks for; they must end."""
    for _ in range(2 * MAX_ENGINES):
        switch = decide(deployment(roles, prompts, answers))
        if switch is None:
            return roles
        index = int(switch.instance_id[1:])
        assert roles[index] != switch.role
        roles = (*roles[:index], switch.role, *roles[index + 1 :])
    raise AssertionError((roles, prompts, answers))


def test_the_same_work_comes_to_rest_with_engines_of_both_kinds() -> None:
    for roles, prompts, answers in deployments():
        last = settled(roles, prompts, answers)
        if len(roles) == 1:
            assert last == roles
        else:
            assert {"prefill", "decode"} == set(last), (roles, prompts, answers)


def test_no_switch_takes_the_last_of_a_kind() -> None:
    for roles, prompts, answers in deployments():
        switch = decide(deployment(roles, prompts, answers))
        if switch is None:
            continue
        other = "decode" if switch.role == "prefill" else "prefill"
        index = int(switch.instance_id[1:])
        left = [role for i, role in enumerate(roles) if i != index]
        assert any(role in (other, "both") for role in left)


def test_an_engine_goes_where_too_much_waits_and_is_spared_where_little_does() -> None:
    for roles, prompts, answers in deployments():
        engines = deployment(roles, prompts, answers)
        switch = decide(engines)
        if switch is None or switch.is_first:
            continue
        kind = "prefill" if switch.role == "prefill" else "decode"
        other = "decode" if kind == "prefill" else "prefill"
        doing = [one.load(kind) for one in engines if one.does(kind)]
        if not doing:
            continue
        giving = [one.load(other) for one in engines if one.does(other)]
        left = sum(giving) / (len(giving) - 1)
        assert left < LOW
        assert sum(doing) / len(doing) > (LOW if left < IDLE else HIGH)


def test_an_engine_with_nothing_to_do_goes_before_others_have_too_much() -> None:
    roles: tuple[Role, ...] = ("prefill", "prefill", "decode")
    switch = decide(deployment(roles, 0.0, (LOW + HIGH) / 2))
    assert switch is not None
    assert switch.role == "decode"
    assert decide(deployment(roles, 1.0, (LOW + HIGH) / 2)) is None
    assert decide(deployment(roles, 0.0, LOW - 0.1)) is None


def test_what_an_engine_cannot_do_nobody_asks_for() -> None:
    kinds: tuple[Role, ...] = ("prefill", "decode")
    for roles in itertools.product(kinds, repeat=3):
        for prompts, answers in itertools.product(WORK, WORK):
            engines = [
                replace(one, can=one.used_for) for one in deployment(roles, prompts, answers)
            ]
            assert decide(engines) is None


def test_a_kind_that_is_gone_is_given_to_one_of_the_others() -> None:
    kinds: tuple[tuple[Role, Role], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for num in range(2, MAX_ENGINES + 1):
        for role, other in kinds:
            assert decide(deployment((role,) * num, 6.0, 6.0)) == Switch("e0", other)


def switched_after(asks: Callable[[float], Switch | None], patience: RolePatience) -> float:
    """By looks once a second from now on; so long there must be a switch."""
    begun = patience.looked_at
    return next(s for s in range(1000) if patience.take(asks(begun + s), begun + s) is not None)


def looks(
    patience: RolePatience, asks: Switch | None, seconds: float, later: float = 0.0
) -> list[Switch]:
    """What is done by looks once a second, after so long without one."""
    begun, done = patience.looked_at + later, []
    for s in range(1, int(seconds) + 1):
        if (switch := patience.take(asks, begun + s)) is not None:
            done.append(switch)
    return done


def test_a_switch_waits_until_it_is_asked_for_steadily_and_rests_then() -> None:
    patience, wanted, back = RolePatience(), Switch("e0", "prefill"), Switch("e1", "decode")
    assert not looks(patience, wanted, HOLD_S)
    assert not looks(patience, None, 1)  # it was a moment
    assert not looks(patience, wanted, 1)
    assert not looks(patience, back, 1)  # the other way: from the start
    other = replace(back, instance_id="e2")
    assert not looks(patience, other, HOLD_S - 1)
    assert looks(patience, back, 1) == [back]
    assert not looks(patience, wanted, REST_S - 1)
    assert looks(patience, wanted, 1) == [wanted]
    assert looks(patience, wanted, REST_S) == [wanted]


def test_what_was_asked_for_while_a_switch_rests_is_not_owed_for_ever() -> None:
    patience, wanted = RolePatience(), Switch("e0", "prefill")
    assert looks(patience, wanted, HOLD_S + 1) == [wanted]
    assert not looks(patience, wanted, REST_S - HOLD_S)
    assert not looks(patience, None, HOLD_S)
    assert not looks(patience, wanted, HOLD_S)
    assert looks(patience, wanted, 1) == [wanted]


def test_the_first_look_that_asks_says_nothing_of_the_time_before() -> None:
    patience, wanted = RolePatience(), Switch("e0", "prefill")
    assert not looks(patience, wanted, HOLD_S)
    assert not looks(patience, None, 1)
    assert not looks(patience, wanted, 1, later=100)
    assert looks(patience, wanted, 2) == [wanted]


def test_time_in_which_nobody_looked_is_not_asked_for_all_of_it() -> None:
    patience, wanted = RolePatience(), Switch("e0", "prefill")
    assert not looks(patience, wanted, HOLD_S / 2)
    assert not looks(patience, wanted, 1, later=100)
    assert looks(patience, wanted, HOLD_S / 2) == [wanted]


def test_a_moment_without_need_does_not_make_a_switch_wait_from_the_start() -> None:
    wanted = Switch("e0", "prefill")
    steadily = switched_after(lambda _: wanted, RolePatience())
    with_gaps = switched_after(lambda now: wanted if now % 4 else None, RolePatience())
    assert steadily == HOLD_S
    assert steadily < with_gaps <= 2 * HOLD_S + 2
    patience = RolePatience()
    for now in range(1000):  # as often as not: never
        assert patience.take(wanted if now % 2 else None, now) is None


def test_the_more_there_is_to_do_the_sooner_a_switch_comes() -> None:
    waits = [
        switched_after(lambda _, n=n: Switch("e0", "prefill", urgency=n), RolePatience())
        for n in (0.0, 1.0, 2.0, 10.0)
    ]
    assert waits[0] == waits[1] == HOLD_S
    assert waits == sorted(waits, reverse=True)
    assert waits[2] == HOLD_S / 2
    assert waits[3] >= HOLD_S / MAX_URGENCY


def test_load_says_how_urgent_it_is() -> None:
    for load in (1.5, 4.0):
        switch = decide(deployment(("prefill", "decode", "decode"), load, 0.0))
        assert switch is not None
        assert switch.urgency == load / HIGH


def test_engines_that_were_used_for_both_are_told_apart_at_once() -> None:
    patience, first = RolePatience(), Switch("e0", "prefill", is_first=True)
    assert patience.take(first, 0.0) == first
    assert patience.take(Switch("e1", "decode", is_first=True), 0.0) is not None


def test_with_a_plan_the_wanted_kind_gets_the_engine_that_has_least_to_do() -> None:
    for roles, prompts, answers in deployments():
        engines = deployment(roles, prompts, answers)
        if "both" in roles or len(set(roles)) < 2:
            continue
        for kind, other in itertools.permutations(("prefill", "decode")):
            switch = decide(engines, lambda needs, *_, kind=kind: needs == kind)
            givers = [one for one in engines if one.used_for == other]
            if len(givers) < 2:
                assert switch is None
            else:
                assert switch is not None
                assert switch.role == kind
                least = min(givers, key=lambda one: one.load(other))
                assert switch.instance_id == least.instance_id
        assert decide(engines, lambda *_: False) is None


def test_engines_that_hand_nothing_over_keep_their_roles() -> None:
    """Two of a pooling model, which tell no fingerprint, beside two that can do both."""
    told: list[tuple[str, Role]] = []

    async def say(name: str, epoch: str, changes: dict[str, Any]) -> None:
        told.append((name, changes["role"]))

    pooling = {"models": ("embedder",), "fingerprint": None}
    registry = registered(spec(1), spec(2), spec(3, **pooling), spec(4, **pooling))
    metrics = Metrics(lambda: registry, dict, dict, 60)
    asyncio.run(AutoRoles(registry, say, metrics).look(0.0))
    assert told == [("e1", "prefill")]

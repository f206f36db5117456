# SPDX-License-Identifier: Apache-2.0
"""The reconciler over a fleet without engines, and a router that believes what it is told."""

from __future__ import annotations

from itertools import product
from random import Random

import msgspec
import pytest

from vllm_ascend_pd.cluster.operator import RouterAway
from vllm_ascend_pd.cluster.scaling.fleet import Phase
from vllm_ascend_pd.cluster.scaling.fleet_status import FleetStatus
from vllm_ascend_pd.cluster.scaling.reconciler import FirstStartError, Reconciler
from vllm_ascend_pd.cluster.scaling.target import DRAIN_S, Counts, Ratio, Target, split
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import DrainOrder, InstanceStatus, Role
from vllm_ascend_pd.testing.fake_fleet import FakeFleet


class RouterOfFleet:
    """Knows every engine that is up, what it is told of them, and what a test says they do."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.is_away = False
        self.roles: dict[str, Role] = {}
        self.draining: set[str] = set()
        self.num_active: dict[str, int] = {}
        self.num_admitted: dict[str, int] = {}
        self.unhealthy: set[str] = set()

    def status(self, name: str) -> InstanceStatus:
        active = self.num_active.get(name, 0)
        used_for = self.roles.get(name, "both")
        return InstanceStatus(
            instance_id=name,
            url="http://127.0.0.1:1",
            role="both",
            used_for=used_for,
            num_decoding=active if used_for != "prefill" else 0,
            state="draining" if name in self.draining else "ready",
            healthy=name not in self.unhealthy,
            source="registered",
            models=(),
            num_active=active,
            num_admitted=self.num_admitted.get(name, 0),
        )

    async def instances(self) -> list[InstanceStatus]:
        if self.is_away:
            raise RouterAway("no router answers")
        members = self.fleet.members.values()
        return [self.status(one.name) for one in members if one.phase is Phase.READY]

    async def use_for(self, instance_id: str, role: Role) -> None:
        others = [one for one in await self.instances() if one.instance_id != instance_id]
        if role != "both" and not any(one.used_for in ("both", _other(role)) for one in others):
            raise ConfigError(f"409: no engine for {_other(role)} would be left")
        self.roles[instance_id] = role

    async def drain(self, instance_id: str, order: DrainOrder) -> None:
        assert order.seconds is None
        self.draining.add(instance_id)

    async def undo_drain(self, instance_id: str) -> None:
        self.draining.discard(instance_id)


def _other(role: Role) -> Role:
    return "decode" if role == "prefill" else "prefill"


class World:
    def __init__(self, ratio: str = "1:2", maximum: int = 3, **nodes: int) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.fleet = FakeFleet(nodes)
        self.router = RouterOfFleet(self.fleet)
        target = Target(Ratio.parse(ratio), maximum)
        self.reconciler = Reconciler(
            self.fleet, self.router, target, lambda: self.now, self.lines.append
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 1
            with pytest.raises(StopIteration):  # nothing in this world waits
                self.reconciler.step().send(None)
            have = self.have
            if have.total > 1:
                assert min(have) > 0, self.lines

    def until_settled(self, patience: int = 400) -> Counts:
        for _ in range(patience):
            self.step()
            if self.status.is_settled:
                return self.have
        raise AssertionError(self.lines)

    @property
    def status(self) -> FleetStatus:
        assert self.reconciler.status is not None
        return self.reconciler.status

    @property
    def have(self) -> Counts:
        """By what the router was told."""
        members = self.fleet.members.values()
        names = [one.name for one in members if one.phase is Phase.READY]
        roles = [self.router.roles.get(n) for n in names if n not in self.router.draining]
        return Counts(roles.count("prefill"), roles.count("decode"))

    def of(self, role: Role) -> list[str]:
        return [one.name for one in self.status.engines if one.used_for == role]

    def aim(self, ratio: str, maximum: int) -> None:
        generation = self.reconciler.target.generation
        self.reconciler.target = Target(Ratio.parse(ratio), maximum, generation)

    def renew(self) -> None:
        target = self.reconciler.target
        generation = target.generation + 1
        self.reconciler.target = msgspec.structs.replace(target, generation=generation)


@pytest.mark.parametrize("ratio", ["1:1", "1:2", "3:1", "2:5"])
def test_the_ratio_is_reached_with_the_engines_that_have_room(ratio: str) -> None:
    for room, maximum in product(range(2, 7), range(2, 7)):
        world = World(ratio, maximum, a=room)
        assert world.until_settled() == split(min(room, maximum), Ratio.parse(ratio))


def test_what_has_no_room_waits_and_says_why() -> None:
    world = World("1:2", 3, a=2)
    world.until_settled()
    world.step(5)
    assert world.have == (1, 1)
    assert [one.state for one in world.status.engines] == ["serving", "serving", "waiting"]
    assert world.status.lines() == [
        "1 P and 1 D serve; wanted are 1:2, 3 engines at most",
        "engine-2 waiting: no room on ['a']",
    ]
    world.fleet.nodes["b"] = 1
    assert world.until_settled() == (1, 2)
    assert world.status.engines[-1].node == "b"


def test_one_engine_alone_does_both() -> None:
    world = World("1:2", 3, a=1)
    world.step(5)
    assert world.router.roles.get("engine-0", "both") == "both"
    world.fleet.nodes["b"] = 1
    world.router.num_active["engine-0"] = 4
    world.until_settled()
    # What has answers in progress goes on answering.
    assert world.router.roles == {"engine-0": "decode", "engine-1": "prefill"}
    world.fleet.remove_node("b")
    world.step(3)
    assert world.router.roles["engine-0"] == "both"


def test_the_last_of_a_role_dies_and_another_takes_it_before_the_next_is_up() -> None:
    world = World("1:2", 3, a=3)
    world.until_settled()
    (prefill,) = world.of("prefill")
    world.fleet.comes_up = False
    world.fleet.kill(prefill)
    world.step(2)
    assert world.have == (1, 1)
    world.fleet.comes_up = True
    assert world.until_settled() == (1, 2)
    assert "engine-3 asked for: decode" in world.lines


def test_a_node_that_is_lost_leaves_the_nearest_ratio_and_its_engines_come_back() -> None:
    world = World("1:1", 4, a=2, b=2)
    assert world.until_settled() == (2, 2)
    world.fleet.remove_node("b")
    world.step()
    assert world.until_settled() == (1, 1)
    world.fleet.nodes["c"] = 2
    world.step()
    assert world.until_settled() == (2, 2)


def test_an_engine_that_the_router_cannot_reach_does_not_count_for_its_role() -> None:
    world = World("1:2", 3, a=3)
    world.until_settled()
    (prefill,) = world.of("prefill")
    world.router.unhealthy.add(prefill)
    world.step(2)
    assert sorted(role for name, role in world.router.roles.items() if name != prefill) == [
        *("decode", "prefill")
    ]


def test_a_new_ratio_is_reached_by_switches_alone() -> None:
    world = World("1:2", 6, a=6)
    assert world.until_settled() == (2, 4)
    names = {one.name for one in world.status.engines}
    busy, *_ = world.of("decode")
    world.router.num_active[busy] = 9
    world.aim("2:1", 6)
    world.step()
    assert world.until_settled() == (4, 2)
    assert {one.name for one in world.status.engines} == names
    assert world.router.roles[busy] == "decode"


@pytest.mark.parametrize("counted", ["num_active", "num_admitted"])
def test_what_goes_is_drained_and_ends_when_it_is_empty(counted: str) -> None:
    world = World("1:1", 4, a=4)
    world.until_settled()
    setattr(world.router, counted, {one.name: 1 for one in world.status.engines})
    world.aim("1:1", 2)
    world.step(20)
    leaving = [one.name for one in world.status.engines if one.state == "draining"]
    assert len(leaving) == 2
    assert world.router.draining == set(leaving)
    assert len(world.fleet.members) == 4
    assert not world.status.is_settled
    setattr(world.router, counted, {})
    assert world.until_settled() == (1, 1)
    assert not set(leaving) & set(world.fleet.members)


def one_of_three_leaves() -> tuple[World, str]:
    """It is drained, and has requests."""
    world = World("1:1", 3, a=3)
    world.until_settled()
    world.router.num_active = {one.name: 1 for one in world.status.engines}
    world.aim("1:1", 2)
    world.step(3)
    (name,) = world.router.draining
    return world, name


def test_what_goes_is_drained_again_by_a_router_that_has_forgotten_it() -> None:
    world, name = one_of_three_leaves()
    assert not any("drained again" in line for line in world.lines)
    world.router.draining.clear()
    world.step(3)
    assert world.router.draining == {name}
    assert sum("drained again" in line for line in world.lines) == 1
    world.router.num_active = {}
    assert world.until_settled() == (1, 1)
    assert name not in world.fleet.members


@pytest.mark.parametrize("room", [3, 4])
def test_a_new_generation_takes_the_place_of_every_engine_one_after_another(room: int) -> None:
    world = World("1:2", 3, a=room)
    world.until_settled()
    before = {one.name for one in world.status.engines}
    world.renew()
    while before & {one.name for one in world.status.engines}:
        world.step()
        assert world.have.total >= 2, world.lines
        assert world.now < 200, world.lines
    assert world.until_settled() == Counts(1, 2)
    assert len([line for line in world.lines if line.endswith("is drained, to be replaced")]) == 3
    assert {one.name for one in world.status.engines} == {"engine-3", "engine-4", "engine-5"}


@pytest.mark.parametrize("error", [RouterAway("no answer"), ConfigError("500: no answer")])
@pytest.mark.parametrize("is_done", [False, True])
def test_a_drain_whose_answer_is_lost_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch, is_done: bool, error: ConfigError
) -> None:
    world = World("1:1", 3, a=3)
    world.until_settled()
    before = {one.name for one in world.status.engines}
    drain, num_lost = world.router.drain, 0

    async def lost(instance_id: str, order: DrainOrder) -> None:
        nonlocal num_lost
        if is_done or num_lost:
            await drain(instance_id, order)
        num_lost += 1
        if num_lost == 1:
            raise error

    monkeypatch.setattr(world.router, "drain", lost)
    world.renew()
    while before & {one.name for one in world.status.engines}:
        world.step()
        assert world.now < 200, world.lines
    assert world.until_settled().total == 3
    assert not world.router.draining & world.fleet.members.keys()


def test_an_old_generation_goes_only_while_as_many_serve_as_before() -> None:
    world = World("1:1", 4, a=3)  # one more waits for room, with it and without
    world.until_settled()
    world.renew()
    world.step()
    assert world.have.total == 2
    world.fleet.nodes["a"] = 2  # another one took the place
    for _ in range(20):
        world.step()
        assert world.have.total == 2
    world.fleet.nodes["a"] = 3
    assert world.until_settled() == Counts(2, 1)
    names = {one.name for one in world.status.engines if one.state == "serving"}
    assert not names & {"engine-0", "engine-1", "engine-2"}


@pytest.mark.parametrize("num_good", [0, 2])
@pytest.mark.parametrize("room", [8, 7])
def test_a_new_generation_that_does_not_come_up_takes_one_engine_only(
    num_good: int, room: int
) -> None:
    world = World("1:1", 8, a=room)
    world.until_settled()
    before = {one.name for one in world.status.engines if one.state == "serving"}
    world.renew()
    num_up = 0

    def step_with_failures() -> None:
        nonlocal num_up
        for one in list(world.fleet.members.values()):
            if one.phase is Phase.STARTING and one.name not in before:
                num_up += 1
                if num_up > num_good:
                    world.fleet.kill(one.name, "exited with code 1")
        world.step()

    for _ in range(600):
        step_with_failures()
        assert world.have.total >= room - 1, world.lines
    names = {one.name for one in world.status.engines if one.state == "serving"}
    assert len(names & before) == room - num_good - 1
    assert not world.status.is_settled
    (told,) = [line for line in world.lines if "did not come up" in line]
    assert "(exited with code 1): engines of before stay until one does" in told
    assert world.status.lines()[-1] == told
    num_good = 1000
    for _ in range(400):
        step_with_failures()
    names = {one.name for one in world.status.engines if one.state == "serving"}
    assert not names & before
    assert len(names) == room
    assert not world.status.held


@pytest.mark.parametrize("room", [8, 7])
def test_a_new_generation_that_ends_at_its_first_requests_takes_one_engine_only(room: int) -> None:
    world = World("1:1", 8, a=room)
    world.until_settled()
    before = {one.name for one in world.status.engines if one.state == "serving"}
    world.renew()

    up_since: dict[str, float] = {}

    def step(lasts_s: float) -> None:
        for one in list(world.fleet.members.values()):
            if one.phase is not Phase.READY or one.name in before:
                continue
            if up_since.setdefault(one.name, world.now) + lasts_s <= world.now:
                world.fleet.kill(one.name)
        world.step()

    for _ in range(600):
        step(lasts_s=3)
        assert len(before & set(world.fleet.members)) >= room - 1, world.lines
    assert len(before & set(world.fleet.members)) == room - 1
    (told,) = [line for line in world.lines if "did not stay up" in line]
    assert "(killed by SIGKILL): engines of before stay until one does" in told
    assert world.status.held == told
    assert 10 <= sum("asked for" in line for line in world.lines) - room <= 40  # more slowly
    for _ in range(400):
        step(lasts_s=1000)
    assert not before & set(world.fleet.members)
    assert (world.have.total, world.status.held) == (room, "")


def test_what_ends_soon_of_before_a_restart_holds_nothing() -> None:
    world = World("1:1", 3, a=3)
    world.until_settled()
    world.renew()
    world.fleet.kill("engine-0")
    world.step()
    assert not world.status.held
    world.until_settled()


def test_who_is_too_many_and_has_requests_is_drained_although_nobody_sends_it_more() -> None:
    """As one that an operator has drained."""
    world = World("1:1", 3, a=3)
    world.until_settled()
    world.router.draining.add("engine-0")
    world.router.num_active["engine-0"] = 1
    world.aim("1:1", 2)
    world.step(20)
    assert world.fleet.members["engine-0"].phase is Phase.READY
    world.router.num_active.clear()
    assert world.until_settled() == (1, 1)
    assert "engine-0" not in world.fleet.members


def test_who_is_too_many_in_a_restart_is_one_of_before() -> None:
    world = World("1:1", 4, a=4)
    world.until_settled()
    world.renew()
    while not any(line.startswith("engine-4 is used for") for line in world.lines):
        world.step()
    world.router.num_active = {f"engine-{number}": 5 for number in range(4)}
    world.aim("1:1", 2)
    world.step(2)
    assert "engine-4" not in world.router.draining
    world.router.num_active.clear()
    world.until_settled()
    assert "engine-4" in world.fleet.members


def test_what_did_not_come_up_before_a_restart_or_is_wanted_no_more_holds_nothing() -> None:
    world = World("1:1", 3, a=4)
    world.until_settled()
    first = {one.name for one in world.status.engines}
    world.aim("1:1", 4)
    for wanted in (4, 3):  # the fourth never comes up, and then nobody wants it
        world.aim("1:1", wanted)
        for _ in range(50):
            for one in list(world.fleet.members.values()):
                if one.phase is Phase.STARTING and one.name not in first:
                    world.fleet.kill(one.name, "exited with code 1")
            world.step()
    assert world.until_settled().total == 3
    world.renew()
    world.until_settled()
    second = {one.name for one in world.status.engines}
    assert not first & second

    world.renew()
    for _ in range(50):
        for one in list(world.fleet.members.values()):
            if one.phase is Phase.STARTING:
                world.fleet.kill(one.name, "exited with code 1")
        world.step()
    assert world.have.total == 2
    assert world.status.held
    world.aim("1:1", 2)
    world.until_settled()
    assert not second & {one.name for one in world.status.engines}


@pytest.mark.parametrize("drain_s", [600.0, 60.0])
def test_requests_that_never_end_hold_an_engine_for_so_long_only(drain_s: float) -> None:
    world = World("1:1", 3, a=3)
    world.until_settled()
    world.router.num_active = {one.name: 1 for one in world.status.engines}
    world.reconciler.target = Target(Ratio(1, 1), 2, drain_s=drain_s)
    since = world.now
    world.step()
    world.step(20)
    assert len(world.fleet.members) == 3
    world.now = since + drain_s - 2
    world.step()
    assert len(world.fleet.members) == 3
    world.now += 2
    assert world.until_settled() == (1, 1)


def test_an_engine_that_is_wanted_again_stays() -> None:
    world, name = one_of_three_leaves()
    world.aim("1:1", 3)
    world.step()
    assert f"{name} stays" in world.lines
    world.until_settled()
    assert not world.router.draining
    assert "engine-3" not in "".join(world.lines)


def test_without_a_router_engines_are_replaced_and_nobody_is_stopped() -> None:
    world = World("1:2", 3, a=3)
    world.until_settled()
    world.router.is_away = True
    world.aim("1:2", 2)
    world.step(5)
    assert len(world.fleet.members) == 3
    world.aim("1:2", 3)
    world.fleet.kill("engine-1")
    world.step(5)
    assert "engine-3" in world.fleet.members
    world.router.is_away = False
    assert world.until_settled() == (1, 2)


def test_the_first_engine_that_ends_before_any_was_up_ends_it_all() -> None:
    world = World(a=2)
    world.fleet.comes_up = False
    world.step(2)
    world.fleet.kill("engine-0", "exited with code 2")
    with pytest.raises(FirstStartError, match=r"engine-0 did not come up: exited with code 2"):
        world.step()


def test_a_node_that_is_lost_before_any_engine_was_up_is_no_wrong_option() -> None:
    world = World("1:1", 2, a=2, b=2)
    world.fleet.comes_up = False
    world.step(2)
    world.fleet.remove_node("a")
    world.fleet.comes_up = True
    assert world.until_settled() == (1, 1)


def test_engines_that_fail_are_asked_for_more_and_more_slowly() -> None:
    world = World("1:1", 3, a=3)
    world.until_settled()
    world.fleet.comes_up = False
    world.fleet.kill("engine-2")
    for _ in range(100):
        world.step()
        for one in list(world.fleet.members.values()):
            if one.phase is Phase.STARTING:
                world.fleet.kill(one.name, "exited with code 1")
    assert 6 <= sum("asked for" in line for line in world.lines) - 3 <= 10


def test_a_status_is_one_for_another_process() -> None:
    world = World(a=3)
    world.until_settled()
    body = msgspec.json.encode(world.status)
    assert msgspec.json.decode(body, type=FleetStatus) == world.status


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_the_nearest_ratio_is_reached(seed: int) -> None:
    random = Random(seed)
    world = World("1:2", 4, a=3, b=2)
    world.until_settled()
    for number in range(40):
        nodes, ready = world.fleet.nodes, [one.name for one in world.status.engines]
        match random.randrange(7):
            case 0:
                nodes[f"n{number}"] = random.randint(1, 3)
            case 1 if len(nodes) > 1 and sum(nodes.values()) > 4:
                world.fleet.remove_node(random.choice(list(nodes)))
            case 2 if ready:
                name = random.choice(ready)
                if world.fleet.members[name].phase is Phase.READY:
                    world.fleet.kill(name)
            case 3:
                world.aim(f"{random.randint(1, 3)}:{random.randint(1, 3)}", random.randint(2, 7))
            case 4:
                world.router.num_active = {name: random.randint(0, 3) for name in ready}
            case 5:
                world.renew()
        world.step(random.randint(1, 3))
    world.router.num_active = {}
    world.now += DRAIN_S
    world.step()
    target = world.reconciler.target
    room = min(sum(world.fleet.nodes.values()), target.maximum)
    assert world.until_settled() == split(room, target.ratio)

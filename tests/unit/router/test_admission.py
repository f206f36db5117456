# SPDX-License-Identifier: Apache-2.0
"""The line of those for whom no engine has room: who is asked for, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.router.admission import Admission, Admitted, Outcome
from vllm_ascend_pd.router.config import Queueing
from vllm_ascend_pd.router.instances import Instance, Registry
from vllm_ascend_pd.router.metrics import Metrics
from vllm_ascend_pd.router.policies import Routed, make_policy
from vllm_ascend_pd.router.policies.base import Pair
from vllm_ascend_pd.router.selection import Full, Labels, Selector, Unavailable
from vllm_ascend_pd.router.stored import new_response_id
from vllm_ascend_pd.router.tenants import Quota, Tenant


class Counting(Selector):
    num_asked = 0

    def choose(self, request: Routed) -> Pair | Unavailable | Full:
        self.num_asked += 1
        return super().choose(request)


@dataclass
class Line:
    """Engines that have one request each, and those that wait."""

    engines: list[Instance]
    selector: Counting
    admission: Admission
    came: list[str] = field(default_factory=list)
    """Names of those that were admitted."""
    tasks: list[asyncio.Task[Outcome]] = field(default_factory=list)

    async def wait(self, name: str, *, again: bool = False, **wanted: Any) -> None:
        routed = Routed(100, 16, **{"model": "m", "alone": "test", **wanted})

        async def admit() -> Outcome:
            outcome = await self.admission.admit(routed, again=again)
            if isinstance(outcome, Admitted):
                self.came.append(f"{name} {outcome.pair.decode.instance_id}")
            return outcome

        self.tasks.append(asyncio.ensure_future(admit()))
        await asyncio.sleep(0)

    async def end_one(self, *engines: Instance) -> None:
        """Of each of these."""
        for engine in engines:
            engine.num_admitted -= 1
        self.admission.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def run(test: Callable[[Line], Coroutine[Any, Any, None]], num_engines: int = 3) -> None:
    async def in_line() -> None:
        made = iter([instance(f"e{i}", "f") for i in range(num_engines)])
        registry = Registry(lambda spec: next(made))
        for i in range(num_engines):
            registry.put(instance(f"e{i}", "f").spec)
        engines = list(registry)
        for one in engines:
            one.models, one.num_admitted = ("m",), 1
        selector = Counting(registry, make_policy("least-loaded"), Labels(), max_requests=1)
        metrics = Metrics(lambda: registry, dict, dict, 60)
        line = Line(engines, selector, Admission(selector, Queueing(1, 1000, 60), metrics))
        try:
            await test(line)
        finally:
            for task in line.tasks:
                task.cancel()
            await asyncio.gather(*line.tasks, return_exceptions=True)
        assert line.admission.num_queued == 0

    asyncio.run(in_line())


def test_streams_of_an_engine_that_died_do_not_ask_for_each_other() -> None:
    async def test(line: Line) -> None:
        dead, num_streams = line.engines[0], 200
        for i in range(num_streams):
            await line.wait(f"{i}", again=True, excluded={dead})
        assert line.admission.num_queued == num_streams
        assert line.selector.num_asked < 3 * num_streams  # two each, and looks as time passes
        before = line.selector.num_asked
        line.admission.look()
        assert line.selector.num_asked == before + 1

    run(test)


def test_who_leaves_as_there_is_room_gives_it_back() -> None:
    async def test(line: Line) -> None:
        engine = line.engines[0]
        await line.wait("a", target=engine)
        engine.num_admitted -= 1
        line.admission.look()
        assert engine.num_admitted == 1
        line.tasks[0].cancel()
        await asyncio.wait(line.tasks)
        assert (engine.num_admitted, line.came) == (0, [])

    run(test)


def test_those_who_wait_for_different_engines_come_in_order_of_their_turns() -> None:
    async def test(line: Line) -> None:
        first, second, third = line.engines
        await line.wait("a", excluded={first})
        await line.wait("b")
        await line.wait("c", excluded={first})
        await line.wait("d", target=third)
        await line.wait("e", previous_response=new_response_id("e0"))
        await line.wait("f", again=True, excluded={first, second})
        await line.end_one(second)
        await line.end_one(third)
        await line.end_one(first)
        assert line.came == ["a e1", "f e2", "b e0"]
        line.came.clear()
        await line.end_one(first, third)
        assert line.came == ["c e2", "e e0"]
        await line.end_one(third)
        assert line.came[2:] == ["d e2"]

    run(test)


def test_who_waits_for_one_engine_keeps_nobody_from_others() -> None:
    async def test(line: Line) -> None:
        first, second, _ = line.engines
        await line.wait("a", target=first)
        await line.wait("b")
        await line.end_one(second)
        assert line.came == ["b e1"]

    run(test)


def test_priority_counts_among_those_who_wait_for_different_engines() -> None:
    async def test(line: Line) -> None:
        first, second, _ = line.engines
        low, high = (Tenant(f"{i}", Quota(priority=i), 1, lambda: 0.0) for i in range(2))
        await line.wait("a", tenant=low, excluded={first})
        await line.wait("b", tenant=low)
        await line.wait("c", tenant=high, excluded={first})
        await line.wait("d", tenant=high)
        for _ in range(4):
            await line.end_one(second)
        assert line.came == ["c e1", "d e1", "a e1", "b e1"]

    run(test)


def test_who_waits_for_an_engine_that_is_not_known_yet_keeps_nobody_from_others() -> None:
    """A router that has just started may know the engine of a response later."""

    async def test(line: Line) -> None:
        first, *others = line.engines
        registry = line.selector.registry
        registry.remove("e0", "it has not registered yet")
        await line.wait("a", previous_response=new_response_id("e0"))
        await line.wait("b")
        registry.make = lambda spec: first
        registry.put(first.spec)
        await line.end_one(*others)
        assert [name[0] for name in line.came] == ["b"]
        await line.end_one(first)
        assert line.came[-1] == "a e0"

    run(test)


def test_lines_for_models_of_the_same_engines_are_looked_at_as_one() -> None:
    async def test(line: Line) -> None:
        names = [f"adapter-{i}" for i in range(50)]
        first, *others = line.engines
        for one in others:
            one.models = tuple(names)
        first.models = ("alone", *names)
        await line.wait("alone", model="alone")
        for name in names:
            await line.wait(name, model=name)
        before = line.selector.num_asked
        line.admission.look()
        assert line.selector.num_asked == before + 2
        await line.end_one(others[0])
        assert line.came == ["adapter-0 e1"]
        await line.end_one(first)
        assert line.came[1:] == ["alone e0"]
        await line.end_one(first, others[1])
        assert sorted(one.split()[0] for one in line.came[2:]) == names[1:3]

    run(test)

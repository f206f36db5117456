# SPDX-License-Identifier: Apache-2.0
"""What a fleet makes of errors that Ray answers with. Ray is not connected; fleets on real raylets
are in the contract's tests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import exceptions

from tests.clock import Clock
from vllm_ascend_pd.cluster.scaling import ray_fleet
from vllm_ascend_pd.cluster.scaling.fleet import Phase
from vllm_ascend_pd.cluster.scaling.keeper import KeeperReport
from vllm_ascend_pd.cluster.scaling.ray_fleet import RayFleet, _Engine

READY = KeeperReport("ready")


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actors of fleets whose engines answer at once."""
    names: list[str] = []

    def get(answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "kill", lambda actor: names.append(actor.name))
    monkeypatch.setattr(ray.util, "remove_placement_group", lambda group: None)
    monkeypatch.setattr(ray_fleet, "_settle", lambda groups: None)
    return names


def fleet(**answers: Any) -> RayFleet:
    """Engines that were ready, and what their actors answer."""
    made = RayFleet({"CPU": 1.0}, lambda *_: pytest.fail("all run"))
    for name, answer in answers.items():
        methods = {
            "report": SimpleNamespace(remote=lambda answer=answer: answer),
            "stop": SimpleNamespace(remote=lambda: None),
        }
        actor = SimpleNamespace(name=name, **methods)
        made._engines[name] = _Engine(
            name, "group", Phase.READY, actor=actor, asked=answer, is_running=True
        )
    return made


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (exceptions.ActorDiedError(), "The actor died"),
        (exceptions.OutOfMemoryError("killed for its memory\nand more"), "killed for its memory"),
        (exceptions.ActorUnschedulableError("no node"), "no node"),
        (exceptions.RuntimeEnvSetupError("no environment"), "runtime environment"),
        (exceptions.ActorPlacementGroupRemoved(), "placement group"),
        (exceptions.RayError(), "RayError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_takes_an_actor_the_engine_is_lost_and_the_others_go_on(
    error: Exception, note: str, killed: list[str]
) -> None:
    made = fleet(a=READY, b=error)
    a, b = asyncio.run(made.look())
    assert (a.phase, b.phase) == (Phase.READY, Phase.LOST)
    assert b.note.startswith("its actor is gone: ")
    assert note in b.note
    assert "\n" not in b.note
    assert killed == ["b"]
    assert [one.name for one in asyncio.run(made.look())] == ["a"]


def test_engines_of_a_node_that_is_lost_wait_together_for_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, removed, attempts = Clock(), [], iter(range(10_000))

    def table(group: str) -> dict[str, Any]:
        tried = {"scheduling_state": "QUEUED", "scheduling_attempt": next(attempts)}
        return {} if group == "unknown" else {"state": "PENDING", "stats": tried}

    def sleep(seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(ray.util, "placement_group_table", table)
    monkeypatch.setattr(ray.util, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_fleet, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    made = fleet(a=READY, b=READY, c=READY)
    groups = ["unknown", "b", "c"]
    for engine, group in zip(made._engines.values(), groups, strict=True):
        engine.group, engine.actor = group, None
    since = clock.now
    made._drop_all()
    assert removed == groups
    assert clock.now - since <= ray_fleet.SETTLE_S + 1


def test_what_an_actor_raises_itself_ends_its_engine(killed: list[str]) -> None:
    cause = ValueError("no such file")
    error = exceptions.RayTaskError("report", "traceback", cause, ip="127.0.0.1")
    (a,) = asyncio.run(fleet(a=error).look())
    assert (a.phase, a.note) == (Phase.ENDED, "no such file")
    assert killed == ["a"]


def test_closing_gives_all_places_back_whatever_the_cluster_answers(killed: list[str]) -> None:
    made = fleet(a=READY, b=ValueError("not of Ray"))
    with pytest.raises(ValueError, match="not of Ray"):
        asyncio.run(made.close())
    assert killed == ["a", "b"]

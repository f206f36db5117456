# SPDX-License-Identifier: Apache-2.0
"""A fleet's contract: of the one that has no cluster, and of real raylets whose engines are small
HTTP servers."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.raylets import Raylets, raylets
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.scaling import ray_fleet
from vllm_ascend_pd.cluster.scaling.fleet import Fleet, Member, Phase
from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder
from vllm_ascend_pd.cluster.scaling.orders import Node
from vllm_ascend_pd.cluster.scaling.ray_fleet import ClusterLostError, RayFleet, connect
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.testing.fake_fleet import FakeFleet

PATIENCE_S = 120.0
NUM_RESERVED = 40


class Subject(ABC):
    """A fleet whose nodes and engines a test can lose. One engine has room on a node at first."""

    fleet: Fleet

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.seen: list[Member] = []

    @abstractmethod
    def add_node(self) -> Any: ...
    @abstractmethod
    def remove_node(self, node: Any) -> None: ...
    @abstractmethod
    def kill(self, name: str) -> None: ...
    def is_left(self, name: str) -> bool:
        """Whether anything of it still runs."""
        return False

    def start(self, name: str) -> None:
        self.loop.run_until_complete(self.fleet.start(name))

    def end(self, name: str) -> None:
        self.loop.run_until_complete(self.fleet.end(name))

    def look(self) -> tuple[Member, ...]:
        members = self.loop.run_until_complete(self.fleet.look())
        self.seen += members
        return members

    def until(self, phases: dict[str, Phase]) -> dict[str, Member]:
        """Looks until all of these are told at once."""
        end = time.monotonic() + PATIENCE_S
        while True:
            members = {one.name: one for one in self.look()}
            if {name: members[name].phase for name in phases if name in members} == phases:
                return members
            assert time.monotonic() < end, members
            over = [one for one in members.values() if one.is_over]
            assert not [one for one in over if one.name in phases], members
            self.wait()

    @abstractmethod
    def wait(self) -> None:
        """Until the next look may tell more."""

    def close(self) -> None:
        self.loop.run_until_complete(self.fleet.close())
        self.loop.close()


class FakeSubject(Subject):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = self.fake = FakeFleet({"n": 1})

    def add_node(self) -> str:
        self.fake.nodes["another"] = 1
        return "another"

    def remove_node(self, node: Any) -> None:
        self.fake.remove_node(node)

    def kill(self, name: str) -> None:
        self.fake.kill(name)

    def wait(self) -> None: ...


class RaySubject(Subject):
    def __init__(self, cluster: Raylets | None, folder: Path) -> None:
        super().__init__()
        self.cluster, self.folder = cluster, folder
        self.fleet = RayFleet({"CPU": 1.0}, self.order)
        self.ports: dict[str, int] = {}

    def order(self, name: str, node: Node, place: int) -> KeeperOrder:
        assert (place, node.num_places, node.machine.device) == (0, 1, "cpu")
        if name == "refused":
            raise ConfigError("args.x: not for this node")
        self.ports[name] = node.port
        words = ("-m", "http.server", str(node.port), "--bind", node.address)
        argv = (sys.executable, *(words if name != "broken" else ("-c", "print('why'); exit(3)")))
        return KeeperOrder(
            name=name,
            argv=argv,
            env={"HELD": name},
            health_url=f"http://{node.address}:{node.port}/",
            log_dir=str(self.folder / "logs"),
            secrets={str(self.folder / f".{name}"): "secret"},
            startup_s=60,
            rotation=Rotation(1 << 20, 1),
            needs_patches=False,
        )

    def add_node(self) -> Any:
        return self.cluster.add(num_cpus=1)

    def remove_node(self, node: Any) -> None:
        self.cluster.remove(node)

    def process(self, name: str) -> psutil.Process | None:
        port = str(self.ports[name])
        for process in psutil.process_iter(["cmdline"]):
            if port in (process.info["cmdline"] or []):
                return process
        return None

    def kill(self, name: str) -> None:
        process = self.process(name)
        assert process is not None
        process.kill()

    def is_left(self, name: str) -> bool:
        return self.process(name) is not None or (self.folder / f".{name}").exists()

    def wait(self) -> None:
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets() as made:
        made.add(num_cpus=1)
        ray.init(address=made.address, log_to_driver=False)
        try:
            yield made
        finally:
            ray.shutdown()


@pytest.fixture(params=["fake", pytest.param("ray", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_subject")
        return
    made = FakeSubject()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def ray_subject(cluster: Raylets, tmp_path: Path) -> Iterator[RaySubject]:
    """Gives back the room for one engine; if not, later tests get another node."""
    made = RaySubject(cluster, tmp_path)
    try:
        yield made
    finally:
        made.close()
        try:
            until(lambda: free_cpus() >= 1)
        except AssertionError:
            cluster.add(num_cpus=1)
            raise


def free_cpus() -> float:
    free: float = ray.available_resources().get("CPU", 0)
    return free


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_engine_comes_up_and_ends_in_good_order(subject: Subject) -> None:
    subject.start("a")
    (a,) = subject.until({"a": Phase.READY}).values()
    assert a.node
    subject.end("a")
    subject.end("a")
    subject.until({"a": Phase.ENDED})
    assert not subject.is_left("a")
    assert subject.look() == ()
    subject.end("a")
    phases = list(dict.fromkeys(one.phase for one in subject.seen))
    assert set(phases) - {Phase.WAITING, Phase.ENDING} == {Phase.STARTING, Phase.READY, Phase.ENDED}


def test_a_name_is_used_once(subject: Subject) -> None:
    subject.start("a")
    with pytest.raises(ValueError, match="a was asked for before"):
        subject.start("a")


def test_what_has_no_room_waits_with_a_reason_until_there_is_some(subject: Subject) -> None:
    subject.start("a")
    subject.until({"a": Phase.READY})
    subject.start("b")
    until(lambda: subject.until({"a": Phase.READY, "b": Phase.WAITING})["b"].note != "")
    subject.end("a")
    subject.until({"a": Phase.ENDED})
    assert subject.until({"b": Phase.READY})["b"].note == ""


def test_who_waits_ends_at_once(subject: Subject) -> None:
    subject.start("a")
    subject.until({"a": Phase.READY})
    subject.start("b")
    subject.look()
    subject.end("b")
    assert subject.until({"a": Phase.READY, "b": Phase.ENDED})
    assert [one.name for one in subject.look()] == ["a"]


def test_a_process_that_dies_has_ended_with_a_reason_and_gives_its_place_back(
    subject: Subject,
) -> None:
    subject.start("a")
    subject.until({"a": Phase.READY})
    subject.kill("a")
    assert "killed by SIGKILL" in subject.until({"a": Phase.ENDED})["a"].note
    subject.start("b")
    subject.until({"b": Phase.READY})


def test_a_node_that_is_gone_takes_its_engine_along_and_a_new_one_has_room(
    subject: Subject,
) -> None:
    subject.start("a")
    subject.until({"a": Phase.READY})
    subject.start("b")
    subject.until({"b": Phase.WAITING})
    node = subject.add_node()
    subject.until({"a": Phase.READY, "b": Phase.READY})
    subject.remove_node(node)
    lost = subject.until({"a": Phase.READY, "b": Phase.LOST})["b"]
    assert lost.note
    assert [one.name for one in subject.look()] == ["a"]
    until(lambda: not subject.is_left("b"))


def test_closing_ends_all(subject: Subject) -> None:
    subject.start("a")
    subject.until({"a": Phase.READY})
    subject.start("b")
    subject.look()
    subject.loop.run_until_complete(subject.fleet.close())
    until(lambda: not subject.is_left("a"))


@pytest.mark.slow
def test_engines_that_end_while_their_place_is_reserved_give_it_back(
    ray_subject: RaySubject,
) -> None:
    node = ray_subject.cluster.add(num_cpus=NUM_RESERVED)
    try:
        until(lambda: free_cpus() == NUM_RESERVED + 1)
        for i in range(NUM_RESERVED):
            ray_subject.start(f"a{i}")
            time.sleep(i % 4 / 2000)  # a place is reserved within that time
            ray_subject.end(f"a{i}")
            assert [one.phase for one in ray_subject.look()] == [Phase.ENDED]
        until(lambda: free_cpus() == NUM_RESERVED + 1)
    finally:
        ray_subject.remove_node(node)


@pytest.mark.slow
def test_an_actor_that_is_killed_is_lost_and_leaves_nothing(ray_subject: RaySubject) -> None:
    ray_subject.start("a")
    ray_subject.until({"a": Phase.READY})
    process = ray_subject.process("a")
    assert process is not None
    secret = ray_subject.folder / ".a"
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("secret", 0o600)
    assert not any(key.startswith("RAY_") for key in process.environ())
    (actor,) = [one for one in process.parents() if "ray::EngineHost" in one.name()]
    os.kill(actor.pid, signal.SIGKILL)
    assert "its actor is gone" in ray_subject.until({"a": Phase.LOST})["a"].note
    until(lambda: not ray_subject.is_left("a"))
    until(lambda: not secret.exists())


@pytest.mark.slow
def test_a_place_that_nobody_saw_settle_is_given_back(
    ray_subject: RaySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray_subject.start("a")
    ray_subject.until({"a": Phase.READY})
    monkeypatch.setattr(ray_fleet, "_settle", lambda groups: 1 / 0)
    ray_subject.end("a")
    ray_subject.until({"a": Phase.ENDED})
    ray_subject.start("b")
    ray_subject.until({"b": Phase.READY})


@pytest.mark.slow
def test_a_head_that_is_restarted_finds_its_engines_running(ray_subject: RaySubject) -> None:
    ray_subject.start("a")
    ray_subject.until({"a": Phase.READY})
    process = ray_subject.process("a")
    ray_subject.cluster.restart_head()
    ray_subject.start("b")
    ray_subject.until({"a": Phase.READY, "b": Phase.WAITING})
    assert ray_subject.process("a") == process
    ray_subject.end("a")
    ray_subject.until({"b": Phase.READY})


@pytest.mark.slow
def test_an_engine_that_does_not_start_tells_the_end_of_its_log(ray_subject: RaySubject) -> None:
    ray_subject.start("broken")
    note = ray_subject.until({"broken": Phase.ENDED})["broken"].note
    assert "exited with code 3" in note
    assert note.endswith("  why")
    ray_subject.start("refused")
    note = ray_subject.until({"refused": Phase.ENDED})["refused"].note
    assert note == "args.x: not for this node"


@pytest.mark.slow
def test_what_no_node_will_ever_hold_says_so(cluster: Raylets) -> None:
    loop = asyncio.new_event_loop()
    fleet = RayFleet({"CPU": 7.0}, lambda *_: pytest.fail("no place"))
    loop.run_until_complete(fleet.start("a"))
    end = time.monotonic() + PATIENCE_S
    while True:
        (one,) = loop.run_until_complete(fleet.look())
        assert one.phase is Phase.WAITING
        if one.note == "no node of the cluster has 7 CPU; the most that one has: 1 CPU":
            break
        assert time.monotonic() < end, one
        time.sleep(0.1)
    loop.run_until_complete(fleet.close())
    loop.close()


class Driver:
    """A fleet with one engine, in a process of its own; it asks for one more with each line."""

    def __init__(self, address: str, folder: Path) -> None:
        self.folder = folder
        program = f"from {__name__} import drive; drive({address!r}, {str(folder)!r})"
        with (folder / "driver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        until(lambda: self._port is not None or self.process.poll() is not None)
        words = ((one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"]))
        (self.engine,) = [one for one, cmdline in words if self._port in cmdline]

    @property
    def _port(self) -> str | None:
        """Of its engine, once that is up."""
        found = re.search(r"^engine at (\d+)$", self.log, re.MULTILINE)
        return found and found[1]

    @property
    def log(self) -> str:
        return (self.folder / "driver.log").read_text()

    def start_another(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def nothing_is_left(self) -> bool:
        return not self.engine.is_running() and not list(self.folder.glob(".a*"))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def drive(address: str, folder: str) -> None:
    """What ``Driver`` runs."""
    connect(address)
    subject = RaySubject(None, Path(folder))
    try:
        subject.start("a")
        subject.until({"a": Phase.READY})
        print("engine at", subject.ports["a"], flush=True)
        sys.stdin.readline()
        subject.start("b")
    except ClusterLostError as e:
        print(e, flush=True)
    finally:
        subject.close()


@pytest.mark.slow
def test_a_driver_that_is_killed_takes_its_engines_along(cluster: Raylets, tmp_path: Path) -> None:
    driver = Driver(cluster.address, tmp_path)
    try:
        driver.process.kill()
        until(driver.nothing_is_left)
    finally:
        driver.close()


@pytest.mark.slow
def test_a_head_that_has_lost_its_state_ends_driver_and_engines(tmp_path: Path) -> None:
    with raylets(RAY_gcs_storage="memory") as cluster:
        cluster.add(num_cpus=1)
        driver = Driver(cluster.address, tmp_path)
        try:
            cluster.restart_head()
            driver.start_another()
            assert driver.process.wait(PATIENCE_S) == 0
            assert f"{cluster.address} is back without its state" in driver.log
            assert driver.nothing_is_left()
        finally:
            driver.close()

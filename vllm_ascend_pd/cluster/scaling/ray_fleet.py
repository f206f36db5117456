# SPDX-License-Identifier: Apache-2.0
"""A fleet on a Ray cluster: for each engine a placement group and an actor, which has a keeper run
the engine on its node.

The actors belong to the job of who started them: when that ends, however it does, Ray ends them,
and each keeper ends its engine. Ray itself is imported where it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ascend_pd.cluster.scaling.fleet import Member, Phase
from vllm_ascend_pd.cluster.scaling.ray_actor import EngineHost
from vllm_ascend_pd.errors import ConfigError, PDError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder, KeeperReport
    from vllm_ascend_pd.cluster.scaling.orders import Node

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S = 5.0
CLOSE_S = 45.0
"""Engines that are told to end and go on are killed after that."""
_POLL_S = 0.2
SETTLE_S = 5.0
"""Ray looks for a place at least every two seconds."""
_SETTLE_POLL_S = 0.02
"""Ray learns in less whether a node has room, and looks again after 100 ms at the earliest."""


def import_ray() -> Any:
    """``ConfigError`` that says how to get it."""
    try:
        import ray
    except ImportError as e:
        raise ConfigError(
            "--ray: Ray is not installed beside vllm-pd; install the extra vllm-ascend-pd[ray], in"
            " the version that the cluster runs (ray --version), on every node"
        ) from e
    return ray


def connect(address: str) -> None:
    """To a cluster that runs: ``auto`` is that of this host, or of the job that this is part of.

    Raises:
        ConfigError: there is none.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"--ray {address}: not through Ray's client, for the router runs here and engines must"
            " reach it; start this on a node of the cluster with --ray auto, or submit it as a job"
        )
    ray = import_ray()
    _refuse_a_closed_port(os.environ.get("RAY_ADDRESS", "") if address == "auto" else address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, ValueError, RuntimeError) as e:
        first = str(e).strip().splitlines()[0]
        raise ConfigError(f"--ray {address}: no Ray cluster answers ({first})") from e


def _refuse_a_closed_port(address: str) -> None:
    """Ray would ask again for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(
            f"no Ray cluster answers at {address} ({e}): start its head (ray start --head), or give"
            " another address with --ray"
        ) from e


class ClusterLostError(PDError):
    """What answers at the address of the cluster is another one: its head has lost its state."""


def refuse_another_cluster() -> None:
    """``ClusterLostError`` where Ray itself would abort the process at the next question.

    Nothing while nobody answers.
    """
    ray = import_ray()
    address = ray.get_runtime_context().gcs_address
    try:
        found = ray._raylet.GcsClient(address=address).cluster_id
    except Exception as e:  # noqa: BLE001 - of several kinds; the head is away, or being restarted
        logger.debug("the head is away: %s", e)
        return
    if found != ray._private.worker.global_worker.gcs_client.cluster_id:
        raise ClusterLostError(
            f"the head of the Ray cluster at {address} is back without its state, which makes it"
            " another cluster: the engines of the old one end. Start its nodes again where nothing"
            f" else does (ray start --address={address}); a head with Redis or"
            " RAY_gcs_storage=rocksdb keeps its state"
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a cluster says of itself."""

    address: str
    """Of this node, as the others reach it."""
    device: str
    """``cuda``, ``npu`` or ``cpu``."""


def ask_cluster(address: str) -> Cluster:
    """Connects for the question alone; ``ConfigError`` when there is none."""
    ray = import_ray()
    connect(address)
    try:
        has = ray.cluster_resources()
        device = "cuda" if has.get("GPU") else "npu" if has.get("NPU") else "cpu"
        return Cluster(ray.util.get_node_ip_address(), device)
    finally:
        ray.shutdown()


def _settle(groups: Sequence[Any]) -> None:
    """Wait until each group has its place, or has just found none, for ``SETTLE_S`` at most: Ray
    never gives back what it is reserving for one that is removed (ray-project/ray#64693)."""
    left: list[tuple[Any, list[int]]] = [(group, []) for group in groups]
    end = time.monotonic() + SETTLE_S
    while time.monotonic() < end:
        left = [one for one in left if not _has_settled(*one)]
        if not left:
            return
        time.sleep(_SETTLE_POLL_S)


def _has_settled(group: Any, attempts: list[int]) -> bool:
    """``attempts``: to place it, as of each call before."""
    table = import_ray().util.placement_group_table(group)
    if not table:
        return True  # nobody knows it any more
    state, stats = table["state"], table["stats"]
    if state in ("CREATED", "REMOVED") or stats["scheduling_state"] == "INFEASIBLE":
        return True
    attempts.append(stats["scheduling_attempt"])
    is_reserving = state == "PREPARED" or stats["scheduling_state"] == "QUEUED"
    return not is_reserving and attempts[0] < attempts[-1] == attempts[-2]


@dataclass(slots=True)
class _Engine:
    """One engine; every field belongs to the fleet's thread."""

    name: str
    group: Any
    """Its placement group."""
    phase: Phase = Phase.WAITING
    note: str = ""
    node: str = ""
    node_id: str = ""
    place: int = 0
    actor: Any = None
    asked: Any = None
    """The answer of ``Node`` or ``KeeperReport`` that is awaited."""
    is_running: bool = False
    is_told: bool = False
    """To end."""

    @property
    def member(self) -> Member:
        return Member(self.name, self.phase, self.note, self.node)


@dataclass(slots=True)
class RayFleet:
    """Passes ``FleetContract``. Ray must be connected. What asks the cluster blocks a thread of its
    own, so that the loop goes on while a head is being restarted. ``start`` and ``look`` raise
    ``ClusterLostError``; then all is to be closed."""

    resources: Mapping[str, float]
    """Of each engine, on one node."""
    order: Callable[[str, Node, int], KeeperOrder]
    """What an engine's node is to run; ``ConfigError`` ends the engine."""
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _is_closed: bool = False
    _is_lost: bool = False
    """There is nobody who knows of what is here."""
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="pd-ray")
    )

    async def start(self, name: str) -> None:
        if name in self._names:
            raise ValueError(f"{name} was asked for before")
        self._names.add(name)
        await self._call(lambda: self._start(name))

    async def look(self) -> tuple[Member, ...]:
        return await self._call(self._look)

    async def end(self, name: str) -> None:
        await self._call(lambda: self._end(name))

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            for name in tuple(self._engines):
                await self.end(name)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._until_over(), CLOSE_S)
        finally:
            await self._call(self._drop_all)
            self._thread.shutdown(wait=False)

    async def _until_over(self) -> None:
        while self._engines:
            await self.look()
            await asyncio.sleep(_POLL_S)

    async def _call(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _start(self, name: str) -> None:
        self._refuse_another_cluster()
        ray = import_ray()
        group = ray.util.placement_group(
            [dict(self.resources)], strategy="STRICT_PACK", name=f"vllm-pd-{name}"
        )
        self._engines[name] = _Engine(name, group)

    def _look(self) -> tuple[Member, ...]:
        for engine in self._engines.values():
            if engine.phase not in (Phase.ENDED, Phase.LOST):
                self._advance(engine)
        members = tuple(engine.member for engine in self._engines.values())
        self._drop([self._engines.pop(one.name) for one in members if one.is_over])
        return members

    def _advance(self, engine: _Engine) -> None:
        if engine.actor is None:
            self._wait_for_place(engine)
            return
        ray = import_ray()
        done, _ = ray.wait([engine.asked], timeout=0)
        if not done:
            return
        try:
            answer = ray.get(engine.asked)
        except ray.exceptions.RayTaskError as e:
            self._is(engine, Phase.ENDED, str(e.cause))
            return
        except ray.exceptions.RayError as e:  # an actor that is gone has errors of several kinds
            cause = (str(e).strip() or type(e).__name__).splitlines()[0]
            over = Phase.ENDED if engine.is_told else Phase.LOST
            self._is(engine, over, f"its actor is gone: {cause}")
            return
        if engine.is_running:
            self._reported(engine, answer)
        else:
            self._run(engine, answer)

    def _refuse_another_cluster(self) -> None:
        try:
            refuse_another_cluster()
        except ClusterLostError:
            self._is_lost = True
            raise

    def _wait_for_place(self, engine: _Engine) -> None:
        self._refuse_another_cluster()
        ray = import_ray()
        table = ray.util.placement_group_table(engine.group)
        if table["state"] == "REMOVED":  # by somebody else
            self._is(engine, Phase.LOST, "its placement group was removed")
            return
        if table["state"] != "CREATED":
            self._is(engine, Phase.WAITING, self._lacking(table["stats"]["scheduling_state"]))
            return
        engine.node_id = next(iter(table["bundles_to_node_id"].values()))
        others = {
            one.place
            for one in self._engines.values()
            if one is not engine and one.node_id == engine.node_id
        }
        engine.place = next(n for n in range(len(others) + 1) if n not in others)
        engine.actor = self._make_actor(engine)
        engine.asked = engine.actor.describe.remote(self.resources["CPU"])
        self._is(engine, Phase.STARTING, "")

    def _make_actor(self, engine: _Engine) -> Any:
        ray = import_ray()
        in_group = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(engine.group)
        others = {k: v for k, v in self.resources.items() if k not in ("CPU", "GPU")}
        options = {
            "num_cpus": self.resources.get("CPU", 0),
            "num_gpus": self.resources.get("GPU", 0),
            "resources": others,
            "max_restarts": 0,
            "scheduling_strategy": in_group,
        }
        return ray.remote(EngineHost).options(**options).remote()

    def _lacking(self, state: str) -> str:
        """Why there is no place, by what the nodes have; nothing while one is looked for."""
        if state not in ("NO_RESOURCES", "INFEASIBLE"):
            return ""
        ray = import_ray()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        wanted = " and ".join(f"{value:g} {key}" for key, value in self.resources.items())
        fits = any(
            all(node.get(key, 0) >= value for key, value in self.resources.items())
            for node in nodes
        )
        if state == "INFEASIBLE" or not fits:
            most = {key: max((n.get(key, 0) for n in nodes), default=0) for key in self.resources}
            has = ", ".join(f"{value:g} {key}" for key, value in most.items())
            return f"no node of the cluster has {wanted}; the most that one has: {has}"
        return f"no node has {wanted} free now"

    def _run(self, engine: _Engine, node: Node) -> None:
        engine.node = node.address
        try:
            order = self.order(engine.name, node, engine.place % node.num_places)
        except PDError as e:
            self._is(engine, Phase.ENDED, str(e))
            return
        engine.asked = engine.actor.run.remote(order)
        engine.is_running = True

    def _reported(self, engine: _Engine, report: KeeperReport) -> None:
        phase = Phase(report.phase)
        if engine.is_told and phase is not Phase.ENDED:
            phase = Phase.ENDING  # it does not know yet
        self._is(engine, phase, report.note)
        if phase is not Phase.ENDED:
            engine.asked = engine.actor.report.remote()

    def _end(self, name: str) -> None:
        engine = self._engines.get(name)
        if engine is None or engine.is_told:
            return
        engine.is_told = True
        if engine.actor is None or not engine.is_running:
            self._is(engine, Phase.ENDED, "")
            return
        engine.actor.stop.remote()
        self._is(engine, Phase.ENDING, "")

    def _drop(self, engines: Sequence[_Engine]) -> None:
        """All at once: those of a node that is lost take no longer than one."""
        if self._is_lost or not engines:
            return
        ray = import_ray()
        for engine in engines:
            if engine.actor is not None:
                with contextlib.suppress(Exception):  # gone with its node
                    ray.kill(engine.actor)
        with contextlib.suppress(Exception):
            _settle([engine.group for engine in engines])
        for engine in engines:
            with contextlib.suppress(Exception):
                ray.util.remove_placement_group(engine.group)

    def _drop_all(self) -> None:
        self._drop(tuple(self._engines.values()))
        self._engines.clear()

    @staticmethod
    def _is(engine: _Engine, phase: Phase, note: str) -> None:
        engine.phase, engine.note = phase, note

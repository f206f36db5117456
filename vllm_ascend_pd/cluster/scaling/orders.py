# SPDX-License-Identifier: Apache-2.0
"""From a node that has room to the command of the engine there: as ``commands`` makes it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.cluster.commands import Programs, joining_engine
from vllm_ascend_pd.cluster.log_rotation import Rotation
from vllm_ascend_pd.cluster.placement import (
    PlacedEngine,
    divide,
    num_devices,
    num_ranks,
    spread_events,
)
from vllm_ascend_pd.cluster.scaling.keeper import KeeperOrder
from vllm_ascend_pd.cluster.topology import (
    LOCAL,
    EngineGroup,
    Host,
    Topology,
    option_name,
    render_args,
)
from vllm_ascend_pd.config import ANYWHERE
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import is_loopback

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.machine import Machine

RESOURCES = {"cuda": "GPU", "npu": "NPU"}
"""What a cluster calls the accelerators."""


@dataclass(frozen=True, slots=True)
class Node:
    """The part of a node that an engine was given, as a process there sees it."""

    address: str
    machine: Machine
    num_places: int
    """Engines of a CPU host that have room there, each with its part of cores and memory."""
    port: int
    kv_port: int
    inner_port: int
    programs: Programs


class Shared(msgspec.Struct, frozen=True):
    """What every engine is made of, wherever it is put."""

    topology: Topology
    device: str
    cores: int
    """That an engine is to have; on hosts with accelerators no core is kept for it."""
    router_url: str
    log_dir: str
    master: str | None = None
    secrets: dict[str, str] = {}
    """``security.secret_file``, ``router.token_file``: what the file holds that its node gets."""
    startup_s: float = 1800.0
    rotation: Rotation = Rotation()

    @property
    def num_devices(self) -> int:
        """Of each engine; none on CPU hosts."""
        return num_devices("engine", self.words) if self.device != "cpu" else 0

    @property
    def words(self) -> list[str]:
        """Options of ``vllm serve``."""
        return render_args(self.topology.args) + list(self.topology.more_args)

    @property
    def resources(self) -> dict[str, float]:
        """To ask of one node."""
        asked = {"CPU": float(self.cores)}
        if self.device != "cpu":
            asked[RESOURCES[self.device]] = float(self.num_devices)
        return asked


def refuse_what_a_cluster_decides(topology: Topology) -> None:
    """``ConfigError`` where a topology says what is not its to say."""
    if topology.hosts != {LOCAL: Host()}:
        raise ConfigError("hosts: with --ray the cluster says where engines run; leave it out")
    words = render_args(topology.args) + list(topology.more_args)
    if num_ranks("engine", words) > 1:
        raise ConfigError(
            "data-parallel-size: with --ray each engine has one rank; give more engines with"
            " --max-instances"
        )
    if any(option_name(key) == "roles" for key in topology.router.args):
        raise ConfigError(
            "router.args.roles: with --ray, --pd-ratio says how many engines have which role; leave"
            " it out"
        )
    for role, groups in topology.groups:
        for group in groups:
            if group != EngineGroup(count=group.count):
                raise ConfigError(
                    f"{role}: with --ray every engine may get any role, so all are equal; give"
                    " args and env for all of them"
                )
    for role, num_engines in (("both", 0), ("prefill", 1), ("decode", 1)):
        if sum(group.count for group in getattr(topology, role)) != num_engines:
            raise ConfigError(
                f"{role}: with --ray, --pd-ratio and --max-instances say how many engines have"
                " which role; leave it out"
            )


def order_engine(shared: Shared, name: str, node: Node, place: int) -> KeeperOrder:
    """``place`` is one of ``node.num_places`` that nobody else has."""
    engine = PlacedEngine(
        name=name,
        role="both",
        host=LOCAL,
        address=node.address,
        port=node.port,
        kv_port=node.kv_port,
        words=shared.words,
        env=dict(shared.topology.env),
        inner_port=node.inner_port,
        # A later engine in this place has another name, and goes on with these files.
        folder=f"{node.address.replace(':', '-')}-{place}",
    )
    neighbours = [
        replace(engine, words=list(engine.words), env=dict(engine.env))
        for _ in range(node.num_places)
    ]
    spread_events(neighbours)
    engine = neighbours[place]
    beside = neighbours if shared.device == "cpu" else [engine]
    divide(name, Host(), beside, shared.device, node.machine)
    extra, files = _on_node(shared, name, node.address)
    topology = msgspec.structs.replace(
        shared.topology, hosts={LOCAL: Host(address=node.address)}, extra_config=extra
    )
    command = joining_engine(
        engine, topology, shared.device, shared.router_url, shared.master, node.programs
    )
    return KeeperOrder(
        name=name,
        argv=command.argv,
        env=command.env,
        health_url=command.asked,
        log_dir=shared.log_dir,
        secrets=files,
        startup_s=shared.startup_s,
        rotation=shared.rotation,
    )


def _on_node(shared: Shared, name: str, address: str) -> tuple[dict[str, object], dict[str, str]]:
    """``extra_config`` of an engine, and the files that it names and its node lacks."""
    extra: dict[str, dict[str, object]] = json.loads(json.dumps(shared.topology.extra_config))
    files = {}
    for key, secret in shared.secrets.items():
        section, option = key.split(".")
        path = f"{shared.log_dir}/.{name}-{option.removesuffix('_file')}"
        extra[section] = {**extra.get(section, {}), option: path}
        files[path] = secret
    if not is_loopback(address):  # peers are where there is room; the secret says who is one
        extra.setdefault("security", {}).setdefault("allowed_peers", list(ANYWHERE))
    return dict(extra), files

# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd up --ray``: the router here, and a driver that keeps engines on the cluster."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.cluster.commands import Command, Deployment, make_deployment, wants_master
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.placement import option
from vllm_ascend_pd.cluster.scaling import driver
from vllm_ascend_pd.cluster.scaling.driver import DriverSpec
from vllm_ascend_pd.cluster.scaling.orders import Shared, refuse_what_a_cluster_decides
from vllm_ascend_pd.cluster.scaling.ray_fleet import ask_cluster
from vllm_ascend_pd.cluster.scaling.target import Ratio, Target
from vllm_ascend_pd.cluster.topology import LOCAL, EngineGroup, Host, Topology
from vllm_ascend_pd.cluster.up_socket import Scaling
from vllm_ascend_pd.private_file import write_private

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.commands import PortChooser, Programs
    from vllm_ascend_pd.cluster.launch import Manner


@dataclass(frozen=True, slots=True)
class OnRay:
    """What the user asks for, beside the topology."""

    address: str
    target: Target
    cores: int
    """Of each engine."""

    @classmethod
    def parse(cls, address: str, ratio: str, maximum: int, cores: int) -> OnRay:
        """Of the options; ``ConfigError`` names the one that is wrong."""
        return cls(address, Target(Ratio.parse(ratio), maximum), cores)


def at_router(topology: Topology, asked: OnRay) -> Topology:
    """The same with the router on this host, as the cluster's nodes reach it.

    Raises:
        ConfigError: there is no such cluster, or the topology says what is the cluster's to say.
    """
    refuse_what_a_cluster_decides(topology)
    cluster = ask_cluster(asked.address)
    return msgspec.structs.replace(
        topology,
        hosts={LOCAL: Host(address=cluster.address)},
        device=topology.device or cluster.device,
    )


def deployment_on_ray(
    topology: Topology, asked: OnRay, manner: Manner, programs: Programs, choose_port: PortChooser
) -> tuple[Deployment, Manner]:
    """What runs on this host, and how. ``topology`` is that of ``at_router``, with its secrets.

    Raises:
        ConfigError: something does not fit; it names the field.
    """
    any_engines = msgspec.structs.replace(
        topology, device="cpu", prefill=(EngineGroup(),), decode=(EngineGroup(),), both=()
    )
    nothing = Machine("cpu", (), (), 0)
    deployment = make_deployment(any_engines, nothing, LOCAL, choose_port, programs)
    here = [one for one in deployment.commands if one.role in ("master", "router")]
    folder = manner.log_dir.absolute()
    scaling = Scaling(folder / "target.json", f"http://127.0.0.1:{choose_port('127.0.0.1')}")
    spec = _driver_spec(topology, asked, manner, deployment, scaling)
    write_private(folder / "ray.json", msgspec.json.encode(spec).decode())
    scaling.aim(asked.target)
    argv = (sys.executable, "-m", driver.__name__, str(folder / "ray.json"))
    ray = Command("ray", "ray", LOCAL, argv, {}, scaling.url)
    return Deployment((*here, ray), deployment.router_url), replace(manner, scaling=scaling)


def _driver_spec(
    topology: Topology, asked: OnRay, manner: Manner, deployment: Deployment, scaling: Scaling
) -> DriverSpec:
    master = None
    if wants_master(topology):
        (command,) = [one for one in deployment.commands if one.role == "master"]
        port = option(list(command.argv), "--rpc-port")
        master = f"{topology.hosts[LOCAL].address}:{port}"
    folder = str(manner.log_dir.absolute())
    made = {
        f"{section}.{option}": topology.extra_config[section][option]
        for section, option in (("security", "secret_file"), ("router", "token_file"))
        if Path(topology.extra_config[section][option]).parent == Path(folder)
    }
    shared = Shared(
        topology=topology,
        device=topology.device or "cpu",
        cores=asked.cores,
        router_url=deployment.router_url,
        log_dir=folder,
        master=master,
        startup_s=manner.patience.startup_s,
        rotation=manner.rotation,
    )
    return DriverSpec(
        address=asked.address,
        shared=shared,
        target_file=str(scaling.target_file),
        status_port=int(scaling.url.rpartition(":")[2]),
        secret_files=made,
        token_file=str(manner.token_file) if manner.token_file else None,
    )

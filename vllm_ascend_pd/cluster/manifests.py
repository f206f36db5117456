# SPDX-License-Identifier: Apache-2.0
"""From a topology to Kubernetes workloads: its commands, each group of engines in a Deployment of
its own. Pure.

Commands want addresses, and a pod gets its own when it starts. So those of each group are made for
an address that no network has, in whose place the pods' environment then stands: ``$(POD_IP)``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
import yaml

from vllm_ascend_pd.cluster.commands import MASTER_PORTS, Command, make_deployment, wants_master
from vllm_ascend_pd.cluster.machine import Machine
from vllm_ascend_pd.cluster.placement import num_devices
from vllm_ascend_pd.cluster.restart import LASTS_S
from vllm_ascend_pd.cluster.topology import LOCAL, EngineGroup, Host, Topology
from vllm_ascend_pd.config import ANYWHERE
from vllm_ascend_pd.errors import ConfigError

PORT, KV_PORT = 8000, 14600
PART_OF = "app.kubernetes.io/part-of"
COMPONENT = "app.kubernetes.io/component"
NAME = "vllm-pd"
SECRET_DIR = "/etc/vllm-pd/secret"

_DEVICES = {"cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}
_LEAVE_S = 5
"""From the pod's deletion to SIGTERM, so that routers and services know of it by then."""
_ASKED_EVERY_S = 5
"""Before it is up."""
_STARTUP_S = {"router": 120, "master": 120, "prefill": 3600, "decode": 3600}
"""A model is loaded for up to an hour; a router or master is there at once."""
_PLACED_S = 600
"""For a place, its image, and the end of the pod before it."""
_NOWHERE = "203.0.113.{}"
"""Addresses for documentation, RFC 5737."""
_ROUTER_ADDRESS = _NOWHERE.format(254)

_DISCOVERY = (
    *("--service-discovery", "k8s", "--k8s-namespace", "$(POD_NAMESPACE)"),
    *("--k8s-label-selector", f"{PART_OF}={NAME}", "--k8s-port", str(PORT)),
    *("--prefill-model-labels", "prefill", "--decode-model-labels", "decode"),
)

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Workload:
    """One Deployment; ``command`` is that of each of its pods."""

    name: str
    command: Command
    replicas: int
    address: str
    """What stands for that of the pod."""


def manifests(topology: Topology, image: str) -> list[Object]:
    """Deployments of engines and router, and the pool's master with its service; the other objects
    are in ``deploy/base``.

    Raises:
        ConfigError: it names the field of the topology.
    """
    if topology.device is None:
        raise ConfigError("device is missing: say cpu, cuda or npu, which the cluster's nodes have")
    if topology.hosts != {LOCAL: Host()}:
        raise ConfigError("hosts: Kubernetes says where pods run; leave it out")
    if topology.both:
        raise ConfigError(
            "both: each of several routers would choose roles by itself; give prefill and decode"
        )
    _refuse_ports(topology)
    peers = topology.extra_config.get("security", {}).get("allowed_peers", ANYWHERE)
    if wants_master(topology) and not set(ANYWHERE) <= set(peers):
        raise ConfigError(
            "extra_config.security.allowed_peers: the pool's master is reached by its name, which"
            f" may mean any address; leave the option out, have {' and '.join(ANYWHERE)} in it, or"
            " name a master of your own in extra_config.pool.master"
        )
    workloads = _workloads(topology)
    made = [_deployment(one, topology, image) for one in workloads]
    return made + [_master_service(one) for one in workloads if one.command.role == "master"]


def _refuse_ports(topology: Topology) -> None:
    """Of groups: probes and routers know an engine by the ports that all pods have."""
    for role, groups in topology.groups:
        for index, group in enumerate(groups):
            for field, said, port in (
                ("port", group.port, PORT),
                ("kv_port", group.kv_port, KV_PORT),
            ):
                if said not in (None, port):
                    raise ConfigError(
                        f"{role}[{index}].{field}: each engine is alone in its pod, where that is"
                        f" {port}; leave it out"
                    )


def alert_rules() -> Object:
    """The rules that ``vllm-pd up --observe`` loads, for Prometheus' operator."""
    rules = yaml.safe_load(files("vllm_ascend_pd.cluster").joinpath("alerts.yaml").read_text())
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": NAME, "labels": {PART_OF: NAME}},
        "spec": rules,
    }


def _workloads(topology: Topology) -> list[_Workload]:
    groups = [("prefill", group) for group in topology.prefill if group.count]
    groups += [("decode", group) for group in topology.decode if group.count]
    hosts = {str(n): Host(address=_NOWHERE.format(n + 1)) for n in range(len(groups))}
    hosts["router"] = Host(address=_ROUTER_ADDRESS)
    planned: dict[str, list[EngineGroup]] = {"prefill": [], "decode": []}
    for number, (role, group) in enumerate(groups):
        where = {"host": str(number), "count": 1, "port": PORT, "kv_port": KV_PORT}
        planned[role].append(msgspec.structs.replace(group, **where))
    # Peers are pods, whose addresses nobody knows yet: the secret says who is one.
    security = {"allowed_peers": list(ANYWHERE), **topology.extra_config.get("security", {})}
    in_pods = msgspec.structs.replace(
        topology,
        hosts=hosts,
        router=msgspec.structs.replace(topology.router, host="router"),
        prefill=tuple(planned["prefill"]),
        decode=tuple(planned["decode"]),
        extra_config={
            **topology.extra_config,
            "security": {**security, "secret_file": f"{SECRET_DIR}/secret"},
        },
    )
    nothing = Machine(topology.device or "", (), (), 0)
    made = make_deployment(in_pods, nothing, "", lambda address: 0, discovery=_DISCOVERY)
    found: list[_Workload] = []
    for command in made.commands:
        if command.is_engine:
            group = groups[int(command.host)][1]
            name = f"{NAME}-{command.name.removesuffix('-0')}"
            found.append(_Workload(name, command, group.count, hosts[command.host].address))
        else:
            replicas = 2 if command.role == "router" else 1
            name = f"{NAME}-{command.role}"
            found.append(_Workload(name, command, replicas, _ROUTER_ADDRESS))
    return found


def _in_pod(word: str, one: _Workload) -> str:
    """A word of a command, as Kubernetes is to read it: it expands ``$(NAME)``."""
    if one.command.role == "router" and word == _ROUTER_ADDRESS:
        return "0.0.0.0"  # also what `kubectl port-forward` connects to
    if one.command.role != "master":
        master = f"{_ROUTER_ADDRESS}:{MASTER_PORTS[0]}"
        word = word.replace(master, f"{NAME}-master:{MASTER_PORTS[0]}")
    return word.replace(one.address, "$(POD_IP)")


def _arguments(one: _Workload) -> list[str]:
    words = [w if w in _DISCOVERY else w.replace("$(", "$$(") for w in one.command.argv]
    if one.command.is_engine:
        place = words.index("--kv-transfer-config") + 1
        config = json.loads(words[place])
        config["engine_id"] = "$(POD_NAME)"
        pool = config["kv_connector_extra_config"].get("pool")
        if isinstance(pool, dict) and isinstance(pool.get("ssd"), dict):
            path = pool["ssd"]["path"].removesuffix(one.command.name)
            pool["ssd"]["path"] = f"{path}$(POD_NAME)"
        words[place] = json.dumps(config)
    return [_in_pod(word, one) for word in words]


def _environment(one: _Workload) -> list[Object]:
    own = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    fields = {**own, "POD_IP": "status.podIP"}
    said = {name: value.replace("$(", "$$(") for name, value in one.command.env.items()}
    return [
        *(
            {"name": n, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for n, path in fields.items()
        ),
        *({"name": name, "value": _in_pod(value, one)} for name, value in said.items()),
    ]


def _probes(command: Command) -> Object:
    def ask(path: str, every_s: int, failures: int) -> Object:
        where = {"path": path, "port": "http"}
        times = {"periodSeconds": every_s, "timeoutSeconds": 5, "failureThreshold": failures}
        return {"httpGet": where, **times}

    started, live, ready = ("/health/startup", "/health/live", "/health/ready")
    if command.role != "router":
        started = live = ready = "/health"
    patience = _STARTUP_S[command.role] // _ASKED_EVERY_S
    return {
        "startupProbe": ask(started, _ASKED_EVERY_S, patience),
        "livenessProbe": ask(live, 10, 6),
        "readinessProbe": ask(ready, 5, 2),
    }


def _container(one: _Workload, topology: Topology, image: str) -> Object:
    role = one.command.role
    ports = [{"name": "http", "containerPort": MASTER_PORTS[1] if role == "master" else PORT}]
    if role == "router":
        ports = [{"name": "http", "containerPort": topology.router.port}]
    if one.command.is_engine:
        ports.append({"name": "kv", "containerPort": KV_PORT})
    if role == "master":
        ports.append({"name": "rpc", "containerPort": MASTER_PORTS[0]})
    program, *arguments = _arguments(one)
    container: Object = {
        "name": role,
        "image": image,
        "command": [program],
        "args": arguments,
        "env": _environment(one),
        "ports": ports,
        **_probes(one.command),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_LEAVE_S)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if role != "master":
        mounted = {"name": "secret", "mountPath": SECRET_DIR, "readOnly": True}
        container["volumeMounts"] = [mounted]
    if one.command.is_engine:
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
        if device := _DEVICES.get(topology.device or ""):
            container["resources"] = {
                "limits": {device: num_devices(one.command.name, list(one.command.argv))}
            }
    return container


def _deployment(one: _Workload, topology: Topology, image: str) -> Object:
    role = one.command.role
    labels = {PART_OF: NAME, COMPONENT: role, "app.kubernetes.io/name": one.name}
    if one.command.is_engine:
        labels["model"] = role  # by which routers tell P from D
    grace_s = _LEAVE_S + 15 + one.command.drain_s
    pod: Object = {
        "serviceAccountName": f"{NAME}-router" if role == "router" else "default",
        "automountServiceAccountToken": role == "router",
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_container(one, topology, image)],
    }
    if role != "master":
        secret = {"secretName": NAME, "defaultMode": 0o400}
        pod["volumes"] = [{"name": "secret", "secret": secret}]
    if one.command.is_engine:
        pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    selected = {"app.kubernetes.io/name": one.name}
    # Accelerators may all be in use: one engine ends before another one starts in its place.
    surge, unavailable = (1, 0) if role == "router" else (0, 1)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": one.name, "labels": labels},
        "spec": {
            "replicas": one.replicas,
            # One that ends at its first requests takes no other with it.
            "minReadySeconds": int(LASTS_S),
            "progressDeadlineSeconds": _STARTUP_S[role] + _PLACED_S,
            "selector": {"matchLabels": selected},
            "strategy": {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def _master_service(one: _Workload) -> Object:
    selected = {"app.kubernetes.io/name": one.name}
    ports = [
        {"name": name, "port": port}
        for name, port in zip(("rpc", "http"), MASTER_PORTS, strict=True)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": one.name, "labels": {PART_OF: NAME, COMPONENT: "master"}},
        "spec": {"selector": selected, "ports": ports},
    }

# SPDX-License-Identifier: Apache-2.0
"""From a topology to the commands that make it. Pure: starts nothing, asks nothing."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from vllm_ascend_pd.cluster.topology import (
    EngineGroup,
    Host,
    Topology,
    parse_cores,
    render_args,
)
from vllm_ascend_pd.config import PDConfig
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.machine import Machine

PortChooser = Callable[[str], int]
"""A free port for an address of this machine."""

FIRST_PORT = 8100
"""With several hosts, ports are counted from here, so that every host works out the same ones."""
FIRST_KV_PORT = 14600

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_MEMORY_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Command:
    """One process: what to run, where, and how to ask whether it is up."""

    name: str
    """``prefill-0``, ``decode-1``, ``router``: the name of its log and of its instance."""
    role: Literal["prefill", "decode", "router"]
    host: str
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment of whoever starts it."""
    url: str

    @property
    def shell_line(self) -> str:
        """The command as a person would type it."""
        words = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class Plan:
    """All commands of a topology; engines first, the router last."""

    commands: tuple[Command, ...]
    router_url: str

    def on(self, host: str) -> tuple[Command, ...]:
        """The commands of one host."""
        return tuple(command for command in self.commands if command.host == host)


@dataclass(frozen=True, slots=True)
class Programs:
    """What the commands begin with."""

    vllm: str = "vllm"
    vllm_pd: str = "vllm-pd"


@dataclass(slots=True)
class _Engine:
    """One engine, and the part of its host that it gets."""

    name: str
    role: Literal["prefill", "decode"]
    host: str
    port: int
    kv_port: int
    words: list[str]
    env: dict[str, str]
    cores: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    memory_bytes: int | None = None


def make_plan(
    topology: Topology,
    machine: Machine,
    local_host: str,
    choose_port: PortChooser,
    programs: Programs | None = None,
) -> Plan:
    """Ports, cores, devices and memory divided; one command per process.

    ``machine`` is what ``local_host`` has. Of other hosts only the topology tells.

    Raises:
        ConfigError: something does not fit; it names the field.
    """
    programs = programs or Programs()
    device = topology.device or machine.device
    engines = _engines(topology, choose_port if len(topology.hosts) == 1 else None)
    for name, host in topology.hosts.items():
        here = [engine for engine in engines if engine.host == name]
        _divide(name, host, here, device, machine if name == local_host else None)
    router_host = topology.host_name(topology.router.host)
    router_url = _url(topology.hosts[router_host].address, topology.router.port)
    commands = [_engine_command(e, topology, device, programs) for e in engines]
    commands.append(
        Command(
            name="router",
            role="router",
            host=router_host,
            argv=(
                *(programs.vllm_pd, "router"),
                *("--host", topology.hosts[router_host].address),
                *("--port", str(topology.router.port)),
                *(word for c in commands for word in (f"--{c.role}", c.url)),
                *render_args(topology.router.args),
            ),
            env=dict(topology.router.env),
            url=router_url,
        )
    )
    _refuse_shared_ports(topology, engines)
    return Plan(tuple(commands), router_url)


def _engines(topology: Topology, choose_port: PortChooser | None) -> list[_Engine]:
    engines: list[_Engine] = []
    roles: tuple[tuple[Literal["prefill", "decode"], tuple[EngineGroup, ...]], ...] = (
        ("prefill", topology.prefill),
        ("decode", topology.decode),
    )
    for role, groups in roles:
        number = 0
        for group in groups:
            host = topology.host_name(group.host)
            for offset in range(group.count):

                def port(first: int | None, base: int, host: str = host, n: int = offset) -> int:
                    if first is not None:
                        return first + n
                    if choose_port is not None:
                        return choose_port(topology.hosts[host].address)
                    return base + len(engines)

                engines.append(
                    _Engine(
                        name=f"{role}-{number}",
                        role=role,
                        host=host,
                        port=port(group.port, FIRST_PORT),
                        kv_port=port(group.kv_port, FIRST_KV_PORT),
                        words=render_args({**_dashed(topology.args), **_dashed(group.args)})
                        + list(topology.more_args),
                        env={**topology.env, **group.env},
                    )
                )
                number += 1
    return engines


def _dashed(args: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("_", "-").lstrip("-"): value for key, value in args.items()}


def _divide(
    name: str, host: Host, engines: list[_Engine], device: str, machine: Machine | None
) -> None:
    """Give each engine of a host its devices, or its cores and memory."""
    if device != "cpu":
        _divide_devices(name, host, engines, machine)
        return
    if machine is not None and engines:
        for engine in engines:
            chosen = any(_option(engine.words, option) for option in _MEMORY_OPTIONS)
            if not chosen and "VLLM_CPU_KVCACHE_SPACE" not in engine.env:
                share = machine.free_memory_bytes // (2 * len(engines))
                engine.memory_bytes = max(1, min(share, 16 << 30) // _MIB) * _MIB
    if host.cores is not None:
        cores = parse_cores(f"hosts.{name}.cores", host.cores)
    else:
        cores = machine.cores if machine is not None else ()
    each = len(cores) // len(engines) if engines else 0
    for index, engine in enumerate(engines):
        engine.cores = cores[index * each : (index + 1) * each]


def _divide_devices(name: str, host: Host, engines: list[_Engine], machine: Machine | None) -> None:
    devices = host.devices if host.devices is not None else machine.devices if machine else None
    if devices is None:
        if len(engines) > 1:
            raise ConfigError(
                f"hosts.{name}.devices is missing: {len(engines)} engines share that host, so the"
                " topology must say which accelerators it has, e.g. devices: [0, 1, 2, 3]"
            )
        return
    taken = 0
    for engine in engines:
        needed = _int_option(engine, "--tensor-parallel-size", "-tp") * _int_option(
            engine, "--pipeline-parallel-size", "-pp"
        )
        engine.devices = devices[taken : taken + needed]
        taken += needed
    if taken > len(devices):
        raise ConfigError(
            f"hosts.{name}: its {len(engines)} engines need {taken} devices, and it has"
            f" {len(devices)} {list(devices)}; lower count or tensor-parallel-size"
        )


def _engine_command(
    engine: _Engine, topology: Topology, device: str, programs: Programs
) -> Command:
    address = topology.hosts[engine.host].address
    url = _url(address, engine.port)
    _check_hash_seed(engine)
    words = ["serve", topology.model, "--host", address, "--port", str(engine.port)]
    if topology.served_model_name:
        words += ["--served-model-name", topology.served_model_name]
    words += engine.words
    if engine.memory_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(engine.memory_bytes)]
    words += [
        "--kv-transfer-config",
        json.dumps(_transfer_config(engine, topology)),
    ]
    env = {"VLLM_HOST_IP": address, **engine.env}
    if engine.devices:
        env[_VISIBLE_DEVICES[device]] = ",".join(map(str, engine.devices))
    pinned = ["taskset", "-c", ",".join(map(str, engine.cores))] if engine.cores else []
    return Command(
        engine.name, engine.role, engine.host, (*pinned, programs.vllm, *words), env, url
    )


def _transfer_config(engine: _Engine, topology: Topology) -> dict[str, Any]:
    extra = dict(topology.extra_config)
    address = topology.hosts[engine.host].address
    if not ipaddress.ip_address(address).is_loopback:
        peers = sorted({host.address for host in topology.hosts.values()} - {address})
        security = dict(extra.get("security", {}))
        if "secret_file" not in security:
            security.setdefault("allow_non_loopback", True)
        security.setdefault("allowed_peers", peers or [address])
        extra["security"] = security
    config = {
        "kv_connector": "InEngine",
        "kv_role": _KV_ROLES[engine.role],
        "engine_id": engine.name,
        "kv_ip": address,
        "kv_port": engine.kv_port if engine.role == "prefill" else 0,
        "kv_connector_extra_config": extra,
    }
    try:
        PDConfig.from_kv_transfer_config(SimpleNamespace(**config))
    except ConfigError as e:
        raise ConfigError(f"extra_config, as {engine.name} gets it: {e}") from e
    return config


def _check_hash_seed(engine: _Engine) -> None:
    algorithm = _option(engine.words, "--prefix-caching-hash-algo") or "sha256"
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in engine.env:
        raise ConfigError(
            f"env.PYTHONHASHSEED is missing: with prefix-caching-hash-algo {algorithm} each engine"
            " would draw its own seed, and no engine would find another one's blocks; set it to"
            " one secret number for all engines, or use sha256"
        )


def _refuse_shared_ports(topology: Topology, engines: list[_Engine]) -> None:
    users: dict[tuple[str, int], str] = {}
    router = topology.host_name(topology.router.host)
    users[topology.hosts[router].address, topology.router.port] = "the router"
    for engine in engines:
        ports = [engine.port] + ([engine.kv_port] if engine.role == "prefill" else [])
        for port in ports:
            where = (topology.hosts[engine.host].address, port)
            if not 0 < port <= 65535:
                raise ConfigError(f"{engine.name}: port {port} is not within 1..65535")
            if other := users.get(where):
                raise ConfigError(
                    f"port {port} of host {engine.host} is given both to {other} and to"
                    f" {engine.name}; change a port or kv_port"
                )
            users[where] = engine.name


def _option(words: list[str], *names: str) -> str | None:
    """The value of an option on a command line; the last one counts."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else words[index + 1] if index + 1 < len(words) else ""
    return found


def _int_option(engine: _Engine, *names: str) -> int:
    text = _option(engine.words, *names)
    if text is None:
        return 1
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"{engine.name}: {names[0]} must be a positive number, not {text!r}")
    return int(text)


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"

# SPDX-License-Identifier: Apache-2.0
"""From a topology to the commands that make it. Pure: starts nothing, asks nothing."""

from __future__ import annotations

import ipaddress
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from vllm_ascend_pd.backends.mooncake_master import master_command
from vllm_ascend_pd.cluster.placement import (
    PlacedEngine,
    divide,
    http_url,
    num_ranks,
    option,
    spread_events,
)
from vllm_ascend_pd.cluster.topology import (
    Topology,
    option_name,
    render_args,
    render_router_args,
)
from vllm_ascend_pd.config import PDConfig, PoolConfig
from vllm_ascend_pd.envs import VISIBLE_DEVICES
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import name_of_rank

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.machine import Machine

PortChooser = Callable[[str], int]
"""A free port for an address of this machine."""

FIRST_PORT = 8100
"""With several hosts, ports are counted from here, so that every host works out the same ones."""
FIRST_KV_PORT = 14600
MASTER_PORTS = (14500, 14501)
DRAIN_S = 30
"""An engine that is told to end finishes its requests, and ends, so long. vLLM's own default is to
kill the engine core at once, and then it takes no leave of the router."""
_ROUTER_DRAIN_S = 60
"""What ``vllm-pd router`` waits for by itself."""
_WORKER_STOP = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_INNER_PORT = "VLLM_PORT"

_TOOL_CALL_PARSER = "--tool-call-parser"
_CACHED = "--enable-prompt-tokens-details"
"""Answers say how much of the prompt was cached: the router compares that with its estimate."""
_UNLOGGED = "--disable-access-log-for-endpoints"
_PROBED = "/health,/metrics,/v1/models"
"""What the router and Prometheus ask for all the time: else most lines of a log."""

_OTHER_ENGINES = frozenset({"instances", "service-discovery", "static-backends"})
"""Options of a router by which it has engines that are not the topology's."""

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


@dataclass(frozen=True, slots=True)
class Command:
    """One process: what to run, where, and how to ask whether it is up."""

    name: str
    """``prefill-0``, ``both-1``, ``router``, ``master``: of its log, and at the router."""
    role: Literal["master", "prefill", "decode", "both", "router", "prometheus", "ray"]
    host: str
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment of whoever starts it."""
    url: str
    health: str = "/health"
    """Path below ``url`` that answers 200 when it is up."""
    ranks: tuple[int | None, ...] = (None,)
    """Of an engine: each registers with the router."""
    kv_ports: tuple[int, ...] = ()
    """Of an engine: on which peers reach its ranks, if they were chosen."""

    @property
    def is_engine(self) -> bool:
        return self.role in _KV_ROLES

    @property
    def asked(self) -> str:
        """URL that tells whether it is up."""
        return self.url + self.health

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """Under which an engine registers."""
        return tuple(name_of_rank(self.name, rank) for rank in self.ranks)

    @property
    def drain_s(self) -> int:
        """Seconds that it may take from SIGTERM on; ``ConfigError`` names a wrong option."""
        name = "shutdown-timeout" if self.is_engine else "drain-timeout"
        said = option(list(self.argv), f"--{name}")
        if said is None:
            return _ROUTER_DRAIN_S
        try:
            seconds = math.ceil(float(said))
        except (ValueError, OverflowError) as e:
            raise ConfigError(f"{self.name}: {name} must be seconds, not {said!r}") from e
        if seconds < 0:
            raise ConfigError(f"{self.name}: {name} must not be negative, not {said}")
        return seconds

    @property
    def shell_line(self) -> str:
        """The command as a person would type it."""
        words = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class Deployment:
    """All commands of a topology; the pool's master, engines, the router, a Prometheus."""

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
    master: str = "mooncake_master"


@dataclass(slots=True)
class _Shared:
    """What every engine is told."""

    router_url: str
    registers: bool
    discovery: tuple[str, ...]
    master: str | None = None


def make_deployment(
    topology: Topology,
    machine: Machine,
    local_host: str,
    choose_port: PortChooser,
    programs: Programs | None = None,
    discovery: Sequence[str] = (),
) -> Deployment:
    """Ports, cores, devices and memory divided; one command per process.

    ``machine`` is what ``local_host`` has. Of other hosts only the topology tells. ``discovery``:
    options by which the router finds the engines, if they are neither named nor register.

    Raises:
        ConfigError: something does not fit; it names the field.
    """
    programs = programs or Programs()
    device = topology.device or machine.device
    chooser = choose_port if len(topology.hosts) == 1 else None
    engines = place(topology, chooser)
    for name, host in topology.hosts.items():
        here = [engine for engine in engines if engine.host == name]
        divide(name, host, here, device, machine if name == local_host else None)
    router_host = topology.host_name(topology.router.host)
    address = topology.hosts[router_host].address
    shared = _Shared(
        router_url=http_url(address, topology.router.port),
        registers=not discovery and _registers(topology),
        discovery=tuple(discovery),
    )
    if not discovery:  # else each is alone in its pod
        spread_events(engines)
    for engine in engines:
        if _kv_role(engine, topology, shared) == "kv_consumer":
            engine.kv_port = 0  # nobody asks it for anything
    _refuse_shared_ports(topology, engines)
    commands: list[Command] = []
    if wants_master(topology):
        rpc_port, http_port = (chooser(address), chooser(address)) if chooser else MASTER_PORTS
        shared.master = f"{address}:{rpc_port}"
        argv = master_command(programs.master, address, rpc_port, http_port)
        if topology.extra_config["pool"].get("ssd"):
            argv += ("--enable_offload=true",)
        url = http_url(address, http_port)
        commands.append(Command("master", "master", router_host, argv, {}, url))
    commands += [_engine_command(e, topology, device, shared, programs) for e in engines]
    commands.append(_router_command(router_host, topology, engines, shared, programs))
    return Deployment(tuple(commands), shared.router_url)


def joining_engine(
    engine: PlacedEngine,
    topology: Topology,
    device: str,
    router_url: str,
    master: str | None,
    programs: Programs,
) -> Command:
    """One engine that joins a router which runs, in a place that somebody else has chosen.

    Raises:
        ConfigError: something does not fit; it names the field.
    """
    shared = _Shared(router_url, registers=True, discovery=(), master=master)
    return _engine_command(engine, topology, device, shared, programs)


def _registers(topology: Topology) -> bool:
    """Whether engines register with the router, which off loopback needs a token."""
    loopback = all(ipaddress.ip_address(h.address).is_loopback for h in topology.hosts.values())
    return loopback or "token_file" in topology.extra_config.get("router", {})


def has_mooncake(topology: Topology) -> bool:
    """Whether engines have a pool with the tier that needs a master."""
    pool = topology.extra_config.get("pool")
    if not isinstance(pool, dict):
        return False
    tiers = pool.get("tiers", PoolConfig().tiers)
    return isinstance(tiers, list | tuple) and "mooncake" in tiers


def wants_master(topology: Topology) -> bool:
    """Whether engines need one, and the user has none of his own."""
    return has_mooncake(topology) and "master" not in topology.extra_config["pool"]


def place(topology: Topology, choose_port: PortChooser | None) -> list[PlacedEngine]:
    """Every engine with its ports; without ``choose_port`` they are counted."""
    engines: list[PlacedEngine] = []
    next_kv_port = FIRST_KV_PORT
    for role, groups in topology.groups:
        number = 0
        for group in groups:
            host = topology.host_name(group.host)
            words = render_args({**_dashed(topology.args), **_dashed(group.args)})
            words += topology.more_args
            # That of a decode engine peers learn from the router: any will do.
            has_kv_port = role != "decode" or group.kv_port is not None
            for offset in range(group.count):
                name = f"{role}-{number}"
                ranks = num_ranks(name, words)

                def port(first: int | None, base: int, each: int, host: str, n: int) -> int:
                    """``each`` in a row for every engine of a group."""
                    if first is not None:
                        return first + n * each
                    if choose_port is not None:  # of several in a row it cannot tell
                        return choose_port(topology.hosts[host].address) if each == 1 else 0
                    return base

                engines.append(
                    PlacedEngine(
                        name=name,
                        role=role,
                        host=host,
                        address=topology.hosts[host].address,
                        port=port(group.port, FIRST_PORT + len(engines), 1, host, offset),
                        kv_port=port(group.kv_port, next_kv_port, ranks, host, offset)
                        if has_kv_port
                        else 0,
                        words=list(words),
                        env={**topology.env, **group.env},
                        # Ranks would all look there first, at the same time.
                        inner_port=port(None, 0, ranks, host, offset) or None,
                    )
                )
                next_kv_port += ranks
                number += 1
    return engines


def _dashed(args: dict[str, Any]) -> dict[str, Any]:
    return {option_name(key): value for key, value in args.items()}


def _engine_command(
    engine: PlacedEngine, topology: Topology, device: str, shared: _Shared, programs: Programs
) -> Command:
    _check_hash_seed(engine)
    _check_servers(engine)
    words = ["serve", topology.model, "--host", engine.address, "--port", str(engine.port)]
    if topology.served_model_name:
        words += ["--served-model-name", topology.served_model_name]
    words += engine.words
    if option(engine.words, "--shutdown-timeout") is None:
        words += ["--shutdown-timeout", str(DRAIN_S)]
    if option(engine.words, _CACHED, _CACHED.replace("--", "--no-", 1)) is None:
        words.append(_CACHED)
    if option(engine.words, _UNLOGGED) is None:
        words += [_UNLOGGED, _PROBED]
    if engine.memory_bytes is not None:
        words += ["--kv-cache-memory-bytes", str(engine.memory_bytes)]
    words += [
        "--kv-transfer-config",
        json.dumps(_transfer_config(engine, topology, shared)),
    ]
    env = {"VLLM_HOST_IP": engine.address, _WORKER_STOP: str(DRAIN_S)}
    if engine.inner_port is not None:
        env[_INNER_PORT] = str(engine.inner_port)
    env |= engine.env
    if engine.devices:
        env[VISIBLE_DEVICES[device]] = ",".join(map(str, engine.devices))
    pinned = ["taskset", "-c", ",".join(map(str, engine.cores))] if engine.cores else []
    argv = (*pinned, programs.vllm, *words)
    ranks = engine.ranks if shared.registers else (None,)
    return Command(
        engine.name,
        engine.role,
        engine.host,
        argv,
        env,
        engine.url,
        ranks=ranks,
        kv_ports=_kv_ports(engine),
    )


def _router_command(
    host: str,
    topology: Topology,
    engines: list[PlacedEngine],
    shared: _Shared,
    programs: Programs,
) -> Command:
    address, router = topology.hosts[host].address, topology.router
    words = [programs.vllm_pd, "router", "--host", address, "--port", str(router.port)]
    words += shared.discovery
    if not shared.registers and not shared.discovery:
        words += [word for e in engines if e.role != "both" for word in (f"--{e.role}", e.url)]
        if both := [e.url for e in engines if e.role == "both"]:
            words += ["--static-backends", ",".join(both)]
    elif token_file := topology.extra_config.get("router", {}).get("token_file"):
        words += ["--registration-token-file", token_file]
    if secret_file := topology.extra_config.get("security", {}).get("secret_file"):
        words += ["--secret-file", secret_file]
    parsers = {option(engine.words, _TOOL_CALL_PARSER) or "" for engine in engines}
    if len(parsers) == 1 and "" not in parsers:
        words += [_TOOL_CALL_PARSER, *parsers]
    args = _dashed(router.args)
    if any(engine.role == "both" for engine in engines):
        args = {"roles": "auto", **args}
    if args.get("roles") == "auto" and str(args.get("workers") or 1) != "1":
        raise ConfigError(
            "router.args.workers: one process decides who computes prompts and who answers; leave"
            " it out, or give roles: operator"
        )
    _refuse_other_secrets(args, topology)
    _refuse_unknown_labels(args, topology, shared)
    if args.get("host", address) not in (address, "0.0.0.0", "::"):
        raise ConfigError(
            f"router.args.host: engines reach the router at {address}, hosts.{host}.address; leave"
            " it out, or give 0.0.0.0 for all addresses"
        )
    argv = (*words, *render_router_args(args))
    return Command("router", "router", host, argv, dict(router.env), shared.router_url)


def _refuse_other_secrets(args: Mapping[str, Any], topology: Topology) -> None:
    """Than the engines have."""
    for option_of_router, section, field in (
        ("registration-token-file", "router", "token_file"),
        ("secret-file", "security", "secret_file"),
    ):
        said = topology.extra_config.get(section, {}).get(field)
        if said is not None and args.get(option_of_router, said) != said:
            raise ConfigError(
                f"router.args.{option_of_router}: the engines need that file, too; name it as"
                f" extra_config.{section}.{field}, which the router gets as well"
            )


def _refuse_unknown_labels(args: Mapping[str, Any], topology: Topology, shared: _Shared) -> None:
    """Which none of the router's engines has: it would wait for one for ever."""
    if shared.discovery or not _OTHER_ENGINES.isdisjoint(args):
        return
    had = topology.extra_config.get("router", {}).get("labels", {}).get("model")
    fix = "leave it out"
    if shared.registers:  # else the router has engines as options, which say no labels
        fix += ", or name one as extra_config.router.labels.model"
    for option_of_router in ("prefill-model-labels", "decode-model-labels"):
        said = args.get(option_of_router) or ()
        parts = said if isinstance(said, list | tuple) else str(said).split(",")
        wanted = [str(part).strip() for part in parts]
        if wanted and had not in wanted:
            there = f"all have {had!r}" if had is not None else "none has any"
            raise ConfigError(
                f"router.args.{option_of_router}: no engine has a label of {wanted} ({there});"
                f" {fix}"
            )


def _kv_role(engine: PlacedEngine, topology: Topology, shared: _Shared) -> str:
    is_known = shared.registers or "secret_file" in topology.extra_config.get("security", {})
    if engine.role == "decode" and is_known:
        return "kv_both"  # its running requests can be copied
    return _KV_ROLES[engine.role]


def _transfer_config(engine: PlacedEngine, topology: Topology, shared: _Shared) -> dict[str, Any]:
    extra = dict(topology.extra_config)
    address = engine.address
    if not ipaddress.ip_address(address).is_loopback:
        peers = sorted({host.address for host in topology.hosts.values()})
        security = dict(extra.get("security", {}))
        if "secret_file" not in security:
            security.setdefault("allow_non_loopback", True)
        security.setdefault("allowed_peers", peers)
        extra["security"] = security
    if shared.registers:
        others = extra.get("router", {}).get("url")
        urls = f"{shared.router_url},{others}" if others else shared.router_url
        own = {"url": urls, "http_url": engine.url, "instance_id": engine.name}
        if engine.role == "decode":
            own["role"] = "decode"
        extra["router"] = {**extra.get("router", {}), **own}
    if isinstance(extra.get("pool"), dict):
        extra["pool"] = _pool(extra["pool"], engine, shared)
    config = {
        "kv_connector": "InEngine",
        "kv_role": _kv_role(engine, topology, shared),
        "engine_id": engine.name,
        "kv_ip": address,
        "kv_port": engine.kv_port,
        "kv_connector_extra_config": extra,
    }
    try:
        PDConfig.from_kv_transfer_config(SimpleNamespace(**config))
    except ConfigError as e:
        raise ConfigError(f"extra_config, as {engine.name} gets it: {e}") from e
    return config


def _pool(pool: dict[str, Any], engine: PlacedEngine, shared: _Shared) -> dict[str, Any]:
    pool = dict(pool)
    if shared.master is not None:
        pool["master"] = shared.master
    if "dram_size" not in pool and engine.pool_bytes is not None:
        pool["dram_size"] = engine.pool_bytes
    ssd = pool.get("ssd")
    if isinstance(ssd, dict) and isinstance(ssd.get("path"), str):
        # A folder belongs to one engine.
        pool["ssd"] = {**ssd, "path": f"{ssd['path'].rstrip('/')}/{engine.folder or engine.name}"}
    return pool


def _check_hash_seed(engine: PlacedEngine) -> None:
    algorithm = option(engine.words, "--prefix-caching-hash-algo") or "sha256"
    if not algorithm.startswith("sha256") and "PYTHONHASHSEED" not in engine.env:
        raise ConfigError(
            f"env.PYTHONHASHSEED is missing: with prefix-caching-hash-algo {algorithm} each engine"
            " would draw its own seed, and no engine would find another one's blocks; set it to"
            " one secret number for all engines, or use sha256"
        )


def _check_servers(engine: PlacedEngine) -> None:
    said = option(engine.words, "--api-server-count", "-asc")
    if said is not None and not (said.isdecimal() and int(said)):
        raise ConfigError(
            f"{engine.name}: api-server-count must be at least 1, not {said!r}: the router asks an"
            " engine at its API server; leave it out"
        )


def _kv_ports(engine: PlacedEngine) -> tuple[int, ...]:
    first = engine.kv_port
    return tuple(range(first, first + len(engine.ranks))) if first else ()


def _refuse_shared_ports(topology: Topology, engines: list[PlacedEngine]) -> None:
    users: dict[tuple[str, int], str] = {}
    router = topology.host_name(topology.router.host)
    users[topology.hosts[router].address, topology.router.port] = "the router"
    for engine in engines:
        for port in (engine.port, *_kv_ports(engine)):
            where = (topology.hosts[engine.host].address, port)
            if not 0 < port <= 65535:
                raise ConfigError(f"{engine.name}: port {port} is not within 1..65535")
            if other := users.get(where):
                raise ConfigError(
                    f"port {port} of host {engine.host} is given both to {other} and to"
                    f" {engine.name}; change a port or kv_port"
                )
            users[where] = engine.name

# SPDX-License-Identifier: Apache-2.0
"""Engines on their hosts: each gets its part of the host's devices, or of its cores and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.cluster.topology import Host, parse_cores
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from vllm_ascend_pd.cluster.machine import Machine
    from vllm_ascend_pd.registration import Role

_MEMORY_OPTIONS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_EVENTS = "--kv-events-config"
_EVENTS_ENDPOINT = "tcp://*:5557"
"""vLLM's own, where nothing else is said (``vllm/config/kv_events.py``)."""
_MAX_KV_BYTES = 16 << 30
_MIB = 1 << 20


@dataclass(slots=True)
class PlacedEngine:
    """One engine, and the part of its host that ``divide`` gives it."""

    name: str
    role: Role
    host: str
    address: str
    port: int
    kv_port: int
    """Of its first data parallel rank, and the next numbers of the next ranks; 0: any free ones."""
    words: list[str]
    """Options of ``vllm serve``."""
    env: dict[str, str]
    inner_port: int | None = None
    """Where vLLM looks first for a port of its own; ``None``: the system hands one out."""
    cores: tuple[int, ...] = ()
    devices: tuple[int | str, ...] = ()
    memory_bytes: int | None = None
    """Of KV cache on a CPU host; ``None``: the user or vLLM decides."""
    pool_bytes: int | None = None
    """To contribute to the pool; ``None``: the engine decides."""
    folder: str | None = None
    """Of its pool, in that of all engines; ``None``: called like the engine."""

    @property
    def url(self) -> str:
        return http_url(self.address, self.port)

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Each is an instance at the router, and has the memory that an engine has."""
        count = num_ranks(self.name, self.words)
        return tuple(range(count)) if count > 1 else (None,)


def http_url(address: str, port: int) -> str:
    """With the brackets that an IPv6 address needs."""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def divide(
    name: str, host: Host, engines: list[PlacedEngine], device: str, machine: Machine | None
) -> None:
    """Give each engine of a host its devices, or its cores and memory."""
    total_ranks = sum(len(engine.ranks) for engine in engines)
    if machine is not None:
        for engine in engines:
            engine.pool_bytes = machine.free_memory_bytes // (4 * total_ranks) // _MIB * _MIB
    if device != "cpu":
        _divide_devices(name, host, engines, machine)
        return
    if machine is not None and engines:
        for engine in engines:
            chosen = any(option(engine.words, word) for word in _MEMORY_OPTIONS)
            if not chosen and "VLLM_CPU_KVCACHE_SPACE" not in engine.env:
                share = machine.free_memory_bytes // (2 * total_ranks)
                engine.memory_bytes = max(1, min(share, _MAX_KV_BYTES) // _MIB) * _MIB
    if host.cores is not None:
        cores = parse_cores(f"hosts.{name}.cores", host.cores)
    else:
        cores = machine.cores if machine is not None else ()
    each = len(cores) // len(engines) if engines else 0
    for index, engine in enumerate(engines):
        if each:
            engine.cores = cores[index * each : (index + 1) * each]
        elif cores and num_devices(engine.name, engine.words) == 1:
            # vLLM would bind them all to the same core, on which they starve each other.
            engine.cores = (cores[index % len(cores)],)


def _divide_devices(
    name: str, host: Host, engines: list[PlacedEngine], machine: Machine | None
) -> None:
    if host.devices is None and machine is not None and machine.hides_devices:
        raise ConfigError(
            f"{machine.hides_devices} does not say by number which accelerators engines may use:"
            f" unset it, or name them in a topology file, e.g. hosts.{name}.devices: [2, 3]"
        )
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
        needed = num_devices(engine.name, engine.words)
        engine.devices = devices[taken : taken + needed]
        taken += needed
    if taken > len(devices):
        raise ConfigError(
            f"hosts.{name}: its {len(engines)} engines need {taken} devices, and it has"
            f" {len(devices)} {list(devices)}; lower count or tensor-parallel-size"
        )


def spread_events(engines: list[PlacedEngine]) -> None:
    """Engines of one host that would all publish their KV events at one port get ports of their
    own. Each rank of an engine takes the next one, by vLLM's own doing."""
    said: dict[tuple[str, str], list[PlacedEngine]] = {}
    for engine in engines:
        if (text := option(engine.words, _EVENTS)) is not None:
            said.setdefault((engine.host, text), []).append(engine)
    for (_, text), sharing in said.items():
        if len(sharing) == 1:
            continue
        try:
            config = msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue  # vLLM says what is wrong with it
        offset, total = 0, sum(len(engine.ranks) for engine in sharing)
        for engine in sharing:
            moved = msgspec.json.encode({**config, **_at_own_ports(config, offset, total)})
            _replace_option(engine.words, _EVENTS, moved.decode())
            offset += len(engine.ranks)


def _at_own_ports(config: dict[str, Any], offset: int, total: int) -> dict[str, str]:
    """Of the endpoints those at which vLLM listens, so that ``total`` ports of each do not meet.
    It connects to an ``endpoint`` that names an address."""
    ports = {}
    for name in ("endpoint", "replay_endpoint"):
        endpoint = config.get(name) or (_EVENTS_ENDPOINT if name == "endpoint" else "")
        address, _, port = str(endpoint).rpartition(":")
        listens = name == "replay_endpoint" or "*" in address or "::" in address
        if listens and address.startswith("tcp:") and port.isdecimal():
            ports[name] = address, int(port)
    numbers = [number for _, number in ports.values()]
    moved = {name: f"{address}:{number + offset}" for name, (address, number) in ports.items()}
    if len(numbers) == 2 and abs(numbers[0] - numbers[1]) < total:
        moved["replay_endpoint"] = f"{ports['replay_endpoint'][0]}:{max(numbers) + total + offset}"
    return moved


def option(words: list[str], *names: str) -> str | None:
    """The value of an option on a command line; the last one counts."""
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else words[index + 1] if index + 1 < len(words) else ""
    return found


def _replace_option(words: list[str], said: str, by: str) -> None:
    """Wherever it is said."""
    for index, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name.replace("_", "-") == said:
            words[index : index + (1 if equals else 2)] = [said, by]


def num_devices(engine: str, words: list[str]) -> int:
    """That an engine with these options of ``vllm serve`` needs."""
    tensor = _int_option(engine, words, "--tensor-parallel-size", "-tp")
    each = tensor * _int_option(engine, words, "--pipeline-parallel-size", "-pp")
    return each * num_ranks(engine, words)


def num_ranks(engine: str, words: list[str]) -> int:
    """Data parallel ones."""
    return _int_option(engine, words, "--data-parallel-size", "-dp")


def _int_option(engine: str, words: list[str], *names: str) -> int:
    text = option(words, *names)
    if text is None:
        return 1
    if not re.fullmatch(r"[1-9]\d*", text):
        raise ConfigError(f"{engine}: {names[0]} must be a positive number, not {text!r}")
    return int(text)

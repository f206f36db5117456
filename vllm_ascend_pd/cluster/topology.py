# SPDX-License-Identifier: Apache-2.0
"""The topology: which engines run where. One file, from which every command follows.

model: Qwen/Qwen3-8B
args: {dtype: bfloat16, max-model-len: 32768}
hosts:
  node-a: {address: 10.0.0.1}
  node-b: {address: 10.0.0.2}
router: {host: node-a, port: 8000}
prefill:
  - {host: node-a, count: 2}
decode:
  - {host: node-b, count: 2, args: {max-num-seqs: 512}}
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from vllm_ascend_pd import parsing
from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_ascend_pd.registration import Role

LOCAL = "localhost"
"""The host that is meant where the file names none."""

RESERVED = frozenset({"host", "port", "kv-transfer-config", "served-model-name", "model"})
"""Options of ``vllm serve`` that a deployment sets itself, with dashes."""

_NOT_AT_HTTP_PORT = frozenset({"grpc", "headless", "ssl-certfile", "ssl-keyfile", "uds"})
"""Options of ``vllm serve`` with which a deployment's own processes cannot ask an engine."""
_OF_ONE_RANK = frozenset(
    {
        *("data-parallel-rank", "dpn", "data-parallel-start-rank", "dpr"),
        *("data-parallel-external-lb", "dpe", "data-parallel-hybrid-lb", "dph"),
        *("data-parallel-multi-port-external-lb", "dpm"),
    }
)
"""Options of ``vllm serve`` that engines with equal options cannot share."""
_TLS = frozenset({"tls-certificate", "tls-key"})
_JSON = frozenset({"allowed-origins", "allowed-methods", "allowed-headers"})
"""Options, of router and engines, whose lists are one word."""
_REPEATED = frozenset({"middleware"})
"""Options of engines that are said once for each item of a list."""
_COMMAS = frozenset(
    {
        *("prefill-model-labels", "decode-model-labels"),
        *("static-backends", "static-models", "static-model-labels"),
    }
)
"""Options of a router whose lists are one word with commas."""
_FLAGS = frozenset({"require-prefill", "allow-credentials"})

Port = Annotated[int, Meta(ge=1, le=65535, description="must be within 1..65535")]
Count = Annotated[int, Meta(ge=0, description="must not be negative")]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine. What is left out is asked of the machine when it is this one."""

    address: str = "127.0.0.1"
    """IP address at which the other hosts, and the router's clients, reach it."""
    cores: str | None = None
    """CPU hosts: cores that the engines share, as ``taskset -c`` writes them, e.g. ``0-15,32``."""
    devices: tuple[int, ...] | None = None
    """Accelerators that the engines share."""


class EngineGroup(msgspec.Struct, frozen=True, kw_only=True):
    """``count`` equal engines on one host."""

    host: str = ""
    count: Count = 1
    port: Port | None = None
    """HTTP port of the first; the next engines take the next numbers."""
    kv_port: Port | None = None
    """Port for the peers of the first, likewise."""
    args: dict[str, Any] = {}
    """Options of ``vllm serve`` for these engines, added to those of all engines."""
    env: dict[str, str] = {}


class RouterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router runs, and its options."""

    host: str = ""
    port: Port = 8000
    args: dict[str, Any] = {}
    env: dict[str, str] = {}


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. ``args``, ``env`` and ``extra_config`` are those of every engine.

    Left out, ``prefill`` and ``decode`` are one engine each, or none where there is ``both``.
    """

    model: str
    served_model_name: str | None = None
    device: str | None = None
    """``cpu``, ``cuda`` or ``npu``; left out, it is what this machine has."""
    hosts: dict[str, Host] = {}
    prefill: tuple[EngineGroup, ...] = (EngineGroup(),)
    decode: tuple[EngineGroup, ...] = (EngineGroup(),)
    both: tuple[EngineGroup, ...] = ()
    """Engines that the router uses for prompts or for answers, as load asks."""
    router: RouterSpec = RouterSpec()
    args: dict[str, Any] = {}
    more_args: tuple[str, ...] = ()
    """Options of ``vllm serve`` as they stand on a command line."""
    env: dict[str, str] = {}
    extra_config: dict[str, Any] = {}
    """``kv_connector_extra_config`` of every engine: ``transfer``, ``security`` and so on."""

    @property
    def name(self) -> str:
        """The model name that clients send."""
        return self.served_model_name or self.model

    @property
    def groups(self) -> tuple[tuple[Role, tuple[EngineGroup, ...]], ...]:
        """The engines by their roles."""
        return ("prefill", self.prefill), ("decode", self.decode), ("both", self.both)

    def host(self, name: str) -> Host:
        """The host of that name, checked when the file was read."""
        return self.hosts[name or next(iter(self.hosts))]

    def host_name(self, name: str) -> str:
        """``name``, or the first host when a section names none."""
        return name or next(iter(self.hosts))


def load(path: Path) -> Topology:
    """Read and check a topology file.

    Raises:
        ConfigError: it names the file, the field and what is wrong.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror})") from e
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line} is not UTF-8: {e.reason}") from e
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML: {e}") from e
    try:
        return parse(raw)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def parse(raw: Any) -> Topology:
    """A topology from plain values; ``ConfigError`` names the field."""
    topology = parsing.parse(raw, Topology, top="the topology")
    if any(group.count for group in topology.both):
        unsaid: dict[str, Any] = {role: () for role in ("prefill", "decode") if role not in raw}
        topology = msgspec.structs.replace(topology, **unsaid)
    if not topology.hosts:
        topology = msgspec.structs.replace(topology, hosts={LOCAL: Host()})
    _check(topology)
    return topology


def with_more_args(topology: Topology, words: Sequence[str]) -> Topology:
    """The same with what stands after ``--``; ``ConfigError`` names the option."""
    _check_words("after --", words)
    return msgspec.structs.replace(topology, more_args=(*topology.more_args, *words))


def _check(topology: Topology) -> None:
    if topology.device not in (None, "cpu", "cuda", "npu"):
        raise ConfigError(f"device: {topology.device!r} is not one of ['cpu', 'cuda', 'npu']")
    for name, host in topology.hosts.items():
        try:
            ipaddress.ip_address(host.address)
        except ValueError as e:
            raise ConfigError(
                f"hosts.{name}.address must be an IP address, not {host.address!r}"
            ) from e
        if host.cores is not None:
            parse_cores(f"hosts.{name}.cores", host.cores)
        if len(topology.hosts) > 1 and ipaddress.ip_address(host.address).is_loopback:
            raise ConfigError(
                f"hosts.{name}.address {host.address} is a loopback address; with several hosts"
                " each needs an address that the others reach"
            )
    _check_host("router.host", topology.router.host, topology)
    _check_args("args", topology.args)
    _check_args("router.args", topology.router.args, frozenset({"port"}))
    _check_no_tls(topology.router.args)
    _check_words("more_args", topology.more_args)
    _check_files(topology.extra_config)
    counts = {}
    for role, groups in topology.groups:
        for index, group in enumerate(groups):
            where = f"{role}[{index}]"
            _check_host(f"{where}.host", group.host, topology)
            _check_args(f"{where}.args", group.args)
        counts[role] = sum(group.count for group in groups)
    for role in ("prefill", "decode"):
        if not counts[role] + counts["both"]:
            raise ConfigError(f"{role}: at least one engine is needed")
    if sum(counts.values()) < 2:
        raise ConfigError("both: at least two engines are needed, or one beside prefill or decode")


def _check_host(path: str, name: str, topology: Topology) -> None:
    if name and name not in topology.hosts:
        raise ConfigError(f"{path}: {name!r} is not in hosts {sorted(topology.hosts)}")


def _check_args(path: str, args: Mapping[str, Any], reserved: frozenset[str] = RESERVED) -> None:
    for key, value in args.items():
        if option_name(key) in reserved:
            raise ConfigError(f"{path}.{key}: set by the topology itself; leave it out")
        if value is not None and value is not False:
            _check_own_option(f"{path}.{key}", option_name(key))


def _check_own_option(path: str, option: str) -> None:
    """Of an engine; no option of a router has these names."""
    if option in _OF_ONE_RANK:
        raise ConfigError(
            f"{path}: each engine of a deployment has all of its data parallel ranks behind one"
            " front end; leave it out, or start `vllm serve` by hand"
        )
    if option in _NOT_AT_HTTP_PORT:
        raise ConfigError(
            f"{path}: a deployment's own processes ask its engines over http, at a port of each;"
            " leave it out, or start `vllm serve` by hand"
        )


def _check_no_tls(args: Mapping[str, Any]) -> None:
    """Who starts a router, and the engines that register, ask it over http."""
    for key, value in args.items():
        if option_name(key) in _TLS and value is not None:
            raise ConfigError(
                f"router.args.{key}: a deployment's own processes ask its router over http; put"
                " what ends TLS in front of it, or start `vllm-pd router` by hand"
            )


def option_name(said: str) -> str:
    """With dashes, as `vllm serve` and `vllm-pd router` write it."""
    return said.replace("_", "-").lstrip("-")


def _check_words(path: str, words: Sequence[str]) -> None:
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and option_name(option) in RESERVED:
            raise ConfigError(f"{path}: {option} is set by vllm-pd itself; leave it out")
        _check_own_option(f"{path}: {option}", option_name(option))


def _check_files(extra_config: Mapping[str, Any]) -> None:
    """Of the sections that the router reads too; engines check all."""
    for section, option in (("security", "secret_file"), ("router", "token_file")):
        values = extra_config.get(section, {})
        if not isinstance(values, Mapping):
            found = type(values).__name__
            raise ConfigError(f"extra_config.{section} must be a mapping, not {found}")
        path = values.get(option)
        if not isinstance(path, str | None):
            raise ConfigError(f"extra_config.{section}.{option} must be a string, not {path!r}")


def parse_cores(path: str, text: str) -> tuple[int, ...]:
    """``0-3,8`` as ``(0, 1, 2, 3, 8)``; ``ConfigError`` names ``path``."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(map(str.isdecimal, numbers)) or int(numbers[-1]) < int(first):
            raise ConfigError(f"{path}: {text!r} is not a list of cores such as 0-15,32")
        cores.extend(range(int(first), int(numbers[-1]) + 1))
    return tuple(dict.fromkeys(cores))


def render_args(args: Mapping[str, Any]) -> list[str]:
    """``{max-model-len: 4096, enforce_eager: true}`` as words of a command line."""
    words: list[str] = []
    for key, value in args.items():
        option = option_name(key)
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple) and option in _REPEATED:
            words += [word for item in value for word in (f"--{option}", _word(item))]
        elif isinstance(value, list | tuple) and option not in _JSON:
            words += [f"--{option}", *map(_word, value)]
        else:
            words += [f"--{option}", _word(value)]
    return words


def _word(value: Any) -> str:
    is_json = isinstance(value, Mapping | list | tuple)
    return msgspec.json.encode(value).decode() if is_json else str(value)


def render_router_args(args: Mapping[str, Any]) -> list[str]:
    """Likewise for ``vllm-pd router``, where a list is JSON or an option that is repeated, and only
    a flag is false: elsewhere it is how YAML reads ``off``.
    """
    words: list[str] = []
    for key, value in args.items():
        option = option_name(key)
        if value is False:
            values = [] if option in _FLAGS else ["off"]
        elif isinstance(value, list | tuple) and option in _COMMAS:
            values = [",".join(map(str, value))]
        elif isinstance(value, list | tuple) and option not in _JSON:
            values = list(value)
        else:
            values = [value]
        words += [word for one in values for word in render_args({option: one})]
    return words

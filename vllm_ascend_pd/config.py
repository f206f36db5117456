# SPDX-License-Identifier: Apache-2.0
"""The configuration, parsed once into frozen dataclasses.

It arrives in ``KVTransferConfig`` (``--kv-transfer-config``); ours is
``kv_connector_extra_config``, every key of which has a default that works on one machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import isfinite
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from vllm_ascend_pd.errors import ConfigError

DEFAULT_KV_PORT = 14579
"""vLLM's default ``kv_port``. With it, any free port is taken when it is in use."""


class Role(str, Enum):
    """What this engine does with KV of requests that ask for a transfer."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"
    BOTH = "kv_both"

    @property
    def produces(self) -> bool:
        return self is not Role.CONSUMER

    @property
    def consumes(self) -> bool:
        return self is not Role.PRODUCER


class WireProtocol(str, Enum):
    """What Mooncake moves bytes over."""

    TCP = "tcp"
    ASCEND = "ascend"


class Placement(str, Enum):
    """Where a peer's bytes arrive: in staging memory, from which they are copied once verified, or
    right in the KV pages. ``auto`` is the latter over the links of the NPUs.
    """

    AUTO = "auto"
    STAGED = "staged"
    DIRECT = "direct"


class LoadMode(str, Enum):
    """Where a peer's KV is loaded: inside a step, or beside the steps while the request waits."""

    AUTO = "auto"
    STEP = "step"
    PARK = "park"


class FirstTokenMode(str, Enum):
    """Where the token after a peer's prompt comes from."""

    AUTO = "auto"
    COMPUTE = "compute"


class PushMode(str, Enum):
    """How much of a prompt is moved at a time while it is computed.

    ``auto`` moves what takes a millisecond at the measured speed, so that a short prompt goes in
    one piece and a long one layer by layer.
    """

    AUTO = "auto"
    LAYER = "layer"
    STEP = "step"
    PROMPT = "prompt"


class Transport(str, Enum):
    """By what bytes travel; ``auto`` is shared memory on one host and Mooncake across hosts."""

    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    MOONCAKE = "mooncake"


class WeightReading(str, Enum):
    """How closely the files of the weights are looked at, see ``engine.weight_files``."""

    SAMPLES = "samples"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """``kv_connector_extra_config.transfer``."""

    lease_s: float = 30.0
    """A producer keeps a prompt's blocks so long without a heartbeat of the consumer."""
    max_lease_s: float = 300.0
    """And so long at most, whatever the consumer says."""
    unopened_share: float = 0.5
    """Prompts that no consumer has asked for hold at most this share of a producer's blocks: the
    oldest ones give way."""
    admission_timeout_s: float = 60.0
    """A consumer's request that waits for memory so long goes on without its peer's KV."""
    peer_timeout_s: float = 2.0
    """A peer that has said nothing for so long, to an open or a fetch, is taken for gone."""
    step_load_timeout_s: float = 5.0
    """Longest wait for KV inside one step; the whole batch waits with it."""
    load_timeout_s: float = 30.0
    """Longest load of a parked request."""
    arrival_timeout_s: float = 5.0
    """When both requests are sent at once: longest wait for the producer's one to arrive there."""
    prefill_timeout_s: float = 60.0
    """When both are sent at once: a producer that computes nothing of the prompt for so long (its
    queue included) is not waited for any more."""
    push_mode: PushMode = PushMode.AUTO
    """When both are sent at once, how much is moved at a time: ``layer``, ``step`` (all layers of
    a chunk), ``prompt`` (everything at its end), or ``auto``: see ``PushMode``."""
    load_mode: LoadMode = LoadMode.AUTO
    """``step``, ``park``, or ``auto``: by expected load time, see ``max_step_load_ms``."""
    max_step_load_ms: float = 50.0
    """With ``auto``, a load expected to take longer parks its request."""
    first_token: FirstTokenMode = FirstTokenMode.AUTO
    """``auto``: the producer's, where both sample in the same way. ``compute``: a consumer computes
    it, and a producer does not give it."""
    staging_slots: int = 8
    """Number of pieces that may be on their way at once."""
    staging_slot_bytes: int = 8 * 1024 * 1024
    """Size of a piece; at least one layer's page of one block."""
    protocol: WireProtocol = WireProtocol.TCP
    """Mooncake's protocol; ``ascend`` goes over the links of the NPUs. The same on both sides."""
    placement: Placement = Placement.AUTO
    """``staged``, ``direct`` (with ``protocol`` ``ascend`` only), or ``auto``: see ``Placement``.
    The same on both sides."""
    verify_placement: bool = False
    """Of pages that are placed directly: both sides read them back through host memory and compare
    checksums. To see that a new installation moves what it should; slow."""
    transport: Transport = Transport.AUTO
    """``shared_memory`` (peers of this host and user only), ``mooncake``, or ``auto``: the first
    that reaches the peer."""

    def __post_init__(self) -> None:
        for name in (
            "lease_s",
            "max_lease_s",
            "unopened_share",
            "admission_timeout_s",
            "peer_timeout_s",
            "step_load_timeout_s",
            "load_timeout_s",
            "arrival_timeout_s",
            "prefill_timeout_s",
            "staging_slots",
            "staging_slot_bytes",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"transfer.{name} must be positive, not {getattr(self, name)}")
        if self.unopened_share > 1:
            raise ConfigError(
                f"transfer.unopened_share must be at most 1, not {self.unopened_share}"
            )
        if self.max_step_load_ms < 0:
            raise ConfigError(
                f"transfer.max_step_load_ms must not be negative, not {self.max_step_load_ms}"
            )
        if self.transport is Transport.SHARED_MEMORY and self.protocol is not WireProtocol.TCP:
            raise ConfigError(
                f"transfer.transport shared_memory moves nothing over transfer.protocol"
                f" {self.protocol.value}: leave one of them out"
            )
        if self.placement is Placement.DIRECT and self.protocol is WireProtocol.TCP:
            raise ConfigError(
                "transfer.placement direct needs transfer.protocol ascend: over tcp bytes may land"
                " in KV pages after a transfer has failed"
            )

    @property
    def places_directly(self) -> bool:
        """Whether parked loads go from the producer's pages right into the consumer's."""
        return self.protocol is WireProtocol.ASCEND and self.placement is not Placement.STAGED


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """``kv_connector_extra_config.security``."""

    allow_non_loopback: bool = False
    """Without a secret: allow addresses off the host, which need a trusted network."""
    allowed_peers: tuple[str, ...] = ()
    """Addresses or networks (CIDR) that may be a peer, beside the loopback ones."""
    secret_file: str | None = None
    """File with the secret that P and D share; with it they accept only each other's messages."""

    def __post_init__(self) -> None:
        for peer in self.allowed_peers:
            try:
                ipaddress.ip_network(peer, strict=False)
            except ValueError as e:
                raise ConfigError(
                    f"security.allowed_peers: {peer!r} is not an IP address or network ({e})"
                ) from e
        if self.secret_file == "":
            raise ConfigError("security.secret_file is empty; give a path, or leave the option out")
        if self.allowed_peers and not self.may_leave_host:
            raise ConfigError(
                "security.allowed_peers needs security.secret_file, or on a trusted network"
                " security.allow_non_loopback: true; without either only loopback peers are used"
            )

    @property
    def may_leave_host(self) -> bool:
        """Whether addresses other than loopback ones may be used."""
        return self.allow_non_loopback or self.secret_file is not None

    def allows(self, host: str) -> bool:
        """Whether this engine may connect to ``host`` (an IP address or ``localhost``)."""
        if host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if address.is_loopback:
            return True
        return any(
            address in ipaddress.ip_network(peer, strict=False) for peer in self.allowed_peers
        )


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """``kv_connector_extra_config.router``: the router that this engine tells of itself."""

    url: str | None = None
    """``http[s]://HOST:PORT`` of the router; without it the engine registers nowhere."""
    http_url: str | None = None
    """This engine's OpenAI server as the router reaches it; ``kv_ip`` and ``--port`` without it."""
    instance_id: str | None = None
    """Its name at the router; host and port of ``http_url`` without it."""
    token_file: str | None = None
    """File with the token that the router asks of engines."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the instance, for the router's ``--prefill-model-labels`` and the like."""

    def __post_init__(self) -> None:
        for name in ("url", "http_url"):
            value = getattr(self, name)
            if value is None:
                continue
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"router.{name}: {value!r} is not http://HOST:PORT")
        if not self.url and (self.http_url or self.instance_id or self.token_file or self.labels):
            raise ConfigError("router.url is missing: the router that the other options are for")


class PoolLoad(str, Enum):
    """Which of the blocks that the pool has are loaded."""

    AUTO = "auto"
    ALL = "all"
    NONE = "none"


class PoolSave(str, Enum):
    """When a block is stored."""

    WRITE_THROUGH = "write_through"
    """As soon as it is full."""
    EVICTION = "eviction"
    """Before the engine's own prefix cache evicts it."""


@dataclass(frozen=True, slots=True)
class SsdConfig:
    """``kv_connector_extra_config.pool.ssd``."""

    path: str
    """An absolute folder of this engine alone; made if it is not there."""
    size: int
    """Bytes at most."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ConfigError(f"pool.ssd.path must be an absolute path, not {self.path!r}")
        if self.size < _MIN_SSD_BYTES:
            raise ConfigError(
                f"pool.ssd.size must be at least {_MIN_SSD_BYTES >> 20} MiB, not {self.size} bytes"
            )

    @classmethod
    def parse(cls, raw: Any) -> SsdConfig:
        raw = _mapping("pool.ssd", raw)
        _refuse_unknown("pool.ssd", raw, {"path", "size"})
        if missing := {"path", "size"} - raw.keys():
            raise ConfigError(f"pool.ssd: {sorted(missing)} is missing")
        if not isinstance(raw["path"], str):
            raise ConfigError(f"pool.ssd.path must be a string, not {raw['path']!r}")
        return cls(raw["path"], parse_size("pool.ssd.size", raw["size"]))


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """``kv_connector_extra_config.pool``; the pool is on when the section is there."""

    master: str | None = None
    """``host:port`` of a running mooncake_master; without it the engine starts its own."""
    dram_size: int | None = None
    """Bytes of memory to contribute; without it 25 % of what is available at start."""
    ssd: SsdConfig | None = None
    get: bool = True
    """Take blocks that the pool has."""
    put: bool = True
    """Store blocks."""
    save: PoolSave = PoolSave.WRITE_THROUGH
    """``write_through``: as they become full; ``eviction``: before the prefix cache evicts them."""
    put_decoded: bool = True
    """Store blocks with generated tokens too, for the next turn of a conversation."""
    load: PoolLoad = PoolLoad.AUTO
    """``all``, ``none``, or ``auto``: as many as is faster than computing them."""
    lookup_timeout_ms: float = 100.0
    """A request waits so long for its lookup, then goes on without the pool."""
    io_threads: int = 2
    """Threads that read."""
    staging_slot_bytes: int = 8 * 1024 * 1024
    """One read or write at a time; raised to one block's KV when that is larger."""
    breaker_failures: int = 3
    """So many failures in a row, and the pool is bypassed."""
    breaker_slow_ms: float = 2000.0
    """A lookup, read or write that takes longer is a failure."""
    probe_interval_s: float = 1.0
    """How often a bypassed pool is tried."""

    def __post_init__(self) -> None:
        if self.master is not None:
            host, _, port = self.master.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"pool.master must be host:port, not {self.master!r}")
        if self.dram_size is not None and 0 < self.dram_size < _MIN_DRAM_BYTES:
            raise ConfigError(
                f"pool.dram_size must be 0 or at least {_MIN_DRAM_BYTES >> 20} MiB,"
                f" not {self.dram_size} bytes"
            )
        if self.save is PoolSave.EVICTION and not self.put_decoded:
            raise ConfigError(
                "pool.put_decoded false needs pool.save write_through: an evicted block does not"
                " say which of its tokens were generated"
            )
        for name in (
            "lookup_timeout_ms",
            "io_threads",
            "staging_slot_bytes",
            "breaker_failures",
            "breaker_slow_ms",
            "probe_interval_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"pool.{name} must be positive, not {getattr(self, name)}")

    def for_worker(self, rank: int, num_workers: int) -> PoolConfig:
        """One worker's part of the memory and of the disk, with a folder of its own."""
        if num_workers == 1:
            return self
        dram_size, ssd = self.dram_size, self.ssd
        if dram_size is not None:
            dram_size //= num_workers
            _check_part("pool.dram_size", dram_size, _MIN_DRAM_BYTES, num_workers)
        if ssd is not None:
            _check_part("pool.ssd.size", ssd.size // num_workers, _MIN_SSD_BYTES, num_workers)
            ssd = SsdConfig(f"{ssd.path}/worker-{rank}", ssd.size // num_workers)
        return replace(self, dram_size=dram_size, ssd=ssd)

    @property
    def master_host(self) -> str | None:
        return self.master.rpartition(":")[0] if self.master is not None else None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> PoolConfig | None:
        """``None`` when there is no such section."""
        if "pool" not in extra:
            return None
        raw = _mapping("pool", extra["pool"])
        _refuse_unknown("pool", raw, {f.name for f in fields(cls)})
        defaults = cls()
        values = {
            key: _coerce(f"pool.{key}", value, getattr(defaults, key))
            for key, value in raw.items()
            if key not in ("master", "dram_size", "ssd")
        }
        master = raw.get("master")
        if master is not None and not isinstance(master, str):
            raise ConfigError(f"pool.master must be host:port, not {master!r}")
        if raw.get("dram_size") is not None:
            values["dram_size"] = parse_size("pool.dram_size", raw["dram_size"])
        if raw.get("ssd") is not None:
            values["ssd"] = SsdConfig.parse(raw["ssd"])
        return cls(master=master, **values)


_MIN_DRAM_BYTES = 16 << 20
_MIN_SSD_BYTES = 64 << 20
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)


def _check_part(name: str, part: int, least: int, num_workers: int) -> None:
    if 0 < part < least:
        raise ConfigError(
            f"{name} is divided among {num_workers} workers and must be at least"
            f" {(least >> 20) * num_workers} MiB, not {part * num_workers} bytes"
        )


def parse_size(path: str, value: Any) -> int:
    """Bytes: a number, or a text such as ``"512MiB"`` or ``"8G"`` (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        if value.isdigit():
            return int(value)
        if match := _SIZE.fullmatch(value.strip()):
            return int(float(match[1]) * 1024 ** ("KMGT".index(match[2].upper()) + 1))
    raise ConfigError(f'{path} must be bytes or a text such as "8GiB", not {value!r}')


class KVTransferConfigLike(Protocol):
    """The fields of vLLM's ``KVTransferConfig`` that are read here."""

    kv_role: Any
    engine_id: str | None
    kv_ip: str
    kv_port: int
    kv_connector_extra_config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PDConfig:
    """Everything the user chose. Classes take the section that they need."""

    role: Role
    engine_id: str
    host: str
    port: int
    transfer: TransferConfig = field(default_factory=TransferConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    pool: PoolConfig | None = None
    identity: WeightReading = WeightReading.SAMPLES
    """``samples`` of every tensor, or every byte (``full``)."""

    @classmethod
    def from_kv_transfer_config(cls, config: KVTransferConfigLike) -> PDConfig:
        """Parse and check; every error names the field and the fix."""
        if config.kv_role is None:
            raise ConfigError(
                "kv_role is missing; set it to one of " + ", ".join(role.value for role in Role)
            )
        extra = config.kv_connector_extra_config
        _refuse_unknown(
            "kv_connector_extra_config",
            extra,
            {"transfer", "security", "router", "pool", "identity"},
        )
        security = _section(SecurityConfig, "security", extra)
        host = "127.0.0.1" if config.kv_ip == "localhost" else config.kv_ip
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError as e:
            raise ConfigError(f"kv_ip must be an IP address, not {config.kv_ip!r}") from e
        if not loopback and not security.may_leave_host:
            raise ConfigError(
                f"kv_ip {host} is not a loopback address, and without a secret the control and data"
                " sockets have no authentication: in kv_connector_extra_config set"
                " security.secret_file on all engines (or security.allow_non_loopback: true on a"
                " trusted network), and security.allowed_peers to the peers' addresses"
            )
        pool = PoolConfig.parse(extra)
        if pool is not None and (master := pool.master_host) and not security.allows(master):
            raise ConfigError(
                f"pool.master {pool.master!r} is neither a loopback address nor in"
                " security.allowed_peers; the pool has no authentication"
            )
        if not 0 <= config.kv_port <= 65535:
            raise ConfigError(f"kv_port must be within 0..65535, not {config.kv_port}")
        return cls(
            role=Role(config.kv_role),
            engine_id=config.engine_id or "",
            host=host,
            port=config.kv_port,
            transfer=_section(TransferConfig, "transfer", extra),
            security=security,
            router=_section(RouterConfig, "router", extra),
            pool=pool,
            identity=_coerce("identity", extra.get("identity", "samples"), WeightReading.SAMPLES),
        )


def _mapping(path: str, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} must be a mapping, not {type(raw).__name__}")
    return raw


def _refuse_unknown(path: str, raw: Mapping[str, Any], valid: set[str]) -> None:
    if unknown := sorted(raw.keys() - valid):
        raise ConfigError(f"{path}: unknown keys {unknown}; valid: {sorted(valid)}")


_S = TypeVar("_S", TransferConfig, SecurityConfig, RouterConfig)


def _section(cls: type[_S], name: str, extra: Mapping[str, Any]) -> _S:
    raw = _mapping(name, extra.get(name, {}))
    _refuse_unknown(name, raw, {f.name for f in fields(cls)})
    defaults = cls()
    return cls(
        **{key: _coerce(f"{name}.{key}", v, getattr(defaults, key)) for key, v in raw.items()}
    )


def _coerce(path: str, value: Any, default: Any) -> Any:
    """``value`` as the type of the option's default; bool is never taken for a number.

    An option without a default is a string.
    """
    if isinstance(default, Enum):
        kind = type(default)
        try:
            return kind(value)
        except ValueError as e:
            raise ConfigError(
                f"{path}: {value!r} is not one of {[member.value for member in kind]}"
            ) from e
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
    elif default is None:
        if isinstance(value, str):
            return value
        raise ConfigError(f"{path} must be a string, not {value!r}")
    elif isinstance(default, tuple):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise ConfigError(f"{path} must be a list of strings, not {value!r}")
    elif isinstance(default, dict):
        if isinstance(value, Mapping) and all(
            isinstance(word, str) for pair in value.items() for word in pair
        ):
            return dict(value)
        raise ConfigError(f"{path} must be a mapping of strings, not {value!r}")
    elif isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
        if isinstance(default, float):
            return float(value)
        if int(value) == value:
            return int(value)
    raise ConfigError(f"{path} must be {type(default).__name__}, not {value!r}")

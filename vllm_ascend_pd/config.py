# SPDX-License-Identifier: Apache-2.0
"""The configuration, parsed once into frozen dataclasses.

It arrives in ``KVTransferConfig`` (``--kv-transfer-config``); ours is
``kv_connector_extra_config``, every key of which has a default that works on one machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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


class LoadMode(str, Enum):
    """Where a peer's KV is loaded: inside a step, or beside the steps while the request waits."""

    AUTO = "auto"
    STEP = "step"
    PARK = "park"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """``kv_connector_extra_config.transfer``."""

    lease_s: float = 30.0
    """A producer keeps a prompt's blocks so long without a heartbeat of the consumer."""
    peer_timeout_s: float = 2.0
    """A peer that has said nothing for so long, to an open or a fetch, is taken for gone."""
    step_load_timeout_s: float = 5.0
    """Longest wait for KV inside one step; the whole batch waits with it."""
    load_timeout_s: float = 30.0
    """Longest load of a parked request."""
    load_mode: LoadMode = LoadMode.AUTO
    """``step``, ``park``, or ``auto``: by expected load time, see ``max_step_load_ms``."""
    max_step_load_ms: float = 50.0
    """With ``auto``, a load expected to take longer parks its request."""
    staging_slots: int = 8
    """Number of pieces that may be on their way at once."""
    staging_slot_bytes: int = 8 * 1024 * 1024
    """Size of a piece; at least one layer's page of one block."""

    def __post_init__(self) -> None:
        for name in (
            "lease_s",
            "peer_timeout_s",
            "step_load_timeout_s",
            "load_timeout_s",
            "staging_slots",
            "staging_slot_bytes",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"transfer.{name} must be positive, not {getattr(self, name)}")
        if self.max_step_load_ms < 0:
            raise ConfigError(
                f"transfer.max_step_load_ms must not be negative, not {self.max_step_load_ms}"
            )


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

    @classmethod
    def from_kv_transfer_config(cls, config: KVTransferConfigLike) -> PDConfig:
        """Parse and check; every error names the field and the fix."""
        if config.kv_role is None:
            raise ConfigError(
                "kv_role is missing; set it to one of " + ", ".join(role.value for role in Role)
            )
        extra = config.kv_connector_extra_config
        _refuse_unknown("kv_connector_extra_config", extra, {"transfer", "security", "router"})
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
        )


def _refuse_unknown(path: str, raw: Mapping[str, Any], valid: set[str]) -> None:
    if unknown := sorted(raw.keys() - valid):
        raise ConfigError(f"{path}: unknown keys {unknown}; valid: {sorted(valid)}")


_S = TypeVar("_S", TransferConfig, SecurityConfig, RouterConfig)


def _section(cls: type[_S], name: str, extra: Mapping[str, Any]) -> _S:
    raw = extra.get(name, {})
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} must be a mapping, not {type(raw).__name__}")
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

# SPDX-License-Identifier: Apache-2.0
"""The configuration, parsed once into frozen structs.

It arrives in ``KVTransferConfig`` (``--kv-transfer-config``); ours is
``kv_connector_extra_config``, every key of which has a default that works on one machine.
"""

from __future__ import annotations

import ipaddress
import sys
from enum import Enum
from typing import Annotated, Any, Literal, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.parsing import Size, parse
from vllm_ascend_pd.types import Endpoint

_FINITE = sys.float_info.max
_LONGEST = 1e9
"""Some years: no lock waits for more than 292 of them."""
Count = Annotated[int, Meta(ge=1, description="must be positive")]
Duration = Annotated[float, Meta(gt=0, le=_LONGEST, description="must be positive and at most 1e9")]
NotNegative = Annotated[float, Meta(ge=0, le=_FINITE, description="must not be negative")]
Share = Annotated[float, Meta(gt=0, le=1, description="must be positive and at most 1")]

ETCD = "etcd://"
"""Before the addresses of an etcd, in ``pool.master``."""
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
    RDMA = "rdma"
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


class LoadFromPeer(str, Enum):
    """Which of the blocks that a peer has are loaded."""

    ALL = "all"
    AUTO = "auto"


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


class TransferConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config.transfer``."""

    lease_s: Duration = 30.0
    """A producer keeps a prompt's blocks so long without a heartbeat of the consumer."""
    max_lease_s: Duration = 300.0
    """And so long at most, whatever the consumer says."""
    unopened_share: Share = 0.5
    """Prompts that no consumer has asked for hold at most this share of a producer's blocks: the
    oldest ones give way."""
    admission_timeout_s: Duration = 60.0
    """A consumer's request that waits for memory so long goes on without its peer's KV."""
    peer_timeout_s: Duration = 2.0
    """A peer that has said nothing for so long, to an open or a fetch, is taken for gone."""
    step_load_timeout_s: Duration = 5.0
    """Longest wait for KV inside one step; the whole batch waits with it."""
    load_timeout_s: Duration = 30.0
    """Longest load of a parked request."""
    breaker_failures: Count = 3
    """So many failures in a row, and a consumer computes a producer's prompts itself, but for one
    at a time that tries it."""
    max_freeze_s: Duration = 0.5
    """A running request that moves to another engine stops for so long at most, before it stays."""
    arrival_timeout_s: Duration = 5.0
    """When both requests are sent at once: longest wait for the producer's one to arrive there."""
    prefill_timeout_s: Duration = 60.0
    """When both are sent at once: a producer that computes nothing of the prompt for so long (its
    queue included) is not waited for any more."""
    push_mode: PushMode = PushMode.AUTO
    """When both are sent at once, how much is moved at a time: ``layer``, ``step`` (all layers of
    a chunk), ``prompt`` (everything at its end), or ``auto``: see ``PushMode``."""
    load_mode: LoadMode = LoadMode.AUTO
    """``step``, ``park``, or ``auto``: by expected load time, see ``max_step_load_ms``."""
    max_step_load_ms: NotNegative = 50.0
    """With ``auto``, a load expected to take longer parks its request."""
    load: LoadFromPeer = LoadFromPeer.ALL
    """``all``, or ``auto``: a consumer computes what that brings sooner than loading it, by what it
    has measured of both."""
    first_token: FirstTokenMode = FirstTokenMode.AUTO
    """``auto``: the producer's, where both sample in the same way. ``compute``: a consumer computes
    it, and a producer does not give it."""
    staging_slots: Count = 8
    """Number of pieces that may be on their way at once."""
    staging_slot_bytes: Count = 8 * 1024 * 1024
    """Size of a piece; at least one layer's page of one block."""
    copy_threads: Count | None = None
    """Threads of one copy within host memory, of an engine whose KV caches are not there; by
    default as the cores of the host allow."""
    protocol: WireProtocol = WireProtocol.TCP
    """Mooncake's protocol; ``ascend`` goes over the links of the NPUs, ``rdma`` over the RDMA cards
    of the hosts. The same on both sides."""
    placement: Placement = Placement.AUTO
    """``staged``, ``direct`` (with ``protocol`` ``ascend`` only), or ``auto``: see ``Placement``.
    The same on both sides."""
    verify_placement: bool = False
    """Of pages that are placed directly: both sides read them back through host memory and compare
    checksums. To see that a new installation moves what it should; slow."""
    check_integrity: bool = False
    """An engine without a request looks whether anything of one is left: an error in the log, and
    in ``internal_errors``. To see that a new version loses nothing."""
    transport: Transport = Transport.AUTO
    """``shared_memory`` (peers of this host and user only), ``mooncake``, or ``auto``: the first
    that reaches the peer."""

    def __post_init__(self) -> None:
        if self.lease_s > self.max_lease_s:
            raise ConfigError(
                f"transfer.lease_s {self.lease_s:g} is longer than transfer.max_lease_s"
                f" {self.max_lease_s:g}, after which a prompt is given up in any case: raise that,"
                " too"
            )
        if self.transport is Transport.SHARED_MEMORY and self.protocol is not WireProtocol.TCP:
            raise ConfigError(
                f"transfer.transport shared_memory moves nothing over transfer.protocol"
                f" {self.protocol.value}: leave one of them out"
            )
        if self.placement is Placement.DIRECT and self.protocol is not WireProtocol.ASCEND:
            raise ConfigError(
                "transfer.placement direct needs transfer.protocol ascend: over tcp and rdma bytes"
                " may land in KV pages after a transfer has failed"
            )

    @property
    def places_directly(self) -> bool:
        """Whether parked loads go from the producer's pages right into the consumer's."""
        return self.protocol is WireProtocol.ASCEND and self.placement is not Placement.STAGED


ANYWHERE = ("0.0.0.0/0", "::/0")
"""Networks that every address is in."""
NOT_ALLOWED = "is neither a loopback address nor in security.allowed_peers"
"""Said of a host that ``SecurityConfig.allows`` does not."""


class SecurityConfig(msgspec.Struct, frozen=True):
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
        """Whether this engine may connect to ``host``: an IP address, ``localhost``, or where any
        address is allowed a name, which may mean any."""
        if host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host != "" and set(ANYWHERE) <= set(self.allowed_peers)
        if address.is_loopback:
            return True
        return any(
            address in ipaddress.ip_network(peer, strict=False) for peer in self.allowed_peers
        )


class RouterLink(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config.router``: the routers that this engine tells of itself."""

    url: str | None = None
    """``http[s]://HOST:PORT`` of the router, or of several with commas between them, each of which
    is told; without it the engine registers nowhere."""
    http_url: str | None = None
    """This engine's OpenAI server as the router reaches it. Without it by ``--port``, and by
    ``--host``, or ``kv_ip`` where the server is at every address."""
    instance_id: str | None = None
    """Its name at the router; host and port of ``http_url`` without it."""
    token_file: str | None = None
    """File with the token that the router asks of engines."""
    labels: dict[str, str] = {}
    """Labels of the instance, for the router's ``--prefill-model-labels`` and the like."""
    role: Literal["prefill", "decode", "both"] | None = None
    """What a ``kv_both`` engine is for the router. As ``decode`` it gets no prompts of others, and
    its running requests can be copied all the same. By ``kv_role`` without it."""

    def __post_init__(self) -> None:
        named = [("url", url) for url in self.urls]
        if self.http_url is not None:
            named.append(("http_url", self.http_url))
        for name, value in named:
            if not _is_url(value):
                told = repr(value) if "@" not in value else "it has a user or password, and"
                raise ConfigError(f"router.{name}: {told} is not http://HOST:PORT")
        named_anyway = (self.http_url, self.instance_id, self.token_file, self.labels, self.role)
        if not self.url and any(named_anyway):
            raise ConfigError("router.url is missing: the router that the other options are for")

    @property
    def urls(self) -> tuple[str, ...]:
        """Of each router once."""
        if self.url is None:
            return ()
        return tuple(dict.fromkeys(part.strip().rstrip("/") for part in self.url.split(",")))


class ForwardConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config.forward``: what an engine does that ends without a router."""

    peers: tuple[str, ...] = ()
    """``kv_ip:kv_port`` of engines that compute its running requests from SIGTERM on, until these
    have ended; their clients stay this engine's."""

    def __post_init__(self) -> None:
        for peer in self.peers:
            host, port = _host_and_port(peer)
            if not _is_reachable(host, port):
                raise ConfigError(f"forward.peers: {peer!r} is not HOST:PORT (kv_ip and kv_port)")

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """With a secret, which they need, the key is the same for all."""
        return tuple(Endpoint(h, int(p)) for h, p in map(_host_and_port, self.peers))


class LoadFromPool(str, Enum):
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


class SsdConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config.pool.ssd``."""

    path: str
    """An absolute folder of this engine alone; made if it is not there."""
    size: Size
    """Bytes at most."""

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ConfigError(f"pool.ssd.path must be an absolute path, not {self.path!r}")
        if self.size < _MIN_SSD_BYTES:
            raise ConfigError(
                f"pool.ssd.size must be at least {_MIN_SSD_BYTES >> 20} MiB, not {self.size} bytes"
            )


class PoolConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config.pool``; the pool is on when the section is there."""

    master: str | None = None
    """``host:port`` of a running mooncake_master, or where an etcd tells which of several leads:
    ``etcd://host:port``, more of them behind ``;``. Without it the engine starts its own.
    """
    dram_size: Size | None = None
    """Bytes of memory to contribute; without it 25 % of what is available at start."""
    ssd: SsdConfig | None = None
    """A folder for what memory does not hold: of the tier ``fs``, or of Mooncake."""
    tiers: tuple[str, ...] = ("mooncake",)
    """Where blocks are looked for, in this order (``pool.registry``)."""
    tenant_share: float | None = None
    """Of each tier's room, the most that blocks of one tenant take."""
    tenant_shares: dict[str, float] = {}
    """The same of single tenants, by name; ``tenant_share`` is that of the others."""
    get: bool = True
    """Take blocks that the pool has."""
    put: bool = True
    """Store blocks."""
    save: PoolSave = PoolSave.WRITE_THROUGH
    """``write_through``: as they become full; ``eviction``: before the prefix cache evicts them."""
    put_decoded: bool = True
    """Store blocks with generated tokens too, for the next turn of a conversation."""
    load: LoadFromPool = LoadFromPool.AUTO
    """``all``, ``none``, or ``auto``: as many as is faster than computing them."""
    lookup_timeout_ms: Duration = 100.0
    """A request waits so long for its lookup, then goes on without the pool."""
    io_threads: Count = 2
    """Threads that read."""
    staging_slot_bytes: Count = 8 * 1024 * 1024
    """One read or write at a time; raised to one block's KV when that is larger."""
    breaker_failures: Count = 3
    """So many failures in a row, and the pool is bypassed."""
    breaker_slow_ms: Duration = 2000.0
    """A lookup, write or load in a step that takes longer is a failure."""
    probe_interval_s: Duration = 1.0
    """How often a bypassed pool is tried."""

    def __post_init__(self) -> None:
        for host, port in map(_host_and_port, self.master_addresses):
            if "//" in host or not _is_reachable(host, port):
                raise ConfigError(
                    "pool.master must be host:port, or etcd://host:port;host:port…,"
                    f" not {self.master!r}"
                )
        if self.dram_size is not None and 0 < self.dram_size < _MIN_DRAM_BYTES:
            raise ConfigError(
                f"pool.dram_size must be 0 or at least {_MIN_DRAM_BYTES >> 20} MiB,"
                f" not {self.dram_size} bytes"
            )
        self._check_tiers()
        if not self.get and not self.put:
            raise ConfigError(
                "pool.get and pool.put are both false, so the pool does nothing: leave one out, or"
                " the whole pool"
            )
        if self.save is PoolSave.EVICTION and not self.put_decoded:
            raise ConfigError(
                "pool.put_decoded false needs pool.save write_through: an evicted block does not"
                " say which of its tokens were generated"
            )

    def _check_tiers(self) -> None:
        tiers = self.tiers
        if not tiers or len(set(tiers)) < len(tiers):
            raise ConfigError(f"pool.tiers must name some tiers, each once, not {list(tiers)}")
        has_mooncake = "mooncake" in tiers
        if has_mooncake and "dram" in tiers:
            raise ConfigError("pool.tiers: mooncake and dram both take pool.dram_size; name one")
        if "fs" in tiers and self.ssd is None:
            raise ConfigError('pool.tiers: fs needs pool.ssd: {"path": "/…", "size": "…"}')
        if self.ssd is not None and not {"fs", "mooncake"} & set(tiers):
            raise ConfigError("pool.ssd is for the tiers fs and mooncake: name one in pool.tiers")
        for field, share in self.shares.items():
            if not 0 < share < 1:
                raise ConfigError(f"{field} must be above 0 and below 1, not {share}")
            if others := sorted(set(tiers) - {"dram", "fs"}):
                raise ConfigError(
                    f"{field}: {', '.join(others)} evicts by itself, whosever blocks they are; name"
                    " dram and fs in pool.tiers, or leave the share out"
                )
        if self.master is not None and not has_mooncake:
            raise ConfigError("pool.master is for the tier mooncake: name it in pool.tiers")

    @property
    def shares(self) -> dict[str, float]:
        """Of tenants, by the option that says it."""
        shares = {f"pool.tenant_shares.{name}": share for name, share in self.tenant_shares.items()}
        if self.tenant_share is not None:
            shares["pool.tenant_share"] = self.tenant_share
        return shares

    def for_rank(self, rank: int | None) -> PoolConfig:
        """That of a data parallel rank, which has what is configured, and a folder of its own."""
        if rank is None or self.ssd is None:
            return self
        ssd = SsdConfig(f"{self.ssd.path}/dp{rank}", self.ssd.size)
        return msgspec.structs.replace(self, ssd=ssd)

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
        return msgspec.structs.replace(self, dram_size=dram_size, ssd=ssd)

    @property
    def master_addresses(self) -> list[str]:
        """Of the master, or of the etcd that knows it, each ``host:port``."""
        return [] if self.master is None else self.master.removeprefix(ETCD).split(";")

    @property
    def master_hosts(self) -> list[str]:
        return [_host_and_port(address)[0] for address in self.master_addresses]


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), port


def _is_reachable(host: str, port: str) -> bool:
    """Whether both are there, and the port is one that a server can have."""
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536


def _is_url(value: str) -> bool:
    """Whether a server can have it."""
    try:
        parts = urlsplit(value)
        host = (parts.hostname or "").encode("idna")  # as who looks it up does
        is_plain = value.isascii() and parts.username is None
        return is_plain and parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        return False


def _check_forward(extra: _ExtraConfig, role: Role, own_host: str, own_port: int) -> None:
    if not extra.forward.peers:
        return
    if role is not Role.BOTH:
        raise ConfigError("forward.peers needs kv_role kv_both, here and at the peers")
    if extra.security.secret_file is None:
        raise ConfigError(
            "forward.peers needs security.secret_file, here and the same at the peers"
        )
    if extra.router.url:
        raise ConfigError(
            "forward.peers and router.url: leave one of them out; where there is a router, it moves"
            " the requests of an engine that ends"
        )
    for peer in extra.forward.endpoints:
        is_chosen = own_port not in (0, DEFAULT_KV_PORT)
        if is_chosen and (peer.host, peer.port) == (own_host, own_port):
            raise ConfigError(
                f"forward.peers: {peer.host}:{peer.port} is this engine (kv_ip and kv_port): name"
                " others only"
            )
        if not extra.security.allows(peer.host):
            raise ConfigError(f"forward.peers: {peer.host!r} {NOT_ALLOWED}")


_MIN_DRAM_BYTES = 16 << 20
_MIN_SSD_BYTES = 64 << 20


def _check_part(name: str, part: int, least: int, num_workers: int) -> None:
    if 0 < part < least:
        raise ConfigError(
            f"{name} is divided among {num_workers} workers and must be at least"
            f" {(least >> 20) * num_workers} MiB, not {part * num_workers} bytes"
        )


class KVTransferConfigLike(Protocol):
    """Touches: vllm/config/kv_transfer.py:KVTransferConfig"""

    kv_role: Any
    engine_id: str | None
    kv_ip: str
    kv_port: int
    kv_connector_extra_config: dict[str, Any]


class _ExtraConfig(msgspec.Struct, frozen=True):
    """``kv_connector_extra_config``."""

    transfer: TransferConfig = TransferConfig()
    security: SecurityConfig = SecurityConfig()
    router: RouterLink = RouterLink()
    forward: ForwardConfig = ForwardConfig()
    pool: PoolConfig | None = None
    identity: WeightReading = WeightReading.SAMPLES
    """``samples`` of every tensor, or every byte (``full``)."""


class PDConfig(_ExtraConfig, frozen=True, kw_only=True):
    """Everything the user chose. Classes take the section that they need."""

    role: Role
    engine_id: str
    host: str
    port: int

    def port_of(self, rank: int) -> int:
        """Where a data parallel rank answers consumers: a port that was chosen is the first one's,
        and the next ranks take the next numbers."""
        return self.port + rank if self.port not in (0, DEFAULT_KV_PORT) else self.port

    @classmethod
    def from_kv_transfer_config(cls, config: KVTransferConfigLike) -> PDConfig:
        """Parse and check; every error names the field and the fix."""
        if config.kv_role is None:
            raise ConfigError(
                "kv_role is missing; set it to one of " + ", ".join(role.value for role in Role)
            )
        raw = config.kv_connector_extra_config
        extra = parse(raw, _ExtraConfig, top="kv_connector_extra_config")
        for section in ("security", "router"):
            for option, value in raw.get(section, {}).items():
                if value is None:  # what was to be a secret must not be taken for none
                    raise ConfigError(f"{section}.{option} must be a string, not None")
        if "pool" in raw and extra.pool is None:
            raise ConfigError("pool must be a mapping, not NoneType; leave it out for no pool")
        security, pool = extra.security, extra.pool
        host = "127.0.0.1" if config.kv_ip == "localhost" else config.kv_ip
        try:
            address = ipaddress.ip_address(host)
        except ValueError as e:
            raise ConfigError(f"kv_ip must be an IP address, not {config.kv_ip!r}") from e
        loopback = address.is_loopback
        if not loopback and not security.may_leave_host:
            raise ConfigError(
                f"kv_ip {host} is not a loopback address, and without a secret the control and data"
                " sockets have no authentication: in kv_connector_extra_config set"
                " security.secret_file on all engines (or security.allow_non_loopback: true on a"
                " trusted network), and security.allowed_peers to the peers' addresses"
            )
        if address.is_unspecified:
            raise ConfigError(f"kv_ip {host}: peers are told it, so give the address they reach")
        if pool is not None and not all(map(security.allows, pool.master_hosts)):
            raise ConfigError(
                f"pool.master {pool.master!r} {NOT_ALLOWED}; the pool has no authentication"
            )
        has_mooncakes_files = pool is not None and pool.ssd is not None and "fs" not in pool.tiers
        if address.version == 6 and has_mooncakes_files:
            raise ConfigError(
                f"pool.ssd: Mooncake reads no file back over IPv6, and kv_ip is {host}: name dram"
                " and fs in pool.tiers, or leave pool.ssd out"
            )
        if not 0 <= config.kv_port <= 65535:
            raise ConfigError(f"kv_port must be within 0..65535, not {config.kv_port}")
        role = Role(config.kv_role)
        if extra.router.role is not None and role is not Role.BOTH:
            raise ConfigError(
                f"router.role: leave it out, for kv_role {role.value} decides, or set kv_role to"
                " kv_both"
            )
        _check_forward(extra, role, host, config.kv_port)
        return cls(
            role=role,
            engine_id=config.engine_id or "",
            host=host,
            port=config.kv_port,
            **msgspec.structs.asdict(extra),
        )

# SPDX-License-Identifier: Apache-2.0
"""How an engine tells a router that it is there: the HTTP messages of self-registration.

    PUT    /registry/instances/{instance_id}    body ``Registration``; 200 with ``Registered``
    DELETE /registry/instances/{instance_id}?epoch=...
                                                204: gone; new requests go elsewhere at once; with
                                                an epoch only if it is that one's
    PUT    /registry/instances/{instance_id}/drain
                                                body ``DrainOrder`` or nothing; 204: no new requests
                                                for so long, or until it registers with another
                                                epoch, and those in progress move where they can;
                                                again to renew; one without an end is ended
                                                by DELETE alone
    PUT    /registry/instances/{instance_id}/role
                                                body ``RoleOrder``; 204: it is used for that only;
                                                409 if it cannot be, or none would be left for the
                                                other
    DELETE /registry/instances/{instance_id}/drain
                                                204: it gets requests as before
    GET    /registry/instances                  200 with a JSON array of ``InstanceStatus``

The engine sends the whole ``Registration`` again every ``Registered.heartbeat_s``. So one message
registers, renews, and reports a change of state, and a router that was restarted knows all engines
after one heartbeat. An instance that is silent for ``Registered.ttl_s`` is removed.

An engine that stops sends ``state="draining"`` first, waits for its running requests, then sends
DELETE. One that died is noticed by the router's probes, long before ``ttl_s``.

Errors are JSON like OpenAI's, ``{"error": {"message", "type", "param", "code"}}``: 400 names the
wrong field; 403 says that the token is wrong, or that the address may not register; 409 that the
id is that of an instance known from elsewhere, or of an engine at another URL that answers or
starts; 429 that too many have registered.

Who may register: with ``--registration-token-file`` on the router, whoever sends that token as
``Authorization: Bearer ...``; without it, only clients on loopback with URLs on loopback.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from vllm_ascend_pd.errors import UNREADABLE, ConfigError

PATH = "/registry/instances"
HEARTBEAT_S = 5.0
TTL_S = 20.0
DRAIN_S = 30.0
"""Who drains an engine from outside and is gone after that has changed his mind."""
MAX_BODY_BYTES = 64 * 1024
MAX_ADAPTERS = 128
MAX_TEXT = 200
"""Of the name of an adapter, in bytes, and of what is said of it: all of them fit in a body."""

Role = Literal["prefill", "decode", "both"]
ROLE_OF: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""By ``kv_role`` of vLLM."""
State = Literal["starting", "ready", "draining"]
"""Only a ``ready`` instance gets new requests."""

NAME = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"
"""Of an instance."""
_URL = {"pattern": r"^https?://[^/?#@]+:[0-9]{1,5}$", "description": "http[s]://host:port"}
Url = Annotated[str, Meta(extra_json_schema=_URL)]
"""See ``check_url``."""
Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Rank = Annotated[int, Meta(ge=0)]
RANK_HEADER = "X-data-parallel-rank"
"""With it vLLM's front end leaves the choice among its engine cores to the client."""
ZmqAddress = Annotated[str, Meta(pattern="^tcp://")]


class KVEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where consumers reach a producer's KV. Needed for ``concurrent`` order."""

    engine_id: str
    """``remote_engine_id`` of ``kv_transfer_params``."""
    host: str
    port: Port
    key: str = ""
    """``remote_key`` of ``kv_transfer_params``: what the process shows that listens there."""
    supports_concurrent: bool = False
    """A consumer may ask for a transfer before this producer has computed the prompt."""


class KVEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine publishes KV events (``--kv-events-config``), for prefix-aware routing."""

    endpoint: ZmqAddress
    """To connect to, e.g. ``tcp://127.0.0.1:5557``."""
    replay_endpoint: ZmqAddress | None = None
    topic: str = ""


class EngineDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One engine, as the router needs to know it."""

    url: Url
    """Of the engine's OpenAI server, as the router reaches it."""
    role: Role
    data_parallel_rank: Rank | None = None
    """Of one of several engine cores at that URL; it is an instance of its own, and requests name
    it in ``RANK_HEADER``."""
    state: State = "ready"
    models: tuple[str, ...] = ()
    """Names that it serves; empty: the router asks ``/v1/models``."""
    labels: dict[str, str] = {}
    """For ``--prefill-model-labels`` and ``--decode-model-labels`` (key ``model``)."""
    fingerprint: str | None = None
    """A producer and a consumer are paired only if theirs fit together (see ``types.serves``), or
    one of them is not known."""
    sampling: dict[str, Annotated[str, Meta(max_length=MAX_TEXT)]] = {}
    """How tokens are sampled there whatever a request says: parts of ``resume.made_by``."""
    grammars: Annotated[str, Meta(max_length=MAX_TEXT)] = ""
    """What makes the grammars of structured output there; empty until the first request with one
    has chosen it."""
    adapters: dict[str, Annotated[str, Meta(max_length=MAX_TEXT)]] = {}
    """What the LoRA adapters are that its last requests have used: digests, by name."""
    kv: KVEndpoint | None = None
    kv_events: KVEvents | None = None
    block_size: Positive | None = None
    """Tokens per KV block."""
    num_blocks: Positive | None = None
    """KV blocks of the engine: its capacity."""


class Registration(EngineDescription, frozen=True, kw_only=True):
    """What an engine sends. Unknown fields are ignored."""

    epoch: Annotated[str, Meta(min_length=1, max_length=128)]
    """New at each start of the engine: the router forgets what it knew of the one before."""


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """The router's answer: send again after ``heartbeat_s``; ``ttl_s`` of silence is the end."""

    heartbeat_s: float = HEARTBEAT_S
    ttl_s: float = TTL_S


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For how long an engine gets no new requests, from outside."""

    seconds: Annotated[float, Meta(ge=0)] | None = DRAIN_S
    """``None``: until that is undone, whatever is ordered meanwhile. Else who gives the order gives
    it again and again: if he is gone, the engine is used as before."""


class RoleOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine of role ``both`` is used for from now on, also when it has started anew."""

    role: Role


class InstanceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the router says about an instance, however it was found."""

    instance_id: str
    url: str
    role: Role
    """What it can do."""
    data_parallel_rank: int | None = None
    used_for: Role = "both"
    """What it is used for, as an operator said."""
    num_decoding: int = 0
    """Answers that it gives now, or is to give yet; as long as there are any, it computes no
    prompts for others if it is to do nothing else."""
    state: State
    healthy: bool
    source: str
    """``static``, ``registered`` or ``kubernetes``."""
    models: tuple[str, ...]
    num_active: int
    """Legs that the router has open to it."""
    num_admitted: int = 0
    """Requests that have room on it, those too whose leg to it has not begun."""
    num_background: int = 0
    """Responses that it computes in the background; they have no leg."""
    last_error: str | None = None

    @property
    def num_left(self) -> int:
        """What it does, or is to do yet: without any it is idle."""
        return max(self.num_active, self.num_admitted) + self.num_background


_decoder: msgspec.json.Decoder[Registration] = msgspec.json.Decoder(Registration)


def decode(body: bytes) -> Registration:
    """A checked registration; ``ConfigError`` names the wrong field."""
    try:
        registration = _decoder.decode(body)
    except UNREADABLE as e:
        raise ConfigError(f"not a registration: {e}") from e
    check_url(registration.url)
    if (events := registration.kv_events) is not None:
        _check_endpoints(events)
    return registration


def _check_endpoints(events: KVEvents) -> None:
    for endpoint in (events.endpoint, events.replay_endpoint or events.endpoint):
        try:
            urlsplit(endpoint)
        except ValueError as e:
            raise ConfigError(f"kv_events {endpoint!r}: {e}") from e


def default_id(url: str) -> str:
    """``host:port``, with which people find the engine; an id begins with no colon."""
    found = urlsplit(url).netloc.replace("[", "").replace("]", "").replace("%", "-")
    return f"0{found}" if found.startswith(":") else found


def name_of_rank(name: str, rank: int | None) -> str:
    """The instance id of a data parallel rank of the engine of that name."""
    return name if rank is None else f"{name}-dp{rank}"


def engine_on(metrics: bytes, rank: int | None) -> int | None:
    """Label ``engine`` of what a server's ``/metrics`` tell of a rank: requests count those of the
    server, labels go on from one server of a group to the next. -1: nothing is told of it.
    """
    if rank is None:
        return None
    numbers = sorted({int(number) for number in re.findall(rb'engine="(\d+)"', metrics)})
    return numbers[rank] if rank < len(numbers) else -1


def check_instance_id(instance_id: str) -> None:
    """``ConfigError`` unless it is a name that logs and metrics can carry."""
    if not re.fullmatch(NAME, instance_id):
        raise ConfigError(
            f"instance id {instance_id[:64]!r}: 1 to 128 of letters, digits, '.', '_', ':', '-',"
            " and a letter or digit first"
        )


def check_url(url: str) -> str:
    """``http[s]://host:port`` without path, query or credentials; its host, or ``ConfigError``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as e:
        raise ConfigError(f"url {url!r}: {e}") from e
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or extra:
        raise ConfigError(f"url {url!r}: give http://HOST:PORT or https://HOST:PORT")
    try:
        parts.hostname.encode("idna")  # as whoever looks it up does
    except UnicodeError as e:
        raise ConfigError(f"url {url!r}: {parts.hostname!r} is no name of a host") from e
    return parts.hostname


def is_loopback(host: str) -> bool:
    """Whether this host name or address is surely on this machine."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback  # who comes by IPv4 to a socket for both
    return address.is_loopback

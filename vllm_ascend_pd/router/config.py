# SPDX-License-Identifier: Apache-2.0
"""What the command line sets. Parsed once, then frozen."""

from __future__ import annotations

import logging
import math
import pickle
import secrets
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import access_log
from vllm_ascend_pd.router.access_log import FORMATS, AccessLogFormat
from vllm_ascend_pd.router.resumable import RESUME_MODES, ResumeMode

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_ascend_pd.registration import Role

Order = Literal["auto", "prefill-first", "concurrent"]
SKIP_MODES = ("auto", "held", "never", "always")
SkipMode = Literal["auto", "held", "never", "always"] | int
MAX_WORKERS = 256
ORDERS: tuple[Order, ...] = get_args(Order)
Roles = Literal["operator", "auto"]
ROLES: tuple[Roles, ...] = get_args(Roles)
Rebalance = Literal["off", "load"]
REBALANCE: tuple[Rebalance, ...] = get_args(Rebalance)


def _check_seconds(option: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{option} must be a positive number of seconds, not {value:g}")


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds that each phase of a request may take."""

    connect_s: float = 5.0
    """A TCP (and TLS) connection to an engine."""
    keep_alive_s: float = 130.0
    """A client's connection without a whole request head, new or kept open. Who keeps idle
    connections for longer may send a request just when the router closes one: nginx and AWS's load
    balancers keep theirs for 60 s, Go and Traefik for 90 s, Caddy for 120 s."""
    body_s: float = 30.0
    """The rest of a request whose head has come, see also ``incoming.BODY_BYTES_PER_S``."""
    prefill_s: float = 300.0
    """From the start of the prefill leg to the end of its answer."""
    first_token_s: float = 300.0
    """From the start of a streamed decode leg to its first token."""
    idle_s: float = 120.0
    """Between two tokens of a stream, see also ``Body.silence_s``; and how long a client may not
    read."""
    answer_s: float = 3600.0
    """A decode leg that is not streamed."""

    def __post_init__(self) -> None:
        for option in fields(self):
            name = f"--{option.name.removesuffix('_s').replace('_', '-')}-timeout"
            _check_seconds(name, getattr(self, option.name))


@dataclass(frozen=True, slots=True)
class Retries:
    """Another pair is tried while nothing was sent to the client."""

    max_attempts: int = 3
    """Pairs per request, the first one too."""
    budget_ratio: float = 0.2
    """Retries per request, over all requests."""
    budget_burst: int = 100
    """Retries that may come at once, when an engine with that many requests dies."""
    resume: ResumeMode = "exact"
    """Which broken streams go on from another engine."""
    max_resumes: int = 3
    """Of one stream. They take nothing of the budget: all streams of an engine end with it."""
    tool_call_parser: str = ""
    """The engines', see ``resumable.EXACT_TOOL_PARSERS``."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ConfigError(f"--max-attempts must be at least 1, not {self.max_attempts}")
        if self.resume not in RESUME_MODES or self.max_resumes < 1:
            raise ConfigError(
                f"--resume-streams {self.resume!r}: one of {', '.join(RESUME_MODES)};"
                " --max-resumes must be at least 1"
            )
        if self.budget_ratio < 0 or self.budget_burst < 0:
            raise ConfigError("budget_ratio and budget_burst must not be negative")


@dataclass(frozen=True, slots=True)
class Queueing:
    """How many requests engines get, and how long others wait."""

    max_requests: int = 1024
    """In progress on one instance."""
    max_queued: int = 4096
    """Waiting for room on any."""
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_requests < 1 or self.max_queued < 0:
            raise ConfigError("--max-requests must be at least 1, --max-queued not negative")
        _check_seconds("--queue-timeout", self.timeout_s)

    def share(self, num_workers: int) -> Queueing:
        """Of one of several workers."""
        return Queueing(
            -(-self.max_requests // num_workers), -(-self.max_queued // num_workers), self.timeout_s
        )


@dataclass(frozen=True, slots=True)
class Probes:
    """How the router watches its engines."""

    interval_s: float = 2.0
    timeout_s: float = 2.0
    load_interval_s: float = 0.0
    """At least, between two looks at an engine's ``/metrics``; each probe looks if it is 0."""
    failure_threshold: int = 3
    """Failures in a row, of requests or probes, after which an instance gets no requests. A
    refused connection is enough by itself."""

    def __post_init__(self) -> None:
        _check_seconds("--probe-interval", self.interval_s)
        if self.timeout_s <= 0 or self.failure_threshold < 1:
            raise ConfigError("probe timeout and failure threshold must be positive")
        if not 0 <= self.load_interval_s < math.inf:
            raise ConfigError("--engine-stats-interval must not be negative, nor for ever")


@dataclass(frozen=True, slots=True)
class CORS:
    """What pages of other origins may do; the options and defaults of ``vllm serve``."""

    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, slots=True)
class TLS:
    """Server certificate, and how engines' certificates are checked."""

    certificate: Path | None = None
    key: Path | None = None
    engine_ca: Path | None = None
    """CA bundle for https engines; the system's by default."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("--tls-certificate and --tls-key: give both or none")


@dataclass(frozen=True, slots=True)
class Backend:
    """One of production-stack's ``--static-backends``."""

    url: str
    model: str | None = None
    label: str | None = None
    """It says the role: one of ``--prefill-model-labels`` or of ``--decode-model-labels``. Without
    labels every backend does both."""


@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Where the pods of the engines are."""

    namespace: str = "default"
    label_selector: str = ""
    port: int = 8000
    """Of the engines."""
    kubeconfig: Path | None = None
    """Without: the service account of the router's own pod."""


@dataclass(frozen=True, slots=True)
class Planning:
    """By what ``--roles auto`` decides: ``--profile``, ``--slo-ttft`` and ``--slo-itl``."""

    profile: Path
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.1

    def __post_init__(self) -> None:
        if not (self.slo_ttft_s > 0 and self.slo_itl_s > 0):
            raise ConfigError("--slo-ttft and --slo-itl must be positive")


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """All settings of one router."""

    host: str = "127.0.0.1"
    port: int = 8000
    num_workers: int = 1
    """Processes that share the port."""
    prefills: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    backends: tuple[Backend, ...] = ()
    instances_file: Path | None = None
    policy: str = "least-loaded"
    session_key: str | None = None
    """Header, or field of a body, that tells ``session-affinity`` whose request it is."""
    stats_window_s: float = 60.0
    """What the status tells as of now is of so many seconds."""
    order: Order = "auto"
    roles: Roles = "operator"
    """Who says what engines of role ``both`` are used for; ``auto``: their load, too."""
    planning: Planning | None = None
    """With ``auto``: by the planner's model, and not by load."""
    rebalance: Rebalance = "off"
    """``load``: answers move from the fullest engine to the emptiest one."""
    require_prefill: bool = False
    """No engine computes a prompt alone for lack of another one: without a pair there is 503."""
    api_keys_file: Path | None = None
    engine_api_key_file: Path | None = None
    tenants_file: Path | None = None
    """Who shares the engines, see ``tenants``."""
    registration_token_file: Path | None = None
    secret_file: Path | None = None
    """The engines' ``security.secret_file``: what they are to go on with is signed with it."""
    prefill_labels: tuple[str, ...] = ()
    decode_labels: tuple[str, ...] = ()
    kubernetes: Kubernetes | None = None
    drain_s: float = 60.0
    access_log: AccessLogFormat = "text"
    otlp_endpoint: str | None = None
    log_level: str = "info"
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    queueing: Queueing = field(default_factory=Queueing)
    probes: Probes = field(default_factory=Probes)
    max_body_bytes: int = 64 << 20
    cors: CORS = field(default_factory=CORS)
    tls: TLS = field(default_factory=TLS)
    router_id: str = field(default_factory=lambda: secrets.token_hex(8), init=False, compare=False)
    """By which a request that was here already is known, whichever worker gets it."""
    skip: SkipMode = "auto"
    """When D computes a prompt itself. ``held``: all but its last block is in D's prefix cache, as
    the policy ``prefix-aware`` knows. ``auto``: that, and prompts so short that D computes them
    sooner than P hands them over, as measured. A number: the first, and prompts of fewer tokens."""

    @property
    def awaits_registrations(self) -> bool:
        """Engines may be up of which it hears only when they register: it is not told of any, or
        where to look for them, or has a token for them."""
        given = self.prefills, self.decodes, self.backends, self.instances_file, self.kubernetes
        return not any(given) or self.registration_token_file is not None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"order {self.order!r}: one of {', '.join(ORDERS)}")
        if self.roles not in ROLES:
            raise ConfigError(f"--roles {self.roles!r}: one of {', '.join(ROLES)}")
        if self.rebalance not in REBALANCE:
            raise ConfigError(f"--rebalance {self.rebalance!r}: one of {', '.join(REBALANCE)}")
        if self.rebalance != "off" and self.retries.resume == "off":
            raise ConfigError(
                "--rebalance load moves answers, and with --resume-streams off none can move: leave"
                " out one of the two"
            )
        if self.require_prefill and self.skip == "always":
            raise ConfigError(
                "--skip-prefill always has D compute every prompt, and --require-prefill none:"
                " leave out one of the two"
            )
        if self.planning is not None and self.roles != "auto":
            raise ConfigError("--profile is for --roles auto")
        if self.roles == "auto" and self.num_workers > 1:
            raise ConfigError("--roles auto: one process decides, so give --workers 1")
        if self.access_log not in FORMATS:
            raise ConfigError(f"--access-log {self.access_log!r}: one of {', '.join(FORMATS)}")
        if not 1 <= self.num_workers <= MAX_WORKERS:
            raise ConfigError(f"--workers {self.num_workers}: 1 to {MAX_WORKERS}")
        if not self.stats_window_s > 0:
            raise ConfigError(f"--request-stats-window {self.stats_window_s:g}: must be positive")

    def role_of(self, label: str) -> Role | None:
        """What an engine with this value of the label ``model`` does."""
        if label in self.prefill_labels:
            return "prefill"
        return "decode" if label in self.decode_labels else None


def pack(config: RouterConfig) -> bytes:
    """For a process of the same version of the package."""
    return pickle.dumps((_options(), pickle.dumps(config)))


def unpack(packed: bytes) -> RouterConfig:
    """``ConfigError`` if a version with other options has packed it. Pickled values have no names,
    so they would be those of other options."""
    options, config = pickle.loads(packed)
    if options != _options():
        raise ConfigError(
            "this router was started by another version of vllm-pd, which has been replaced since:"
            " start it again"
        )
    unpacked: RouterConfig = pickle.loads(config)
    return unpacked


def _options() -> dict[str, tuple[str, ...]]:
    """Of all parts of the settings, in order."""
    parts = (kind for kind in globals().values() if isinstance(kind, type) and is_dataclass(kind))
    return {part.__name__: tuple(option.name for option in fields(part)) for part in parts}


def set_up_logging(config: RouterConfig) -> None:
    """Once per process."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    access_log.set_up(config.access_log)


def skip_mode(text: str) -> SkipMode:
    """``--skip-prefill``."""
    if text in SKIP_MODES:
        return cast("SkipMode", text)
    if text.isdecimal():
        return int(text)
    raise ConfigError(f"--skip-prefill {text!r}: {', '.join(SKIP_MODES)}, or a number of tokens")


def static_backends(urls: str, models: str, labels: str) -> tuple[Backend, ...]:
    """Of three options that are lists with commas, as in production-stack."""
    found = _split(urls)
    columns: list[list[str | None]] = []
    for option, text in (("--static-models", models), ("--static-model-labels", labels)):
        values = _split(text)
        if values and len(values) != len(found):
            raise ConfigError(f"{option}: {len(values)} for {len(found)} --static-backends")
        columns.append([*values] or [None] * len(found))
    return tuple(map(Backend, found, *columns))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []

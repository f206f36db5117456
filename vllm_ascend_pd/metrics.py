# SPDX-License-Identifier: Apache-2.0
"""What is counted. The scheduler adds up, the front end exposes (``engine.carrier``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from vllm_ascend_pd.types import Place

COUNTERS: dict[str, tuple[str, str | None]] = {
    # name: (help, label or None)
    "leases_granted": ("Prompts kept for a consumer", None),
    "leases_closed": ("Leases that ended, by cause", "cause"),
    "requests": ("Requests that asked for a peer's KV, by how it ended", "outcome"),
    "peer_failures": ("Of them, those whose KV did not come, by the peer that had it", "peer"),
    "loads": ("Loads from a peer, by how they ended", "outcome"),
    "load_bytes": ("Bytes of KV loaded from peers, by transport", "transport"),
    "load_ms": ("Milliseconds from the start to the end of loads, added up", None),
    "prompt_tokens": ("Prompt tokens by where their KV came from", "source"),
    "first_tokens": ("First tokens of requests with a peer, by who sampled them", "source"),
    "resumes": ("Requests that another engine has begun, by how they go on here", "outcome"),
    "moves": ("Running requests that another engine asked for, by how that ended", "outcome"),
    "forwards": ("Requests that another engine was to compute from here, by outcome", "outcome"),
    "frames_refused": ("Peers and messages that were refused, by what was wrong", "reason"),
    "internal_errors": ("What raised in a thread of transfers; each is in the log", "thread"),
    "pool_lookups": ("Lookups in the pool, by how they ended", "outcome"),
    "pool_lookup_ms": ("Milliseconds that requests waited for lookups, added up", None),
    "pool_decisions": ("What was taken of what the pool had: all, part, none", "decision"),
    "pool_loads": ("Loads from the pool, by how they ended", "outcome"),
    "pool_load_bytes": ("Bytes loaded from the pool, by tier", "tier"),
    "pool_load_ms": ("Milliseconds of loads from the pool, added up", None),
    "pool_over_share_blocks": ("Blocks that went because their tenant had its share", None),
    "pool_file_errors": ("Files of the pool that could not be written or read", None),
    "pool_put_blocks": ("Blocks offered to the pool, by how that ended", "outcome"),
    "pool_put_bytes": ("Bytes stored in the pool", None),
    "pool_put_ms": ("Milliseconds of writes to the pool, added up", None),
    "pool_breaker_opened": ("How often the pool was bypassed, by direction", "direction"),
    "recovered_requests": ("Requests preempted because KV under them failed to load", None),
}
"""Exposed as ``vllm:pd_<name>_total``."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (help, labels)
    "pool_bypassed": ("1 while the pool is not used in this direction", ("direction",)),
    "pool_pinned_blocks": ("Blocks that are held until they have been copied", ()),
    "pool_saves_queued": ("Writes to the pool that have not ended", ()),
    "pool_load_bytes_per_s": ("Measured speed of loads, by tier", ("tier",)),
    "pool_prefill_tokens_per_s": ("Measured speed of prefill; 0 before any", ()),
    "router_registered": ("1 while this router, of those it registers with, knows it", ("router",)),
    "engine_info": (
        "1: what this engine is. Fingerprints say which engines fit together",
        ("engine_id", "role", "epoch", "kv_endpoint", "fingerprint", "pool_master"),
    ),
    "tokens_made_by": (
        "1: what decides here beside a request which tokens it gets, as requests that move compare",
        ("part", "adapter", "value"),
    ),
}
"""Exposed as ``vllm:pd_<name>``."""

INFOS = frozenset({"engine_info", "tokens_made_by"})
"""Gauges that say what is so in their labels: a series that is 0 is over."""

MAX_LABEL_VALUES = 256
_SEPARATOR = "\x1f"


class OpenLabel:
    """A label whose values requests bring along: each is a series, so the first so many are told
    apart, and all further ones are ``others``."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def of(self, value: str) -> str:
        if len(self._values) < MAX_LABEL_VALUES:
            self._values.add(value)
        return value if value in self._values else "others"


@dataclass(slots=True)
class Stats:
    """Increments since the last ``take``; scheduler thread."""

    values: dict[str, float] = field(default_factory=dict)
    """See ``take``."""

    def add(self, name: str, value: float = 1, label: str | None = None) -> None:
        """``label`` is the value of the counter's label."""
        key = name if label is None else f"{name}/{label}"
        self.values[key] = self.values.get(key, 0) + value

    def add_errors(self, errors: dict[str, int]) -> None:
        """What raised in the threads of this process, number by thread."""
        for thread, count in errors.items():
            self.add("internal_errors", count, thread)

    def add_refused(self, refused: dict[str, int]) -> None:
        """Frames that were refused, number by reason."""
        for reason, count in refused.items():
            self.add("frames_refused", count, reason)

    def set(self, name: str, value: float, *labels: str) -> None:
        """``labels`` are the values of the gauge's labels, in their order."""
        told = _SEPARATOR.join(label.replace(_SEPARATOR, "?") for label in labels)
        self.values[f"{name}/{told}" if labels else name] = value

    def take(self) -> dict[str, float]:
        """``{name or name/label: increment, or value of a gauge}``, and start again."""
        taken, self.values = self.values, {}
        return taken


def split_key(key: str) -> tuple[str, list[str]]:
    """Name and label values of a key of ``Stats.take``."""
    name, slash, labels = key.partition("/")
    return name, labels.split(_SEPARATOR) if slash else []


@dataclass(slots=True)
class Provenance:
    """Where the KV of one request's prompt came from. Tokens add up to the prompt's length."""

    num_prompt_tokens: int
    num_local_tokens: int = 0
    num_peer_tokens: int = 0
    pool_tokens: dict[str, int] = field(
        default_factory=lambda: {place.label: 0 for place in Place.all()}
    )
    """By ``Place.label``."""
    num_computed_tokens: int = 0
    num_peer_blocks: int = 0
    num_peer_bytes: int = 0
    num_pool_bytes: int = 0
    transfer_ms: float = 0.0
    transport: str = ""
    """By what the bytes came, a value of ``transfer.transport``."""
    first_token: str = "here"
    """Who has sampled it: ``peer`` or ``here``."""
    outcome: str = ""
    """``loaded``, ``local`` (nothing was missing), ``computed`` (nothing was to be had),
    ``first_token`` (the request ended with the peer's first token), or the cause why KV of a peer
    or of the pool was not used.
    """

    def take_back(self, num_kept: int) -> None:
        """All but so many tokens are computed after all, those of the pool first."""
        excess = sum(self.pool_tokens.values()) + self.num_local_tokens + self.num_peer_tokens
        excess = max(0, excess - num_kept)
        self.num_computed_tokens += excess
        for label, num_tokens in self.pool_tokens.items():
            self.pool_tokens[label] -= min(excess, num_tokens)
            excess -= min(excess, num_tokens)
        num_local = min(excess, self.num_local_tokens)
        self.num_local_tokens -= num_local
        self.num_peer_tokens -= excess - num_local

    def as_params(self) -> dict[str, object]:
        """As a response shows it: the tokens of each place have a name of their own."""
        values = asdict(self)
        pool_tokens = values.pop("pool_tokens")
        return values | {f"num_{label}_tokens": count for label, count in pool_tokens.items()}

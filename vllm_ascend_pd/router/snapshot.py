# SPDX-License-Identifier: Apache-2.0
"""What a router counted until now, as plain data: added up over workers, and exposed."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from vllm_ascend_pd.registration import Role, State
from vllm_ascend_pd.router.trace import NUM_TIMELINES, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from vllm_ascend_pd.router.instances import Instance

PREFIX = "vllm:pd_router_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (help, labels)
    "requests": ("Requests by how they ended", ("outcome",)),
    "retries": ("Attempts after a failed one, by cause", ("cause",)),
    "retry_budget_exhausted": ("Retries not made for lack of budget", ()),
    "legs": ("Legs to engines, by how they ended", ("instance", "leg", "outcome")),
    "orders": ("Attempts by order", ("order",)),
    "prefix_expected_tokens": (
        "Prompt tokens that the policy expected an engine to have; told: it said what it had",
        ("role", "told"),
    ),
    "prefix_cached_tokens": ("Prompt tokens that engines said they had", ("role",)),
    "prefix_prompt_tokens": ("Prompt tokens of requests whose engine said that", ("role",)),
    "prefill_skips": ("Requests without a prefill leg, by reason", ("reason",)),
    "releases": ("Prompts given back that no decode engine took, by how that ended", ("outcome",)),
    "refused": (
        "Requests that got 429: they waited too long for room, or found too many waiting",
        ("reason",),
    ),
    "tenant_requests": ("Requests of a tenant, by how they ended", ("tenant", "outcome")),
    "tenant_tokens": ("Tokens of a tenant: of prompts and of answers", ("tenant", "part")),
    "resumes": (
        "Attempts to go on with a broken stream from another engine, by how they ended",
        ("kind", "outcome"),
    ),
    "moves": (
        "Running requests that were to go on at another engine, by who wanted it and the end",
        ("reason", "outcome", "cause"),
    ),
    "not_moved": ("Requests that could not move when somebody wanted it", ("reason", "cause")),
    "role_switches": ("Engines that --roles auto used for something else", ("role",)),
    "not_resumed": ("Broken streams that nothing was promised for, by cause", ("cause",)),
    "out_of_files": ("Looks, one a second, that found no file descriptor left", ()),
    "worker_restarts": ("Workers that ended by themselves and were started again", ()),
}
HISTOGRAMS = {
    "ttft": "Request to the first byte of its answer",
    "itl": "Between two pieces of a stream",
    "prefill_leg": "Prefill leg, all of it",
    "decode_leg": "Decode leg, all of it",
    "loop_lag": "How late the event loop was, looked at every 0.1 s",
    "queue": "Wait of a request that engines had no room for",
    "resume": "Broken stream to its next token, from another engine",
    "move": "Move of a running request, from its order to the end of the source's part",
    "move_gap": "End of the source's part of a moved request to the next token for its client",
    "handover": "Decode leg to its first byte, for a prompt that another engine computed",
}
"""Exposed as ``<name>_seconds``."""
INSTANCE_GAUGES: dict[str, tuple[str, Callable[[InstanceSnapshot], float | None]]] = {
    "up": ("1 if it may get requests", lambda i: i.is_available),
    "breaker_open": (
        "0 closed, 0.5 half open, 1 open",
        lambda i: {"closed": 0.0, "half_open": 0.5}.get(i.breaker, 1.0),
    ),
    "admitted": ("Requests that have room on it", lambda i: i.num_admitted),
    "active_legs": ("Legs in progress", lambda i: i.num_active),
    "active_tokens": ("Tokens of the legs in progress", lambda i: i.num_active_tokens),
    "connections": ("TCP connections", lambda i: i.num_connections),
    "running": (
        "Requests that the engine runs, by its own metrics; absent where these cannot be read",
        lambda i: i.num_running if i.load_read_at else None,
    ),
    "waiting": (
        "Requests that the engine queues, by its own metrics; absent where these cannot be read",
        lambda i: i.num_waiting if i.load_read_at else None,
    ),
    "kv_usage": (
        "Share of its KV blocks in use, by its own metrics; absent where these cannot be read",
        lambda i: i.kv_usage if i.load_read_at else None,
    ),
    "prefix_hit_rate": (
        "Hits of its prefix cache in the last minute, by its own metrics; absent without a lookup",
        lambda i: i.prefix_hit_rate,
    ),
    "prefix_index": (
        "What its KV events tell: 1 exact, 0.5 degraded, else 0",
        lambda i: {"exact": 1.0, "degraded": 0.5}.get(i.prefix_index or "", 0.0),
    ),
    "prefix_blocks": ("Blocks that its KV events told of", lambda i: i.num_prefix_blocks),
}
"""Exposed as ``instance_<name>``, with the labels ``instance`` and ``role``."""
_BREAKERS = ("closed", "half_open", "open")
_INDEXES = (None, "fallback", "degraded", "exact")
NUM_RECENT_ERRORS = 20


class Histogram(msgspec.Struct):
    """Seconds, by bucket of ``SECONDS``."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class RecentError(msgspec.Struct):
    at: float
    """Unix time, seconds."""
    text: str


class InstanceSnapshot(msgspec.Struct, kw_only=True):
    """One engine, as the live page shows it."""

    instance_id: str
    url: str
    data_parallel_rank: int | None
    role: Role
    used_for: Role
    num_decoding: int
    num_background: int
    source: str
    state: State
    breaker: str
    is_available: bool
    models: tuple[str, ...]
    num_admitted: int
    num_active: int
    num_active_tokens: int
    num_connections: int
    num_running: float
    num_waiting: float
    kv_usage: float
    prefix_hit_rate: float | None
    prefix_index: str | None
    num_prefix_blocks: int
    load_read_at: float
    """On the host's monotonic clock, seconds."""
    num_failures: int
    errors: list[RecentError]

    @property
    def healthy(self) -> bool:
        return self.breaker == "closed"

    @property
    def last_error(self) -> str | None:
        return self.errors[-1].text if self.errors else None

    @classmethod
    def of(cls, instance: Instance) -> InstanceSnapshot:
        load, index = instance.load, instance.prefix_index
        return cls(
            instance_id=instance.instance_id,
            url=instance.spec.url,
            data_parallel_rank=instance.spec.data_parallel_rank,
            role=instance.spec.role,
            used_for=instance.used_for if instance.spec.role == "both" else instance.spec.role,
            num_decoding=instance.num_answers,
            num_background=instance.num_background,
            source=instance.spec.source,
            state=instance.spec.state,
            breaker=instance.breaker.state.value,
            is_available=instance.is_available,
            models=instance.models,
            num_admitted=instance.num_admitted,
            num_active=instance.num_active,
            num_active_tokens=instance.num_active_tokens,
            num_connections=instance.client.num_open,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_usage=load.kv_usage,
            prefix_hit_rate=instance.hit_rate.value,
            prefix_index=index.state.value if index is not None else None,
            num_prefix_blocks=len(index) if index else 0,
            load_read_at=load.read_at,
            num_failures=instance.num_failures,
            errors=list(instance.errors),
        )

    def add(self, other: InstanceSnapshot) -> None:
        """The same engine, as another worker sees it: what each did is added up, and where they
        see different things, the worse one counts."""
        if other.load_read_at > self.load_read_at:
            for name in ("load_read_at", "num_running", "num_waiting", "kv_usage"):
                setattr(self, name, getattr(other, name))
            self.prefix_hit_rate = other.prefix_hit_rate
        self.is_available &= other.is_available
        self.breaker = max(self.breaker, other.breaker, key=_BREAKERS.index)
        self.prefix_index = min(self.prefix_index, other.prefix_index, key=_INDEXES.index)
        self.num_prefix_blocks = min(self.num_prefix_blocks, other.num_prefix_blocks)
        self.models = self.models or other.models
        self.num_admitted += other.num_admitted
        self.num_active += other.num_active
        self.num_decoding += other.num_decoding
        self.num_background += other.num_background
        self.num_active_tokens += other.num_active_tokens
        self.num_connections += other.num_connections
        self.num_failures += other.num_failures
        self.errors = sorted((*self.errors, *other.errors), key=lambda error: error.at)
        del self.errors[:-NUM_RECENT_ERRORS]


Counts = dict[tuple[str, ...], float]
"""One counter's values, by the values of its labels."""


class Snapshot(msgspec.Struct):
    """All that a router counted, and its engines as it sees them now."""

    counters: dict[str, list[tuple[tuple[str, ...], float]]] = {}
    histograms: dict[str, Histogram] = {}
    num_requests: int = 0
    """In progress."""
    num_waiting: int = 0
    """Of them, those whose answer has not begun."""
    num_queued: int = 0
    """What engines have no room for."""
    instances: list[InstanceSnapshot] = []
    break_evens: dict[str, int] = {}
    """By model: tokens up to which D computes a prompt itself, as measured."""
    degraded: dict[str, str] = {}
    """Models that no pair of engines serves now, and why."""
    num_recent: int = 0
    """Answers that began within the last seconds of ``stats_window_s``."""
    recent_ttft_s: float = 0.0
    """Sum of their times to the first byte."""
    timelines: list[Timeline] = []
    """Of the requests that ended last, up to ``NUM_TIMELINES``, the oldest first."""
    memory_bytes: int = 0
    """Resident."""

    def expose(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry())

    def sample(self, name: str, **labels: str) -> float:
        """One exposed value; 0 if it was never counted."""
        return self._registry().get_sample_value(PREFIX + name, labels) or 0.0

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Families(self))
        return registry


def add_up(ended: Iterable[Snapshot], running: Iterable[Snapshot]) -> Snapshot:
    """Of several workers. What ``ended`` counted stays; what they saw is gone with them."""
    ended, running = list(ended), list(running)
    instances: dict[str, InstanceSnapshot] = {}
    for one in (instance for snapshot in running for instance in snapshot.instances):
        if one.instance_id in instances:
            instances[one.instance_id].add(one)
        else:
            instances[one.instance_id] = msgspec.structs.replace(one)
    break_evens: dict[str, int] = {}
    for model, num_tokens in (item for one in running for item in one.break_evens.items()):
        break_evens[model] = min(num_tokens, break_evens.get(model, num_tokens))
    counts: dict[str, Counts] = {name: {} for name in COUNTERS}
    histograms = {name: Histogram() for name in HISTOGRAMS}
    for snapshot in (*ended, *running):
        for name, values in snapshot.counters.items():
            for labels, value in values:
                counts[name][labels] = counts[name].get(labels, 0) + value
        for name, histogram in snapshot.histograms.items():
            histograms[name].add(histogram)
    timelines = [one for snapshot in (*ended, *running) for one in snapshot.timelines]
    timelines.sort(key=lambda timeline: timeline.ended_at)
    return Snapshot(
        {name: list(values.items()) for name, values in counts.items()},
        histograms,
        sum(snapshot.num_requests for snapshot in running),
        sum(snapshot.num_waiting for snapshot in running),
        sum(snapshot.num_queued for snapshot in running),
        list(instances.values()),
        break_evens,
        {model: why for one in running for model, why in one.degraded.items()},
        sum(one.num_recent for one in running),
        sum(one.recent_ttft_s for one in running),
        timelines[-NUM_TIMELINES:],
        sum(snapshot.memory_bytes for snapshot in running),
    )


class _Families(Collector):
    """A snapshot as Prometheus' client wants it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        snapshot = self._snapshot
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, count in snapshot.counters.get(name, ()):
                counter.add_metric(values, count)
            yield counter
        for name, text in HISTOGRAMS.items():
            yield _histogram(name, text, snapshot.histograms.get(name) or Histogram())
        for name, text, value in (
            ("requests_in_progress", "Requests in progress", snapshot.num_requests),
            ("requests_waiting", "Of them, those without a first byte", snapshot.num_waiting),
            ("requests_queued", "Requests, and parts of some, without room", snapshot.num_queued),
            ("memory_bytes", "Resident memory of who serves requests", snapshot.memory_bytes),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=value)
        text = "Prompts of up to so many tokens are computed by an idle D, as measured"
        break_even = GaugeMetricFamily(PREFIX + "break_even_tokens", text, labels=["model"])
        for model, num_tokens in snapshot.break_evens.items():
            break_even.add_metric([model], num_tokens)
        yield break_even
        text = "1 if no pair of engines serves the model now: one alone does, or none"
        degraded = GaugeMetricFamily(PREFIX + "degraded", text, labels=["model", "reason"])
        for model, why in snapshot.degraded.items():
            degraded.add_metric([model, why], 1.0)
        yield degraded
        for name, (text, read) in INSTANCE_GAUGES.items():
            gauge = GaugeMetricFamily(f"{PREFIX}instance_{name}", text, labels=["instance", "role"])
            for instance in snapshot.instances:
                if (number := read(instance)) is not None:
                    gauge.add_metric([instance.instance_id, instance.role], float(number))
            yield gauge


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text)
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, below))
    family.add_metric([], buckets, histogram.total)
    return family

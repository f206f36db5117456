# SPDX-License-Identifier: Apache-2.0
"""What the router counts, for Prometheus. Event loop thread.

Numbers are kept here and given to ``prometheus_client`` when somebody asks: its own counters and
histograms take locks and scan buckets, which a request would pay for several times.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from vllm_ascend_pd.router.instances import Instance

PREFIX = "vllm:pd_router_"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    # name: (help, labels)
    "requests": ("Requests by how they ended", ("outcome",)),
    "retries": ("Attempts with another pair, by cause", ("cause",)),
    "retry_budget_exhausted": ("Retries not made for lack of budget", ()),
    "legs": ("Legs to engines, by how they ended", ("instance", "leg", "outcome")),
    "orders": ("Attempts by order", ("order",)),
    "prefix_hit_tokens": ("Prompt tokens that the policy expected to be cached", ("role",)),
    "prefill_skips": ("Requests without a prefill leg, by reason", ("reason",)),
}
HISTOGRAMS = {
    "ttft": "Request to the first byte of its answer",
    "itl": "Between two pieces of a stream",
    "prefill_leg": "Prefill leg, all of it",
    "decode_leg": "Decode leg, all of it",
    "handover": "Decode leg to its first byte, for a prompt that another engine computed",
}
"""Exposed as ``<name>_seconds``."""
OUTCOMES = (
    "ok",
    "client_error",
    "unauthorized",
    "unavailable",
    "failed",
    "timeout",
    "broken_stream",
    "disconnected",
)
"""How a request ends, each exactly once."""


class Histogram:
    """Seconds, by bucket."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Metrics(Collector):
    """Counters, histograms, and gauges read from the instances."""

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self._instances = instances
        self._counts: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in COUNTERS}
        self._counts["requests"] = {(outcome,): 0 for outcome in OUTCOMES}
        self.ttft = Histogram()
        self.itl = Histogram()
        self.prefill_leg = Histogram()
        self.decode_leg = Histogram()
        self.handover = Histogram()
        self.num_requests = 0
        """In progress now."""
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """To a counter of ``COUNTERS``."""
        counts = self._counts[name]
        counts[labels] = counts.get(labels, 0) + by

    def value(self, name: str, **labels: str) -> float:
        """Of one sample now; 0 if it was never counted."""
        return self.registry.get_sample_value(f"{PREFIX}{name}", labels) or 0.0

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def forget(self, instance_id: str) -> None:
        """An instance is gone: its series would stay for ever."""
        legs = self._counts["legs"]
        for labels in [labels for labels in legs if labels[0] == instance_id]:
            del legs[labels]

    def collect(self) -> Iterable[Metric]:
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            for values, count in self._counts[name].items():
                counter.add_metric(values, count)
            yield counter
        for name, text in HISTOGRAMS.items():
            yield self._histogram(name, text)
        running = GaugeMetricFamily(PREFIX + "requests_in_progress", "Requests in progress")
        running.add_metric([], self.num_requests)
        yield running
        yield from self._gauges()

    def _histogram(self, name: str, text: str) -> HistogramMetricFamily:
        histogram: Histogram = getattr(self, name)
        family = HistogramMetricFamily(f"{PREFIX}{name}_seconds", text)
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric([], buckets, histogram.total)
        return family

    def _gauges(self) -> Iterable[Metric]:
        families = {
            name: GaugeMetricFamily(PREFIX + name, text, labels=["instance", "role"])
            for name, text in (
                ("instance_up", "1 if it may get requests"),
                ("instance_breaker_open", "0 closed, 0.5 half open, 1 open"),
                ("instance_active_legs", "Legs in progress"),
                ("instance_active_tokens", "Tokens of the legs in progress"),
                ("instance_connections", "TCP connections"),
                ("instance_running", "Requests that the engine runs, by its own metrics"),
                ("instance_waiting", "Requests that the engine queues, by its own metrics"),
                ("instance_kv_usage", "Share of its KV blocks in use, by its own metrics"),
                ("instance_prefix_hit_rate", "Hits of its prefix cache, by its own metrics"),
                ("instance_prefix_index", "What its KV events tell: 1 exact, 0.5 degraded, else 0"),
                ("instance_prefix_blocks", "Blocks that its KV events told of"),
            )
        }
        for instance in self._instances():
            load, index = instance.load, instance.prefix_index
            values = (
                float(instance.is_available),
                {"closed": 0.0, "half_open": 0.5, "open": 1.0}[instance.breaker.state.value],
                float(instance.num_active),
                float(instance.num_active_tokens),
                float(instance.client.num_open),
                load.num_running,
                load.num_waiting,
                load.kv_usage,
                load.prefix_hits / load.prefix_queries if load.prefix_queries else 0.0,
                {"exact": 1.0, "degraded": 0.5}.get(index.state.value, 0.0) if index else 0.0,
                float(len(index)) if index else 0.0,
            )
            for family, value in zip(families.values(), values, strict=True):
                family.add_metric([instance.instance_id, instance.spec.role], value)
        yield from families.values()

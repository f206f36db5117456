# SPDX-License-Identifier: Apache-2.0
"""What the router counts, for Prometheus. Event loop thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client.metrics_core import Metric

    from vllm_ascend_pd.router.instances import Instance

PREFIX = "vllm:pd_router_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

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


class Metrics:
    """Labels are made once, here or when an instance is first seen: requests only add."""

    def __init__(self, instances: Callable[[], Iterable[Instance]]) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._outcomes = self._counter("requests", "Requests by how they ended", "outcome")
        self._retries = self._counter("retries", "Attempts with another pair, by cause", "cause")
        self._legs = self._counter("legs", "Legs to engines", "instance", "leg", "outcome")
        self._orders = self._counter("orders", "Attempts by order", "order")
        self._skips = self._counter("prefill_skips", "Requests without prefill leg", "reason")
        self.budget_exhausted = self._counter("retry_budget_exhausted", "Retries not made")
        self.ttft = self._histogram("ttft_seconds", "Request to first byte of the answer")
        self.itl = self._histogram("itl_seconds", "Between two pieces of a stream")
        self.prefill = self._histogram("prefill_leg_seconds", "Prefill leg, all of it")
        self.decode = self._histogram("decode_leg_seconds", "Decode leg, all of it")
        self.handover = self._histogram("handover_seconds", "Decode leg to its first byte")
        self.prefix_estimated = self._counter(
            "prefix_estimated_tokens", "Prompt tokens expected in a prefix cache"
        )
        self.prefix_actual = self._counter(
            "prefix_actual_tokens", "Prompt tokens that prefill engines said were cached"
        )
        self._children: dict[tuple[str, ...], Counter] = {}
        self.num_requests = 0
        """In progress now."""
        self.registry.register(_Instances(self, instances))

    def ended(self, outcome: str) -> None:
        self._child(self._outcomes, outcome).inc()

    def retried(self, cause: str) -> None:
        self._child(self._retries, cause).inc()

    def leg(self, instance_id: str, leg: str, outcome: str) -> None:
        self._child(self._legs, instance_id, leg, outcome).inc()

    def ordered(self, order: str) -> None:
        self._child(self._orders, order).inc()

    def skipped(self, reason: str) -> None:
        self._child(self._skips, reason).inc()

    def value(self, name: str, **labels: str) -> float:
        """Of one counter now; 0 if it was never counted."""
        return self.registry.get_sample_value(f"{PREFIX}{name}", labels) or 0.0

    def expose(self) -> bytes:
        return generate_latest(self.registry)

    def forget(self, instance_id: str) -> None:
        """An instance is gone: its series would stay for ever."""
        for key in [k for k in self._children if len(k) == 4 and k[1] == instance_id]:
            del self._children[key]
            self._legs.remove(*key[1:])

    def _child(self, metric: Counter, *labels: str) -> Counter:
        key = (metric._name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=_SECONDS)


class _Instances(Collector):
    """Gauges read from the instances when somebody asks."""

    def __init__(self, metrics: Metrics, instances: Callable[[], Iterable[Instance]]) -> None:
        self._metrics = metrics
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        running = GaugeMetricFamily(PREFIX + "requests_in_progress", "Requests in progress")
        running.add_metric([], self._metrics.num_requests)
        yield running
        labels = ["instance", "role"]
        families = {
            name: GaugeMetricFamily(PREFIX + name, text, labels=labels)
            for name, text in (
                ("instance_up", "1 if it may get requests"),
                ("instance_breaker_open", "0 closed, 0.5 half open, 1 open"),
                ("instance_active_legs", "Legs in progress"),
                ("instance_active_tokens", "Tokens of the legs in progress"),
                ("instance_connections", "TCP connections"),
                ("instance_running", "Requests that the engine runs, by its own metrics"),
                ("instance_waiting", "Requests that the engine queues, by its own metrics"),
                ("instance_kv_usage", "Share of its KV blocks in use, by its own metrics"),
            )
        }
        for instance in self._instances():
            values = (
                float(instance.is_available),
                {"closed": 0.0, "half_open": 0.5, "open": 1.0}[instance.breaker.state.value],
                float(instance.num_active),
                float(instance.num_active_tokens),
                float(instance.client.num_open),
                instance.load.num_running,
                instance.load.num_waiting,
                instance.load.kv_usage,
            )
            for family, value in zip(families.values(), values, strict=True):
                family.add_metric([instance.instance_id, instance.spec.role], value)
        yield from families.values()

# SPDX-License-Identifier: Apache-2.0
"""What the name ``InEngine`` stands for in vLLM's connector registry.

No object of it is made. vLLM asks the class what a connector of that name needs, and the front end
asks it how to log and expose the statistics that arrive with the engine's outputs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.vllm_api.connector import (
    KVConnectorBase_V1,
    KVConnectorPromMetrics,
    KVConnectorStats,
    SupportsHMA,
)
from vllm_ascend_pd.engine.vllm_api.outputs import attach_stats
from vllm_ascend_pd.metrics import COUNTERS, GAUGES, INFOS, split_key

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig
    from vllm_ascend_pd.engine.vllm_api.types import KVConnectorOutput
    from vllm_ascend_pd.metrics import Stats


@dataclass
class PDStats(KVConnectorStats):
    """Increments of counters and values of gauges, see ``metrics.Stats.take``."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            is_gauge = split_key(name)[0] in GAUGES
            self.data[name] = value if is_gauge else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the periodic line of the log, which counts what happened; gauges say what is."""
        return {name: round(self.data[name], 3) for name in sorted(self.data) if _counts(name)}

    def is_empty(self) -> bool:
        return not any(map(_counts, self.data))


def carry(stats: Stats, output: KVConnectorOutput) -> None:
    """To the front end, what there is since the last time."""
    if values := stats.take():
        attach_stats(output, PDStats(data=values))


def _counts(key: str) -> bool:
    return split_key(key)[0] not in GAUGES


class PDPromMetrics(KVConnectorPromMetrics):
    """``vllm:pd_*`` in the front end's ``/metrics``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:pd_{name}",
                documentation=text,
                labelnames=labelnames + ([label] if label else []),
            )
            for name, (text, label) in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:pd_{name}",
                documentation=text,
                labelnames=[*labelnames, *labels],
                multiprocess_mode="mostrecent",
            )
            for name, (text, labels) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, labels = split_key(key)
            if name in self._gauges:
                self._gauges[name].labels(*values, *labels).set(value)
                if name in INFOS and not value:
                    _forget(self._gauges[name], (*values, *labels))
            else:
                self._counters[name].labels(*values, *labels).inc(value)


def _forget(gauge: Any, labels: tuple[object, ...]) -> None:
    """A series that is over. Ray's gauges keep it, and so do the files of several front ends, of
    which ``prometheus_client`` warns: there it stays as it was set last."""
    remove = getattr(gauge, "remove", None)
    if remove is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            remove(*labels)


class InEngineCarrier(KVConnectorBase_V1, SupportsHMA):
    """Static answers only; the engine side lives in ``engine.scheduler`` and ``engine.worker``.

    With ``SupportsHMA`` vLLM keeps sliding windows and full attention in groups of their own;
    ``supported.check_config`` takes that back where it does not do.
    """

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return PDStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return PDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

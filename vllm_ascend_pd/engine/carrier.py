# SPDX-License-Identifier: Apache-2.0
"""What the name ``InEngine`` stands for in vLLM's connector registry.

No object of it is made. vLLM asks the class what a connector of that name needs, and the front end
asks it how to log and expose the statistics that arrive with the engine's outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_ascend_pd.metrics import COUNTERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class PDStats(KVConnectorStats):
    """Increments by counter name, see ``metrics.Stats.take``."""

    def reset(self) -> None:
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class PDPromMetrics(KVConnectorPromMetrics):
    """``vllm:pd_*_total`` counters in the front end's ``/metrics``."""

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

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for key, increment in transfer_stats_data.items():
            name, _, label = key.partition("/")
            self._counters[name].labels(*values, *([label] if label else [])).inc(increment)


class InEngineCarrier(KVConnectorBase_V1, SupportsHMA):
    """Static answers only; the engine side lives in ``engine.scheduler`` and ``engine.worker``."""

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

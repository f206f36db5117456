# SPDX-License-Identifier: Apache-2.0
"""The classes of vLLM's connector interface that ours derive from."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorPromMetrics",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
]

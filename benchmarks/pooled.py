# SPDX-License-Identifier: Apache-2.0
"""An engine with a KV pool."""

from __future__ import annotations

import json
from typing import Any


def with_pool(pool: str) -> Any:
    """Its ``KVTransferConfig``; ``pool`` is JSON. ``None`` without one: the engine has none."""
    from vllm.config import KVTransferConfig

    if not pool:
        return None
    return KVTransferConfig(
        kv_connector="InEngine",
        kv_role="kv_both",
        kv_port=0,
        kv_connector_extra_config={"pool": json.loads(pool)},
    )

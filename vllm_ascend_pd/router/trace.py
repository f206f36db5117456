# SPDX-License-Identifier: Apache-2.0
"""One request's story."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Trace:
    """One request's story, for the access log and the metrics."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    outcome: str = "disconnected"
    order: str = ""
    prefill: str = ""
    decode: str = ""
    num_attempts: int = 0
    status: int = 0
    num_bytes: int = 0
    ttft_s: float | None = None
    error: str = ""
    span: Any = None
    """Of OpenTelemetry, if it traces."""

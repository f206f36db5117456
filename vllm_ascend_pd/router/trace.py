# SPDX-License-Identifier: Apache-2.0
"""A client's request on its way through the router."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import web


@dataclass(slots=True)
class Trace:
    """What came, and what became of it, for the access log and the metrics."""

    request: web.Request
    request_id: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """For engines."""
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

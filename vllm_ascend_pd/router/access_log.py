# SPDX-License-Identifier: Apache-2.0
"""One line per request: what it was, who served it, how it ended. No body and no secret."""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from aiohttp import web

    from vllm_ascend_pd.router.trace import Trace

logger = logging.getLogger("vllm_ascend_pd.router.access")

AccessLogFormat = Literal["text", "json", "off"]
FORMATS: tuple[AccessLogFormat, ...] = get_args(AccessLogFormat)


class Line(msgspec.Struct, omit_defaults=True):
    """One request. In JSON, what does not apply is left out."""

    time: str
    """When it ended: ISO 8601, UTC."""
    request_id: str
    method: str
    path: str
    status: int
    outcome: str
    duration_ms: float
    num_bytes: int
    """Of the answer's body."""
    num_attempts: int
    remote: str | None = None
    order: str | None = None
    prefill: str | None = None
    decode: str | None = None
    ttft_ms: float | None = None
    error: str | None = None

    @classmethod
    def of(cls, request: web.BaseRequest, trace: Trace) -> Line:
        return cls(
            datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            trace.request_id,
            request.method,
            request.path,
            trace.status,
            trace.outcome,
            round((time.monotonic() - trace.started) * 1e3, 1),
            trace.num_bytes,
            trace.num_attempts,
            remote=request.remote,
            order=trace.order or None,
            prefill=trace.prefill or None,
            decode=trace.decode or None,
            ttft_ms=None if trace.ttft_s is None else round(trace.ttft_s * 1e3, 1),
            error=trace.error or None,
        )

    @property
    def text(self) -> str:
        """For a person; a client's text cannot begin a line of its own."""
        ttft = "-" if self.ttft_ms is None else f"{self.ttft_ms:.1f}ms"
        line = (
            f'{self.remote or "-"} {self.request_id} "{self.method} {self.path}" {self.status}'
            f" {self.num_bytes}B {self.duration_ms:.1f}ms outcome={self.outcome}"
            f" order={self.order or '-'} prefill={self.prefill or '-'} decode={self.decode or '-'}"
            f" attempts={self.num_attempts} ttft={ttft}"
        )
        if self.error:
            line += f" error={self.error!r}"
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


class AccessLog:
    """Silent while the logger's level is above INFO."""

    def __init__(self, form: AccessLogFormat) -> None:
        self._form = form

    def write(self, request: web.BaseRequest, trace: Trace) -> None:
        if self._form == "off" or not logger.isEnabledFor(logging.INFO):
            return
        line = Line.of(request, trace)
        logger.info("%s", line.text if self._form == "text" else msgspec.json.encode(line).decode())


def set_up(form: AccessLogFormat) -> None:
    """Lines of JSON stand alone on the standard output; text is among the rest. Once a process."""
    if form == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

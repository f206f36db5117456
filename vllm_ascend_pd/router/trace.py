# SPDX-License-Identifier: Apache-2.0
"""A client's request on its way through the router, and the timeline that is kept of it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

NUM_TIMELINES = 100


class Stage(msgspec.Struct):
    """A part of a request's way, in seconds since the request came."""

    name: str
    """``queue``, ``prefill``: a prefill leg, ``decode``: a decode leg for a prompt that another
    engine computes, ``alone``: one that computes it itself."""
    instance: str
    start_s: float
    end_s: float | None = None
    first_token_s: float | None = None
    """Of a decode leg: when there was something for the client."""

    def shift(self, seconds: float) -> Stage:
        """The same, of a request that came so much earlier."""
        names = ("start_s", "end_s", "first_token_s")
        times = {name: getattr(self, name) for name in names}
        later = {name: at + seconds for name, at in times.items() if at is not None}
        return msgspec.structs.replace(self, **later)


class Timeline(msgspec.Struct, kw_only=True):
    """A request that has ended, as the live page shows it. No body and no secret."""

    ended_at: float
    """Unix time, seconds."""
    request_id: str
    path: str
    model: str
    order: str
    outcome: str
    status: int
    num_attempts: int
    error: str
    ttft_s: float | None
    duration_s: float
    stages: list[Stage]


@dataclass(slots=True)
class Trace:
    """What came, and what became of it, for the access log, the metrics and the timelines."""

    request: web.Request
    request_id: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """For engines."""
    started: float = field(default_factory=time.monotonic)
    outcome: str = "disconnected"
    model: str = ""
    order: str = ""
    prefill: str = ""
    decode: str = ""
    num_attempts: int = 0
    num_resumes: int = 0
    status: int = 0
    num_bytes: int = 0
    ttft_s: float | None = None
    error: str = ""
    span: Any = None
    """Of OpenTelemetry, if it traces."""
    stages: list[Stage] = field(default_factory=list)
    """In the order in which they began; legs of one attempt may overlap."""

    @contextmanager
    def stage(self, name: str, instance: str = "") -> Iterator[Stage]:
        """From here to the end of ``with``."""
        stage = Stage(name, instance, time.monotonic() - self.started)
        self.stages.append(stage)
        try:
            yield stage
        finally:
            stage.end_s = time.monotonic() - self.started

    def timeline(self) -> Timeline:
        """Of a request that ends now."""
        return Timeline(
            ended_at=time.time(),
            request_id=self.request_id,
            path=self.request.path,
            model=self.model,
            order=self.order,
            outcome=self.outcome,
            status=self.status,
            num_attempts=self.num_attempts,
            error=self.error,
            ttft_s=self.ttft_s,
            duration_s=time.monotonic() - self.started,
            stages=self.stages,
        )

# SPDX-License-Identifier: Apache-2.0
"""A client's request on its way through the router, and the timeline that is kept of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.router.prefilled import find_num_tokens

if TYPE_CHECKING:
    from aiohttp import web

    from vllm_ascend_pd.router.tenants import Tenant

NUM_TIMELINES = 100
MAX_STAGES = 100
"""Of a timeline: that of a batch of chats would have some for each."""


class Stage(msgspec.Struct):
    """A part of a request's way, which ends with ``with``. Times are seconds of the host's
    monotonic clock."""

    name: str
    """``queue``, ``prefill``: a prefill leg, ``decode``: a decode leg for a prompt that another
    engine computes, ``alone``: one that computes it itself, ``resumed``: one that goes on where
    another engine broke off, ``moved``: one that was asked to while another engine still did."""
    instance: str
    start_s: float = msgspec.field(default_factory=time.monotonic)
    end_s: float | None = None
    first_token_s: float | None = None
    """Of a decode leg: when there was something for the client."""
    failure: str = ""
    """How its leg failed, and why."""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end_s = time.monotonic()


class Timeline(msgspec.Struct, kw_only=True):
    """A request that has ended, as the live page shows it. No body and no secret."""

    ended_at: float
    """Unix time, seconds."""
    request_id: str
    tenant: str = ""
    """Whose it was, if the router tells tenants apart."""
    path: str
    model: str
    order: str
    outcome: str
    status: int
    num_attempts: int
    error: str
    ttft_s: float | None
    start_s: float
    """On the host's monotonic clock, as the times of its stages."""
    end_s: float
    stages: list[Stage]
    """The first ``MAX_STAGES``."""
    num_more_stages: int = 0
    """That it had."""

    def since_start(self) -> dict[str, Any]:
        """As plain values, in which times count from when the request came."""
        told: dict[str, Any] = msgspec.to_builtins(self)
        start_s = told.pop("start_s")
        told["duration_s"] = told.pop("end_s") - start_s
        for stage in told["stages"]:
            for name in ("start_s", "end_s", "first_token_s"):
                if stage[name] is not None:
                    stage[name] -= start_s
        return told


@dataclass(slots=True)
class Trace:
    """What came, and what became of it, for the access log, the metrics and the timelines."""

    request: web.Request
    request_id: str
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """For engines."""
    started: float = field(default_factory=time.monotonic)
    is_waiting: bool = False
    """Counted among those whose answer has not begun."""
    outcome: str = "disconnected"
    model: str = ""
    order: str = ""
    prefill: str = ""
    decode: str = ""
    num_attempts: int = 0
    num_resumes: int = 0
    """Engines that have gone on with a broken stream: the client has got something of each."""
    num_moves: int = 0
    tenant: Tenant | None = None
    """Whose request it is, if the router tells tenants apart."""
    counts_tokens: bool = False
    """Somebody wants to know how many there are."""
    num_prompt_tokens: int | None = None
    """If an engine said."""
    num_answer_tokens: int = 0
    """As the engine said; of a stream that does not say, its pieces."""
    status: int = 0
    num_bytes: int = 0
    ttft_s: float | None = None
    error: str = ""
    span: Any = None
    """Of OpenTelemetry, if it traces."""
    stages: list[Stage] = field(default_factory=list)
    """In the order in which they began; legs of one attempt may overlap."""

    def stage(self, name: str, instance: str = "") -> Stage:
        """From here to the end of ``with``."""
        stage = Stage(name, instance)
        self.stages.append(stage)
        return stage

    def answered(self, data: bytes) -> None:
        """A whole answer, or whole events of one, for the client."""
        self.num_bytes += len(data)
        if self.counts_tokens:
            told = find_num_tokens(data)
            self.num_prompt_tokens = told.prompt or self.num_prompt_tokens
            pieces = data.count(b"data: {")
            self.num_answer_tokens = (
                self.num_answer_tokens + pieces if told.answer is None else told.answer
            )

    def timeline(self) -> Timeline:
        """Of a request that ends now."""
        return Timeline(
            ended_at=time.time(),
            request_id=self.request_id,
            tenant=self.tenant.name if self.tenant else "",
            path=self.request.path,
            model=self.model,
            order=self.order,
            outcome=self.outcome,
            status=self.status,
            num_attempts=self.num_attempts,
            error=self.error,
            ttft_s=self.ttft_s,
            start_s=self.started,
            end_s=time.monotonic(),
            stages=self.stages[:MAX_STAGES],
            num_more_stages=len(self.stages[MAX_STAGES:]),
        )

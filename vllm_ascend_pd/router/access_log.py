# SPDX-License-Identifier: Apache-2.0
"""One line per request: what it was, who served it, how it ended. No body and no secret."""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

if TYPE_CHECKING:
    from vllm_ascend_pd.router.trace import Trace

logger = logging.getLogger("vllm_ascend_pd.router.access")

MAX_FAILED_LEGS = 8
MAX_FAILURE_CHARS = 200
AccessLogFormat = Literal["text", "json", "off"]
FORMATS: tuple[AccessLogFormat, ...] = get_args(AccessLogFormat)


def describe(trace: Trace) -> dict[str, Any]:
    """A request that has ended; ``None`` for what does not apply."""
    request = trace.request
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": trace.request_id,
        "method": request.method,
        "path": request.path,
        "status": trace.status,
        "outcome": trace.outcome,
        "duration_ms": round((time.monotonic() - trace.started) * 1e3, 1),
        "num_bytes": trace.num_bytes,  # of the answer's body
        "num_attempts": trace.num_attempts,
        "num_resumes": trace.num_resumes or None,
        "num_moves": trace.num_moves or None,
        "remote": request.remote,
        "tenant": trace.tenant.name if trace.tenant else None,
        "num_answer_tokens": trace.num_answer_tokens or None,
        "order": trace.order or None,
        "prefill": trace.prefill or None,
        "decode": trace.decode or None,
        "ttft_ms": None if trace.ttft_s is None else round(trace.ttft_s * 1e3, 1),
        "failed_legs": _failed_legs(trace) or None,
        "error": trace.error or None,
    }


def _failed_legs(trace: Trace) -> list[str]:
    """The first of them; an answer may be good in spite of them."""
    told = [f"{s.name} {s.instance}: {s.failure}" for s in trace.stages if s.failure]
    return [one[:MAX_FAILURE_CHARS] for one in told[:MAX_FAILED_LEGS]]


def as_text(line: dict[str, Any]) -> str:
    """For a person; a client's text cannot begin a line of its own."""
    told: dict[str, Any] = {name: "-" if value is None else value for name, value in line.items()}
    ttft = "-" if line["ttft_ms"] is None else f"{line['ttft_ms']:.1f}ms"
    text = (
        '{remote} {request_id} "{method} {path}" {status} {num_bytes}B {duration_ms:.1f}ms'
        " outcome={outcome} order={order} prefill={prefill} decode={decode}"
        " attempts={num_attempts} ttft={ttft}"
    ).format(**told, ttft=ttft)
    if line["num_resumes"]:
        text += " resumes={num_resumes}".format(**line)
    if line["num_moves"]:
        text += " moves={num_moves}".format(**line)
    if line["tenant"]:
        text += " tenant={tenant} tokens={num_answer_tokens}".format(**told)
    if line["failed_legs"]:
        text += " failed={failed_legs}".format(**line)
    if line["error"]:
        text += f" error={line['error']!r}"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def as_json(line: dict[str, Any]) -> str:
    """Without what does not apply."""
    told = {name: value for name, value in line.items() if value is not None}
    return msgspec.json.encode(told).decode()


class AccessLog:
    """Silent while the logger's level is above INFO."""

    def __init__(self, form: AccessLogFormat) -> None:
        self._form = form

    def write(self, trace: Trace) -> None:
        if self._form == "off" or not logger.isEnabledFor(logging.INFO):
            return
        line = describe(trace)
        logger.info("%s", as_text(line) if self._form == "text" else as_json(line))


def set_up(form: AccessLogFormat) -> None:
    """Lines of JSON stand alone on the standard output; text is among the rest. Once a process."""
    if form == "json":
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.propagate = False

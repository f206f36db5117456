# SPDX-License-Identifier: Apache-2.0
"""Why a leg to an engine failed, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus


class FailureKind(str, Enum):
    """The value is the label of the metric."""

    CONNECT = "connect"
    """Nothing was sent: refused or unreachable."""
    CONNECT_TIMEOUT = "connect_timeout"
    """No connection in time, or no address: the engine is away, or it or a name server has too
    much to do."""
    ROUTER = "router"
    """The router's own: it has no file descriptor, port or memory left."""
    DISCONNECT = "disconnect"
    """The engine closed the connection before it answered."""
    TRUNCATED = "truncated"
    """The engine closed the connection within its answer, as vLLM does where it refuses a streamed
    response: it may be the request's own doing."""
    PROTOCOL = "protocol"
    """What came is not HTTP, or larger than we accept."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """The engine answered 5xx, or gave the request up: it may be the request's own doing."""
    BUSY = "busy"
    """The engine answered 503: it takes no more now (``--max-num-queued-reqs``), or is away for a
    cause that passes."""
    NO_PARAMS = "no_kv_transfer_params"
    """The prefill engine answered without telling where the KV is."""
    REFUSED = "refused"
    """The prefill engine answered 4xx."""
    DIFFERS = "differs"
    """The engine that was to go on with a stream began with other tokens."""
    MOVED = "moved"
    """No failure: the router has it go on at another engine."""
    DOWN = "down"
    """The engine stopped to answer probes while we waited for it."""


BLAMELESS = (FailureKind.CONNECT_TIMEOUT, FailureKind.ROUTER, FailureKind.BUSY)
"""They say nothing of the engine: as many requests at once may bring them about. Its probes do."""
UNEXPLAINED = (FailureKind.STATUS, FailureKind.TRUNCATED)
"""They say nothing of it either, unless another one answers the same request."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One leg's end without a usable answer; ``detail`` is for a person."""

    kind: FailureKind
    detail: str

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}"


def failed_with(status: int, message: str) -> Failure:
    """What the engine answered, 5xx or as good as that."""
    is_busy = status == HTTPStatus.SERVICE_UNAVAILABLE
    kind = FailureKind.BUSY if is_busy else FailureKind.STATUS
    return Failure(kind, f"status {status}: {message}")

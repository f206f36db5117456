# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a router: the HTTP messages beside those of ``registration``.

    GET  /requests                       200 with ``RunningRequests``
    POST /requests/{request_id}/move     body ``MoveOrder`` or nothing; 200 with a JSON array of
                                         ``MoveReport``, one for each request of that id, when
                                         they have moved or have not; 504 if a worker of the
                                         router that may have it does not answer

Only who may register engines may ask, see ``registration``: no client does.
"""

from __future__ import annotations

import msgspec

REQUESTS = "/requests"
TRUST_FIX = "give the CA of its certificate with --ca"
"""What an operator is told of a server whose certificate is not trusted here."""


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request that an engine answers now."""

    request_id: str
    path: str
    model: str
    instance: str
    age_s: float
    """Since it came."""
    num_bytes: int
    """That its client has of the answer."""
    stays: str | None
    """Why it cannot move now, or did not when it was last to; ``None`` if nothing is known."""
    moves_to: str | None
    """Where it is about to go on."""


class RunningRequests(msgspec.Struct, frozen=True, kw_only=True):
    """All that the router can tell of."""

    requests: list[RequestStatus]
    silent_workers: list[str] = []
    """Of a router of several processes: who did not answer in time, whose requests are missing."""

    @property
    def missing(self) -> str:
        """What a person is told of that; empty if nothing is missing."""
        if not self.silent_workers:
            return ""
        names = ", ".join(self.silent_workers)
        return f"worker {names} of the router does not answer: its requests are not among these"


class MoveOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to become of a request."""

    to: str | None = None
    """An instance; ``None``: the one that the router's policy chooses."""


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of it."""

    request_id: str
    source: str
    target: str
    """Empty if none was chosen."""
    outcome: str
    """``moved``; ``stayed``: its engine goes on; ``not_needed``: the answer was complete before;
    ``broken``: its engine has failed meanwhile, and its stream goes on as any broken one."""
    cause: str
    """Why it did not move."""
    seconds: float

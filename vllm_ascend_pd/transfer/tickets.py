# SPDX-License-Identifier: Apache-2.0
"""What ties a fetch to an open that was accepted. Pure: no sockets, no threads.

    worker of P                scheduler of P              scheduler of D         worker of D
      key (new at each start) ──► issues a ticket  ──opened──►  ticket  ──load──►   ticket
      accepts(ticket)  ◄──────────────────────── fetch, watch ─────────────────────────┘

The worker keeps nothing of a ticket: its key says whether the scheduler has issued it.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from vllm_ascend_pd.types import Endpoint, Layers, LeaseRef
from vllm_ascend_pd.wire import Fetch, Ticket, Watch, Worker

_KEY_BYTES = 32
_MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class TicketKey:
    """One worker's. Its bytes appear in no ``repr`` and on no wire between engines."""

    _bytes: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)

    def issue(self, lease: LeaseRef, end: int) -> Ticket:
        """For the tokens [0, ``end``) of this lease."""
        return Ticket(lease.generation, end, self._mac(lease, end))

    def accepts(self, transfer_id: str, ticket: Ticket) -> bool:
        """Whether this key has issued it, for a lease of this transfer."""
        expected = self._mac(LeaseRef(transfer_id, ticket.generation), ticket.end)
        return hmac.compare_digest(expected, ticket.mac)

    def _mac(self, lease: LeaseRef, end: int) -> bytes:
        said = f"{lease.generation} {end} {lease.transfer_id}".encode()
        return hmac.digest(self._bytes, said, "sha256")[:_MAC_BYTES]


@dataclass(frozen=True, slots=True)
class PageServer:
    """Where one worker serves pages, and the key of the tickets that it accepts."""

    endpoint: Endpoint
    key: TicketKey
    layers: Layers | None = None
    """As in ``wire.Worker``."""

    def admit(self, lease: LeaseRef, end: int) -> Worker:
        """What a consumer is told that may read the tokens [0, ``end``) of this lease."""
        at = self.endpoint
        return Worker(at.host, at.port, self.key.issue(lease, end), at.key, self.layers)


def lease_of(message: Fetch | Watch) -> LeaseRef:
    """The lease that its ticket is for."""
    return LeaseRef(message.transfer_id, message.ticket.generation)

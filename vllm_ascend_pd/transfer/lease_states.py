# SPDX-License-Identifier: Apache-2.0
"""The states of a lease, one for each prompt that a consumer may read:

    OPEN ──finished──► LEASED ──released / expired / displaced / revoked──► CLOSED
      └──released, or revoked (preempted, aborted, failed)────────────────────┘

``OPEN`` is a prompt that is still being computed. It can be opened then only when the router has
chosen its transfer id (decode first). A consumer's side is in ``engine.scheduler.sources``.
"""

from __future__ import annotations

from enum import Enum, auto

from vllm_ascend_pd.states import Transitions


class ProducerState(Enum):
    OPEN = auto()
    LEASED = auto()
    CLOSED = auto()


class ProducerEvent(Enum):
    FINISHED = auto()
    RELEASED = auto()
    EXPIRED = auto()
    DISPLACED = auto()
    REVOKED = auto()


# A lease may end while the control thread decides that it has expired, or is in the way.
PRODUCER_TRANSITIONS: Transitions[ProducerState, ProducerEvent] = Transitions(
    {
        ProducerState.OPEN: {
            ProducerEvent.FINISHED: ProducerState.LEASED,
            ProducerEvent.RELEASED: ProducerState.CLOSED,
            ProducerEvent.REVOKED: ProducerState.CLOSED,
            ProducerEvent.EXPIRED: ProducerState.OPEN,
            ProducerEvent.DISPLACED: ProducerState.OPEN,
        },
        ProducerState.LEASED: {
            ProducerEvent.RELEASED: ProducerState.CLOSED,
            ProducerEvent.EXPIRED: ProducerState.CLOSED,
            ProducerEvent.DISPLACED: ProducerState.CLOSED,
            ProducerEvent.REVOKED: ProducerState.CLOSED,
        },
        ProducerState.CLOSED: dict.fromkeys(ProducerEvent, ProducerState.CLOSED),
    }
)

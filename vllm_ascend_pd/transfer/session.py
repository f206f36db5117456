# SPDX-License-Identifier: Apache-2.0
"""The states of a transfer, one table a side. This file owns every transition.

Producer, one per prompt that a consumer may read:

    OPEN ──finished──► LEASED ──released / expired / displaced / revoked──► CLOSED
      └──released, or revoked (preempted, aborted, failed)────────────────────┘

``OPEN`` is a prompt that is still being computed. It can be opened then only when the router has
chosen its transfer id (decode first).

Consumer, one per request that wants a peer's KV:

    OPENING ──opened──► READY ──load──► LOADING ──loaded──► READY … ──done──► DONE
       │                  │                │
       └── refused, failed ────────────────┴──► FAILED        aborted, from any: ABORTED

A request in ``OPENING``, or in ``LOADING`` while parked, waits in ``WAITING_FOR_KV``. ``DONE``,
``FAILED`` and ``ABORTED`` are final: the request needs nothing more from its peer.
"""

from __future__ import annotations

from enum import Enum, auto


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


class ConsumerState(Enum):
    OPENING = auto()
    READY = auto()
    LOADING = auto()
    DONE = auto()
    FAILED = auto()
    ABORTED = auto()

    @property
    def final(self) -> bool:
        return self in (ConsumerState.DONE, ConsumerState.FAILED, ConsumerState.ABORTED)


class ConsumerEvent(Enum):
    OPENED = auto()
    REFUSED = auto()
    LOAD = auto()
    LOADED = auto()
    LOAD_FAILED = auto()
    DONE = auto()
    ABORT = auto()


PRODUCER_TRANSITIONS: dict[ProducerState, dict[ProducerEvent, ProducerState]] = {
    ProducerState.OPEN: {
        ProducerEvent.FINISHED: ProducerState.LEASED,
        ProducerEvent.RELEASED: ProducerState.CLOSED,
        ProducerEvent.REVOKED: ProducerState.CLOSED,
    },
    ProducerState.LEASED: {
        ProducerEvent.RELEASED: ProducerState.CLOSED,
        ProducerEvent.EXPIRED: ProducerState.CLOSED,
        ProducerEvent.DISPLACED: ProducerState.CLOSED,
        ProducerEvent.REVOKED: ProducerState.CLOSED,
    },
    ProducerState.CLOSED: {},
}

CONSUMER_TRANSITIONS: dict[ConsumerState, dict[ConsumerEvent, ConsumerState]] = {
    ConsumerState.OPENING: {
        ConsumerEvent.OPENED: ConsumerState.READY,
        ConsumerEvent.REFUSED: ConsumerState.FAILED,
        ConsumerEvent.ABORT: ConsumerState.ABORTED,
    },
    ConsumerState.READY: {
        ConsumerEvent.LOAD: ConsumerState.LOADING,
        ConsumerEvent.LOAD_FAILED: ConsumerState.FAILED,
        ConsumerEvent.DONE: ConsumerState.DONE,
        ConsumerEvent.ABORT: ConsumerState.ABORTED,
    },
    ConsumerState.LOADING: {
        ConsumerEvent.LOAD: ConsumerState.LOADING,
        ConsumerEvent.LOADED: ConsumerState.READY,
        ConsumerEvent.LOAD_FAILED: ConsumerState.FAILED,
        ConsumerEvent.ABORT: ConsumerState.ABORTED,
    },
    ConsumerState.DONE: {},
    ConsumerState.FAILED: {},
    ConsumerState.ABORTED: {},
}


def next_producer_state(state: ProducerState, event: ProducerEvent) -> ProducerState | None:
    """The state after ``event``, or ``None`` where the event has no effect (it came too late)."""
    return PRODUCER_TRANSITIONS[state].get(event)


def next_consumer_state(state: ConsumerState, event: ConsumerEvent) -> ConsumerState | None:
    """The state after ``event``, or ``None`` where the event has no effect (it came too late)."""
    return CONSUMER_TRANSITIONS[state].get(event)

# SPDX-License-Identifier: Apache-2.0
"""The states of a move: a stream that one engine gives, the source, goes on from the target.

    PLANNED ──asked──► ASKED ──began──► READY ──source broke──► MOVED
       │                 ├──source broke──► AWAITED ──began────────┘
       │                 │                     └──failed──► BROKEN
       └─────────────────┴──failed──► STAYED

Until ``READY`` the client gets what the source gives; then the router ends the source's part, and
the client gets the target's from there on. In ``AWAITED`` the source has given up by itself, for it
has handed the request over or has failed: which of them, only the target can say.
"""

from __future__ import annotations

from enum import Enum

from vllm_ascend_pd.states import Transitions


class MoveState(Enum):
    """The values of ``ENDS`` are the outcomes that the metric tells."""

    PLANNED = "planned"
    """The target has not been asked: it may have no room yet."""
    ASKED = "asked"
    """Both engines have the request."""
    AWAITED = "awaited"
    """The source's part is over, and the target has not begun."""
    READY = "ready"
    """The target has begun, and the source's part is not over yet."""
    MOVED = "moved"
    STAYED = "stayed"
    """The source goes on as if nothing had been."""
    NOT_NEEDED = "not_needed"
    """The answer was complete before, or its client had left."""
    BROKEN = "broken"
    """Neither goes on: the tokens that are known go to another engine."""


class MoveEvent(Enum):
    ASKED = "asked"
    """There is room, and the target is sent the request."""
    BEGAN = "began"
    """The target has computed something that the client may lack."""
    FAILED = "failed"
    """No target, it cannot go on, or it takes too long."""
    SOURCE_ENDED = "source_ended"
    """The answer is complete, or its client has left."""
    SOURCE_BROKE = "source_broke"
    """It gives nothing more, and the answer is not complete."""


ENDS = frozenset((MoveState.MOVED, MoveState.STAYED, MoveState.NOT_NEEDED, MoveState.BROKEN))
MOVE_TRANSITIONS: Transitions[MoveState, MoveEvent] = Transitions(
    {
        MoveState.PLANNED: {
            MoveEvent.ASKED: MoveState.ASKED,
            MoveEvent.FAILED: MoveState.STAYED,
            MoveEvent.SOURCE_ENDED: MoveState.NOT_NEEDED,
            MoveEvent.SOURCE_BROKE: MoveState.BROKEN,
        },
        MoveState.ASKED: {
            MoveEvent.BEGAN: MoveState.READY,
            MoveEvent.FAILED: MoveState.STAYED,
            MoveEvent.SOURCE_ENDED: MoveState.NOT_NEEDED,
            MoveEvent.SOURCE_BROKE: MoveState.AWAITED,
        },
        MoveState.AWAITED: {
            MoveEvent.BEGAN: MoveState.MOVED,
            MoveEvent.FAILED: MoveState.BROKEN,
            MoveEvent.SOURCE_ENDED: MoveState.NOT_NEEDED,
        },
        MoveState.READY: {
            MoveEvent.SOURCE_ENDED: MoveState.NOT_NEEDED,
            MoveEvent.SOURCE_BROKE: MoveState.MOVED,
        },
        **{state: dict.fromkeys(MoveEvent, state) for state in ENDS},
    }
)

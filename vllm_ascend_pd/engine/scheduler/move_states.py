# SPDX-License-Identifier: Apache-2.0
"""The states of a running request that moves from engine S to engine T.

S, which runs it:

    COPYING ──freeze──► STOPPING ──drained──► STOPPED ──ready──► GONE
       └───────────────────┴──── stay ───────────┴─────────────► STAYS

T, which takes it:

    ASKED ─extended─► COPYING ─freeze─► FREEZING ─frozen─► FINISHING ─loaded─► READY ─go─► HERE
      ▲                  │                  ▲                  │
      └─── load ended ───┘                  └────── freeze ────┘
    from any of them but HERE: ─fail─► OVER

Where S has asked T to take it, and keeps its client (``forwards_out``):

    ASKED ──go──► AWAY ──fail──► BACK
      ├── fail ──► STAYS
      └── end, also from AWAY ──► OVER

Exactly one engine computes the next token. S computes it only while the request is in its running
queue: in COPYING and STAYS. T computes it only in HERE. T comes to HERE only by ``Go``, S sends
``Go`` only as it enters GONE, out of STOPPED, and no event leads out of GONE. A message that is
lost, late or comes twice moves neither to a state from which both compute: ``Ready`` counts in
STOPPED only, and ``Go`` in READY only. When ``Go`` is lost neither computes: S has ended its answer
with all tokens of it, T ends in OVER, and who relays the answer resumes it by its tokens.
"""

from __future__ import annotations

from enum import Enum, auto

from vllm_ascend_pd.states import Transitions


class Leaving(Enum):
    """At S. The request is in the running queue in ``COPYING`` and ``STAYS``."""

    COPYING = auto()
    STOPPING = auto()
    """It is not scheduled any more, but steps with it are in flight."""
    STOPPED = auto()
    GONE = auto()
    STAYS = auto()


class LeavingEvent(Enum):
    FREEZE = auto()
    DRAINED = auto()
    READY = auto()
    STAY = auto()
    """T has released it or is late, or the request was preempted or has ended."""


_L, _LE = Leaving, LeavingEvent

LEAVING: Transitions[Leaving, LeavingEvent] = Transitions(
    {
        _L.COPYING: {
            _LE.FREEZE: _L.STOPPING,
            _LE.READY: _L.COPYING,
            _LE.STAY: _L.STAYS,
        },
        _L.STOPPING: {
            _LE.FREEZE: _L.STOPPING,
            _LE.DRAINED: _L.STOPPED,
            _LE.READY: _L.STOPPING,
            _LE.STAY: _L.STAYS,
        },
        _L.STOPPED: {
            _LE.FREEZE: _L.STOPPED,
            _LE.READY: _L.GONE,
            _LE.STAY: _L.STAYS,
        },
        _L.GONE: dict.fromkeys(LeavingEvent, _L.GONE),
        _L.STAYS: dict.fromkeys(LeavingEvent, _L.STAYS),
    }
)


class Coming(Enum):
    """At T. Nothing of it is scheduled before ``HERE``."""

    ASKED = auto()
    COPYING = auto()
    FREEZING = auto()
    FINISHING = auto()
    """S has stopped: what it said and has is all."""
    READY = auto()
    HERE = auto()
    OVER = auto()


class ComingEvent(Enum):
    EXTENDED = auto()
    LOAD_ENDED = auto()
    """Well or not; what is missing then is loaded in another round."""
    FREEZE = auto()
    FROZEN = auto()
    LOADED = auto()
    GO = auto()
    FAIL = auto()


_C, _CE = Coming, ComingEvent
_FAILS = {_CE.FAIL: _C.OVER}

COMING: Transitions[Coming, ComingEvent] = Transitions(
    {
        _C.ASKED: {_CE.EXTENDED: _C.COPYING, **_FAILS},
        _C.COPYING: {_CE.LOAD_ENDED: _C.ASKED, _CE.FREEZE: _C.FREEZING, **_FAILS},
        _C.FREEZING: {_CE.FROZEN: _C.FINISHING, **_FAILS},
        _C.FINISHING: {_CE.LOADED: _C.READY, _CE.FREEZE: _C.FREEZING, **_FAILS},
        _C.READY: {_CE.GO: _C.HERE, **_FAILS},
        _C.HERE: dict.fromkeys(ComingEvent, _C.HERE),
        _C.OVER: dict.fromkeys(ComingEvent, _C.OVER),
    }
)


class Forwarding(Enum):
    """At S. Its client gets what T computes in ``AWAY``, and what S computes in all others."""

    ASKED = auto()
    AWAY = auto()
    STAYS = auto()
    BACK = auto()
    """As it was, with all tokens that T has told: here it goes on as one that was preempted."""
    OVER = auto()


class ForwardingEvent(Enum):
    GO = auto()
    """S enters ``Leaving.GONE``."""
    FAIL = auto()
    """T has refused it, has lost it, or is not heard of."""
    END = auto()
    """By T's tokens, or by its client."""


_F, _FE = Forwarding, ForwardingEvent

FORWARDING: Transitions[Forwarding, ForwardingEvent] = Transitions(
    {
        _F.ASKED: {_FE.GO: _F.AWAY, _FE.FAIL: _F.STAYS, _FE.END: _F.OVER},
        _F.AWAY: {_FE.FAIL: _F.BACK, _FE.END: _F.OVER},
        _F.STAYS: dict.fromkeys(ForwardingEvent, _F.STAYS),
        _F.BACK: dict.fromkeys(ForwardingEvent, _F.BACK),
        _F.OVER: dict.fromkeys(ForwardingEvent, _F.OVER),
    }
)

# SPDX-License-Identifier: Apache-2.0
"""The table of a move: whatever order the target's and the source's news come in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from vllm_ascend_pd.router.move_states import ENDS, MOVE_TRANSITIONS, MoveEvent, MoveState

TARGET = [
    (),
    (MoveEvent.FAILED,),
    (MoveEvent.ASKED,),
    (MoveEvent.ASKED, MoveEvent.FAILED),
    (MoveEvent.ASKED, MoveEvent.BEGAN),
]
SOURCE = [
    (MoveEvent.SOURCE_ENDED,),
    (MoveEvent.SOURCE_BROKE,),
    (MoveEvent.SOURCE_BROKE, MoveEvent.SOURCE_ENDED),
]


def interleaved() -> Iterator[tuple[MoveEvent, ...]]:
    for target, source in itertools.product(TARGET, SOURCE):
        for at in itertools.combinations(range(len(target) + len(source)), len(target)):
            left = {True: iter(target), False: iter(source)}
            yield tuple(next(left[i in at]) for i in range(len(target) + len(source)))


def end_of(events: tuple[MoveEvent, ...]) -> MoveState:
    state = MoveState.PLANNED
    for event in events:
        state = MOVE_TRANSITIONS.after(state, event)
    return state


def test_it_has_moved_only_when_the_target_began_and_the_source_broke() -> None:
    seen = set()
    for events in interleaved():
        end = end_of(events)
        seen.add(end)
        came = {event: events.index(event) for event in events}
        first_end = came.get(MoveEvent.SOURCE_ENDED, len(events))
        both = {MoveEvent.BEGAN, MoveEvent.SOURCE_BROKE} <= set(events)
        if end is MoveState.MOVED:
            assert both
            assert max(came[MoveEvent.BEGAN], came[MoveEvent.SOURCE_BROKE]) < first_end
            assert came[MoveEvent.ASKED] < came[MoveEvent.SOURCE_BROKE]
        if end is MoveState.STAYED:
            assert came[MoveEvent.FAILED] < came.get(MoveEvent.SOURCE_BROKE, first_end)
    assert seen >= ENDS


def test_every_move_ends_once_the_answer_has() -> None:
    for events in interleaved():
        end = end_of(events)
        if MoveEvent.SOURCE_ENDED in events:
            assert end in ENDS
        if end in ENDS:
            assert all(MOVE_TRANSITIONS.after(end, event) is end for event in MoveEvent)


@pytest.mark.parametrize("state", [one for one in MoveState if one not in ENDS])
def test_the_client_s_answer_may_end_in_every_state(state: MoveState) -> None:
    assert MOVE_TRANSITIONS.after(state, MoveEvent.SOURCE_ENDED) is MoveState.NOT_NEEDED

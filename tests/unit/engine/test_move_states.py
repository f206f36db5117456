# SPDX-License-Identifier: Apache-2.0
"""The states of a move: whatever becomes of messages, one engine computes."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from vllm_ascend_pd.engine.scheduler.move_states import (
    COMING,
    FORWARDING,
    LEAVING,
    Coming,
    ComingEvent,
    Forwarding,
    ForwardingEvent,
    Leaving,
    LeavingEvent,
)

ASKS = {"freeze": LeavingEvent.FREEZE, "ready": LeavingEvent.READY}
ANSWERS = {"extended": ComingEvent.EXTENDED, "frozen": ComingEvent.FROZEN, "go": ComingEvent.GO}
COMPUTES_HERE = {Leaving.COPYING, Leaving.STAYS}


class World(NamedTuple):
    """Both engines, and all that was ever sent: a message may come late, twice or never."""

    leaving: Leaving
    coming: Coming
    sent: frozenset[str]


def _next(world: World) -> list[World]:
    """What may happen. Whoever looks at a table event is the code of ``moves_out`` and
    ``moves_in``: what an engine sends, and when.
    """
    found = []
    for name in world.sent & ASKS.keys():
        after = LEAVING.after(world.leaving, ASKS[name])
        has_gone = after is Leaving.GONE and world.leaving is not Leaving.GONE
        found.append(World(after, world.coming, world.sent | ({"go"} if has_gone else set())))
    found.append(world._replace(leaving=LEAVING.after(world.leaving, LeavingEvent.STAY)))
    if world.leaving is Leaving.STOPPING:
        after = LEAVING.after(world.leaving, LeavingEvent.DRAINED)
        found.append(World(after, world.coming, world.sent | {"frozen"}))
    for name in world.sent & ANSWERS.keys():
        event = ANSWERS[name]
        if event in COMING.table[world.coming]:  # others are refused: see MovesIn._extended
            found.append(world._replace(coming=COMING.after(world.coming, event)))
    found.append(world._replace(coming=COMING.after(world.coming, ComingEvent.FAIL)))
    decisions = {
        Coming.COPYING: [(ComingEvent.LOAD_ENDED, "extend"), (ComingEvent.FREEZE, "freeze")],
        Coming.FINISHING: [(ComingEvent.LOADED, "ready"), (ComingEvent.FREEZE, "freeze")],
    }
    for event, message in decisions.get(world.coming, []):
        after = COMING.after(world.coming, event)
        found.append(World(world.leaving, after, world.sent | {message}))
    return found


def test_never_do_both_compute() -> None:
    start = World(Leaving.COPYING, Coming.ASKED, frozenset({"extended"}))
    seen, todo = {start}, [start]
    while todo:
        for world in _next(todo.pop()):
            both = world.leaving in COMPUTES_HERE and world.coming is Coming.HERE
            assert not both, world
            if world not in seen:
                seen.add(world)
                todo.append(world)
    assert {world.leaving for world in seen} == set(Leaving)
    assert {world.coming for world in seen} == set(Coming)


@pytest.mark.parametrize("event", LeavingEvent)
def test_no_event_leads_back_from_where_the_word_was_given(event: LeavingEvent) -> None:
    assert LEAVING.after(Leaving.GONE, event) is Leaving.GONE


@pytest.mark.parametrize("state", [s for s in Coming if s not in (Coming.HERE, Coming.OVER)])
def test_it_may_fail_at_any_time_before_it_is_here(state: Coming) -> None:
    assert COMING.after(state, ComingEvent.FAIL) is Coming.OVER


def test_tables_name_every_state() -> None:
    assert set(LEAVING.table) == set(Leaving)
    assert set(COMING.table) == set(Coming)
    assert set(FORWARDING.table) == set(Forwarding)


@pytest.mark.parametrize("event", ForwardingEvent)
@pytest.mark.parametrize("state", [Forwarding.STAYS, Forwarding.BACK, Forwarding.OVER])
def test_forwarded_request_that_is_here_again_is_not_lent_by_what_comes_late(
    state: Forwarding, event: ForwardingEvent
) -> None:
    assert FORWARDING.after(state, event) is state

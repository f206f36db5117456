# SPDX-License-Identifier: Apache-2.0
"""Which request moves to even out engines: over all small deployments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from vllm_ascend_pd.router.rebalance import (
    FULL,
    MIN_GAP,
    Candidate,
    choose_pair,
    choose_request,
)

SHARES = (1 / 16, 1 / 8, 1 / 4, 7 / 16, 13 / 16)
"""Of an engine, by request."""
State = tuple[tuple[float, ...], ...]
"""The requests of each engine."""


def states() -> Iterator[State]:
    lists = [
        held for num in range(4) for held in itertools.combinations_with_replacement(SHARES, num)
    ]
    for num_engines in (1, 2):
        yield from itertools.product(lists, repeat=num_engines)
    yield from itertools.product(lists[::5], repeat=3)


def step(state: State) -> State | None:
    """After one move; ``None`` if nothing moves."""
    fullness = [sum(held) for held in state]
    pair = choose_pair(fullness)
    if pair is None:
        return None
    source, target = pair
    candidates = [Candidate(share) for share in state[source]]
    at = choose_request(fullness[source], fullness[target], candidates)
    if at is None:
        return None
    moved = state[source][at]
    after = [list(held) for held in state]
    after[source].pop(at)
    after[target].append(moved)
    return tuple(tuple(sorted(held)) for held in after)


def test_moves_come_to_an_end_and_each_makes_the_fuller_engine_emptier() -> None:
    for begun in states():
        state, num_moves = begun, 0
        while (after := step(state)) is not None:
            (given,) = [i for i in range(len(state)) if sum(after[i]) < sum(state[i])]
            (taken,) = [i for i in range(len(state)) if sum(after[i]) > sum(state[i])]
            assert sum(state[given]) == max(map(sum, state))
            assert max(sum(after[given]), sum(after[taken])) < sum(state[given])
            state, num_moves = after, num_moves + 1
            assert num_moves <= 12, begun


def test_engines_that_have_room_or_are_much_alike_keep_what_they_have() -> None:
    for state in states():
        fullness = [sum(held) for held in state]
        gap = max(fullness) - min(fullness)
        if max(fullness) <= FULL or gap <= MIN_GAP:
            assert step(state) is None


def test_the_shortest_request_moves() -> None:
    for state in states():
        after = step(state)
        if after is None:
            continue
        fullest = max(range(len(state)), key=lambda i: (sum(state[i]), -i))
        left = list(state[fullest])
        for share in after[fullest]:
            left.remove(share)
        assert left == [min(state[fullest])]


def test_nobody_is_asked_without_an_engine() -> None:
    assert choose_pair([]) is None
    assert choose_request(1.0, 0.0, []) is None


def test_the_least_important_request_moves_and_one_that_stands_still_before_all() -> None:
    high, low = Candidate(0.1, (0, 0)), Candidate(0.3, (0, -5))
    still = Candidate(0.4, (1, 0), is_stalled=True)
    tenants = Candidate(0.2, (1, -9))
    assert choose_request(1.0, 0.0, [high, low, tenants]) == 1
    assert choose_request(1.0, 0.0, [high, low, tenants, still]) == 3
    assert choose_request(1.0, 0.65, [high, low, still]) == 1  # there is no room for more
    assert choose_request(1.0, 0.75, [high, low, still]) == 0
    assert choose_request(1.0, 0.95, [high, low, still]) is None


def test_one_that_makes_room_for_what_waits_moves() -> None:
    """The shortest that does; or else the shortest of all, which is a beginning."""
    shares = [Candidate(share) for share in (0.3, 0.1, 0.2, 0.4)]
    assert choose_request(1.2, 0.0, shares, needed=0.15) == 2
    assert choose_request(1.2, 0.0, shares, needed=0.25) == 0
    assert choose_request(1.2, 0.0, shares, needed=0.5) == 1
    assert choose_request(1.2, 0.0, shares, needed=-0.2) == 1

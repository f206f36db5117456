# SPDX-License-Identifier: Apache-2.0
"""Which role the next engine gets, over all small states."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import product

import pytest

from vllm_ascend_pd.cluster.scaling.target import (
    Counts,
    Ratio,
    Target,
    next_role,
    next_stop,
    next_switch,
    split,
)
from vllm_ascend_pd.errors import ConfigError

RATIOS = [Ratio(p, d) for p, d in product((1, 2, 3, 7), repeat=2)]
SMALL = [Counts(p, d) for p, d in product(range(6), repeat=2)]


def distance(counts: Counts, ratio: Ratio) -> Fraction:
    return abs(Fraction(counts.prefill, counts.total) - Fraction(ratio.prefill, sum(ratio)))


def filled(have: Counts, num_starting: int, ratio: Ratio) -> Counts:
    """The roles of those on their way."""
    pending = Counts()
    for _ in range(num_starting):
        job = next_role(have, pending, ratio, maximum=100)
        assert job is not None
        pending = pending.with_one(job)
    return pending


@pytest.mark.parametrize("ratio", RATIOS, ids=str)
def test_a_split_is_the_nearest_with_one_of_each_role(ratio: Ratio) -> None:
    for num in range(2, 30):
        choices = [Counts(p, num - p) for p in range(1, num)]
        assert distance(split(num, ratio), ratio) == min(distance(c, ratio) for c in choices)
        more = split(num + 1, ratio)
        assert more in [split(num, ratio).with_one(job) for job in ("prefill", "decode")]


def states() -> Iterator[tuple[Counts, Counts, Ratio, int]]:
    yield from product(SMALL, SMALL[:20], RATIOS[:9], range(2, 9))


def test_engines_are_added_up_to_the_maximum_and_make_the_split_better() -> None:
    for have, pending, ratio, maximum in states():
        counted = have.plus(pending)
        job = next_role(have, pending, ratio, maximum)
        assert (job is None) == (counted.total >= maximum)
        if job is None:
            continue
        after = counted.with_one(job)
        if counted.total:  # a missing role comes first
            assert min(after) >= min(1, min(counted) + (1 if 0 in counted else 0))
        wanted = split(after.total, ratio)
        assert getattr(after, job) <= getattr(wanted, job) or counted == Counts()


def test_from_nothing_each_number_of_engines_has_its_split() -> None:
    for ratio in RATIOS:
        have = Counts()
        for num in range(1, 12):
            job = next_role(have, Counts(), ratio, maximum=11)
            assert job is not None
            have = have.with_one(job)
            assert have == split(num, ratio)
        assert next_role(have, Counts(), ratio, maximum=11) is None


def test_switches_end_at_the_split_and_never_take_the_last_of_a_role() -> None:
    for have, num_starting, ratio in product(SMALL, range(4), RATIOS):
        left = have
        for _ in range(20):
            starting = filled(left, num_starting, ratio)
            job = next_switch(left, starting, ratio)
            if job is None:
                break
            other = "decode" if job == "prefill" else "prefill"
            assert getattr(left, other) >= 2
            left = Counts(left.prefill + 1, left.decode - 1).plus(
                Counts() if job == "prefill" else Counts(-2, 2)
            )
        else:
            pytest.fail(f"{have} with {num_starting} starting at {ratio} switches for ever")
        if left.total >= 2:
            assert min(left) >= 1
            final = left.plus(filled(left, num_starting, ratio))
            only_one_does_it = 1 in left
            assert final == split(final.total, ratio) or only_one_does_it


def test_a_role_without_an_engine_gets_one_of_the_other_at_once() -> None:
    assert next_switch(Counts(0, 2), Counts(1, 0), Ratio(1, 2)) == "prefill"
    assert next_switch(Counts(2, 0), Counts(0, 2), Ratio(1, 2)) == "decode"
    # One alone does both.
    assert next_switch(Counts(1, 0), Counts(0, 1), Ratio(1, 2)) is None


def test_an_engine_that_is_coming_up_spares_a_switch() -> None:
    assert next_switch(Counts(3, 8), Counts(1, 0), Ratio(1, 2)) is None
    assert next_switch(Counts(3, 8), Counts(), Ratio(1, 2)) == "prefill"


def test_too_many_engines_go_until_the_split_of_the_maximum_is_left() -> None:
    for ratio, num, maximum in product(RATIOS, range(2, 12), range(2, 12)):
        have = split(num, ratio)
        while job := next_stop(have, ratio, maximum):
            have = have.plus(Counts(-1, 0) if job == "prefill" else Counts(0, -1))
            assert min(have) >= 1
        assert have == split(min(num, maximum), ratio)


@pytest.mark.parametrize("text", ["", "1", "0:1", "1:0", "1:2:3", "-1:2", "a:b", "1:2 "])
def test_a_wrong_ratio_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--pd-ratio: .* two positive numbers"):
        Ratio.parse(text)


def test_a_target_has_room_for_both_roles() -> None:
    assert Target(Ratio.parse("1:2"), 2).ratio == (1, 2)
    with pytest.raises(ConfigError, match="--max-instances: 1 "):
        Target(Ratio(1, 2), 1)

# SPDX-License-Identifier: Apache-2.0
"""Spans: which blocks of each group hold which tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.kv.span import NO_BLOCK, GroupBlocks, KVGroup, Span


def make_span(start: int, end: int, *block_sizes: int) -> Span:
    """With a block for every token, named by its first one: 100 * group + its index."""
    bare = Span(start, end, tuple(map(GroupBlocks, block_sizes)))
    return bare.holding([range(100 * i, 100 * i + 100) for i in range(len(block_sizes))])


def test_empty_span_has_no_blocks() -> None:
    span = make_span(32, 32, 16, 32)
    assert span.block_ids == ()
    assert [span.num_blocks(i) for i in (0, 1)] == [0, 0]
    assert span.unit_start == 32
    assert span.first_of({0, 100}) == 32
    assert span.block_ids_from(0) == set()


def test_span_that_ends_within_a_block_has_it_as_its_tail() -> None:
    span = make_span(0, 35, 16)
    assert (span.num_blocks(0), span.num_full(0), span.unit_start) == (3, 2, 32)
    assert span.block_ids == (0, 1, 2)


def test_last_block_of_a_span_is_its_tail_also_when_it_is_full() -> None:
    span = make_span(0, 32, 16)
    assert (span.num_blocks(0), span.num_full(0), span.unit_start) == (2, 2, 16)


def test_groups_of_different_block_sizes_have_a_tail_behind_the_last_whole_unit() -> None:
    span = make_span(64, 120, 16, 32)
    assert [span.num_blocks(i) for i in (0, 1)] == [4, 2]
    assert (span.unit_size, span.unit_start) == (32, 96)
    assert span.block_ids == (0, 1, 2, 3, 100, 101)


def test_block_is_found_by_its_first_token_in_every_group() -> None:
    span = make_span(64, 120, 16, 32)
    assert span.first_of({3}) == 112
    assert span.first_of({101}) == 96
    assert span.first_of({3, 101}) == 96
    assert span.first_of({7}) == 120


def test_blocks_from_a_token_on_are_those_that_hold_it_or_what_follows() -> None:
    span = make_span(64, 120, 16, 32)
    assert span.block_ids_from(112) == {3, 101}
    assert span.block_ids_from(80) == {1, 2, 3, 100, 101}
    assert span.block_ids_from(0) == set(span.block_ids)


@pytest.mark.parametrize(
    ("block_ids", "first"), [((), 0), ((4, 5), 0), ((NO_BLOCK, NO_BLOCK, 5), 2), ((NO_BLOCK,), 1)]
)
def test_first_block_that_is_left_comes_behind_those_that_were_given_up(
    block_ids: tuple[int, ...], first: int
) -> None:
    assert GroupBlocks(16, block_ids).first == first


@pytest.mark.parametrize(("start", "sizes"), [(8, (16,)), (16, (16, 32))])
def test_span_must_begin_with_a_block_in_every_group(start: int, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"token {start} is within one of the {sizes[-1]} tokens"):
        make_span(start, 64, *sizes)


@pytest.mark.parametrize(("start", "end"), [(-16, 0), (32, 16)])
def test_span_must_go_forward(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="not a span of tokens"):
        make_span(start, end, 16)


@pytest.mark.parametrize(
    "blocks", [GroupBlocks(16, (1, 2, 3)), GroupBlocks(16, (1, 2), (b"a", b"b"))]
)
def test_span_must_not_have_more_blocks_than_tokens_for_them(blocks: GroupBlocks) -> None:
    with pytest.raises(ValueError, match="group 0 has"):
        Span(0, 20, (blocks,))


@given(
    st.integers(0, 8), st.integers(0, 200), st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1)
)
def test_tail_begins_before_the_end_and_ends_with_it(
    first: int, num_tokens: int, sizes: list[int]
) -> None:
    start = first * 64
    span = make_span(start, start + num_tokens, *sizes)
    for i, size in enumerate(sizes):
        each = span.unit_size // size
        group = KVGroup(i, size, 1, ("layer",), blocks_per_unit=each)
        length = span.end - span.unit_start
        assert length == 0 if not num_tokens else 0 < length <= group.unit_size == span.unit_size
        if not start and num_tokens:
            num_units = span.unit_start // span.unit_size
            assert group.unit_of(group.tail_index(span.end)) == num_units


class Counted(int):
    """Counts how often two different ones are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.num_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_long_span_is_searched_once_however_many_of_its_blocks_are_bad() -> None:
    block_ids = tuple(map(Counted, range(500)))
    span = Span(0, 500 * 16, (GroupBlocks(16, block_ids),))
    Counted.num_compared = 0
    assert span.first_of(set(block_ids[3:])) == 3 * 16
    assert Counted.num_compared <= len(block_ids)

# SPDX-License-Identifier: Apache-2.0
"""Which requests and blocks a failed load takes with it."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_pd.engine.scheduler import recovery
from vllm_ascend_pd.kv.span import NO_BLOCK, GroupBlocks, Span


def find_affected(tables: Mapping[str, list[int]], bad: set[int]) -> tuple[set[str], set[int]]:
    """Of requests with one group of blocks."""
    spans = {
        request_id: Span(0, 16 * len(table), (GroupBlocks(16, tuple(table)),))
        for request_id, table in tables.items()
    }
    return recovery.find_affected(spans, bad)


def test_blocks_after_a_bad_one_are_bad() -> None:
    assert find_affected({"a": [1, 2, 3, 4]}, {2}) == ({"a"}, {2, 3, 4})


def test_request_without_a_bad_block_is_left_alone() -> None:
    assert find_affected({"a": [1, 2], "b": [3, 4]}, {2}) == ({"a"}, {2})


def test_request_that_shares_only_good_blocks_is_left_alone() -> None:
    assert find_affected({"a": [1, 2, 3], "b": [1, 9]}, {2}) == ({"a"}, {2, 3})


def test_block_that_became_bad_affects_requests_seen_before() -> None:
    tables = {"a": [3, 4], "b": [2, 3], "c": [1, 2]}
    assert find_affected(tables, {1}) == ({"a", "b", "c"}, {1, 2, 3, 4})


def test_bad_block_that_nobody_uses_stays_bad() -> None:
    assert find_affected({}, {7}) == (set(), {7})
    assert find_affected({"a": []}, {7}) == (set(), {7})


def test_what_is_left_ends_at_a_boundary_of_every_group() -> None:
    """Blocks 1 to 4 have 16 tokens each, 5 and 6 have 32."""
    span = Span(0, 64, (GroupBlocks(16, (1, 2, 3, 4)), GroupBlocks(32, (5, 6))))
    assert recovery.find_affected({"a": span}, {4}) == ({"a"}, {3, 4, 6})
    assert recovery.find_affected({"a": span}, {6}) == ({"a"}, {3, 4, 6})
    assert recovery.find_affected({"a": span}, {7}) == (set(), {7})


def test_what_a_window_has_given_up_is_no_block_in_common() -> None:
    windows = {"a": (NO_BLOCK, NO_BLOCK, 5, 6), "b": (NO_BLOCK, 7, 8, 9)}
    spans = {
        name: Span(0, 64, (GroupBlocks(16, tuple(range(10 * i, 10 * i + 4))), GroupBlocks(16, ids)))
        for i, (name, ids) in enumerate(windows.items(), 2)
    }
    assert recovery.find_affected(spans, {5}) == ({"a"}, {5, 6, 22, 23})
    assert recovery.find_affected(spans, {31}) == ({"b"}, {7, 8, 9, 31, 32, 33})


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=2), st.lists(st.integers(1, 20), max_size=6, unique=True), max_size=6
    ),
    st.sets(st.integers(1, 20), max_size=3),
)
def test_result_is_a_fixed_point(tables: dict[str, list[int]], bad: set[int]) -> None:
    affected, all_bad = find_affected(tables, bad)
    assert find_affected(tables, all_bad) == (affected, all_bad)
    assert bad <= all_bad
    for request_id, table in tables.items():
        assert (request_id in affected) == bool(all_bad.intersection(table))

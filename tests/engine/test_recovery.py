# SPDX-License-Identifier: Apache-2.0
"""Which requests and blocks a failed load takes with it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.engine.peer_world import make_request
from tests.engine.scripted_source import ScriptedSource
from vllm_ascend_pd.engine.scheduler import recovery
from vllm_ascend_pd.engine.scheduler.loads import Loads
from vllm_ascend_pd.engine.scheduler.phantom import Phantom
from vllm_ascend_pd.kv.span import NO_BLOCK, GroupBlocks, Span, Wanted


def find_affected(tables: Mapping[str, list[int]], bad: set[int]) -> tuple[set[str], set[int]]:
    """Of requests with one group of blocks."""
    spans = {
        request_id: Span(0, 16 * len(table), (GroupBlocks(16, tuple(table)),))
        for request_id, table in tables.items()
    }
    return recovery.find_affected(spans, bad, dict.fromkeys(spans, 0))


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
    assert recovery.find_affected({"a": span}, {4}, {"a": 0}) == ({"a"}, {3, 4, 6})
    assert recovery.find_affected({"a": span}, {6}, {"a": 0}) == ({"a"}, {3, 4, 6})
    assert recovery.find_affected({"a": span}, {7}, {"a": 0}) == (set(), {7})


def test_what_a_window_has_given_up_is_no_block_in_common() -> None:
    windows = {"a": (NO_BLOCK, NO_BLOCK, 5, 6), "b": (NO_BLOCK, 7, 8, 9)}
    spans = {
        name: Span(0, 64, (GroupBlocks(16, tuple(range(10 * i, 10 * i + 4))), GroupBlocks(16, ids)))
        for i, (name, ids) in enumerate(windows.items(), 2)
    }
    begins = dict.fromkeys(spans, 0)
    assert recovery.find_affected(spans, {5}, begins) == ({"a"}, {5, 6, 22, 23})
    assert recovery.find_affected(spans, {31}, begins) == ({"b"}, {7, 8, 9, 31, 32, 33})


def test_what_was_cached_behind_a_bad_block_of_another_group_is_good() -> None:
    """Both have the cached blocks 20 to 22; of the window "a" has loaded 5, and computes from token
    48 on.
    """
    a = Span(
        0, 64, (GroupBlocks(16, (20, 21, 22, 23)), GroupBlocks(16, (NO_BLOCK, NO_BLOCK, 5, 6)))
    )
    b = Span(
        0, 64, (GroupBlocks(16, (20, 21, 22, 33)), GroupBlocks(16, (NO_BLOCK, NO_BLOCK, 7, 8)))
    )
    affected = recovery.find_affected({"a": a, "b": b}, {5}, {"a": 48, "b": 48})
    assert affected == ({"a"}, {5, 6, 23})


def test_of_a_load_that_fails_in_part_only_who_computed_on_that_is_affected() -> None:
    """Blocks 1 and 2 are loaded; "a" computes 3 on both, "b" 4 on the first, "c" 5 on 3, which
    it has of "a", and "d" 6 on what was cached.
    """
    blocks: dict[int, Any] = {
        i: SimpleNamespace(block_id=i, block_hash=str(i), is_null=False) for i in range(1, 8)
    }
    tables = {make_request([0], {}): ids for ids in ([1, 2, 3], [1, 4], [7, 3, 5], [7, 6])}
    a, b, c, d = requests = list[Any](tables)
    source = ScriptedSource(a, 2)
    loads = Loads()
    for request, begin in zip(requests, (2, 1, 2, 1), strict=True):
        loads.note_begin(request, begin)
    phantoms = [Phantom(blocks[i], blocks[i].block_hash, source, Wanted(i - 1)) for i in (1, 2)]
    loads.claim(a, source, phantoms)
    for request, shared in ((b, [1]), (c, [3]), (d, [7])):
        loads.note_user(request, [blocks[i] for i in shared])
        loads.note_computed(lambda request: [[blocks[i] for i in tables[request]]])
    loads.note_user(c, [blocks[3]])
    loads.note_computed(lambda request: [[blocks[i] for i in tables[request]]])
    [record] = loads.new
    assert record.bad_block_ids([2]) == record.spoiled_block_ids([2]) == {2, 3, 5}
    assert record.spoiled_users([2]) == [a, c]
    assert record.bad_block_ids([1]) == {1, 3, 4, 5}
    assert record.spoiled_users([1]) == [a, b, c]
    assert record.spoiled_users([]) == [a, b, c]


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

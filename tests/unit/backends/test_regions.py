# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.backends.regions import RegionTable

ranges = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12)), max_size=12)


@given(ranges=ranges, probe=st.tuples(st.integers(0, 80), st.integers(1, 12)))
def test_the_table_agrees_with_a_set_of_bytes(ranges, probe):
    table = RegionTable()
    held: list[set[int]] = []
    for start, size in ranges:
        new = set(range(start, start + size))
        if any(new & old for old in held):
            with pytest.raises(ValueError, match="overlap"):
                table.add(start, size)
        else:
            table.add(start, size)
            held.append(new)
    assert len(table) == len(held)
    asked = set(range(probe[0], probe[0] + probe[1]))
    assert table.contains(*probe) == any(asked <= old for old in held)


def test_clear_returns_the_starts():
    table = RegionTable()
    table.add(30, 5)
    table.add(10, 5)
    assert table.clear() == [10, 30]
    assert len(table) == 0
    table.add(12, 5)
    assert table.contains(12, 5)

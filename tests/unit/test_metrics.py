# SPDX-License-Identifier: Apache-2.0
"""Counting in the scheduler."""

from __future__ import annotations

from vllm_ascend_pd.metrics import (
    COUNTERS,
    GAUGES,
    MAX_LABEL_VALUES,
    OpenLabel,
    Provenance,
    Stats,
    split_key,
)


def test_take_returns_increments_and_starts_again() -> None:
    stats = Stats()
    stats.add("leases_granted")
    stats.add("loads", label="ok")
    stats.add("loads", label="ok")
    stats.add("loads", label="checksum")
    stats.add("load_ms", 1.5)
    assert stats.take() == {
        "leases_granted": 1,
        "loads/ok": 2,
        "loads/checksum": 1,
        "load_ms": 1.5,
    }
    assert stats.take() == {}


def test_taken_values_do_not_change_later() -> None:
    stats = Stats()
    stats.add("loads", label="ok")
    taken = stats.take()
    stats.add("loads", label="ok")
    assert taken == {"loads/ok": 1}


def test_gauges_keep_the_last_value_and_all_labels() -> None:
    stats = Stats()
    stats.set("pool_pinned_blocks", 1)
    stats.set("pool_pinned_blocks", 0)
    stats.set("engine_info", 1, "id", "", "a/b")
    taken = stats.take()
    assert taken["pool_pinned_blocks"] == 0
    assert [split_key(key) for key in taken] == [
        ("pool_pinned_blocks", []),
        ("engine_info", ["id", "", "a/b"]),
    ]


def test_metric_names_hold_no_separator() -> None:
    assert all("/" not in name for name in (*COUNTERS, *GAUGES))
    assert COUNTERS.keys().isdisjoint(GAUGES)
    assert all(text for text, _ in COUNTERS.values())


def test_provenance_starts_empty() -> None:
    provenance = Provenance(100)
    assert provenance.num_prompt_tokens == 100
    assert provenance.num_local_tokens + provenance.num_peer_tokens == 0
    assert provenance.outcome == ""


def test_label_that_requests_choose_has_so_many_values_and_no_more() -> None:
    label = OpenLabel()
    first = [f"10.0.0.1:{port}" for port in range(MAX_LABEL_VALUES)]
    assert [label.of(peer) for peer in (*first, *first)] == [*first, *first]
    assert label.of("10.0.0.2:1") == "others"

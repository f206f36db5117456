# SPDX-License-Identifier: Apache-2.0
"""Sums over the last seconds."""

from __future__ import annotations

from vllm_ascend_pd.router.metrics import Recent


def test_only_the_last_seconds_count() -> None:
    now = 100.0
    recent = Recent(10.0, lambda: now)
    assert recent.sums() == (0, 0.0)
    for value in (1.0, 2.0):
        recent.add(value)
        now += 0.4
    assert recent.sums() == (2, 3.0)
    now = 109.0
    recent.add(5.0)
    assert recent.sums() == (3, 8.0)
    now = 111.0
    assert recent.sums() == (1, 5.0)
    now = 1000.0
    assert recent.sums() == (0, 0.0)

# SPDX-License-Identifier: Apache-2.0
"""Scripted faults of a tier."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from vllm_ascend_pd.errors import BackendError, ConfigError
from vllm_ascend_pd.pool.fake_tier import FaultyTier, TierScript
from vllm_ascend_pd.pool.memory_tier import MemoryTier
from vllm_ascend_pd.pool.tier import Status, Value
from vllm_ascend_pd.types import Place

BUFFER = ctypes.create_string_buffer(64)


def value(key: str = "k") -> Value:
    return Value(key, ctypes.addressof(BUFFER), 64)


def faulty(script: str) -> FaultyTier:
    inner = MemoryTier(1 << 20)
    BUFFER.raw = bytes(range(64))
    inner.put([value()])
    return FaultyTier(inner, TierScript(script))


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        ("ok", Status.OK),
        ("fail", Status.FAILED),
        ("missing", Status.MISSING),
        ("short", Status.DAMAGED),
    ],
)
def test_scripted_get(fault: str, status: Status) -> None:
    tier = faulty(f"get:{fault}")
    assert tier.get([value()]) == [status]
    assert tier.get([value()]) == [Status.OK]


def test_scripted_calls_that_raise() -> None:
    tier = faulty("put:raise;get:raise;lookup:raise")
    calls: list[Callable[[], object]] = [
        lambda: tier.put([value()]),
        lambda: tier.get([value()]),
        lambda: tier.lookup(["k"]),
    ]
    for call in calls:
        with pytest.raises(BackendError, match="scripted"):
            call()
        call()


def test_corrupt_get_has_one_wrong_bit() -> None:
    tier = faulty("get:corrupt")
    assert tier.get([value()]) == [Status.OK]
    wrong = [i for i in range(64) if BUFFER.raw[i] != i]
    assert wrong == [32]


def test_scripted_put_and_lookup() -> None:
    tier = faulty("put:full,fail;lookup:missing")
    assert tier.put([value("a"), value("b"), value("c")]) == [
        Status.FULL,
        Status.FAILED,
        Status.OK,
    ]
    assert tier.lookup(["k", "k"]) == [Place.NOWHERE, Place.DRAM]


def test_star_repeats() -> None:
    tier = faulty("get:ok*2,fail*")
    statuses = [tier.get([value()])[0] for _ in range(4)]
    assert statuses == [Status.OK, Status.OK, Status.FAILED, Status.FAILED]


@pytest.mark.parametrize("script", ["got:ok", "get:broken", "ok"])
def test_wrong_script_is_refused(script: str) -> None:
    with pytest.raises(ConfigError, match="tier script"):
        TierScript(script)


def test_full_memory_evicts_the_oldest() -> None:
    tier = MemoryTier(128)
    assert tier.put([value("a"), value("b"), value("c")]) == [Status.OK] * 3
    assert tier.lookup(["a", "b", "c"]) == [Place.NOWHERE, Place.DRAM, Place.DRAM]

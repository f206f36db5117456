# SPDX-License-Identifier: Apache-2.0
"""What becomes of an instance when what is known of it changes."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.registration import KVEndpoint
from vllm_ascend_pd.router.instances import EngineLoad, HitRate, Registry

KV = KVEndpoint(engine_id="e", host="h", port=1)


def test_where_its_kv_is_goes_with_the_spec_that_says_so_and_stays_where_an_answer_said_so() -> (
    None
):
    one = instance("one")
    registry = Registry(lambda spec: one)
    registry.put(one.spec)
    one.kv = KV  # as an answer said
    registry.put(msgspec.structs.replace(one.spec, state="draining"))
    assert one.kv == KV
    told = msgspec.structs.replace(KV, port=2)
    registry.put(msgspec.structs.replace(one.spec, kv=told))
    assert one.kv == told
    registry.put(msgspec.structs.replace(one.spec, kv=None))
    assert one.kv is None


def test_hit_rate_is_that_of_the_last_minute() -> None:
    rate = HitRate()
    assert rate.value is None
    hits = 8000.0
    for second in range(0, 200, 2):
        # After 100 s nothing is found any more, of 100 tokens a second.
        hits += 160 if 0 < second <= 100 else 0
        rate.note(EngineLoad(prefix_queries=1e4 + 100 * second, prefix_hits=hits, read_at=second))
        if second == 100:
            assert rate.value == pytest.approx(0.8)
    assert rate.value == 0
    rate.note(EngineLoad(read_at=200))  # the engine has started again
    assert rate.value is None

# SPDX-License-Identifier: Apache-2.0
"""What becomes of an instance when what is known of it changes."""

from __future__ import annotations

import msgspec

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.registration import KVEndpoint
from vllm_ascend_pd.router.instances import Registry

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

# SPDX-License-Identifier: Apache-2.0
"""With ``--scheduling-policy priority`` who comes first takes the memory of others."""

from __future__ import annotations

from tests.schedulers.harness import Engines, prompt_of


def test_what_a_step_does_not_compute_after_all_is_found_by_nobody(engines: Engines) -> None:
    """The step would have filled a block and begun the next one."""
    engine = engines.make(
        "kv_both",
        num_blocks=5,  # of which vLLM keeps one
        scheduler_fields={
            "policy": "priority",
            "max_num_batched_tokens": 18,
            "long_prefill_token_threshold": 6,
        },
    )
    low = engine.add("low", prompt_of(40, 1000), max_tokens=3)
    low.priority = 1
    engine.run(lambda: low.num_computed_tokens == 18)
    engine.add("high", prompt_of(24, 300), max_tokens=3)
    engine.run(lambda: low.num_preemptions > 0)
    assert engine.cached_block(low, 0) is not None
    assert engine.cached_block(low, 1) is None
    engine.run_to_end()
    engine.expect_tokens("low", 3)
    engine.expect_tokens("high", 3)

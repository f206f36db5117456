# SPDX-License-Identifier: Apache-2.0
"""What a request fills is stored, whichever steps it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedulers.harness import BLOCK_SIZE, WINDOW, Engines, expect_all_tokens, prompt_of
from tests.schedulers.test_random_schedulers import SimulatedPool
from vllm_ascend_pd.types import Cause


@pytest.mark.parametrize("specs", [(), (WINDOW,)], ids=["full", "windows"])
@pytest.mark.parametrize("num_left_out", [0, 1, 3])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_all_full_blocks_are_stored(
    engines: Engines, length: int, num_left_out: int, specs: tuple[Any, ...]
) -> None:
    """Also the last one, and those that are filled before steps that leave the request out."""
    engine = engines.make("kv_producer", specs=specs, pool={"load": "all"})
    values: dict[tuple[int, bytes], list[int]] = {}
    draw: Any = SimpleNamespace(random=lambda: 0.5)
    pool = SimulatedPool(engine, values, draw)
    try:
        # The last token is sampled behind a full block.
        request = engine.add("r", prompt_of(length), max_tokens=3 * BLOCK_SIZE + 1 - length)
        known = 0
        while engine.scheduler.has_requests():
            if request.num_tokens > known:
                known = request.num_tokens
                step = engine.scheduler.current_step + 1
                request.next_decode_eligible_step = step + num_left_out
            engine.step()
        while engine.in_flight:
            engine.finish_step()
        pool.finish()
        assert len(request.block_hashes) == 3
        assert [(0, bytes(one)) in values for one in request.block_hashes] == [True] * 3
    finally:
        pool.close()


def test_request_without_its_transfer_says_what_the_pool_brought(engines: Engines) -> None:
    engine = engines.make("kv_producer", pool={"load": "all", "lookup_timeout_ms": 5000})
    draw: Any = SimpleNamespace(random=lambda: 0.5)
    pool = SimulatedPool(engine, {}, draw)
    try:
        engine.add("r", prompt_of(3 * BLOCK_SIZE + 1))
        engine.run_to_end()
        pool.finish()
        assert engine.scheduler.reset_prefix_cache()
        asks = {"do_remote_prefill": True, "return_provenance": True}
        engine.add("s", prompt_of(3 * BLOCK_SIZE + 1), asks)
        engine.run_to_end()
        provenance = (engine.params["s"] or {})["provenance"]
        assert provenance["outcome"] == Cause.WRONG_ROLE.value
        assert provenance["num_dram_tokens"] == 3 * BLOCK_SIZE
        expect_all_tokens(provenance)
    finally:
        pool.close()

# SPDX-License-Identifier: Apache-2.0
"""What a request fills is stored, whichever steps it is in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.schedulers.harness import BLOCK_SIZE, Engines, prompt_of
from tests.schedulers.test_random_schedulers import SimulatedPool


@pytest.mark.parametrize("num_left_out", [0, 1, 3])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_all_full_blocks_are_stored(engines: Engines, length: int, num_left_out: int) -> None:
    """Also the last one, and those that are filled before steps that leave the request out."""
    engine = engines.make("kv_producer", pool={"load": "all"})
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

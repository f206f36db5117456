# SPDX-License-Identifier: Apache-2.0
"""KV cache groups whose blocks have different numbers of tokens, as of Gemma 4 and DeepSeek V4, or
whose blocks have several hashes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.integration.stress.rounds import OPERATIONS
from tests.schedulers.harness import SPEC, WINDOW, Engines
from tests.schedulers.test_random_schedulers import NUM_ROUNDS, POOL, Rounds, store_and_load


def full(block_size: int) -> Any:
    """With pages as large as all others'."""
    head = 128 // block_size
    return replace(SPEC, block_size=block_size, head_size=head, head_size_v=head)


def window(block_size: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    head = 128 // block_size * SPEC.dtype.itemsize // dtype.itemsize
    return replace(
        WINDOW,
        block_size=block_size,
        sliding_window=num_tokens,
        head_size=head,
        head_size_v=head,
        dtype=dtype,
    )


SIZES = {
    "larger windows": (full(8), window(16, 20)),
    "smaller windows": (full(16), window(4, 10)),
    "windows first": (window(4, 6), full(16), window(8, 40)),
    "two of all": (full(16), full(8), window(16, 17)),
    # With types of its own, too: vLLM clears blocks that it gives away.
    "like DeepSeek V4": (full(32), window(8, 16, torch.float16), window(2, 4), window(4, 16)),
}
ROOM = (160, 200, 300)


@pytest.mark.parametrize("specs", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(engines: Engines, seed: int, specs: tuple[Any, ...]) -> None:
    rounds = Rounds(engines, seed, ROOM, specs)
    for _ in range(NUM_ROUNDS):
        rounds.run()


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_with_several_hashes_a_block(engines: Engines, seed: int) -> None:
    """As ``--prefix-match-unit`` makes them."""
    rounds = Rounds(engines, seed, ROOM, (SPEC, window(16, 20)), hash_block_size=4)
    for _ in range(NUM_ROUNDS):
        rounds.run({**OPERATIONS, "alone": 20, "move": 20})


@pytest.mark.parametrize("specs", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_with_moves(engines: Engines, seed: int, specs: tuple[Any, ...]) -> None:
    rounds = Rounds(engines, seed, ROOM, specs)
    for num_rounds in range(1, 10 * NUM_ROUNDS):
        rounds.run({**OPERATIONS, "alone": 20, "move": 20})
        if num_rounds >= NUM_ROUNDS and rounds.num_moved:
            return
    pytest.fail("nothing has moved")


@pytest.mark.parametrize("specs", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_with_drafts(engines: Engines, seed: int, specs: tuple[Any, ...]) -> None:
    rounds = Rounds(engines, seed, ROOM, specs, num_drafts=1 + seed)
    for _ in range(NUM_ROUNDS):
        rounds.run({**OPERATIONS, "alone": 20, "move": 20})
    assert rounds.num_accepted


@pytest.mark.parametrize("save", ["write_through", "eviction"])
@pytest.mark.parametrize("specs", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("seed", range(2))
def test_random_operations_with_a_pool(
    engines: Engines, seed: int, specs: tuple[Any, ...], save: str
) -> None:
    blocks_per_16 = sum(16 / spec.block_size for spec in specs)
    # Little, so that there is something to evict.
    room = tuple(int(min(20 * blocks_per_16, 160) * more) for more in (1.0, 1.2, 1.6))
    store_and_load(Rounds(engines, seed, room, specs, {**POOL, "save": save}, num_drafts=seed))


@pytest.mark.parametrize("save", ["write_through", "eviction"])
def test_random_operations_with_a_pool_and_several_hashes_a_block(
    engines: Engines, save: str
) -> None:
    specs, pool = (SPEC, window(16, 20)), {**POOL, "save": save}
    store_and_load(Rounds(engines, 0, (40, 48, 64), specs, pool, hash_block_size=4))

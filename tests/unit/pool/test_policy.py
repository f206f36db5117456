# SPDX-License-Identifier: Apache-2.0
"""Load or recompute."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_pd.pool.policy import Speeds, num_blocks_to_use
from vllm_ascend_pd.pool.tier import Place

BLOCK_BYTES, BLOCK_SIZE = 1000, 32
DRAM, SSD = Place.DRAM, Place.SSD


def speeds(dram: float, ssd: float, tokens_per_ms: float | None) -> Speeds:
    """``dram`` and ``ssd`` are blocks per millisecond."""
    by_place = {DRAM: dram * BLOCK_BYTES, SSD: ssd * BLOCK_BYTES, Place.REMOTE: 1.0}
    return Speeds(by_place, tokens_per_ms)


def use(places: list[Place | None], at: Speeds) -> int:
    return num_blocks_to_use(places, at, BLOCK_BYTES, BLOCK_SIZE)


def test_all_is_loaded_before_prefill_has_been_measured() -> None:
    assert use([DRAM, SSD], speeds(1, 1, None)) == 2


def test_what_is_faster_to_load_is_loaded() -> None:
    assert use([DRAM] * 5, speeds(10, 1, 32)) == 5


def test_what_is_slower_to_load_is_computed() -> None:
    assert use([SSD] * 5, speeds(10, 0.5, 32)) == 0


def test_a_slow_tail_is_computed_and_a_fast_front_loaded() -> None:
    assert use([DRAM, DRAM, SSD, SSD], speeds(10, 0.5, 32)) == 2


def test_a_slow_block_is_loaded_for_what_it_makes_usable() -> None:
    assert use([SSD, None, None, DRAM], speeds(10, 0.5, 32)) == 4


def test_small_steps_say_nothing_about_prefill() -> None:
    at = Speeds()
    at.note_step(1, 10.0)
    assert at.tokens_per_ms is None
    at.note_step(256, 100.0)
    assert at.tokens_per_ms == 2.56


def test_measured_bandwidth_moves_the_mean() -> None:
    at = speeds(1, 1, None)
    for _ in range(50):
        at.note_load(DRAM, 500_000, 1.0)
    assert abs(at.bytes_per_ms[DRAM] - 500_000) < 1000


@given(
    st.lists(st.sampled_from([None, DRAM, SSD, Place.REMOTE]), max_size=12),
    st.floats(0.1, 10),
    st.floats(0.1, 10),
)
def test_no_other_cut_is_faster(places: list[Place | None], dram: float, ssd: float) -> None:
    at = speeds(dram, ssd, 32.0)

    def total_ms(cut: int) -> float:
        load = at.load_ms([place for place in places[:cut] if place], BLOCK_BYTES)
        return load + (len(places) - cut) * BLOCK_SIZE / 32.0

    chosen = use(places, at)
    assert total_ms(chosen) <= min(total_ms(cut) for cut in range(len(places) + 1)) + 1e-6

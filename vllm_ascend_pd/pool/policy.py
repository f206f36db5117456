# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: how many of the blocks that the pool has are worth loading. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_ascend_pd.pool.tier import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMOOTHING = 0.3
# Before anything has been measured: what a slow network and a slow disk give.
_FIRST_BYTES_PER_MS = {
    Place.DRAM: 2_000_000.0,
    Place.REMOTE: 300_000.0,
    Place.SSD: 500_000.0,
}
_MIN_TOKENS = 32
_RELAXATION = 0.1


@dataclass(slots=True)
class Speeds:
    """Running means of what was measured on this engine."""

    bytes_per_ms: dict[Place, float] = field(default_factory=lambda: dict(_FIRST_BYTES_PER_MS))
    tokens_per_ms: float | None = None
    """Of prefill; ``None`` until a step has computed enough tokens."""

    def note_load(self, place: Place, num_bytes: int, elapsed_ms: float) -> None:
        """A read of one place only has ended."""
        if num_bytes and elapsed_ms > 0 and place in self.bytes_per_ms:
            mean = self.bytes_per_ms[place]
            self.bytes_per_ms[place] = mean + _SMOOTHING * (num_bytes / elapsed_ms - mean)

    def note_step(self, num_tokens: int, elapsed_ms: float) -> None:
        """A step has computed so many tokens; small ones say nothing about prefill."""
        if num_tokens < _MIN_TOKENS or elapsed_ms <= 0:
            return
        measured = num_tokens / elapsed_ms
        if self.tokens_per_ms is None:
            self.tokens_per_ms = measured
        else:
            self.tokens_per_ms += _SMOOTHING * (measured - self.tokens_per_ms)

    def relax(self) -> None:
        """Something was not loaded because that seemed slow: believe it a little less each time, so
        that a bad moment is not remembered for ever.
        """
        for place, first in _FIRST_BYTES_PER_MS.items():
            self.bytes_per_ms[place] += _RELAXATION * (first - self.bytes_per_ms[place])

    def load_ms(self, places: Sequence[Place], bytes_per_block: int) -> float:
        return sum(bytes_per_block / self.bytes_per_ms[place] for place in places if place)


def num_blocks_to_use(
    places: Sequence[Place | None], speeds: Speeds, bytes_per_block: int, block_size: int
) -> int:
    """How many leading blocks to use so that the prompt is ready soonest.

    ``places[i]`` is where block ``i`` lies, ``None`` when it is in the prefix cache already. Blocks
    can only be used from the front, so this is the cut ``k`` with the least
    ``load time of missing blocks before k + compute time of all blocks from k on``.
    """
    if speeds.tokens_per_ms is None:
        return len(places)
    compute_ms = block_size / speeds.tokens_per_ms
    best, best_ms, ms = 0, 0.0, 0.0
    for index, place in enumerate(places):
        ms -= compute_ms
        if place is not None:
            ms += bytes_per_block / speeds.bytes_per_ms[place]
        if ms <= best_ms:
            best, best_ms = index + 1, ms
    return best

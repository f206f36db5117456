# SPDX-License-Identifier: Apache-2.0
"""How far a step has come, whatever the order in which its layers run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.groups import place_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class SavedLayers:
    """Counts the layers that are computed: those before the first that is not. Main thread.

    Names need not be in the order in which layers run: Zamba2 numbers them by shared block.

        saved    model.attn.   0   3   1   4   2   5
        computed               1   1   2   2   5   6
    """

    def __init__(self, layers: Mapping[str, range], hooked: Collection[str]) -> None:
        """Each step saves those that are ``hooked``. Any other counts once a later one of those
        that begin alike is saved.
        """
        num_layers = max(indexes.stop for indexes in layers.values())
        beginnings: dict[str, int] = {}
        owners: dict[int, int] = {}
        self._places: dict[str, tuple[int, int]] = {}  # the first index, and the beginning's number
        self._stops = [0] * num_layers  # by first index
        self._waits_for = [0] * (num_layers + 1)
        for name, indexes in layers.items():
            first, beginning = indexes.start, place_of(name)[0]
            # Of layers that share a cache, the first in the order writes it.
            number = owners.setdefault(first, beginnings.setdefault(beginning, len(beginnings)))
            self._places[name] = first, number
            self._stops[first] = indexes.stop
            self._waits_for[first] = number
        # What is hooked, and the end of all, is saved itself: no other layer stands for it.
        self._no_other = len(beginnings)
        for index in (*(layers[name].start for name in hooked), num_layers):
            self._waits_for[index] = self._no_other
        self.begin_step()

    def begin_step(self) -> None:
        self._is_saved = bytearray(len(self._waits_for))
        self._last = [-1] * (self._no_other + 1)  # that is saved, by beginning
        self._num_computed = 0

    def save(self, name: str) -> int:
        """How many are computed now; a layer may be saved again."""
        index, beginning = self._places[name]
        is_saved, last, count = self._is_saved, self._last, self._num_computed
        is_saved[index] = True
        if index > last[beginning]:
            last[beginning] = index
        while is_saved[count] or last[self._waits_for[count]] > count:
            count = self._stops[count]
        self._num_computed = count
        return count

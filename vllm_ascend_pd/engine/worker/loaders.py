# SPDX-License-Identifier: Apache-2.0
"""All loads of one worker: those from peers and those from the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.loader import Loader
    from vllm_ascend_pd.types import LoadId


class Loaders:
    """Main thread; a ``kv.loader.Loader`` for each kind of source, as far as that goes."""

    def __init__(self, by_spec: Mapping[type, Loader[Any, Any]]) -> None:
        """By what a step asks them with."""
        self._by_spec = by_spec
        self._all = list(by_spec.values())

    def start_load(self, spec: object) -> None:
        self._by_spec[type(spec)].start_load(spec)

    def cancel(self, load_id: LoadId) -> None:
        for loader in self._all:
            loader.cancel(load_id)

    def wait_layer(self, layer: int) -> None:
        for loader in self._all:
            loader.wait_layer(layer)

    def wait_tails(self) -> None:
        for loader in self._all:
            loader.wait_tails()

    def wait_all(self) -> None:
        for loader in self._all:
            loader.wait_all()

    def in_step_under_way(self) -> bool:
        return any(loader.in_step_under_way() for loader in self._all)

    def take_results(self) -> list[LoadResult]:
        return [result for loader in self._all for result in loader.take_results()]

    def take_rested(self) -> list[LoadId]:
        return [load_id for loader in self._all for load_id in loader.take_rested()]

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and there is nothing to take."""
        for loader in self._all:  # noqa: SIM110 - every step pays for a generator's frames
            if not loader.is_idle:
                return False
        return True

    def num_loads(self) -> int:
        return sum(loader.num_loads() for loader in self._all)

    def num_loaded_bytes(self) -> int:
        return sum(loader.num_loaded_bytes() for loader in self._all)

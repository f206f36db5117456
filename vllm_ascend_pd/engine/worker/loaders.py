# SPDX-License-Identifier: Apache-2.0
"""All loads of one worker: those from peers and those from the pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.pool.messages import PoolLoadSpec

if TYPE_CHECKING:
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.pool.io import PoolIO
    from vllm_ascend_pd.transfer.load import LoadSpec
    from vllm_ascend_pd.transfer.receive import Loader
    from vllm_ascend_pd.types import LoadId


class Loaders:
    """Main thread. Each load goes to the side that its blocks come from."""

    def __init__(self, peers: Loader | None, pool: PoolIO | None) -> None:
        self._peers = peers
        self._pool = pool
        self._all: list[Loader | PoolIO] = [x for x in (peers, pool) if x is not None]

    def start_load(self, spec: LoadSpec | PoolLoadSpec) -> None:
        if isinstance(spec, PoolLoadSpec):
            assert self._pool is not None
            self._pool.start_load(spec)
        else:
            assert self._peers is not None
            self._peers.start_load(spec)

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
        return self._peers.take_rested() if self._peers is not None else []

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and there is nothing to take."""
        for loader in self._all:  # noqa: SIM110 - every step pays for a generator's frames
            if not loader.is_idle:
                return False
        return True

    def num_loads(self) -> int:
        return sum(loader.num_loads() for loader in self._all)

    def stop(self) -> None:
        for loader in self._all:
            loader.stop()

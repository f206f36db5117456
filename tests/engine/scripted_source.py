# SPDX-License-Identifier: Apache-2.0
"""A source of blocks for tests of what is published and loaded of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm_ascend_pd.engine.scheduler.sources import BlockSource
from vllm_ascend_pd.kv.span import Wanted


class ScriptedSource(BlockSource):
    """Has the leading blocks of a request, or those of them that ``has`` it by index and group."""

    num_tail_tokens = 0

    def __init__(
        self,
        request: Any,
        num_blocks: int,
        has: Callable[[int, int], bool] = lambda index, group: True,
        parked_only: bool = False,
    ) -> None:
        super().__init__(request)
        self._num_blocks = num_blocks
        self._has = has
        self.parked_only = parked_only

    def has_block(self, index: int, group: int = 0) -> bool:
        return index < self.num_blocks and self._has(index, group)

    def has_tail(self, index: int) -> bool:
        return False

    def load_ms(self, places: Sequence[Wanted]) -> list[float]:
        return [0.0] * len(places)

    def make_load(self, *_: Any, **__: Any) -> NoReturn:
        raise AssertionError("no step takes its loads along")

    def count(self, *_: Any) -> NoReturn:
        raise AssertionError("no request is admitted on it")

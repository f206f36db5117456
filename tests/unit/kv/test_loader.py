# SPDX-License-Identifier: Apache-2.0
"""What all loaders have in common; their contract is in ``testing.loader_contract``."""

from __future__ import annotations

from vllm_ascend_pd.kv.load import Load
from vllm_ascend_pd.kv.loader import Loader
from vllm_ascend_pd.types import LoadId


class OneLayer(Load):
    """Counts who asks for it."""

    num_asked = 0

    def has_layer(self, layer: int) -> bool:
        self.num_asked += 1
        return True

    def has_tails(self) -> bool:
        return True


class Idle(Loader[bool, OneLayer]):
    def start_load(self, spec: bool) -> None:
        load = OneLayer(load_id=LoadId(self.num_loads()), in_step=spec, timeout_s=60.0)
        self._add(load.load_id, [load])

    def stop(self) -> None:
        """It has no threads."""

    def load(self, number: int) -> OneLayer:
        return self._loads[LoadId(number)][0]


def test_layer_waits_for_loads_of_steps_that_have_not_ended() -> None:
    loader = Idle()
    for in_step in (False, True, True):
        loader.start_load(in_step)
    assert loader.in_step_under_way()
    loader.wait_layer(0)
    assert [loader.load(i).num_asked for i in range(3)] == [0, 1, 1]
    loader.cancel(LoadId(1))
    loader.wait_layer(1)
    assert [loader.load(i).num_asked for i in range(3)] == [0, 1, 2]
    loader.cancel(LoadId(2))
    assert not loader.in_step_under_way()
    assert len(loader.take_results()) == 2
    loader.start_load(True)
    assert loader.in_step_under_way()

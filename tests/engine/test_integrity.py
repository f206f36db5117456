# SPDX-License-Identifier: Apache-2.0
"""What is left of requests is told, once, and only when nobody can still take it away."""

from __future__ import annotations

import pytest

from vllm_ascend_pd.engine.scheduler.integrity import LASTS_S, OF_REQUESTS, IntegrityCheck
from vllm_ascend_pd.metrics import Stats

NOTHING = dict.fromkeys((*OF_REQUESTS, "leases"), 0)


class Idle:
    """An engine without requests; ``told`` are the leaks that were counted since it was asked."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stats = Stats()
        self._check = IntegrityCheck(self._stats, lambda: self.now)

    def look(self, after_s: float = 0.0, **left: int) -> float:
        self.now += after_s
        self._check.look({**NOTHING, **left})
        return self._stats.take().get("internal_errors/leak", 0)


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_what_is_left_for_long_is_an_error_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    idle = Idle()
    assert idle.look(**{name: 3}) == 0
    assert idle.look(LASTS_S / 2, **{name: 3}) == 0
    assert idle.look(LASTS_S / 2, **{name: 2}) == 1
    assert caplog.messages == [f"without any request there are still 2 {name}"]
    assert idle.look(LASTS_S, **{name: 2}) == 0


def test_what_was_gone_meanwhile_is_no_leak() -> None:
    idle = Idle()
    for _ in range(3):
        assert idle.look(LASTS_S / 2, remote_prompts=1) == 0
        assert idle.look(LASTS_S / 2) == 0


def test_what_is_left_again_is_told_again() -> None:
    idle = Idle()
    for _ in range(2):
        idle.look(loads=1)
        assert idle.look(LASTS_S, loads=1) == 1
        idle.look()


def test_leases_wait_for_their_consumers() -> None:
    idle = Idle()
    idle.look(leases=1)
    assert idle.look(LASTS_S, leases=1) == 0

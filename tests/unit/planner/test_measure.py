# SPDX-License-Identifier: Apache-2.0
"""What is measured of engines whose times are known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from vllm_ascend_pd.planner.measure import Grid, Measurement
from vllm_ascend_pd.planner.profile import HandoverPoint, PrefillPoint

GRID = Grid(
    num_tokens=(1000,),
    batches=(1,),
    contexts=(8,),
    most_tokens=4000,
    rounds=2,
    token_ids=(300, 400),
)


class NoWaiting(asyncio.SelectorEventLoop):
    """Its time goes on to whatever is next."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


class OneServer(Measurement):
    """P computes 1,000 tokens a second, in one step those of all that wait; a prompt that is handed
    over keeps it for ``sending_s`` more, and is at the client ``later_s`` after that."""

    def __init__(self, sending_s: float, later_s: float) -> None:
        super().__init__(None, "router", GRID, lambda line: None)  # type: ignore[arg-type]
        self._prefill = "P"
        self.sending_s, self.later_s = sending_s, later_s
        self.waiting: list[tuple[float, asyncio.Future[None]]] = []
        self.steps: asyncio.Task[None] | None = None

    async def _token_times(
        self, url: str, prompt: Sequence[int], num_tokens: int
    ) -> Sequence[float]:
        is_sent = url == "router"
        computed = asyncio.get_running_loop().create_future()
        self.waiting.append((len(prompt) / 1000 + self.sending_s * is_sent, computed))
        if self.steps is None or self.steps.done():
            self.steps = asyncio.create_task(self._compute())
        await computed
        await asyncio.sleep(0.001 + self.later_s * is_sent)
        return [time.perf_counter()]

    async def _compute(self) -> None:
        while self.waiting:
            step, self.waiting = self.waiting, []
            await asyncio.sleep(sum(seconds for seconds, _ in step))
            for _, computed in step:
                computed.set_result(None)


@pytest.mark.parametrize(
    ("sending_s", "later_s", "found_s"), [(0.06, 0.1, 0.06), (0.0, 0.3, 0.0), (0.06, 0.9, 0.0)]
)
def test_what_p_spends_on_sending_is_told_from_what_a_request_waits_for(
    sending_s: float, later_s: float, found_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = NoWaiting()
    monkeypatch.setattr(time, "perf_counter", loop.time)
    prefill = [PrefillPoint(num_tokens=1000, batch=1, seconds=1.001)]
    handover = [HandoverPoint(num_tokens=1000, seconds=sending_s + later_s)]

    async def measure() -> Any:
        return await OneServer(sending_s, later_s)._sending_s(prefill, handover)

    try:
        # A P that would wait for its prompts, for they come late, is not measured.
        assert loop.run_until_complete(measure()) == pytest.approx(found_s / 1000, abs=1e-9)
    finally:
        loop.close()

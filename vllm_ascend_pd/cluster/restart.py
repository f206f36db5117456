# SPDX-License-Identifier: Apache-2.0
"""Engines ended and started again, one after another, while the others answer.

An engine is drained first: the router sends it nothing new, and what it has in progress moves to
others or ends. Only then it gets SIGTERM, and only when the router sends requests to it again the
next one is drained.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.cluster.operator import RouterAway
from vllm_ascend_pd.errors import ConfigError, PDError
from vllm_ascend_pd.processes.child import Child, State
from vllm_ascend_pd.registration import DrainOrder, InstanceStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.processes.supervisor import Supervisor

POLL_S = 0.25
RETURN_S = 60.0
"""An engine that is up is one of the router's within so long."""


class RestartError(PDError):
    """An engine was not restarted, or did not come back; those after it were left alone."""


@dataclass(slots=True)
class RollingRestart:
    """Runs on the supervisor's loop."""

    supervisor: Supervisor
    router: RouterOperator
    instances: Mapping[str, Sequence[str]]
    """At the router, of each child: its data parallel ranks."""

    async def run(self, engines: Sequence[Child], drain_s: float) -> AsyncIterator[str]:
        """What happens, line by line. With a ``drain_s`` of 0 nobody waits for requests.

        Raises:
            RestartError: requests did not end within ``drain_s`` seconds, or the engine is not up.
        """
        for child in engines:
            name, started = child.spec.name, time.monotonic()
            if child.state is not State.READY:
                raise RestartError(f"{name} is {child.state.value}, not ready: look at {child.log}")
            if drain_s:
                yield f"{name}: draining"
                await self._drain(name, drain_s)
            yield f"{name}: restarting"
            self.supervisor.restart(child)
            await self._until_up(child)
            await self._until_known(name)
            yield f"{name}: ready again after {time.monotonic() - started:.0f} s"

    async def _drain(self, name: str, drain_s: float) -> None:
        """Until no request is left on it."""

        def is_idle(status: InstanceStatus) -> bool:
            return status.state == "draining" and not status.num_left

        order = DrainOrder()  # the router forgets it when we do not ask again
        ranks = await self._poll(
            name, drain_s, is_idle, lambda name: self.router.drain(name, order)
        )
        if not ranks or not all(map(is_idle, ranks)):
            num_left = sum(status.num_left for status in ranks)
            left = f"{num_left} requests are left" if ranks else "the router is silent"
            raise RestartError(
                f"{name} is not idle after {drain_s:g} s ({left}) and was not restarted; wait"
                " longer with --drain-timeout, or end them with --drain-timeout 0"
            )

    async def _until_up(self, child: Child) -> None:
        while child.state is State.READY and child.restart.is_set():
            await asyncio.sleep(POLL_S)
        while child.state in (State.STOPPING, State.STARTING):
            await asyncio.sleep(POLL_S)
        if child.state is not State.READY:
            raise RestartError(f"{child.spec.name} did not come up: {child.note}; see {child.log}")

    async def _until_known(self, name: str) -> None:
        def is_served(status: InstanceStatus) -> bool:
            return status.state == "ready" and status.healthy

        ranks = await self._poll(name, RETURN_S, is_served)
        if not ranks or not all(map(is_served, ranks)):
            state = ", ".join(status.state for status in ranks) or "silent"
            raise RestartError(
                f"{name} is up, but the router sends it no requests after {RETURN_S:g} s ({state});"
                f" see {self.router.url}/instances"
            )

    async def _poll(
        self,
        name: str,
        patience_s: float,
        enough: Callable[[InstanceStatus], bool],
        ask: Callable[[str], Awaitable[None]] | None = None,
    ) -> list[InstanceStatus]:
        """What the router says of all its ranks, once that is enough or the time is over; nothing
        where it does not say."""
        end = time.monotonic() + patience_s
        names = self.instances[name]
        while True:
            try:
                if ask is not None:
                    for one in names:
                        await ask(one)
                listed = [i for i in await self.router.instances() if i.instance_id in names]
            except RouterAway:
                listed = []
            except ConfigError as e:
                raise RestartError(str(e)) from e
            is_enough = len(listed) == len(names) and all(map(enough, listed))
            if is_enough or time.monotonic() >= end:
                return listed
            await asyncio.sleep(POLL_S)

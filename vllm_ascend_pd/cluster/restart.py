# SPDX-License-Identifier: Apache-2.0
"""Engines ended and started again, one after another, while the others answer.

An engine is drained first: the router sends it nothing new, and what it has in progress moves to
others or ends. Only then it gets SIGTERM. The next one is drained when the router sends requests to
this one again, and it has lasted: an engine that ends at its first requests takes no other with it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from vllm_ascend_pd.cluster.emptying import who_cannot_move
from vllm_ascend_pd.cluster.operator import NotFound, RouterAway
from vllm_ascend_pd.errors import ConfigError, PDError
from vllm_ascend_pd.processes.child import Child, State
from vllm_ascend_pd.registration import HEARTBEAT_S, DrainOrder, InstanceStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from vllm_ascend_pd.cluster.commands import Command
    from vllm_ascend_pd.cluster.operator import RouterOperator
    from vllm_ascend_pd.processes.supervisor import Supervisor

POLL_S = 0.25
RETURN_S = 60.0
"""An engine that is up is one of the router's within so long."""
LASTS_S = 15.0
"""An engine that has been up for so long is taken for a good one."""
KNOWN_AGAIN_S = 2 * HEARTBEAT_S
"""A router that was started anew knows all engines after one heartbeat."""


class RestartError(PDError):
    """An engine was not restarted, or did not come back; those after it were left alone."""


def in_turns(engines: Sequence[Command]) -> list[Command]:
    """One of each role after another: where engines come back with another fingerprint, those of
    before and those of after both have partners nearly all the time."""
    by_role: dict[str, list[Command]] = {}
    for one in engines:
        by_role.setdefault(one.role, []).append(one)
    return [one for turn in zip_longest(*by_role.values()) for one in turn if one is not None]


@dataclass(slots=True)
class RollingRestart:
    """Runs on the supervisor's loop."""

    supervisor: Supervisor
    router: RouterOperator
    instances: Mapping[str, Sequence[str]]
    """At the router, of each child: its data parallel ranks."""
    lasts_s: float = LASTS_S

    async def run(self, engines: Sequence[Child], drain_s: float) -> AsyncIterator[str]:
        """What happens, line by line. With a ``drain_s`` of 0 nobody waits for requests.

        Raises:
            RestartError: requests did not end within ``drain_s`` seconds, or the engine is not up,
                or did not stay so.
        """
        restarted = _Restarted()
        for child in engines:
            name, started = child.spec.name, time.monotonic()
            if child.state is not State.READY:
                raise RestartError(f"{name} is {child.state.value}, not ready: look at {child.log}")
            if drain_s:
                yield f"{name}: draining"
                await self._drain(name, drain_s)
                restarted.refuse_crashed()
            yield f"{name}: restarting"
            self.supervisor.restart(child)
            await self._until_up(child)
            restarted.add(child)
            await self._until_known(name)
            left_s = child.since + self.lasts_s - time.monotonic()
            if left_s > 0:
                yield f"{name}: up, and must last {left_s:.0f} s more"
            while time.monotonic() < child.since + self.lasts_s:
                restarted.refuse_crashed()
                await asyncio.sleep(POLL_S)
            restarted.refuse_crashed()
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
            left = await self._left(ranks)
            raise RestartError(
                f"{name} is not idle after {drain_s:g} s ({left}) and was not restarted; wait"
                " longer with --drain-timeout, or end them with --drain-timeout 0"
            )

    async def _left(self, ranks: Sequence[InstanceStatus]) -> str:
        """What keeps them from being idle, for a person."""
        names = [status.instance_id for status in ranks]
        try:
            told = await self.router.requests()
        except ConfigError:
            names = []
        if not names:
            return "the router is silent"
        num_left = sum(status.num_left for status in ranks)
        running = [one for one in told.requests if one.instance in names]
        missing = [told.missing] if told.missing else []
        return ", ".join([f"{num_left} requests are left", *who_cannot_move(running), *missing])

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
        known_at = time.monotonic()
        while True:
            listed: list[InstanceStatus] = []
            try:
                if ask is not None:
                    for one in names:
                        await ask(one)
                listed = [i for i in await self.router.instances() if i.instance_id in names]
                known_at = time.monotonic()
            except RouterAway:
                known_at = time.monotonic()
            except NotFound as e:
                if time.monotonic() >= known_at + KNOWN_AGAIN_S:
                    raise RestartError(str(e)) from e
            except ConfigError as e:
                raise RestartError(str(e)) from e
            is_enough = len(listed) == len(names) and all(map(enough, listed))
            if is_enough or time.monotonic() >= end:
                return listed
            await asyncio.sleep(POLL_S)


class _Restarted:
    """Engines that have come up again."""

    def __init__(self) -> None:
        self._crashes: list[tuple[Child, int]] = []
        """Of each: how often it had crashed by then."""

    def add(self, child: Child) -> None:
        self._crashes.append((child, child.num_crashes))

    def refuse_crashed(self) -> None:
        """``RestartError`` if one did not stay up: no other one is given up then."""
        for child, num_crashes in self._crashes:
            if child.num_crashes > num_crashes:
                raise RestartError(
                    f"{child.spec.name} came up and did not stay so ({child.last_crash}): see"
                    f" {child.log}; no other engine is restarted"
                )

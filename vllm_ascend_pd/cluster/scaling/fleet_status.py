# SPDX-License-Identifier: Apache-2.0
"""What a fleet is, beside what it is to be; how another process hears of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from vllm_ascend_pd.cluster.scaling.target import Target
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

POLL_S = 0.5
ANSWER_S = 30.0


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine, for a person."""

    name: str
    state: str
    """``waiting``, ``starting``, ``serving``, ``draining``, ``ending``."""
    used_for: Role | None
    node: str
    note: str


class FleetStatus(msgspec.Struct, frozen=True):
    """As of one moment."""

    target: Target
    engines: tuple[EngineStatus, ...]
    is_settled: bool
    """Nothing is left to do, or nothing but to wait for room."""
    step: int
    """Counts on: who changes the target waits for a later one."""
    held: str = ""
    """Why engines from before a restart are not replaced now."""

    def lines(self) -> list[str]:
        """For a person."""
        used_for = [one.used_for for one in self.engines]
        there = f"{used_for.count('prefill')} P and {used_for.count('decode')} D serve"
        wanted = f"wanted are {self.target.ratio}, {self.target.maximum} engines at most"
        lines = [f"{there}; {wanted}"]
        for one in self.engines:
            if one.state != "serving":
                lines.append(f"{one.name} {one.state}{': ' if one.note else ''}{one.note}")
        return [*lines, self.held] if self.held else lines


async def follow(url: str, *, until_settled: bool) -> AsyncIterator[str]:
    """What changes there, line by line; ``ConfigError`` if nobody answers in time."""
    told: list[str] = []
    first: int | None = None
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(f"{url}/engines") as answer:
                    status = msgspec.json.decode(await answer.read(), type=FleetStatus | None)
            except aiohttp.ClientError as e:
                raise ConfigError(f"the driver of the engines is away ({e}): see ray.log") from e
            except msgspec.MsgspecError as e:
                raise ConfigError(
                    f"the driver of the engines is of another version than this command ({e}):"
                    " start `vllm-pd up` again"
                ) from e
            except asyncio.TimeoutError as e:
                raise ConfigError(
                    f"the driver of the engines does not answer within {ANSWER_S:g} s: see ray.log"
                ) from e
            if status is not None:
                first = status.step if first is None else first
                for line in status.lines():
                    if line not in told:
                        yield line
                told = status.lines()
                # The step that was under way when the target changed may not have seen it.
                if not until_settled or (status.is_settled and status.step > first + 1):
                    return
            await asyncio.sleep(POLL_S)

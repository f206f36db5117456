# SPDX-License-Identifier: Apache-2.0
"""Responses that engines answer before they compute them.

The router asks for each until it has ended, so that nobody who drains its engine takes that for
idle, and its tenant pays for what it got.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_ascend_pd.errors import UNREADABLE
from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.prefilled import NumTokens, find_num_tokens

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import Timeouts
    from vllm_ascend_pd.router.http_client import Headers
    from vllm_ascend_pd.router.instances import Instance

LOOK_S, MAX_LOOK_S = 1.0, 5.0
ANSWER_TIMEOUT_S = 10.0
_GOES_ON = ("queued", "in_progress")


class _Stored(msgspec.Struct):
    """A response, as its engine has it now."""

    status: str


@dataclass(slots=True)
class Background:
    """Event loop thread."""

    timeouts: Timeouts
    _tasks: set[asyncio.Task[NumTokens]] = field(default_factory=set)

    def follow(
        self, instance: Instance, response_id: str, headers: Headers
    ) -> asyncio.Task[NumTokens]:
        """One that the engine has taken; at its end, the tokens that the engine told."""
        task = asyncio.ensure_future(self._follow(instance, response_id, headers))
        instance.num_background += 1
        self._tasks.add(task)

        def ended(task: asyncio.Task[NumTokens]) -> None:
            instance.num_background -= 1
            self._tasks.discard(task)

        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, instance: Instance, response_id: str, headers: Headers) -> NumTokens:
        """Until it has ended, is lost, or has taken longer than any answer may."""
        try:
            async with timeout(self.timeouts.answer_s):
                began = time.monotonic()
                while not instance.is_gone:
                    found = await _ask(instance, response_id, headers)
                    if isinstance(found, bytes):
                        return find_num_tokens(found)
                    if found is FailureKind.CONNECT and not instance.breaker.closed:
                        return NumTokens()
                    # Each look costs the engine an answer, and a line in its log.
                    waited_s = time.monotonic() - began
                    await asyncio.sleep(min(max(LOOK_S, waited_s / 10), MAX_LOOK_S))
        except TIMED_OUT:
            pass
        return NumTokens()


async def _ask(
    instance: Instance, response_id: str, headers: Headers
) -> bytes | FailureKind | None:
    """What the engine has of it if it has ended; ``None`` if it goes on, as far as is known."""
    target = f"/v1/responses/{response_id}".encode()
    answer = await instance.client.fetch(b"GET", target, headers, b"", ANSWER_TIMEOUT_S)
    if isinstance(answer, Failure):
        return answer.kind
    code, data = answer
    if code != 200:
        return data if code < 500 else None
    try:
        status = msgspec.json.decode(data, type=_Stored).status
    except UNREADABLE:
        return data
    return None if status in _GOES_ON else data

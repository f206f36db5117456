# SPDX-License-Identifier: Apache-2.0
"""Streams that are read as they come, and what an operator asks of the router meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.router.broken_streams import GREEDY, text, uninterrupted
from tests.router.harness import Deployment, events, until
from tests.router.scripted_engine import ScriptedEngine

NUM_TOKENS = 24
SLOW = {"token_s": 0.02}


class Client:
    """One stream; it begins at once."""

    def __init__(self, d: Deployment, request_id: str = "one", **fields: Any) -> None:
        self._d = d
        self.request_id = request_id
        self.body = b""
        self.path = fields.pop("path", "/v1/completions")
        self.fields = {**GREEDY, "max_tokens": NUM_TOKENS, **fields}
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        said = {"messages": [{"role": "user", "content": "Hello"}]}
        is_chat = self.path.endswith("chat/completions")
        sent = {"model": "tiny", **(said if is_chat else {"prompt": "Hello"}), **self.fields}
        headers = {"x-request-id": self.request_id}
        url = self._d.url + self.path
        async with self._d.http.post(url, json=sent, headers=headers) as response:
            assert response.status == 200
            async for piece in response.content.iter_any():
                self.body += piece

    async def has(self, num_events: int) -> None:
        await until(lambda: self.body.count(b"\n\n") >= num_events, "tokens")

    async def events(self) -> list[Any]:
        await self.task
        return events(self.body)

    async def rest(self) -> list[Any]:
        """All events, the rest of which comes at once."""
        self._d.hurry()
        return await self.events()


def is_whole(got: list[Any], engine: ScriptedEngine) -> bool:
    """What one engine would have streamed, once; ``engine`` has received a leg of it."""
    whole = uninterrupted(engine.received[0])
    return text(got) == text(whole) and got[-1] == "[DONE]" and got.count("[DONE]") == 1


async def move(d: Deployment, request_id: str = "one", **order: Any) -> list[dict[str, Any]]:
    """What became of each of its answers; nothing where it has ended."""
    url = f"{d.url}/requests/{request_id}/move"
    async with d.http.post(url, json=order) as response:
        if response.status == 404:
            return []
        assert response.status == 200, await response.text()
        reports: list[dict[str, Any]] = await response.json()
        return reports


async def listed(d: Deployment) -> list[dict[str, Any]]:
    async with d.http.get(f"{d.url}/requests") as response:
        assert response.status == 200
        running: list[dict[str, Any]] = (await response.json())["requests"]
        return running


def name(engine: ScriptedEngine) -> str:
    """Of its instance."""
    return f"127.0.0.1:{engine.port}"


async def leave_while_it_moves(
    d: Deployment, client: Client, source: ScriptedEngine, target: ScriptedEngine
) -> None:
    """Once its target has been asked; nothing is left of it."""
    moving = asyncio.ensure_future(move(d, to=name(target)))
    await until(lambda: target.num_in_progress == 1)
    client.task.cancel()
    [report] = await moving
    assert report["outcome"] == "not_needed"
    await until(lambda: source.num_given_up == target.num_given_up == 1)
    assert all(i.num_admitted == 0 for i in d.router.registry)

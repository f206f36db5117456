# SPDX-License-Identifier: Apache-2.0
"""The scripted engine's answers behind uvicorn, the server of ``vllm serve``. Port, seconds per
token of a prompt and of an answer:

    .venv/bin/python benchmarks/uvicorn_engine.py 8100 0.0001 0.05
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.router.scripted_answers import Answer
from tests.router.scripted_engine import Received, ScriptedEngine

Send = Callable[[dict[str, Any]], Awaitable[None]]


class Engine:
    """An ASGI application."""

    def __init__(self, compute_token_s: float, token_s: float) -> None:
        self._compute_token_s = compute_token_s
        self._token_s = token_s
        self._scripted = ScriptedEngine("uvicorn", supports_concurrent=True)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not scope["path"].endswith("completions"):
            models = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
            await self._whole(send, json.dumps(models).encode())
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        answer = Answer.make(self._scripted, Received("POST", scope["path"], {}, body))
        fields = json.loads(body)
        if not (fields.get("kv_transfer_params") or {}).get("do_remote_prefill"):
            await asyncio.sleep(self._compute_token_s * answer.num_prompt_tokens)
        if fields.get("stream") is not True:
            await asyncio.sleep(self._token_s * len(answer.tokens))
            whole = {**answer.form.whole(answer, False), "kv_transfer_params": answer.params}
            await self._whole(send, json.dumps(whole).encode())
            return
        await self._start(send, b"text/event-stream; charset=utf-8")
        for event in answer.events():
            await asyncio.sleep(self._token_s)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _whole(self, send: Send, body: bytes) -> None:
        await self._start(send, b"application/json")
        await send({"type": "http.response.body", "body": body})

    async def _start(self, send: Send, content_type: bytes) -> None:
        headers = [(b"content-type", content_type)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


if __name__ == "__main__":
    application = Engine(float(sys.argv[2]), float(sys.argv[3]))
    uvicorn.run(application, port=int(sys.argv[1]), log_level="warning", access_log=False)

# SPDX-License-Identifier: Apache-2.0
"""Engines that compute nothing: they speak HTTP as vLLM does, and take time as engines do.

A step takes ``BASE_S``, more for each request in it and each prompt token. Batch and KV cache are
limited, without memory requests are preempted, and a running one is handed over with its KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiohttp import web
from router import free_port

BASE_S, REQUEST_S, PROMPT_TOKEN_S, COPIED_TOKEN_S = 0.06, 0.003, 0.0006, 2e-5
CHUNK = 256
"""Prompt tokens of one step."""
MAX_RUNNING = 12
ANSWER = "/v1/completions"


@dataclass(eq=False)
class Work:
    """A request at an engine."""

    name: str
    num_prompt: int
    num_output: int
    num_known: int = 0
    """Output tokens that it has."""
    num_computed: int = 0
    wants_kv: bool = False
    """It is a prefill leg."""
    told: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    """Tokens as they come; ``None`` if it has gone elsewhere."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_known


class Engine:
    """Event loop thread."""

    by_port: ClassVar[dict[int, Engine]] = {}

    def __init__(self, name: str, role: str, num_kv_tokens: int) -> None:
        self.name, self.role, self.num_kv_tokens = name, role, num_kv_tokens
        self.waiting: deque[Work] = deque()
        self.running: list[Work] = []
        self.arrived = asyncio.Event()
        self.port = 0

    @property
    def usage(self) -> float:
        return sum(one.num_tokens for one in self.running) / self.num_kv_tokens

    def add(self, one: Work) -> None:
        self.waiting.append(one)
        self.arrived.set()

    def drop(self, one: Work) -> None:
        for held in (self.running, self.waiting):
            with contextlib.suppress(ValueError):
                held.remove(one)

    async def run(self) -> None:
        while True:
            if not self.running and not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
            await asyncio.sleep(self._step())

    def _step(self) -> float:
        """One of a batch; how long it takes. Its tokens are told at its beginning."""
        while self.waiting and len(self.running) < MAX_RUNNING:
            if self.running and self.usage + self.waiting[0].num_tokens / self.num_kv_tokens > 1:
                break
            self.running.append(self.waiting.popleft())
        left = CHUNK
        for one in list(self.running):
            if one not in self.running:
                continue
            missing = one.num_tokens - one.num_computed
            if missing > 1:
                num_now = min(left, missing)
                left -= num_now
                one.num_computed += num_now
                if one.num_computed < one.num_tokens:
                    continue
            while self.usage >= 1 and self.running[-1] is not one:
                self._preempt(self.running[-1])
            one.num_computed = one.num_tokens
            one.num_known += 1
            one.told.put_nowait(one.num_known)
            if one.num_known == one.num_output:
                self.running.remove(one)
        return BASE_S + REQUEST_S * len(self.running) + PROMPT_TOKEN_S * (CHUNK - left)

    def _preempt(self, one: Work) -> None:
        self.running.remove(one)
        one.num_computed = 0
        self.waiting.appendleft(one)

    async def take_over(self, source: Engine, name: str, one: Work) -> bool:
        """From the one that runs it; the copy does not hold it up."""
        found = next((r for r in source.running if r.name == name), None)
        if found is None or self.usage + found.num_tokens / self.num_kv_tokens > 1:
            return False
        await asyncio.sleep(COPIED_TOKEN_S * found.num_tokens)
        if found not in source.running:
            return False
        source.running.remove(found)
        found.told.put_nowait(None)
        one.num_known, one.num_computed = found.num_known, found.num_tokens - 1
        one.told.put_nowait(one.num_known)
        self.running.append(one)
        self.arrived.set()
        return True

    # HTTP.

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/health", lambda _: _answer())
        app.router.add_get("/v1/models", lambda _: _answer(data=[{"id": "tiny"}], object="list"))
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post(ANSWER, self._complete)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self.port = free_port()
        self.by_port[self.port] = self
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        return runner

    async def _metrics(self, request: web.Request) -> web.Response:
        told = {"num_requests_running": len(self.running), "kv_cache_usage_perc": self.usage}
        told["num_requests_waiting"] = len(self.waiting)
        return web.Response(text="".join(f"vllm:{name}{{}} {n}\n" for name, n in told.items()))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        params = body.get("kv_transfer_params") or {}
        resume = params.get("resume") or {}
        name = "cmpl-" + request.headers["x-request-id"]
        one = Work(name, len(body["prompt"]), body["max_tokens"])
        one.num_known = len(resume.get("output_token_ids", ()))
        one.wants_kv = bool(params.get("do_remote_decode"))
        if one.num_known:
            one.told.put_nowait(one.num_known)
        try:
            if source := resume.get("source"):
                engine = self.by_port[source["port"]]
                if not await self.take_over(engine, resume["request_id"], one):
                    return web.json_response({"error": {"code": 409, "message": "no"}}, status=409)
            else:
                if params.get("do_remote_prefill"):
                    await asyncio.sleep(COPIED_TOKEN_S * one.num_prompt)
                    one.num_computed = one.num_prompt - 1
                self.add(one)
            if one.wants_kv:
                await one.told.get()
                return self._prefilled(one)
            return await self._stream(request, one)
        finally:
            self.drop(one)

    def _prefilled(self, one: Work) -> web.Response:
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1"}
        params |= {"remote_engine_id": self.name, "remote_port": self.port}
        usage = {"prompt_tokens": one.num_prompt, "completion_tokens": 1}
        choice = {"index": 0, "text": " w", "finish_reason": "length"}
        return web.json_response(
            {"id": one.name, "choices": [choice], "usage": usage, "kv_transfer_params": params}
        )

    async def _stream(self, request: web.Request, one: Work) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num_told, prompt = 0, list(range(one.num_prompt))
        while num_told < one.num_output:
            known = await one.told.get()
            if known is None:
                await response.write(b'data: {"error":{"message":"moved","code":409}}\n\n')
                break
            ids = list(range(num_told, known))
            choice: dict[str, Any] = {"index": 0, "text": " w" * len(ids), "token_ids": ids}
            choice["prompt_token_ids"] = None if num_told else prompt
            choice["finish_reason"] = "length" if known == one.num_output else None
            chunk = {"id": one.name, "object": "text_completion", "created": 1, "model": "tiny"}
            event = json.dumps({**chunk, "choices": [choice]}, separators=(",", ":"))
            await response.write(b"data: " + event.encode() + b"\n\n")
            num_told = known
        await response.write(b"data: [DONE]\n\n")
        return response


async def _answer(**body: Any) -> web.Response:
    return web.json_response(body)

# SPDX-License-Identifier: Apache-2.0
"""An HTTP server that answers as an engine or a router would, wrong in one thing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from vllm_ascend_pd.cluster.doctor.engines import Engine, Web, ask
from vllm_ascend_pd.registration import Role

FINGERPRINT = (
    "vllm=0.30.0 weights=aa dtype=float32 kv_dtype=auto layout=LBHNC block=128 page=65536 layers=4"
    " isa=x hash=sha256 seed=default wire=1"
)
PROVENANCE = {
    "num_prompt_tokens": 700,
    "num_peer_tokens": 699,
    "num_peer_bytes": 1_600_000,
    "transfer_ms": 5.0,
    "outcome": "loaded",
}

_T = TypeVar("_T")


class ScriptedEngine:
    """Serves on loopback inside ``serving``; attributes may be changed while it runs."""

    def __init__(self, kv_role: str = "kv_producer", **changes: Any) -> None:
        self.kv_role = kv_role
        self.fingerprint: str | None = FINGERPRINT
        self.params: dict[str, Any] | None = {"do_remote_prefill": True, "transfer_id": "t"}
        self.provenance: dict[str, Any] | None = PROVENANCE
        self.text = "abcd"
        self.model = "tiny"
        self.named = "models/tiny"
        self.more_models: list[str] = []
        self.max_model_len = 4096
        self.generates = True
        self.key: str | None = None
        self.tokens: dict[str, list[int] | None] = {"prompt": [1, 2], "messages": [3, 4]}
        """Of a text and of a chat; ``None``: it refuses."""
        self.epoch = ""
        self.healthy = True
        self.dates: list[str] = []
        """Of its next answers; then the time."""
        self.requests_by_outcome: dict[str, int] = {}
        self.counts_as: str | None = None
        self.pool: dict[str, int] = {}
        """``{'put_blocks_total{outcome="ok"}': 5}``"""
        self.pool_master = ""
        self.bodies: list[dict[str, Any]] = []
        self.listed: list[dict[str, Any]] = []
        for name, value in changes.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        if self.generates:
            app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/instances", self._instances)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        headers = {"Date": self.dates.pop(0)} if self.dates else {}
        return web.Response(status=200 if self.healthy else 503, headers=headers)

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.30.0"})

    def _check_key(self, request: web.Request) -> None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized

    async def _models(self, request: web.Request) -> web.Response:
        self._check_key(request)
        names = (self.model, *self.more_models)
        told = {"root": self.named, "max_model_len": self.max_model_len}
        entries = [{"id": name, **told} for name in names]
        return web.json_response({"data": entries})

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = (self.tokens.keys() & (await request.json()).keys()).pop()
        tokens = self.tokens[asked]
        return web.json_response({"tokens": tokens}, status=400 if tokens is None else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = ["# TYPE vllm:pd_requests_total counter"]
        lines += [
            f'vllm:pd_requests_total{{engine="0",outcome="{outcome}"}} {number}'
            for outcome, number in self.requests_by_outcome.items()
        ]
        for name, number in self.pool.items():
            family = name.partition("{")[0]
            kind = "counter" if family.endswith("_total") else "gauge"
            lines.append(f"# TYPE vllm:pd_pool_{family} {kind}")
            lines.append(f"vllm:pd_pool_{name} {number}")
        if self.fingerprint is not None:
            labels = f'role="{self.kv_role}",kv_endpoint="",fingerprint="{self.fingerprint}"'
            labels += f',pool_master="{self.pool_master}",epoch="{self.epoch}"'
            lines += ["# TYPE vllm:pd_engine_info gauge", f"vllm:pd_engine_info{{{labels}}} 1.0"]
        return web.Response(text="\n".join(lines) + "\n")

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if self.counts_as:
            count = self.requests_by_outcome.get(self.counts_as, 0)
            self.requests_by_outcome[self.counts_as] = count + 1
        asked = body.get("kv_transfer_params")
        params = None
        if asked and asked.get("do_remote_decode"):
            params = self.params
        elif asked and self.provenance is not None:
            params = {"provenance": self.provenance}
        return web.json_response({"choices": [{"text": self.text}], "kv_transfer_params": params})

    async def _instances(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response(self.listed)


def with_engines(
    engines: list[tuple[Role, ScriptedEngine]],
    use: Callable[[Web, list[Engine]], Awaitable[_T]],
) -> _T:
    """Serve the engines, ask each what it is, and hand them to ``use``."""

    async def scenario() -> _T:
        runners, known = [], []
        try:
            for role, engine in engines:
                runner = web.AppRunner(engine.application())
                await runner.setup()
                runners.append(runner)
                site = web.TCPSite(runner, "127.0.0.1", 0)
                await site.start()
                host, port = runner.addresses[0][:2]
                known.append(Engine(f"http://{host}:{port}", role, f"{role}-{len(known)}"))
            async with aiohttp.ClientSession() as session:
                client = Web(session)
                for engine in known:
                    await ask(client, engine)
                return await use(client, known)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(scenario())

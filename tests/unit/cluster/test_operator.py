# SPDX-License-Identifier: Apache-2.0
"""What an operator's command makes of answers."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from vllm_ascend_pd.cluster.operator import RouterOperator
from vllm_ascend_pd.errors import ConfigError


@pytest.mark.parametrize("body", ["<html>", "{}", '[{"instance_id": 5}]'])
def test_who_is_no_router_is_told_so(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body)

    async def test() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        async with TestServer(app) as server, RouterOperator(str(server.make_url(""))) as operator:
            with pytest.raises(ConfigError, match="is no vllm-pd router's answer"):
                await operator.instances()

    asyncio.run(test())


@pytest.mark.parametrize(
    "body", ['{"detail": "Not Found"}', '{"error": {"message": "Not Found", "type": "NotFound"}}']
)
def test_who_asks_an_engine_is_told_so(body: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, status=404)

    async def test() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, RouterOperator(str(server.make_url(""))) as operator:
            with pytest.raises(ConfigError, match=r"not as a router does: .* --router, not"):
                await operator.instances()

    asyncio.run(test())


@pytest.mark.parametrize("status", [401, 403])
def test_who_needs_a_token_is_told_which_option_names_it(status: int) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"error": {"type": "no", "message": "no"}}, status=status)

    async def test() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with TestServer(app) as server, RouterOperator(str(server.make_url(""))) as operator:
            with pytest.raises(ConfigError, match="registration-token-file with --token-file"):
                await operator.instances()

    asyncio.run(test())

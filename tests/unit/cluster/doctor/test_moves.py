# SPDX-License-Identifier: Apache-2.0
"""A stream that is to move, through a router that is wrong in one thing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from tests.unit.cluster.doctor.scripted_engine import ScriptedEngine, with_engines
from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict
from vllm_ascend_pd.cluster.doctor.moves import MoveThroughRouter

REPORT = {
    "request_id": "r",
    "source": "d0",
    "target": "d1",
    "outcome": "moved",
    "cause": "",
    "seconds": 0.02,
}


class ScriptedRouter(ScriptedEngine):
    """Streams one chunk, and the rest when it was told to move it."""

    def __init__(self, report: Any, pieces: tuple[str, str] = ("ab", "cd")) -> None:
        super().__init__()
        self.report, self.pieces = report, pieces
        self.moved: list[str] = []
        self.token: str | None = None

    def application(self) -> web.Application:
        app = super().application()
        app.router.add_post("/requests/{name}/move", self._move)
        return app

    async def _move(self, request: web.Request) -> web.Response:
        self.moved.append(request.match_info["name"])
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=403)
        if isinstance(self.report, int):
            return web.Response(status=self.report)
        return web.json_response([{**REPORT, **self.report}])

    async def _complete(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        if not body.get("stream"):
            return await super()._complete(request)
        self.bodies.append({"x-request-id": request.headers["x-request-id"], **body})
        response = web.StreamResponse()
        await response.prepare(request)
        for text in self.pieces:
            event = {"choices": [{"text": text}]}
            if text == "error":
                event = {"error": {"message": "it broke"}}  # type: ignore[dict-item]
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def examine(router: ScriptedRouter, num_engines: int = 2, token: str | None = None) -> Finding:
    async def use(web: Web, known: list[Engine]) -> Finding:
        [finding] = await MoveThroughRouter(web, known[-1].url, known[:-1], token).run()
        return finding

    engines: Any = [("decode", ScriptedEngine("kv_both"))] * num_engines
    return with_engines([*engines, ("both", router)], use)


def test_a_stream_that_moves_is_compared_with_a_whole_answer() -> None:
    router = ScriptedRouter({})
    finding = examine(router)
    assert finding.verdict is Verdict.OK
    assert finding.found == "d0 to d1 in 20 ms, and its client has noticed nothing"
    whole, streamed = router.bodies
    assert router.moved == [streamed.pop("x-request-id")]
    assert streamed == {**whole, "stream": True}


@pytest.mark.parametrize(
    ("report", "pieces", "verdict", "found"),
    [
        ({"outcome": "stayed", "cause": "refused"}, ("ab", "cd"), "fail", "stayed: refused"),
        ({"outcome": "stayed", "cause": "new"}, ("ab", "cd"), "fail", "stayed: new"),
        ({"outcome": "not_needed"}, ("ab", "cd"), "skipped", "the answer was complete"),
        ({}, ("ab", "xd"), "warn", "not that of one engine"),
        ({}, ("ab", "error"), "fail", "it broke"),
        (403, ("ab", "cd"), "skipped", "did not take the order: 403"),
        (404, ("ab", "cd"), "skipped", "did not take the order: 404"),
    ],
)
def test_what_does_not_move_is_told(
    report: Any, pieces: tuple[str, str], verdict: str, found: str
) -> None:
    finding = examine(ScriptedRouter(report, pieces))
    assert finding.verdict.value == verdict
    assert found in finding.found
    assert bool(finding.fix) is (verdict in ("warn", "fail"))


def test_an_operators_token_is_shown_and_asked_for() -> None:
    router = ScriptedRouter({})
    router.token = "t0ken"
    finding = examine(router)
    assert finding.verdict is Verdict.SKIPPED
    assert finding.found.endswith("403; name the file with its token with --token-file")
    assert examine(router, token="t0ken").verdict is Verdict.OK


def test_one_engine_alone_has_nowhere_to_move_to() -> None:
    assert examine(ScriptedRouter({}), num_engines=1).verdict is Verdict.SKIPPED


def test_pooling_models_stream_nothing() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        return list(await MoveThroughRouter(web, known[-1].url, known[:-1], None).run())

    router = ScriptedRouter({})
    embedders: Any = [("both", ScriptedEngine(model="embedder", generates=False))] * 2
    findings = with_engines([*embedders, ("both", router)], use)
    assert {finding.verdict for finding in findings} == {Verdict.SKIPPED}
    assert not router.bodies


def test_a_stream_of_each_model_moves_that_has_two_engines() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        return list(await MoveThroughRouter(web, known[-1].url, known[:-1], None).run())

    router = ScriptedRouter({})
    models = ("tiny", "large", "tiny", "lonely", "large")
    decoders: Any = [("decode", ScriptedEngine("kv_both", model=model)) for model in models]
    findings = with_engines([*decoders, ("both", router)], use)
    assert [finding.verdict for finding in findings] == [Verdict.OK] * 2
    streams = [body for body in router.bodies if body.get("stream")]
    assert [body["model"] for body in streams] == ["tiny", "large"]

# SPDX-License-Identifier: Apache-2.0
"""Targets, errors and clients that leave, before any handler."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from tests.router.harness import FAST, Deployment, deployed, raw_exchange, run
from vllm_ascend_pd.router.front import BadTarget, engine_target

JSON = b"Content-Type: application/json"


async def ask(d: Deployment, line: bytes, *more: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Send a request line and headers as they are; status, JSON and head of the answer."""
    lines = [line, b"Host: x", b"Connection: close", *more, b"", b""]
    head, _, body = (await raw_exchange(d.port, b"\r\n".join(lines))).partition(b"\r\n\r\n")
    assert b"application/json" in head, head
    return int(head.split()[1]), json.loads(body) if body else {}, head


@pytest.mark.parametrize(
    "target",
    [
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/%2E./sleep",
        "/v1/./models",
        "//sleep",
        "/v1//models",
        "/v1/x//",
        "/v1/..%2fsleep",
        "/v1/x%2fy",
        "/v1/%252e%252e/sleep",
        "/v1/x%5c..%5csleep",
        "/v1/%00",
        "/v1/%ff",
        "/v1/%zz",
        "http://x/v1/models",
        "http://x/sleep",
        "v1/models",
        "*",
    ],
)
def test_target_that_can_be_read_in_two_ways_is_400(target: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            for method in (b"GET", b"POST"):
                status, answer, _ = await ask(d, b"%s %s HTTP/1.1" % (method, target.encode()))
                assert status == 400
                assert answer["error"]["code"] == 400
            assert not d.decodes[0].received

    run(test)


@pytest.mark.parametrize(
    ("raw", "sent"),
    [
        ("/", "/"),
        ("/v1/models", "/v1/models"),
        ("/v1/%77hat?a=%20b&c=../d//e", "/v1/what?a=%20b&c=../d//e"),
        ("/v1/a%20b/%C3%A9", "/v1/a%20b/%C3%A9"),
        ("/v1/d0:1@x/", "/v1/d0:1@x/"),
    ],
)
def test_path_is_normalised_once(raw: str, sent: str) -> None:
    assert engine_target(raw) == sent
    assert engine_target(sent) == sent


def test_bytes_beyond_ascii_are_a_bad_target() -> None:
    with pytest.raises(BadTarget):
        engine_target("/v1/\udcff")
    with pytest.raises(BadTarget):
        engine_target("/v1/é?x")


def test_slash_at_the_end_leads_to_this_router_and_not_to_an_engine() -> None:
    async def test() -> None:
        async with deployed() as d:
            body = {"model": "tiny", "prompt": "x"}
            url = f"{d.url}/v1/completions/?a=b"
            async with d.http.post(url, json=body, allow_redirects=False) as response:
                assert response.status == 307
                assert response.headers["Location"] == "/v1/completions?a=b"
            async with d.http.post(url, json=body) as response:
                assert response.status == 200
            assert len(d.prefills[0].received) == 1

    run(test)


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/reset_prefix_cache", "/collective_rpc", "/abort_requests"],
)
def test_engines_other_endpoints_are_404(path: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            for method in (b"GET", b"POST"):
                status, answer, _ = await ask(d, b"%s %s HTTP/1.1" % (method, path.encode()))
                assert status == 404
                assert path in answer["error"]["message"]
            assert not d.decodes[0].received

    run(test)


def test_errors_are_json_as_openai_writes_them() -> None:
    async def test() -> None:
        config = replace(FAST, max_body_bytes=100)
        async with deployed(config=config) as d:
            asked: list[tuple[bytes, tuple[bytes, ...], int]] = [
                (b"GET /v1/completions/x HTTP/1.1", (), 200),
                (b"GET /nowhere HTTP/1.1", (), 404),
                (b"DELETE /v1/completions HTTP/1.1", (), 405),
                (b"POST /health HTTP/1.1", (), 405),
                (b"GET /v1/models HTTP/9.9", (), 400),
                (b"G@T / HTTP/1.1", (), 400),
                (b"POST /v1/completions HTTP/1.1", (JSON, b"Content-Length: 101"), 413),
                (b"POST /v1/completions HTTP/1.1", (b"Content-Length: many",), 400),
                (b"GET /version HTTP/1.1", (b"Expect: tea",), 417),
            ]
            for line, headers, expected in asked:
                status, answer, head = await ask(d, line, *headers)
                assert status == expected, line
                if status >= 400:
                    error = answer["error"]
                    assert set(error) == {"message", "type", "param", "code"}
                    assert error["code"] == status
                assert (b"\r\nAllow: " in head) == (status == 405)

    run(test)


def test_what_is_refused_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def test() -> None:
        async with deployed(config=replace(FAST, access_log="text")) as d:
            for line in (b"GET /v1/../sleep HTTP/1.1", b"GET /sleep HTTP/1.1", b"not HTTP"):
                await ask(d, line)
            assert d.count("requests_total", outcome="client_error") == 3
            told = [r.getMessage() for r in caplog.records if "client_error" in r.getMessage()]
            assert len(told) == 3
            assert not any(record.exc_info for record in caplog.records)

    run(test)


def test_bug_of_ours_is_500_in_json_and_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with deployed() as d:
            monkeypatch.setattr(type(d.router.selector), "by_model", lambda _: 1 / 0)
            async with d.http.get(f"{d.url}/health") as response:
                assert response.status == 500
                error = (await response.json())["error"]
            assert "division" not in error["message"]
            (logged,) = (r for r in caplog.records if r.levelno == logging.ERROR)
            assert logged.exc_info is not None

    run(test)


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/health/ready", "/health/startup", "/ping", "/v1/models"]
)
def test_head_is_answered_without_a_body(path: str) -> None:
    async def test() -> None:
        async with deployed() as d, d.http.head(d.url + path) as response:
            assert response.status == 200
            assert await response.read() == b""

    run(test)


def test_ping_says_what_health_says() -> None:
    async def test() -> None:
        async with deployed() as d:
            for method in ("GET", "POST"):
                async with d.http.request(method, f"{d.url}/ping") as response:
                    assert response.status == 200
            d.router.is_draining = True
            for path in ("/ping", "/health", "/health/ready"):
                async with d.http.get(d.url + path) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "1")

    run(test)


@pytest.mark.parametrize(
    "path",
    [
        *("/tokenize", "/detokenize", "/classify", "/pooling", "/score", "/rerank"),
        *("/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed"),
    ],
)
def test_engines_paths_beside_v1_are_passed_on(path: str) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            body = {"model": "tiny", "prompt": "x"}
            async with d.http.post(d.url + path, json=body) as response:
                assert response.status == 200, await response.text()
            assert d.count("requests_total", outcome="ok") == 1

    run(test)


def test_websocket_is_refused_by_name() -> None:
    async def test() -> None:
        async with deployed() as d:
            status, answer, _ = await ask(
                d,
                b"GET /v1/realtime HTTP/1.1",
                b"Connection: Upgrade",
                b"Upgrade: websocket",
                b"Sec-WebSocket-Version: 13",
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            )
            assert status == 400
            assert "/v1/realtime: no WebSocket" in answer["error"]["message"]
            assert not d.decodes[0].received

    run(test)


@pytest.mark.parametrize("value", [b"application/json; a=\xff", "application/json; a=é".encode()])
def test_content_type_that_is_no_text_passes_as_it_is(value: bytes) -> None:
    async def test() -> None:
        async with deployed() as d:
            lines = b"Content-Type: " + value, b"Content-Length: 0"
            status, _, _ = await ask(d, b"POST /v1/embeddings HTTP/1.1", *lines)
            assert status == 200
            told = d.decodes[0].received[0].headers["content-type"]
            assert told.encode("latin-1") == value

    run(test)


def test_form_with_a_boundary_that_is_no_text_is_400() -> None:
    """The engine might find parts that we do not."""

    async def test() -> None:
        async with deployed() as d:
            for boundary in (b"\xff", "é".encode()):
                form = b"--" + boundary + b"--\r\n"
                lines = (
                    b"Content-Type: multipart/form-data; boundary=" + boundary,
                    b"Content-Length: %d\r\n\r\n" % len(form) + form,
                )
                status, answer, _ = await ask(d, b"POST /v1/audio/translations HTTP/1.1", *lines)
                assert (status, "boundary" in answer["error"]["message"]) == (400, True)
            assert not d.decodes[0].received
            assert d.count("requests_total", outcome="client_error") == 2

    run(test)

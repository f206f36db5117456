# SPDX-License-Identifier: Apache-2.0
"""Pages of other origins get from the router what they get from ``vllm serve``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.router.harness import FAST, deployed, run
from vllm_ascend_pd.router.apis import APIS, BATCH, INVOCATIONS
from vllm_ascend_pd.router.config import CORS

PAGE = {"Origin": "https://page.example"}
CONFIGS = [
    CORS(),
    CORS(allow_credentials=True),
    CORS(allowed_origins=("https://page.example",)),
    CORS(allowed_origins=("https://other.example",)),
    CORS(allowed_origins=("https://page.example",), allow_credentials=True),
    CORS(allowed_methods=("GET", "POST"), allowed_headers=("Authorization",)),
    CORS(allowed_methods=("GET",), allowed_headers=("X-Other",)),
]
PREFLIGHT = PAGE | {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}
GRANTS = ("origin", "credentials", "methods", "headers")


def starlette(cors: CORS) -> TestClient:
    """What ``vllm serve`` puts in front of its paths."""
    middleware = Middleware(
        CORSMiddleware,
        allow_origins=list(cors.allowed_origins),
        allow_methods=list(cors.allowed_methods),
        allow_headers=list(cors.allowed_headers),
        allow_credentials=cors.allow_credentials,
    )

    async def answer(request: object) -> None:
        raise RuntimeError

    app = Starlette(routes=[Route("/v1/completions", answer)], middleware=[middleware])
    return TestClient(app, raise_server_exceptions=False)


def granted(status: int, headers: dict[str, str]) -> dict[str, object]:
    found = {name: headers.get(f"access-control-allow-{name}") for name in GRANTS}
    if status != 200:  # nothing is granted, whatever else it says
        return {"status": status}
    lists = {
        n: sorted({*v.lower().split(", ")} - {"query"})
        for n in ("methods", "headers")
        if (v := found[n])
    }
    return {"status": status, **found, **lists}


@pytest.mark.parametrize("cors", CONFIGS, ids=str)
def test_preflight_is_answered_as_starlette_does(cors: CORS) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, cors=cors)) as d:
            for path in ("/v1/completions", "/v1/embeddings", "/health"):
                async with d.http.options(d.url + path, headers=PREFLIGHT) as response:
                    got = granted(
                        response.status, {k.lower(): v for k, v in response.headers.items()}
                    )
            assert not d.decodes[0].received
        expected = starlette(cors).options("/v1/completions", headers=PREFLIGHT)
        assert got == granted(expected.status_code, dict(expected.headers))

    run(test)


@pytest.mark.parametrize("cors", CONFIGS, ids=str)
def test_answers_errors_and_streams_tell_who_may_read_them(cors: CORS) -> None:
    async def test() -> None:
        expected = starlette(cors).get("/nowhere", headers=PAGE).headers
        config = replace(FAST, cors=cors)
        async with deployed(config=config) as d:
            d.decodes[0].script("ok, status(422)")
            for stream, status in ((True, 200), (False, 422)):
                got, headers, _ = await d.post(stream=stream, headers=PAGE)
                assert got == status
                for name in ("Access-Control-Allow-Origin", "Access-Control-Allow-Credentials"):
                    assert headers.get(name) == expected.get(name)
            async with d.http.get(f"{d.url}/nowhere", headers=PAGE) as response:
                name = "Access-Control-Allow-Origin"
                assert response.headers.get(name) == expected.get(name)
            _, headers, _ = await d.post()
            assert "Access-Control-Allow-Origin" not in headers
            assert all("origin" not in one.headers for one in d.decodes[0].received)

    run(test)


@pytest.mark.parametrize(
    "path", ["/registry/instances/e", "/instances", "/status", "/requests", "/requests/x/move"]
)
def test_no_page_may_register_an_engine_or_list_them(path: str) -> None:
    """A browser on this host is on loopback, whatever site the page is of."""

    async def test() -> None:
        async with deployed() as d:
            asked = PAGE | {"Access-Control-Request-Method": "PUT"}
            async with d.http.options(d.url + path, headers=asked) as response:
                assert response.status == 405
                assert not any("access-control" in name.lower() for name in response.headers)
            async with d.http.get(d.url + path, headers=PAGE) as response:
                assert not any("access-control" in name.lower() for name in response.headers)

    run(test)


def test_no_page_may_move_a_request() -> None:
    """A POST of plain text needs no preflight."""

    async def test() -> None:
        async with deployed() as d:
            url = f"{d.url}/requests/x/move"
            own = {"Origin": d.url}
            for origin, expected in ((PAGE, 403), ({"Origin": "null"}, 403), (own, 404), ({}, 404)):
                async with d.http.post(url, data="{}", headers=origin) as response:
                    assert response.status == expected
            async with d.http.get(f"{d.url}/requests", headers=PAGE) as response:
                assert response.status == 403

    run(test)


@pytest.mark.parametrize("path", [*APIS, BATCH, INVOCATIONS])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_is_not_said_to_be_json_is_refused(path: str, kind: str) -> None:
    """As by ``vllm serve``: pages that may not read answers could have them computed, else."""

    async def test() -> None:
        async with deployed() as d:
            body = b'{"model": "tiny", "prompt": "x"}'
            for who in (PAGE, {}):
                headers = who | {"Content-Type": kind}
                async with d.http.post(d.url + path, data=body, headers=headers) as response:
                    assert response.status == 400
                    assert "application/json" in (await response.json())["error"]["message"]
            assert not d.prefills[0].received
            assert not d.decodes[0].received
            headers = PAGE | {"Content-Type": "application/json; charset=utf-8"}
            async with d.http.post(d.url + "/v1/completions", data=body, headers=headers) as answer:
                assert answer.status == 200

    run(test)


def test_preflight_needs_no_key(tmp_path: Path) -> None:
    async def test() -> None:
        keys = tmp_path / "keys"
        keys.write_text("secret\n")
        async with deployed(config=replace(FAST, api_keys_file=keys)) as d:
            async with d.http.options(f"{d.url}/v1/models", headers=PREFLIGHT) as response:
                assert response.status == 200
            async with d.http.get(f"{d.url}/v1/models", headers=PAGE) as response:
                assert response.status == 401
                assert response.headers["Access-Control-Allow-Origin"] == "*"

    run(test)

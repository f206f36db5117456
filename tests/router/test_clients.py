# SPDX-License-Identifier: Apache-2.0
"""Clients that send what they should not, and keys."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.harness import (
    FAST,
    JSON_POST,
    JSON_TYPE,
    PATIENCE_S,
    deployed,
    raw_exchange,
    run,
    until,
)
from vllm_ascend_pd.router.config import Retries
from vllm_ascend_pd.router.server import MAX_HEADER_BYTES


def error_in(answer: bytes, status: int) -> dict[str, Any]:
    """As OpenAI's clients read it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"%d" % status
    error: dict[str, Any] = json.loads(body)["error"]
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[]", "JSON"),
        (b'"text"', "JSON"),
        (b'{"prompt": NaN}', "JSON"),
        (b'{"model": 7, "prompt": "x"}', "model"),
        (b'{"model": "tiny"}', "prompt"),
        (b'{"prompt": "x", "vllm_xargs": {"a": 1}, "a":' + b"[" * 100_000, "JSON"),
        (json.dumps({"prompt": "x"} | {f"k{i}": 1 for i in range(1000)}).encode(), "1001 fields"),
    ],
    ids=["empty", "cut", "list", "text", "nan", "model", "prompt", "deep", "many"],
)
def test_body_that_no_engine_can_read_is_400(body: bytes, named: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            async with d.http.post(
                f"{d.url}/v1/completions", data=body, headers=JSON_TYPE
            ) as response:
                assert response.status == 400
                assert named in (await response.json())["error"]["message"]
            assert not d.prefills[0].received
            assert d.count("requests_total", outcome="client_error") == 1

    run(test)


async def in_chunks(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def test_large_body_is_413() -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, max_body_bytes=1000)) as d:
            status, _, _ = await d.post(prompt="x" * 2000)
            assert status == 413
            url = f"{d.url}/v1/completions"
            body = in_chunks(500 * [b"{    "])
            async with d.http.post(url, data=body, headers=JSON_TYPE) as response:
                assert response.status == 413
            assert not d.prefills[0].received

    run(test)


def test_header_of_a_mebibyte_is_refused() -> None:
    async def test() -> None:
        async with deployed() as d:
            answer = await raw_exchange(
                d.port, JSON_POST + b"X-Large: " + b"x" * (1 << 20) + b"\r\n\r\n"
            )
            assert b" 400 " in answer[:20] or answer == b""
            assert (await d.post())[0] == 200

    run(test)


@pytest.mark.parametrize(
    "lines",
    [
        b"X-Large: " + b"x" * 2 * MAX_HEADER_BYTES + b"\r\n",
        b"".join(b"X-%d: y\r\n" % i for i in range(1000)),
    ],
    ids=["long", "many"],
)
def test_headers_beyond_the_limits_are_431(lines: bytes) -> None:
    async def test() -> None:
        async with deployed() as d:
            answer = await raw_exchange(d.port, JSON_POST + lines + b"\r\n")
            assert error_in(answer, 431)["type"] == "Request Header Fields Too Large"
            assert not d.prefills[0].received

    run(test)


@pytest.mark.parametrize(
    "start", [b"", b"POST /v1/comp", JSON_POST], ids=["nothing", "line", "headers"]
)
def test_slow_client_is_cut_off(start: bytes) -> None:
    async def test() -> None:
        async with deployed() as d:
            assert await raw_exchange(d.port, start, 3) == b""

    run(test)


def test_stream_of_http_1_0_ends_with_its_connection() -> None:
    """As ``ab -k`` asks, and HAProxy for clients of HTTP/1.0: nothing else tells its end."""
    patient = replace(FAST, timeouts=replace(FAST.timeouts, keep_alive_s=10 * PATIENCE_S))

    async def test() -> None:
        async with deployed(config=patient) as d:
            body = b'{"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": true}'
            head = JSON_POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: keep-alive\r\n"
            answer = await raw_exchange(
                d.port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            assert answer.startswith(b"HTTP/1.0 200 ")
            assert answer.endswith(b"data: [DONE]\n\n")

    run(test)


def test_nginx_is_told_to_pass_each_event_on_at_once() -> None:
    async def test() -> None:
        async with deployed() as d:
            request = {"model": "tiny", "prompt": "x", "max_tokens": 3}
            url = f"{d.url}/v1/completions"
            async with d.http.post(url, json=request | {"stream": True}) as response:
                assert response.headers.getall("X-Accel-Buffering") == ["no"]
            async with d.http.post(url, json=request) as response:
                assert "X-Accel-Buffering" not in response.headers

    run(test)


def test_slow_body_is_408() -> None:
    async def test() -> None:
        async with deployed() as d:
            answer = await raw_exchange(d.port, JSON_POST + b"Content-Length: 100\r\n\r\n{", 3)
            assert "did not come within" in error_in(answer, 408)["message"]

    run(test)


def test_slow_loris_is_cut_off_though_it_sends() -> None:
    async def test() -> None:
        async with deployed() as d:
            _, writer = await asyncio.open_connection("127.0.0.1", d.port)
            for byte in JSON_POST * 10:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.01)
                if writer.transport.is_closing():
                    break
            assert writer.transport.is_closing()
            writer.close()

    run(test)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\r\n", b"\x00" * 5000],
    ids=["tls", "version", "blank", "zeros"],
)
def test_bytes_that_are_not_http_are_refused(data: bytes) -> None:
    async def test() -> None:
        async with deployed() as d:
            answer = await raw_exchange(d.port, data, 3)
            assert b" 200 " not in answer
            assert (await d.post())[0] == 200

    run(test)


def test_request_smuggling_is_refused() -> None:
    async def test() -> None:
        async with deployed() as d:
            both = JSON_POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            assert b" 400 " in (await raw_exchange(d.port, both, 3)).splitlines()[0]

    run(test)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(
    st.sampled_from(
        ["model", "prompt", "stream", "max_tokens", "n", "kv_transfer_params", "vllm_xargs", "x"]
    ),
    JSON,
)


def test_any_body_is_answered_and_reaches_engines_unchanged() -> None:
    async def test() -> None:
        async with deployed() as d:
            bodies: list[bytes] = []

            @settings(max_examples=150, suppress_health_check=list(HealthCheck))
            @given(FIELDS.map(lambda f: json.dumps(f).encode()) | st.binary(max_size=200))
            def collect(body: bytes) -> None:
                bodies.append(body)

            await asyncio.to_thread(collect)
            for body in bodies:
                for engine in (*d.prefills, *d.decodes):
                    engine.received.clear()
                    engine._faults.clear()
                    engine.script("status(418)" if engine in d.decodes else "ok")
                async with d.http.post(
                    f"{d.url}/v1/completions", data=body, headers=JSON_TYPE
                ) as response:
                    assert response.status in (400, 418, 502), body
                    await response.read()
                for request in d.decodes[0].received:
                    sent = {k: v for k, v in json.loads(body).items() if k != "kv_transfer_params"}
                    got = {k: v for k, v in request.json.items() if k != "kv_transfer_params"}
                    if isinstance(sent.get("vllm_xargs"), dict):
                        sent["vllm_xargs"].pop("kv_transfer_params", None)
                    assert got == sent

    run(test)


def test_api_keys(tmp_path: Path) -> None:
    async def test() -> None:
        keys = tmp_path / "keys"
        keys.write_text("# ours\nfirst\nsecond\n")
        async with deployed(config=replace(FAST, api_keys_file=keys)) as d:
            for key, status in (("first", 200), ("second", 200), ("third", 401), ("", 401)):
                headers = {"Authorization": f"Bearer {key}"}
                assert (await d.post(headers=headers))[0] == status
            assert (await d.post())[0] == 401
            assert (await d.post(headers={"Authorization": "Basic first"}))[0] == 401
            for path, status in (("/v1/models", 401), ("/instances", 401), ("/health", 200)):
                async with d.http.get(d.url + path) as response:
                    assert response.status == status
            keys.write_text("third\n")
            os.utime(keys, (1, 1))
            await d.router.refresh(0.0)
            assert (await d.post(headers={"Authorization": "Bearer third"}))[0] == 200
            assert (await d.post(headers={"Authorization": "Bearer first"}))[0] == 401

    run(test)


def test_engine_key_replaces_the_clients(tmp_path: Path) -> None:
    async def test() -> None:
        key = tmp_path / "key"
        key.write_text("engine-secret\n")
        async with deployed(config=replace(FAST, engine_api_key_file=key)) as d:
            await d.post(headers={"Authorization": "Bearer client"})
            for engine in (d.prefills[0], d.decodes[0]):
                assert engine.received[0].headers["authorization"] == "Bearer engine-secret"

    run(test)


def test_idle_connections_to_engines_are_few_and_closed() -> None:
    async def test() -> None:
        async with deployed() as d:
            await asyncio.gather(*(d.post() for _ in range(20)))
            client = d.router.registry.decodes[0].client
            await until(lambda: client.num_busy == 0)  # a probe may be in progress
            assert client.num_open <= 21
            client.retire()
            await until(lambda: client.num_open <= 1)

    run(test)


def test_requests_that_wait_for_their_first_byte_are_counted() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("delay(0.2)")
            d.decodes[0].token_s = 0.1
            posting = asyncio.ensure_future(d.post(stream=True, max_tokens=5))
            await until(lambda: d.count("requests_waiting") == 1)
            await until(lambda: d.count("requests_waiting") == 0)
            assert d.count("requests_in_progress") == 1
            await posting
            d.decodes[0].script("status(422)")
            assert (await d.post())[0] == 422
            assert d.count("requests_waiting") == 0

    run(test)


def test_batch_waits_as_one_request() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.decodes[0].token_s = 0.05
            chats = [[{"role": "user", "content": f"Question {i}"}] for i in range(5)]
            posting = asyncio.ensure_future(
                d.post("/v1/chat/completions/batch", messages=chats, max_tokens=4)
            )
            await until(lambda: d.decodes[0].num_in_progress > 1)
            assert d.count("requests_in_progress") == d.count("requests_waiting") == 1
            await posting

    run(test)


@pytest.mark.parametrize("fault", ["ok", "stall(3)"])
def test_gaps_of_a_stream_are_those_between_its_pieces(fault: str) -> None:
    """A stream of four tokens; what an engine that has fallen silent is given up after is none."""

    async def test() -> None:
        async with deployed(config=replace(FAST, retries=Retries(resume="off"))) as d:
            d.decodes[0].token_s = 0.02
            d.decodes[0].script(fault)
            await d.post(stream=True, max_tokens=4)
            assert 2 <= d.count("itl_seconds_count") <= 4
            assert d.count("itl_seconds_sum") < FAST.timeouts.idle_s

    run(test)


def test_body_that_comes_slowly_but_steadily_is_waited_for() -> None:
    body = json.dumps({"model": "tiny", "prompt": "x " * 40_000, "max_tokens": 1}).encode()
    head = JSON_POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def test() -> None:
        async with deployed() as d:
            reader, writer = await asyncio.open_connection("127.0.0.1", d.port)
            writer.write(head + body[:-1])
            await asyncio.sleep(3 * FAST.timeouts.body_s)  # a client's uplink, and no order
            writer.write(body[-1:])
            answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
            assert answer.startswith(b"HTTP/1.1 200")
            assert d.decodes[0].received[-1].body.count(b"x ") == 40_000
            writer.close()

    run(test)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
def test_byte_order_mark_is_read_as_engines_read_it(encoding: str, path: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            body = json.dumps({"model": "tiny", "prompt": "Grüße", "max_tokens": 1})
            url = d.url + path
            async with d.http.post(url, data=body.encode(encoding), headers=JSON_TYPE) as response:
                assert response.status == 200
            assert d.decodes[0].received[-1].json["prompt"] == "Grüße"

    run(test)


@pytest.mark.parametrize("mark", [codecs.BOM_UTF8, codecs.BOM_UTF16_LE])
def test_byte_order_mark_before_anything_else_is_400(mark: bytes) -> None:
    async def test() -> None:
        async with deployed() as d:
            head = JSON_POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (len(mark) + 3)
            answer = await raw_exchange(d.port, head + mark + b"\xff\xd8\xff")
            assert "JSON" in error_in(answer, 400)["message"]

    run(test)


def test_body_that_is_not_as_encoded_as_it_says_is_400(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with deployed() as d:
            lines = b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n"
            answer = await raw_exchange(d.port, JSON_POST + lines + b"not gzip!")
            assert "gzip" in error_in(answer, 400)["message"]
            assert (await d.post())[0] == 200

    run(test)
    assert "Traceback" not in caplog.text

# SPDX-License-Identifier: Apache-2.0
"""Set-ups that answer and hand nothing over: the log and the page say so."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.router.harness import FAST, Deployment, deployed, free_port, run, until
from tests.router.test_tls import make_certificate
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.config import (
    Probes,
    Queueing,
    Retries,
    RouterConfig,
    Timeouts,
    pack,
    unpack,
)
from vllm_ascend_pd.router.server import RouterServer, bind

CALM = replace(FAST, timeouts=replace(FAST.timeouts, prefill_s=5.0, first_token_s=5.0))


def info(role: str) -> str:
    """Of an engine's ``/metrics``."""
    labels = f'engine="0",role="{role}",epoch="e",kv_endpoint="",fingerprint="a=b"'
    return f"vllm:pd_engine_info{{{labels}}} 1.0\n"


async def told(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: text in caplog.text, f"{text!r} in {caplog.text}")


def errors_of(d: Deployment, url: str) -> list[str]:
    return [e.text for i in d.router.registry if i.spec.url == url for e in i.errors]


def test_router_that_is_its_own_engine_sends_a_request_once() -> None:
    async def test() -> None:
        async with deployed(0, 1) as d:
            port = free_port()
            own = (f"http://127.0.0.1:{port}",)
            server = RouterServer(replace(d.server.config, prefills=own))
            await server.start(bind("127.0.0.1", port))
            try:
                body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4}
                async with d.http.post(f"{own[0]}/v1/completions", json=body) as response:
                    assert response.status == 200
                seen = server.router.metrics.snapshot().counters["requests"]
                assert sum(value for _, value in seen) == 2
            finally:
                await server.stop()

    run(test)


def test_workers_of_a_router_know_its_requests_as_their_own() -> None:
    assert unpack(pack(FAST)).router_id == FAST.router_id != replace(FAST).router_id


def test_request_that_comes_back_is_refused() -> None:
    async def test() -> None:
        async with deployed() as d:
            sent: dict[str, str] = {}
            await d.post()
            for name, value in d.prefills[0].received[0].headers.items():
                if name == "x-vllm-pd-routers":
                    sent[name] = f"another,{value}"
            assert sent
            status, _, body = await d.post(headers=sent)
            assert status == 508
            assert "--prefill" in json.loads(body)["error"]["message"]
            assert len(d.prefills[0].received) == 1
            status, _, _ = await d.post(headers={"x-vllm-pd-routers": "another"})
            assert status == 200
            [*_, last] = d.decodes[0].received
            assert last.headers["x-vllm-pd-routers"].startswith("another,")

    run(test)


@pytest.mark.parametrize(
    ("used_for", "kv_role"), [("prefill", "kv_consumer"), ("decode", "kv_producer")]
)
def test_role_that_contradicts_the_list_is_told(
    used_for: str, kv_role: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with deployed() as d:
            [right, wrong] = [d.prefills[0], d.decodes[0]]
            if used_for == "prefill":
                right, wrong = wrong, right
            right.metrics, wrong.metrics = info("kv_both"), info(kv_role)
            await told(caplog, f"used for {used_for} and its kv_role is {kv_role}")
            assert any(kv_role in text for text in errors_of(d, wrong.url))
            assert errors_of(d, right.url) == []

    run(test)


def test_engine_without_the_switch_beside_one_with_it_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].metrics = info("kv_producer")
            await told(caplog, "no vllm:pd_engine_info")
            [text] = errors_of(d, d.decodes[0].url)
            assert "kv_connector InEngine" in text
            assert errors_of(d, d.prefills[0].url) == []

    run(test)


def test_load_that_was_told_long_ago_counts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """An engine whose metrics hang was perhaps full when they were read last."""

    async def test() -> None:
        async with deployed() as d:
            [instance] = d.router.registry.decodes
            d.decodes[0].metrics = "vllm:num_requests_waiting 9.0\n"
            await until(lambda: instance.load.num_waiting == 9)
            d.decodes[0].metrics_hang = True
            await told(caplog, "/metrics do not answer")
            assert instance.load.num_waiting == 0
            assert instance.load.read_at == 0, "its gauges are absent"
            assert instance.is_available
            d.decodes[0].metrics_hang = False
            await until(lambda: instance.load.num_waiting == 9)

    run(test)


def test_engines_of_stock_vllm_are_not_doubted(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with deployed() as d:
            seen = d.decodes[0].num_metrics_read
            await until(lambda: d.decodes[0].num_metrics_read > seen + 4)
        assert "WARNING" not in caplog.text

    run(test)


def test_router_among_the_engines_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with deployed() as inner, deployed(1, 0, replace(CALM, decodes=(inner.url,))) as d:
            await told(caplog, "it is a router, not an engine")
            assert errors_of(d, d.prefills[0].url) == []

    run(test)


@pytest.mark.parametrize(
    ("status", "fix"), [(400, "--max-model-len"), (401, "--api-key"), (404, "--served-model-name")]
)
def test_prefill_engine_that_refuses_what_decode_engines_answer_is_told(
    status: int, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script(f"status({status})")
            assert (await d.post())[0] == 200
            [text] = errors_of(d, d.prefills[0].url)
            assert fix in text
            assert text in caplog.text

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_both_refuse_raises_no_doubt(stream: bool) -> None:
    """Of a stream an engine tells that within it."""

    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("status(400)")
            d.decodes[0].script("refused(0)" if stream else "status(400)")
            assert (await d.post(stream=stream))[0] == (200 if stream else 400)
            assert errors_of(d, d.prefills[0].url) == []

    run(test)


def test_engine_that_wants_a_key_of_the_router_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with deployed(models_status=401, ready=False) as d:
            await told(caplog, "/v1/models: status 401")
            assert "--engine-api-key-file" in errors_of(d, d.prefills[0].url)[0]

    run(test)


def test_model_without_a_pair_is_told_once_and_when_it_has_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        async with deployed() as d:
            await d.prefills[0].stop()
            await told(caplog, "model tiny has no P and D (no_prefill)")
            await d.prefills[0].start()
            await told(caplog, "model tiny has a P and a D")
        assert caplog.text.count("has no P and D") == 1

    run(test)


def test_model_that_becomes_known_has_no_pair_because_of_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    async def test() -> None:
        async with deployed(0, 1, ready=False, is_healthy=False) as d:
            await told(caplog, "model (not known) has no P and D (unavailable)")
            d.decodes[0].is_healthy = True
            await told(caplog, "model tiny has no P and D (no_prefill)")
        assert "has a P and a D" not in caplog.text

    run(test)


def test_labels_that_nobody_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, prefill_labels=("prefill",))) as d:
            await told(caplog, "1 without a label 'model' that --prefill-model-labels")
            assert (await d.post())[0] == 200
        async with deployed(config=replace(FAST, prefill_labels=("a",), decode_labels=("b",))) as d:
            status, _, body = await d.post()
            assert status == 503
            assert "2 without a label 'model'" in json.loads(body)["error"]["message"]

    run(test)


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "--rebalance load": (
        RouterConfig,
        {"rebalance": "load", "retries": Retries(resume="off")},
    ),
    "--skip-prefill always": (RouterConfig, {"skip": "always", "require_prefill": True}),
    "--prefill-timeout must be a positive number of seconds, not nan": (
        Timeouts,
        {"prefill_s": float("nan")},
    ),
    "--first-token-timeout": (Timeouts, {"first_token_s": float("inf")}),
    "--queue-timeout must be a positive number of seconds, not inf": (
        Queueing,
        {"timeout_s": float("inf")},
    ),
    "--queue-timeout must be a positive number of seconds, not 0": (Queueing, {"timeout_s": 0}),
    "--probe-interval": (Probes, {"interval_s": float("inf")}),
    "--max-attempts": (Retries, {"max_attempts": 0}),
}


@pytest.mark.parametrize("told", WRONG)
def test_options_that_say_nothing_are_refused_by_name(told: str) -> None:
    kind, options = WRONG[told]
    with pytest.raises(ConfigError, match=told):
        kind(**options)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_engine_of_the_other_scheme_is_told(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def test() -> None:
        context = None
        if scheme == "http":
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*make_certificate(tmp_path))
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, deployed(0, 1, replace(FAST, prefills=(url,)), ready=False):
            other = "https" if scheme == "http" else "http"
            await told(caplog, f"give its URL as {other}://")

    run(test)

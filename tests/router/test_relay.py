# SPDX-License-Identifier: Apache-2.0
"""What clients and engines see of a request that goes well."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.router.harness import FAST, deployed, events, run
from tests.router.scripted_answers import Answer
from tests.router.scripted_engine import Received, ScriptedEngine

BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def direct(path: str, sent: dict[str, Any]) -> bytes:
    """What an engine alone answers to the same request, as a stream."""
    request = Received("POST", path, {}, json.dumps(sent).encode())
    return b"".join(Answer.make(ScriptedEngine(), request).events())


@BOTH
def test_prefill_first(path: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            status, headers, body = await d.post(path, temperature=0, n=2, logprobs=1)
            assert status == 200
            assert headers["Content-Type"] == "application/json"
            assert len(json.loads(body)["choices"]) == 2
            (prefill,), (decode,) = d.prefills[0].received, d.decodes[0].received
            assert prefill.params == {"do_remote_decode": True, "do_remote_prefill": False}
            sent = prefill.json
            assert (sent["max_tokens"], sent["stream"], sent["n"]) == (1, False, 1)
            assert sent.get("max_completion_tokens") == (1 if "chat" in path else None)
            assert "logprobs" not in sent
            assert decode.params["remote_engine_id"] == "p0"
            assert decode.params["do_remote_prefill"] is True
            assert decode.params["remote_block_ids"] == [0, 1]
            rest = {k: v for k, v in decode.json.items() if k != "kv_transfer_params"}
            assert (rest["n"], rest["logprobs"], rest["max_tokens"]) == (2, 1, 4)
            identifier = headers["x-request-id"]
            assert prefill.headers["x-request-id"] == decode.headers["x-request-id"] == identifier
            assert d.count("requests_total", outcome="ok") == 1
            assert d.count("orders_total", order="prefill-first") == 1

    run(test)


@BOTH
def test_stream_is_the_engines_byte_for_byte(path: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            options = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
            status, headers, body = await d.post(path, **options)
            assert status == 200
            assert headers["Content-Type"].startswith("text/event-stream")
            assert body == direct(path, d.decodes[0].received[0].json)
            assert events(body)[-1] == "[DONE]"
            assert "stream_options" not in d.prefills[0].received[0].json

    run(test)


def test_stream_in_pieces_of_one_byte_arrives_whole() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.decodes[0].script("slow_body")
            _, _, body = await d.post(stream=True)
            assert body == direct("/v1/completions", d.decodes[0].received[0].json)

    run(test)


def test_concurrent_order_after_the_producer_said_that_it_can() -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=True) as d:
            await d.post()
            status, _, _ = await d.post(stream=True)
            assert status == 200
            assert d.count("orders_total", order="prefill-first") == 1
            assert d.count("orders_total", order="concurrent") == 1
            prefill, decode = d.prefills[0].received[1].params, d.decodes[0].received[1].params
            transfer_id = prefill["transfer_id"]
            assert len(transfer_id) == 32
            assert decode == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer_id,
                "remote_engine_id": "p0",
                "remote_host": "127.0.0.1",
                "remote_port": 14579,
                "remote_key": "scripted",
            }

    run(test)


def test_order_can_be_forced_to_prefill_first() -> None:
    async def test() -> None:
        config = replace(FAST, order="prefill-first")
        async with deployed(config=config, supports_concurrent=True) as d:
            await d.post()
            await d.post()
            assert d.count("orders_total", order="prefill-first") == 2

    run(test)


@pytest.mark.parametrize(
    "smuggled",
    [
        {"kv_transfer_params": {"remote_host": "evil", "do_remote_prefill": True}},
        {"vllm_xargs": {"kv_transfer_params": {"remote_host": "evil"}, "other": 1}},
        {"vllm_xargs": {"kv_cache_report_mode": "evil"}},
    ],
    ids=["field", "vllm_xargs", "report_mode"],
)
@pytest.mark.parametrize("skip", ["never", "always"])
def test_client_chooses_no_peer(smuggled: dict[str, Any], skip: Any) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, skip=skip)) as d:
            status, _, _ = await d.post(**smuggled)
            assert status == 200
            for engine in (*d.prefills, *d.decodes):
                assert all(b"evil" not in request.body for request in engine.received)
            assert len(d.prefills[0].received) == (0 if skip == "always" else 1)

    run(test)


def test_client_chooses_no_peer_in_other_requests() -> None:
    async def test() -> None:
        async with deployed() as d:
            body = b'{"input": "x", "kv_tr\\u0061nsfer_params": {"remote_host": "evil"}}'
            json_type = {"Content-Type": "application/json"}
            async with d.http.post(f"{d.url}/v1/embeddings", data=body, headers=json_type) as r:
                assert r.status == 200
            assert d.decodes[0].received[0].json == {"input": "x"}
            async with d.http.post(f"{d.url}/v1/embeddings", data=b'{"x": NaN}') as r:
                assert r.status == 400

    run(test)


def test_several_prompts_go_to_the_decode_engine_alone() -> None:
    async def test() -> None:
        async with deployed() as d:
            status, _, _ = await d.post(prompt=["one", "two"])
            assert status == 200
            assert not d.prefills[0].received
            assert d.count("prefill_skips_total", reason="batch") == 1

    run(test)


def test_short_prompts_skip_prefill() -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, skip=100)) as d:
            await d.post(prompt=list(range(99)))
            await d.post(prompt=list(range(100)))
            assert len(d.prefills[0].received) == 1
            assert d.count("prefill_skips_total", reason="short_prompt") == 1

    run(test)


def test_measured_break_even_converges() -> None:
    """P computes a token in 50 us and D in 250 us, and a hand-over takes 25 ms: 125 tokens."""

    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].compute_token_s = 50e-6
            d.decodes[0].compute_token_s = 250e-6
            d.decodes[0].load_s = 0.025
            lengths = (16, 60, 250, 500)
            for _ in range(40):
                for length in lengths:
                    await d.post(prompt=[1] * length, max_tokens=1, stream=True)
            assert 60 <= d.count("break_even_tokens", model="tiny") < 250
            before = {e.name: len(e.received) for e in (d.prefills[0], d.decodes[0])}
            skips = d.count("prefill_skips_total", reason="short_prompt")
            for _ in range(15):  # one in 16 still measures the other way
                for length in lengths:
                    assert (await d.post(prompt=[1] * length, max_tokens=1))[0] == 200
            assert 28 <= d.count("prefill_skips_total", reason="short_prompt") - skips <= 30
            assert len(d.decodes[0].received) - before["d0"] == 60
            assert 28 <= len(d.prefills[0].received) - before["p0"] <= 32
            assert d.count("prefill_skips_total", reason="measuring") >= 10

    run(test)


@pytest.mark.parametrize("mode", ["held", "never", 10])
def test_forced_skipping_measures_nothing(mode: Any) -> None:
    async def test() -> None:
        async with deployed(config=replace(FAST, skip=mode)) as d:
            d.decodes[0].load_s = 0.002
            for _ in range(30):
                await d.post(prompt=[1] * 10, max_tokens=1, stream=True)
            assert len(d.prefills[0].received) == 30
            assert d.count("break_even_tokens", model="tiny") == 0

    run(test)


def test_headers_pass_and_those_of_the_connection_do_not() -> None:
    async def test() -> None:
        async with deployed() as d:
            headers = {
                "Authorization": "Bearer secret",
                "traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01",
                "X-Request-Id": "mine",
                "Cookie": "a=b",
                "Accept-Encoding": "gzip",
            }
            _, answered, _ = await d.post(headers=headers)
            assert answered["x-request-id"] == "mine"
            for engine in (d.prefills[0], d.decodes[0]):
                got = engine.received[0].headers
                assert got["authorization"] == "Bearer secret"
                assert got["traceparent"] == headers["traceparent"]
                assert got["x-request-id"] == "mine"
                assert got["host"] == f"127.0.0.1:{engine.port}"
                assert not {"cookie", "accept-encoding"} & set(got)

    run(test)


def test_prefill_that_ended_at_its_first_token_needs_no_transfer() -> None:
    async def test() -> None:
        async with deployed() as d:
            d.prefills[0].script("stopped")
            status, _, _ = await d.post()
            assert status == 200
            assert d.decodes[0].received[0].params == {}
            assert d.count("prefill_skips_total", reason="ended_at_first_token") == 1

    run(test)


def test_unknown_v1_path_is_passed_to_one_engine() -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            async with d.http.get(f"{d.url}/v1/what/ever?a=%20b") as response:
                answer = await response.json()
            assert answer["path"] == "/v1/what/ever?a=%20b"
            assert answer["served_by"] in ("d0", "d1")
            async with d.http.post(f"{d.url}/v1/load_lora_adapter", json={}) as response:
                assert response.status == 403
            async with d.http.head(f"{d.url}/v1/files") as response:
                assert response.status == 405

    run(test)


def test_models_health_version_metrics_instances() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            async with d.http.get(f"{d.url}/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
            for path in ("/health", "/health/live", "/version"):
                async with d.http.get(d.url + path) as response:
                    assert response.status == 200
            await d.post()
            async with d.http.get(f"{d.url}/metrics") as response:
                text = await response.text()
            assert 'vllm:pd_router_requests_total{outcome="ok"} 1.0' in text
            assert "vllm:pd_router_ttft_seconds_bucket" in text
            async with d.http.get(f"{d.url}/instances") as response:
                roles = [instance["role"] for instance in await response.json()]
            assert roles == ["prefill", "decode", "decode"]

    run(test)


@pytest.mark.parametrize(
    ("stream", "refusal"), [(False, "status(400)"), (True, "status(400)"), (True, "refused(0)")]
)
def test_what_is_refused_has_no_first_token(stream: bool, refusal: str) -> None:
    async def test() -> None:
        async with deployed() as d:
            metrics = d.router.metrics
            d.decodes[0].script(refusal)
            for num in range(2):
                await d.post(stream=stream)
                assert sum(metrics.ttft.counts) == sum(metrics.handover.counts) == num
                assert metrics.num_waiting == 0

    run(test)


def test_round_robin_spreads_pairs() -> None:
    async def test() -> None:
        async with deployed(2, 2) as d:
            for _ in range(8):
                await d.post()
            assert [len(e.received) for e in (*d.prefills, *d.decodes)] == [4, 4, 4, 4]
            met = {(p.name, r.params["remote_engine_id"]) for p in d.decodes for r in p.received}
            assert len(met) == 4  # every P with every D

    run(test)


@pytest.mark.parametrize(
    ("header", "told", "expected"),
    [
        (None, "mine", "mine"),
        ("other", "mine", "other"),
        (None, "no\nlog can carry it", None),
        (None, None, None),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_request_has_the_id_that_its_body_tells_if_no_header_does(
    path: str, header: str | None, told: str | None, expected: str | None
) -> None:
    async def test() -> None:
        async with deployed() as d:
            sent = {} if header is None else {"X-Request-Id": header}
            status, headers, _ = await d.post(path, headers=sent, request_id=told)
            assert status == 200
            own = headers["x-request-id"]
            assert own == expected or (expected is None and len(own) == 32)
            for engine in (*d.prefills, *d.decodes):
                assert engine.received[0].headers["x-request-id"] == own

    run(test)

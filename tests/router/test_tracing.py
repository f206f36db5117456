# SPDX-License-Identifier: Apache-2.0
"""Spans of a request and its legs, as an exporter gets them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.router.harness import STRICT, deployed, run
from vllm_ascend_pd.router.app import Router
from vllm_ascend_pd.router.server import RouterServer, bind
from vllm_ascend_pd.router.tracing import Tracing, make_tracing

TRACE_ID, PARENT = "1" * 32, "2" * 16


@pytest.mark.parametrize("fault", ["ok", "status(500)"])
def test_spans_of_both_legs_belong_to_the_clients_trace(fault: str) -> None:
    async def test() -> None:
        exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        async with deployed() as d:
            d.decodes[0].script(fault)
            config = replace(STRICT, prefills=(d.prefills[0].url,), decodes=(d.decodes[0].url,))
            server = RouterServer(config, Router(config, Tracing(provider)))
            sock = bind("127.0.0.1", 0)
            await server.start(sock)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/completions"
            headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}
            async with d.http.post(url, json={"prompt": "x"}, headers=headers) as response:
                assert response.status == (200 if fault == "ok" else 502)
                await response.read()
            async with d.http.get(url.replace("completions", "responses/resp_1")) as response:
                assert response.status == 200
            await server.stop()
        spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
        assert "GET /v1/{path}" in spans  # one name for all that clients make up
        request = spans["POST /v1/completions"]
        assert f"{request.context.trace_id:032x}" == TRACE_ID
        assert f"{request.parent.span_id:016x}" == PARENT
        assert request.attributes["vllm_pd.outcome"] == ("ok" if fault == "ok" else "failed")
        assert request.status.is_ok is (fault == "ok") or request.status.is_unset
        for name, engine in (("prefill", d.prefills[0]), ("decode", d.decodes[0])):
            assert spans[name].parent.span_id == request.context.span_id
            sent = engine.received[0].headers["traceparent"]
            assert sent == f"00-{TRACE_ID}-{spans[name].context.span_id:016x}-01"

    run(test)


def test_off_by_default() -> None:
    assert make_tracing(None)._provider is None

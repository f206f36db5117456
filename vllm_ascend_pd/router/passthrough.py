# SPDX-License-Identifier: Apache-2.0
"""Every other request for an engine: passed as it is to one decode engine of its model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.admission import Admission, Admitted
from vllm_ascend_pd.router.answers import (
    EventStream,
    engine_failed,
    error_response,
    not_admitted,
    whole_answer,
)
from vllm_ascend_pd.router.bodies import as_utf8, parse_other
from vllm_ascend_pd.router.failures import Failure
from vllm_ascend_pd.router.front import TARGET
from vllm_ascend_pd.router.incoming import read_body, session_of
from vllm_ascend_pd.router.legs import Answer, LegFailed, Legs
from vllm_ascend_pd.router.models import model_meant, model_of_form
from vllm_ascend_pd.router.policies.base import Routed
from vllm_ascend_pd.router.selection import Unavailable
from vllm_ascend_pd.router.stored import response_of
from vllm_ascend_pd.router.tenants import check_response

if TYPE_CHECKING:
    from aiohttp import web

    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.selection import Selector
    from vllm_ascend_pd.router.tenants import Tenants
    from vllm_ascend_pd.router.trace import Trace

REFUSED = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""They change one engine, and would leave it different from the others."""
ENGINE_PATHS = (
    "/classify",
    "/detokenize",
    "/generative_scoring",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/tokenizer_info",
    "/v2/embed",
    "/v2/rerank",
)
"""What is passed on beside ``/v1/*``."""
TOKENIZER_INFO = "/tokenizer_info"
"""Of a model, without a body: the one that ``model`` in the query names."""
CACHED = frozenset(
    {
        "/classify",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/systemone",
        "/v2/rerank",
    }
)
"""Of whose prompts engines cache prefixes, by a salt if there is one."""
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "PATCH"})


@dataclass(slots=True)
class Passthrough:
    """Event loop thread. No retries: the router does not know what these requests do."""

    config: RouterConfig
    selector: Selector
    admission: Admission
    legs: Legs
    metrics: Metrics
    tenants: Tenants | None = None

    async def serve(self, trace: Trace) -> web.StreamResponse:
        request, own = trace.request, {"x-request-id": trace.request_id}
        if request.method not in METHODS:
            trace.status, trace.outcome = 405, "client_error"
            message = f"method {request.method} is not passed on"
            allowed = own | {"Allow": ", ".join(sorted(METHODS))}
            return error_response(405, "method_not_allowed", message, headers=allowed)
        if request.path.rstrip("/") in REFUSED:
            trace.status, trace.outcome = 403, "client_error"
            message = f"{request.path} changes one engine: send it to each engine itself"
            return error_response(403, "forbidden", message, headers=own)
        if request.headers.get("Upgrade", "").lower() == "websocket":
            trace.status, trace.outcome = 400, "client_error"
            message = f"{request.path}: no WebSocket is passed on, connect to a decode engine"
            return error_response(400, "not_passed_on", message, headers=own)
        raw = await read_body(request, self.config.timeouts.body_s)
        if content_type := request.headers.get("Content-Type"):
            trace.headers.append((b"content-type", content_type.encode("utf-8", "surrogateescape")))
        return await self.send(trace, raw)

    async def send(self, trace: Trace, raw: bytes) -> web.StreamResponse:
        """``BadRequest`` if it cannot be told which engine is meant."""
        request, model, key = trace.request, None, self.config.session_key
        session = session_of(request, key)
        if request.content_type.startswith("multipart/"):
            # In a thread: a large body may hold what is almost a boundary a million times.
            model = await asyncio.to_thread(model_of_form, raw, request.headers["Content-Type"])
        elif raw:
            raw, (model, *named) = parse_other(as_utf8(raw), "model", *([key] if key else []))
            session = session or next(iter(named), None)
            if self.tenants is not None and trace.tenant is not None and request.path in CACHED:
                raw = self.tenants.salted(raw, trace.tenant)
        elif request.path == TOKENIZER_INFO:
            model = request.query.get("model")
        if raw or request.path == TOKENIZER_INFO:
            model = model_meant(model, self.selector.registry)
        response = response_of(request.path)
        check_response(response, trace.tenant)
        routed = Routed(
            session=session,
            model=model,
            previous_response=response,
            alone="passed on",
            tenant=trace.tenant,
        )
        if not raw:  # small, and it may be what makes room
            instance = self.selector.decode(routed)
            if isinstance(instance, Unavailable):
                return not_admitted(trace, instance)
            return await self._pass_on(trace, raw, instance)
        admitted = await self.admission.admit(routed)
        if not isinstance(admitted, Admitted):
            return not_admitted(trace, admitted)
        with admitted:
            return await self._pass_on(trace, raw, admitted.pair.decode)

    async def _pass_on(self, trace: Trace, raw: bytes, instance: Instance) -> web.StreamResponse:
        request = trace.request
        trace.decode, trace.order, trace.num_attempts = instance.instance_id, "passthrough", 1
        with self.legs.open(instance, "passthrough", 0) as leg:
            response = await instance.client.request(
                request.method.encode(),
                request[TARGET].encode(),
                trace.headers,
                raw,
                head_timeout_s=self.config.timeouts.answer_s,
                phase="answer",
            )
            if isinstance(response, Failure):
                return self._failed(trace, leg.failed(response))
            begun = await self.legs.begin(response, leg)
            if isinstance(begun, LegFailed):
                return self._failed(trace, begun)
            if isinstance(begun, Answer):
                return whole_answer(begun, trace)
            events = EventStream(trace, self.metrics, self.config.timeouts.idle_s)
            answered = await events.end(await events.relay(begun))
            leg.outcome = trace.outcome
            return answered

    def _failed(self, trace: Trace, failed: LegFailed) -> web.Response:
        trace.error = str(failed.failure)
        return engine_failed(trace, failed.failure, "the engine")

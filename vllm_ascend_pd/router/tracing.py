# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans: one for the request, one for each leg. Off unless there is an endpoint.

Without tracing, the client's own ``traceparent`` passes to the engines unchanged. With it, the
engines' spans are children of the legs'.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.trace import Trace

SERVICE = "vllm-pd-router"
_TRACE_HEADERS = (b"traceparent", b"tracestate")

LegHeaders = list[tuple[bytes, bytes]]


class Tracing:
    """Event loop thread; spans are sent by a thread of OpenTelemetry's own."""

    def __init__(self, provider: Any = None) -> None:
        """``provider`` is a ``TracerProvider``; ``None`` traces nothing."""
        self._provider = provider
        if provider is not None:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import (
                TraceContextTextMapPropagator,
            )

            self._trace = trace
            self._tracer = provider.get_tracer(SERVICE)
            self._propagator = TraceContextTextMapPropagator()

    def request(self, trace: Trace) -> AbstractContextManager[None]:
        """Around a client's request."""
        return nullcontext() if self._provider is None else self._request(trace)

    def leg(
        self, trace: Trace, name: str, instance: Instance
    ) -> AbstractContextManager[LegHeaders]:
        """Around a leg; yields the headers for its engine."""
        if self._provider is None:
            return nullcontext(trace.headers)
        return self._leg(trace, name, instance)

    def close(self) -> None:
        if self._provider is not None:
            self._provider.shutdown()

    @contextmanager
    def _request(self, trace: Trace) -> Iterator[None]:
        request = trace.request
        carrier = {
            name: request.headers[name]
            for name in ("traceparent", "tracestate")
            if name in request.headers
        }
        resource = request.match_info.route.resource
        # Backends keep all names, and those of paths that are only passed on are clients' own.
        route = request.path if resource is None else resource.canonical
        span = self._tracer.start_span(
            f"{request.method} {route}",
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            attributes={"http.request.method": request.method, "url.path": request.path},
        )
        trace.span = span
        try:
            yield
        finally:
            span.set_attributes(
                {
                    "vllm_pd.request_id": trace.request_id,
                    "vllm_pd.outcome": trace.outcome,
                    "vllm_pd.order": trace.order,
                    "vllm_pd.attempts": trace.num_attempts,
                    "http.response.status_code": trace.status,
                }
            )
            if trace.ttft_s is not None:
                span.set_attribute("gen_ai.server.time_to_first_token", trace.ttft_s)
            if trace.outcome not in ("ok", "client_error"):
                span.set_status(self._trace.StatusCode.ERROR, trace.error or trace.outcome)
            span.end()

    @contextmanager
    def _leg(self, trace: Trace, name: str, instance: Instance) -> Iterator[LegHeaders]:
        context = self._trace.set_span_in_context(trace.span)
        span = self._tracer.start_span(
            name,
            context=context,
            kind=self._trace.SpanKind.CLIENT,
            attributes={"vllm_pd.instance": instance.instance_id, "server.url": instance.spec.url},
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        sent = [header for header in trace.headers if header[0].lower() not in _TRACE_HEADERS]
        sent += [(key.encode(), value.encode()) for key, value in carrier.items()]
        try:
            yield sent
        finally:
            span.end()


def make_tracing(endpoint: str | None) -> Tracing:
    """Spans go to an OTLP/HTTP endpoint; ``ConfigError`` if OpenTelemetry is not installed."""
    if endpoint is None:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        packages = "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        message = f"--otlp-endpoint: pip install {packages}"
        raise ConfigError(message) from e
    provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)

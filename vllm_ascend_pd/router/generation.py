# SPDX-License-Identifier: Apache-2.0
"""Requests that go over a prefill and a decode engine, one prompt each or a batch of chats."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from vllm_ascend_pd.router.answers import error_response, not_admitted
from vllm_ascend_pd.router.apis import BATCH, CHAT, COMPLETIONS, GENERATE, INVOCATIONS
from vllm_ascend_pd.router.bodies import (
    BadRequest,
    Batch,
    Body,
    as_utf8,
    invoked,
    parse,
    split_batch,
)
from vllm_ascend_pd.router.incoming import (
    REQUEST_ID,
    BodyError,
    is_request_id,
    read_body,
    session_of,
)
from vllm_ascend_pd.router.models import model_meant
from vllm_ascend_pd.router.policies.base import Routed
from vllm_ascend_pd.router.prefilled import NumTokens
from vllm_ascend_pd.router.prefix.tokenizer import Tokenizer
from vllm_ascend_pd.router.relay import Job
from vllm_ascend_pd.router.selection import Unavailable
from vllm_ascend_pd.router.tenants import check_response, more_in_progress
from vllm_ascend_pd.router.trace import Trace

if TYPE_CHECKING:
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.passthrough import Passthrough
    from vllm_ascend_pd.router.planned_roles import PlannedRoles
    from vllm_ascend_pd.router.relay import Relay
    from vllm_ascend_pd.router.selection import Selector
    from vllm_ascend_pd.router.tenants import Tenants
    from vllm_ascend_pd.router.tokens import PromptLengths
    from vllm_ascend_pd.router.tracing import LegHeaders

BATCH_AT_ONCE = 64
"""Chats of one batch that are in progress at a time."""
MAX_CHATS = 4096
"""Of a batch."""
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
"""What is invoked, whatever the body says."""
_OF_ONE_CHAT = (
    "kv_transfer_params",
    "metrics",
    "prompt_logprobs",
    "prompt_text",
    "prompt_token_ids",
)


@dataclass(slots=True)
class Generation:
    """Event loop thread."""

    relay: Relay
    selector: Selector
    passthrough: Passthrough
    lengths: PromptLengths
    config: RouterConfig
    tenants: Tenants | None
    plan: PlannedRoles | None = None
    tokenizer: Tokenizer = field(default_factory=Tokenizer)

    async def serve(self, trace: Trace) -> web.StreamResponse:
        request, path = trace.request, trace.request.path
        if request.content_type != "application/json":  # a page sends others without a preflight
            raise BadRequest("Unsupported Media Type: Only 'application/json' is allowed")
        raw = as_utf8(await read_body(request, self.config.timeouts.body_s))
        trace.headers.append((b"content-type", b"application/json"))
        if path == INVOCATIONS:
            api, raw = invoked(raw, request.headers.get(ADAPTER))
            if api is None:
                return await self._whole(trace, raw, "messages or prompt")
            path = api
        if path != BATCH:
            body = parse(path, raw)
            if body.path in (COMPLETIONS, CHAT, GENERATE):
                _name_as_told(trace, body.string("request_id"))
            return await self._one(trace, body)
        batch = split_batch(raw)
        if isinstance(batch, str):
            return await self._whole(trace, raw, batch)
        self._check_size(batch)
        _name_as_told(trace, batch.string("request_id"))
        most = min(len(batch.chats), BATCH_AT_ONCE)
        with more_in_progress(trace.tenant, most - 1) as num_more:
            return await self._batch(trace, batch, 1 + num_more)

    async def _whole(self, trace: Trace, raw: bytes, field: str) -> web.StreamResponse:
        """To one engine, as it is; ``field``: why."""
        if trace.tenant is not None:  # nobody would charge or salt it
            message = f"'{field}': a tenant's {trace.request.path} is not passed whole to an engine"
            raise BadRequest(message, field)
        return await self.passthrough.send(trace, raw)

    def _check_size(self, batch: Batch) -> None:
        """Chats in progress hold no more than one body may."""
        num, most = len(batch.chats), self.config.max_body_bytes
        if num > MAX_CHATS:
            raise BodyError(413, f"a batch of {num} chats; at most {MAX_CHATS} are accepted")
        if min(num, BATCH_AT_ONCE) * batch.num_common_bytes > most:
            message = (
                f"each of {num} chats has the batch's other fields, {batch.num_common_bytes} bytes"
            )
            raise BodyError(413, f"{message}: more than this router accepts")
        parse(CHAT, batch.body(0))  # what is wrong with those fields is told before any is sent

    async def _one(self, trace: Trace, body: Body) -> web.StreamResponse:
        model = model_meant(body.model, self.selector.registry)
        check_response(body.previous_response, trace.tenant)
        key = self.config.session_key
        routed = Routed(
            self.lengths.estimate(body.model, body.prompt),
            body.num_max_tokens,
            session_of(trace.request, key) or (body.string(key) if key else None),
            model=model,
            previous_response=body.previous_response,
            alone=body.decode_only,
            tenant=trace.tenant,
        )
        if self.tenants is not None and trace.tenant is not None:
            self.tenants.add_salt(body, trace.tenant)
            body.tenant = trace.tenant.name
            body.drop("stream_interval")  # each piece of a stream is a token then, and is counted
        if self.selector.policy.needs_token_ids:
            await self._find_token_ids(body, routed, trace.headers)
        if self.tenants is not None and (refused := self.tenants.charge(routed)):
            return not_admitted(trace, refused)
        trace.model = body.model or ""
        job = Job(body, routed, trace)
        try:
            return await self.relay.serve(job)
        finally:
            routed.num_prompt_tokens = trace.num_prompt_tokens or routed.num_prompt_tokens
            if self.tenants is not None:
                self._settle(self.tenants, job)
            if self.plan is not None:
                self._plan_for(self.plan, routed, trace)

    def _settle(self, tenants: Tenants, job: Job) -> None:
        """At its end, which for one in the background is yet to come."""
        routed, tenant = job.routed, job.trace.tenant
        assert tenant is not None

        def ended(computing: asyncio.Task[NumTokens]) -> None:
            tenant.num_requests -= 1
            told = NumTokens() if computing.cancelled() else computing.result()
            routed.num_prompt_tokens = told.prompt or routed.num_prompt_tokens
            tenants.settle(routed, job.body.num_max_tokens if told.answer is None else told.answer)

        if job.background is not None:
            tenant.num_requests += 1
            job.background.add_done_callback(ended)
        elif job.body.is_background and job.trace.outcome == "disconnected":
            tenants.settle(routed, job.body.num_max_tokens)  # the engine may go on with it
        else:
            tenants.settle(routed, _num_tokens_to_pay(job.trace))

    def _plan_for(self, plan: PlannedRoles, routed: Routed, trace: Trace) -> None:
        answering = self.selector.registry.get(trace.decode)
        if trace.status == 200 and answering is not None and plan.model in answering.models:
            plan.saw(trace.started, routed.num_prompt_tokens, trace.num_answer_tokens)

    async def _find_token_ids(self, body: Body, routed: Routed, headers: LegHeaders) -> None:
        instance = self.selector.to_ask(routed.model)
        is_of_adapter = (
            not isinstance(instance, Unavailable) and body.model in instance.adapter_names
        )
        routed.has_own_blocks = body.says("cache_salt") or is_of_adapter
        if body.decode_only is None and not isinstance(instance, Unavailable):
            routed.token_ids = await self.tokenizer.token_ids(body, instance, headers)
            if routed.token_ids is not None:
                routed.num_prompt_tokens = len(routed.token_ids)

    async def _batch(self, trace: Trace, batch: Batch, num_at_once: int) -> web.StreamResponse:
        """Each chat goes its own way; the first that fails is the answer to all."""
        turns = asyncio.Semaphore(num_at_once)
        others = [(name, value) for name, value in trace.headers if name != REQUEST_ID]
        traces = [
            Trace(
                trace.request,
                f"{trace.request_id}-{i}",
                tenant=trace.tenant,
                counts_tokens=trace.counts_tokens,
            )
            for i in range(len(batch.chats))
        ]

        async def answer(index: int, own: Trace) -> web.Response:
            async with turns:
                own.headers = [*others, (REQUEST_ID, own.request_id.encode())]
                response = await self._one(own, parse(CHAT, batch.body(index)))
                assert isinstance(response, web.Response)
                return response

        tasks = [asyncio.ensure_future(answer(*one)) for one in enumerate(traces)]
        try:
            for answered in asyncio.as_completed(tasks):
                response = await answered
                if response.status != 200:
                    break
            else:
                response = _merge([task.result() for task in tasks], trace)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _fold(traces, trace)
        response.headers["x-request-id"] = trace.request_id
        trace.num_bytes = len(response.body) if isinstance(response.body, bytes) else 0
        trace.status = response.status
        ended = {one.outcome for one in traces if one.status == trace.status} or {"failed"}
        trace.outcome = ended.pop()
        return response


def _name_as_told(trace: Trace, told: str | None) -> None:
    """By the body, which counts for vLLM where there is no header."""
    has_header = "x-request-id" in trace.request.headers
    if told is not None and not has_header and is_request_id(told):
        trace.request_id = told
        others = [(name, value) for name, value in trace.headers if name != REQUEST_ID]
        trace.headers = [*others, (REQUEST_ID, told.encode())]


def _num_tokens_to_pay(trace: Trace) -> int | None:
    """Of the answer; ``None``: no engine has taken the request. One that D refuses P may have."""
    is_refused = trace.outcome == "client_error" and trace.num_prompt_tokens is None
    if not trace.num_attempts or is_refused:
        return None
    return trace.num_answer_tokens


def _merge(answers: list[web.Response], trace: Trace) -> web.Response:
    """One answer with a choice for each chat, as vLLM writes it."""
    try:
        chats = [msgspec.json.decode(answer.body, type=dict[str, Any]) for answer in answers]  # type: ignore[arg-type]
        merged = chats[0] | {"id": f"chatcmpl-{trace.request_id}"}
        merged |= {name: None for name in _OF_ONE_CHAT if name in merged}
        merged["choices"] = [{**chat["choices"][0], "index": i} for i, chat in enumerate(chats)]
        merged["usage"] = {
            name: sum(chat["usage"][name] for chat in chats)
            for name in ("prompt_tokens", "total_tokens", "completion_tokens")
        }
    except (msgspec.MsgspecError, LookupError, TypeError) as e:
        return error_response(502, "protocol", f"an engine's answer is not understood: {e!r}")
    body = msgspec.json.encode(merged)
    return web.Response(body=body, content_type="application/json")


def _fold(traces: list[Trace], trace: Trace) -> None:
    """The story of a batch is that of its chats."""
    for name in ("model", "order", "prefill", "decode"):
        told = dict.fromkeys(getattr(one, name) for one in traces)
        setattr(trace, name, ",".join(filter(None, told)))
    trace.num_attempts = sum(one.num_attempts for one in traces)
    trace.num_answer_tokens = sum(one.num_answer_tokens for one in traces)
    trace.num_moves = sum(one.num_moves for one in traces)
    trace.stages = [stage for one in traces for stage in one.stages]
    trace.error = next((one.error for one in traces if one.error), "")

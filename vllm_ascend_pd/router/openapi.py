# SPDX-License-Identifier: Apache-2.0
"""The router's API as an OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_ascend_pd import __version__, operating, registration
from vllm_ascend_pd.router.apis import (
    BATCH,
    CHAT,
    COMPLETIONS,
    GENERATE,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
)
from vllm_ascend_pd.router.config import ORDERS
from vllm_ascend_pd.router.passthrough import ENGINE_PATHS

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
ONE_OR_MORE: Schema = {"type": "integer", "minimum": 1}
LIMIT: Schema = {"type": ["integer", "null"], "minimum": 1}
MODEL: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
STREAM_OPTIONS: Schema = {"type": ["object", "null"], "properties": {"include_usage": FLAG}}
GENERATION_ERRORS = (400, 401, 404, 408, 413, 422, 429, 502, 503, 504, 508)


def _list(items: Schema, at_least: int = 0) -> Schema:
    return {"type": "array", "items": items} | ({"minItems": at_least} if at_least else {})


def _object(required: Schema, **optional: Schema) -> Schema:
    """Of these fields, and any other."""
    return {"type": "object", "required": list(required), "properties": required | optional}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


TEXT: Schema = {"type": "string", "minLength": 1}
IDS = _list({"type": "integer", "minimum": 0}, 1)
CHAT_MESSAGES = _list(_object({"role": STRING}), 1)
ERROR = _object({"message": STRING, "type": STRING, "param": MODEL, "code": INTEGER})
ID: Schema = {"type": "string", "pattern": f"^{registration.NAME}$"}
ID_PARAMETER: Schema = {"name": "instance_id", "in": "path", "required": True, "schema": ID}
INSTANCES = _list({"$ref": "#/components/schemas/InstanceStatus"})
SAMPLED = {"model": MODEL, "stream": FLAG, "n": LIMIT, "stream_options": STREAM_OPTIONS}
INVOCATION: Schema = {
    "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Completion", "Chat")]
}

SCHEMAS: dict[str, Schema] = {
    "Completion": _object(
        {"prompt": {"anyOf": [TEXT, IDS, _list(TEXT, 1), _list(IDS, 1)]}},
        max_tokens=LIMIT,
        **SAMPLED,
    ),
    "Chat": _object(
        {"messages": CHAT_MESSAGES}, max_tokens=LIMIT, max_completion_tokens=LIMIT, **SAMPLED
    ),
    "Batch": _object({"messages": _list(CHAT_MESSAGES, 1)}, model=MODEL, max_tokens=LIMIT),
    "Response": _object(
        {"input": {"anyOf": [STRING, _list(OBJECT)]}},
        model=MODEL,
        max_output_tokens=LIMIT,
        stream=FLAG,
        store=FLAG,
        background=FLAG,
    ),
    "Message": _object(
        {"messages": CHAT_MESSAGES, "max_tokens": ONE_OR_MORE},
        model=MODEL,
        stream=FLAG,
    ),
    "Generate": _object(
        {"token_ids": IDS, "sampling_params": _object({}, max_tokens=LIMIT, n=ONE_OR_MORE)},
        model=MODEL,
        stream=FLAG,
        stream_options=STREAM_OPTIONS,
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_object({"id": STRING}))}),
    "Error": _object({"error": ERROR}),
    "Status": _object(
        {
            "version": STRING,
            "policy": STRING,
            "order": {"enum": list(ORDERS)},
            "num_workers": ONE_OR_MORE,
            "in_progress": COUNT,
            "queued": COUNT,
            "degraded": _map({"enum": ["no_prefill", "no_decode", "no_partner", "unavailable"]}),
            "requests": _map(INTEGER),
            "instances": _list(OBJECT),
            "timelines": _list(OBJECT),
            "break_even_tokens": _map(INTEGER),
            "answers_per_s": NUMBER,
            "prefix_tokens": _object({"expected": INTEGER, "cached": INTEGER}),
        },
        ttft_mean_s={"type": ["number", "null"]},
        tenant={"type": ["string", "null"]},
    ),
    "Health": _object({"status": {"enum": ["ok", "degraded"]}}),
    "Event": _object({"data": STRING}),
    **msgspec.json.schema_components(
        [
            *(registration.Registration, registration.InstanceStatus, registration.Registered),
            *(registration.DrainOrder, registration.RoleOrder),
            *(operating.RunningRequests, operating.MoveOrder, operating.MoveReport),
        ],
        ref_template="#/components/schemas/{name}",
    )[1],
}


def _content(schema: Schema | str, kind: str = "application/json") -> Schema:
    named = {"$ref": f"#/components/schemas/{schema}"} if isinstance(schema, str) else schema
    return {kind: {"schema": named}}


def _answer(description: str, content: Schema | None = None) -> Schema:
    return {"description": description} | ({"content": content} if content else {})


def _operation(name: str, summary: str, answers: dict[int, Schema], *errors: int) -> Schema:
    responses = {str(status): answer for status, answer in answers.items()}
    for status in errors:
        kind = "Unavailable" if status in (429, 503) else "Error"
        responses[str(status)] = {"$ref": f"#/components/responses/{kind}"}
    return {"operationId": name, "summary": summary, "responses": responses}


def _takes(schema: Schema | str, *, required: bool = True) -> Schema:
    return {"requestBody": {"required": required, "content": _content(schema)}}


def _generation(name: str, summary: str, schema: Schema | str, *, streams: bool = True) -> Schema:
    content = _content(OBJECT) | (_content("Event", "text/event-stream") if streams else {})
    answers = {200: _answer("The answer of the decode engine, whole or as events", content)}
    return {"post": _operation(name, summary, answers, *GENERATION_ERRORS) | _takes(schema)}


def _open(name: str, summary: str, content: Schema | None = None, *errors: int) -> Schema:
    """For anybody, without a key."""
    operation = _operation(name, summary, {200: _answer(summary, content)}, *errors)
    return {"get": operation | {"security": []}}


def _for_clients(name: str, summary: str, content: Schema, *errors: int) -> Schema:
    return {"get": _operation(name, summary, {200: _answer(summary, content)}, 401, *errors)}


def _registry() -> dict[str, Schema]:
    security: Schema = {"security": [{}, {"registration": []}]}
    instances = {200: _answer("Every engine", _content(INSTANCES))}
    known = {200: _answer("Known; send it again after heartbeat_s", _content("Registered"))}
    one = registration.PATH + "/{instance_id}"
    epoch: Schema = {
        "name": "epoch",
        "in": "query",
        "schema": STRING,
        "description": "Of the engine that leaves: another one of that id stays",
    }
    gone = {204: _answer("It gets no new requests")}
    moved = _list({"$ref": "#/components/schemas/MoveReport"})
    moves = {200: _answer("What became of it", _content(moved))}
    refused = (400, 403, 404, 408, 504)
    move = _operation("move", "Have a running request go on elsewhere", moves, *refused)
    answered = {200: _answer("Requests that engines answer now", _content("RunningRequests"))}
    requests = _operation("requests", "Every request in progress", answered, 403)
    named: Schema = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._:+=@-]{0,127}$"}
    request_id: Schema = {"name": "request_id", "in": "path", "required": True, "schema": named}
    back = {204: _answer("It gets requests")}
    drain = _operation("drain", "No new requests; those in progress move", gone, 400, 403, 404, 408)
    used = {204: _answer("It is used for this only")}
    role = _operation("role", "Prompts or answers", used, 400, 403, 404, 408, 409)
    undo = _operation("undo_drain", "Use it as before", back, 400, 403, 404)
    leave = _operation("leave", "An engine takes its leave", gone, 400, 403)
    put = _operation(
        "register", "An engine registers, or renews", known, 400, 403, 408, 409, 413, 429
    )
    return {
        operating.REQUESTS: {"get": requests | security},
        operating.REQUESTS + "/{request_id}/move": {
            "parameters": [request_id],
            "post": move | security | _takes("MoveOrder", required=False),
        },
        registration.PATH: {
            "get": _operation("registry", "Every engine, for engines", instances, 403) | security
        },
        one + "/role": {
            "parameters": [ID_PARAMETER],
            "put": role | security | _takes("RoleOrder"),
        },
        one + "/drain": {
            "parameters": [ID_PARAMETER],
            "put": drain | security | _takes("DrainOrder", required=False),
            "delete": undo | security,
        },
        one: {
            "parameters": [ID_PARAMETER],
            "put": put | security | _takes("Registration"),
            "delete": leave | security | {"parameters": [epoch]},
        },
    }


def document() -> Schema:
    """Of this version."""
    health = _content("Health")
    ping = _open("ping", "The same as /health, for SageMaker", health, 503)
    ping["post"] = ping["get"] | {"operationId": "post_ping"}
    paths = {
        COMPLETIONS: _generation("completions", "Complete a prompt", "Completion"),
        CHAT: _generation("chat", "Answer in a chat", "Chat"),
        BATCH: _generation("batch", "Answer in several chats", "Batch", streams=False),
        RESPONSES: _generation("responses", "Respond to an input", "Response"),
        MESSAGES: _generation("messages", "Answer as Anthropic's API does", "Message"),
        GENERATE: _generation("generate", "Go on with token ids", "Generate"),
        INVOCATIONS: _generation("invoke", "A completion or a chat, for SageMaker", INVOCATION),
        "/v1/models": _for_clients(
            "models", "Models that decode engines serve now", _content("Models"), 503
        ),
        "/health": _open("health", "Whether a request would be answered now", health, 503),
        "/health/ready": _open("ready", "The same as /health", health, 503),
        "/health/startup": _open("startup", "Whether each engine was asked once", health, 503),
        "/ping": ping,
        "/health/live": _open("alive", "Whether the router runs", health),
        "/load": _open("load", "Requests in progress", _content(_object({"server_load": COUNT}))),
        "/metrics": _open("metrics", "For Prometheus", _content(STRING, "text/plain")),
        "/version": _open("version", "Of the router", _content(_object({"version": STRING}))),
        "/": _open("page", "Shows instances, load, errors", _content(STRING, "text/html")),
        "/openapi.json": _open("openapi", "This document", _content(OBJECT)),
        "/status": _for_clients("status", "What the page shows", _content("Status")),
        "/instances": _for_clients(
            "instances", "Every engine, however it was found", _content(INSTANCES)
        ),
        **_registry(),
    }
    retry = {"Retry-After": {"schema": INTEGER}}
    error = _answer("As OpenAI and vLLM write errors", _content("Error"))
    client = "One of --api-keys-file; without that option none is needed"
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vllm-pd router",
            "version": __version__,
            "summary": "OpenAI's API in front of prefill and decode engines.",
            "description": "Fields that are not listed are the engines'. Any other path below"
            f" /v1/, and {', '.join(ENGINE_PATHS)}, goes to one decode engine as it is.",
        },
        "paths": paths,
        "security": [{}, {"client": []}],
        "components": {
            "securitySchemes": {
                "client": {**bearer, "description": client},
                "registration": {**bearer, "description": "The one of --registration-token-file"},
            },
            "schemas": SCHEMAS,
            "responses": {
                "Error": error,
                "Unavailable": error | {"headers": retry},
            },
        },
    }

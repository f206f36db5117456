# SPDX-License-Identifier: Apache-2.0
"""The router against its own OpenAPI document: whatever that allows, and whatever it forbids."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from tests.router.harness import Deployment, deployed
from tests.router.scripted_answers import MAX_SAMPLES
from vllm_ascend_pd.router.openapi import document
from vllm_ascend_pd.router.passthrough import ENGINE_PATHS

DOCUMENT = document()
MAX_TOKENS = 32
METHODS = ("get", "put", "post", "delete")
OPERATIONS = [(p, m) for p, item in DOCUMENT["paths"].items() for m in METHODS if m in item]
CASES = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, method in OPERATIONS
    for mode in GenerationMode
    # Where nothing is sent, nothing can be wrong.
    if mode is GenerationMode.POSITIVE
    or "requestBody" in DOCUMENT["paths"][path][method]
    or "parameters" in DOCUMENT["paths"][path]
]

load_all_checks()
ALL_CHECKS = CHECKS.get_all()


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """In a thread of its own, since schemathesis' client blocks."""
    started, stop = threading.Event(), asyncio.Event()
    found: list[Deployment] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with deployed(1, 2, max_tokens=MAX_TOKENS) as d:
            found.append(d)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(20)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    assert not thread.is_alive()
    loop.close()


@pytest.fixture(scope="module")
def schemas(deployment: Deployment) -> dict[GenerationMode, Any]:
    """As served, with addresses that a router without a token takes; and what is allowed ends
    soon. To ask for more is not wrong.
    """
    document = requests.get(f"{deployment.url}/openapi.json", timeout=10).json()
    parts = document["components"]["schemas"]
    parts["Registration"]["properties"]["url"]["pattern"] = r"^http://127\.0\.0\.1:[1-9]\d{0,3}$"
    negative = schemathesis.openapi.from_dict(copy.deepcopy(document))
    for name in ("Completion", "Chat", "Batch", "Response", "Message", "Generate"):
        fields = parts[name]["properties"]
        fields = fields.get("sampling_params", {}).get("properties", fields)
        fields.get("n", {})["maximum"] = MAX_SAMPLES
        for field in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            fields.get(field, {})["maximum"] = MAX_TOKENS
    positive = schemathesis.openapi.from_dict(document)
    return {GenerationMode.POSITIVE: positive, GenerationMode.NEGATIVE: negative}


def test_document_is_served_with_the_version(deployment: Deployment) -> None:
    served = requests.get(f"{deployment.url}/openapi.json", timeout=10).json()
    version = requests.get(f"{deployment.url}/version", timeout=10).json()["version"]
    assert served["info"]["version"] == version
    assert served == json.loads(json.dumps(DOCUMENT))


def test_every_route_is_described(deployment: Deployment) -> None:
    described = {(path, method.upper()) for path, method in OPERATIONS}
    served = {
        (route.resource.canonical, route.method)
        for route in deployment.server.router.application().router.routes()
        if route.resource is not None
        and route.method not in ("*", "HEAD")
        and route.resource.canonical not in ENGINE_PATHS
    }
    assert served == described


def with_integers(value: Any) -> Any:
    """JSON Schema takes ``1.0`` for an integer; what reads JSON into typed fields does not."""
    if isinstance(value, dict):
        return {key: with_integers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_integers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_operation(
    deployment: Deployment,
    schemas: dict[GenerationMode, Any],
    path: str,
    method: str,
    mode: GenerationMode,
) -> None:
    operation = schemas[mode][path][method]

    @given(case=operation.as_strategy(mode))
    @settings(
        max_examples=50 if operation.body else 10,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Case) -> None:
        case.body = with_integers(case.body)
        case.call_and_validate(base_url=deployment.url, checks=ALL_CHECKS)

    check()

# SPDX-License-Identifier: Apache-2.0
"""vLLM's own proxy, written for another connector, drives ``vllm serve`` engines of ours."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.servers import Server, free_port
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

PROXY = Path(__file__).parent / "third_party" / "toy_proxy_server.py"
SHORT = "Hello, my name is"
LONG = " ".join(f"This is sentence {i} of a story." for i in range(150))

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Deployment:
    proxy: Server
    producer: ForkedEngine
    consumer: ForkedEngine
    single: ForkedEngine


@pytest.fixture(scope="module")
def deployment(
    launched: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("toy-proxy")
    model = make_tiny_model(folder / "model").path

    def start(name: str, role: str | None) -> ForkedEngine:
        config = {"kv_connector": "InEngine", "kv_port": 0, "kv_role": role}
        options = ["--kv-transfer-config", json.dumps(config)] if role else []
        engine = launched.engine(name, model, folder, free_port(), *options)
        engine.start()
        return engine

    producer, consumer = start("producer", "kv_producer"), start("consumer", "kv_consumer")
    single, port = start("single", None), free_port()
    command = [sys.executable, str(PROXY), "--port", str(port)]
    command += ["--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1"]
    command += ["--prefiller-ports", producer.url.rpartition(":")[2]]
    command += ["--decoder-ports", consumer.url.rpartition(":")[2]]
    proxy = Server("proxy", command, port, "/healthcheck", folder / "proxy.log")
    try:
        for server in (producer, consumer, single, proxy):
            server.wait_ready()
        yield Deployment(proxy, producer, consumer, single)
    finally:
        proxy.stop()


def complete(server: Server | ForkedEngine, prompt: str, **options: Any) -> list[str]:
    """The texts of a non-streamed completion."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }
    response = requests.post(f"{server.url}/v1/completions", json=body, timeout=120)
    response.raise_for_status()
    return [choice["text"] for choice in response.json()["choices"]]


def stream(server: Server | ForkedEngine, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer; the stream must end with [DONE]."""
    with requests.post(f"{server.url}{path}", json=body, timeout=120, stream=True) as response:
        response.raise_for_status()
        lines = [line[len(b"data: ") :] for line in response.iter_lines() if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def metric(server: ForkedEngine, name: str) -> float:
    text = requests.get(f"{server.url}/metrics", timeout=30).text
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(f"vllm:pd_{name}") and not line.startswith("#")
    ]
    return sum(values)


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_completion_equals_single_engine(deployment: Deployment, prompt: str) -> None:
    before = metric(deployment.consumer, 'loads_total{engine="0"')
    got = complete(deployment.proxy, prompt)
    assert got == complete(deployment.single, prompt)
    assert metric(deployment.consumer, "load_bytes_total") > 0
    assert metric(deployment.consumer, "loads_total") > before


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_streamed_completion_equals_single_engine(deployment: Deployment, prompt: str) -> None:
    body = {
        "model": "tiny",
        "prompt": "Streamed. " + prompt,
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    # A slow reader gets several tokens in one event, so the events themselves may differ.
    texts = [
        "".join(event["choices"][0]["text"] for event in stream(server, "/v1/completions", body))
        for server in (deployment.proxy, deployment.single)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_equals_single_engine(deployment: Deployment, streamed: bool) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Chat {streamed}: " + LONG[:800]}],
        "max_completion_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": streamed,
    }
    answers: list[str] = []
    for server in (deployment.proxy, deployment.single):
        if streamed:
            events = stream(server, "/v1/chat/completions", body)
            deltas = [event["choices"][0]["delta"].get("content") for event in events]
            answers.append("".join(delta for delta in deltas if delta))
        else:
            response = requests.post(
                f"{server.url}/v1/chat/completions", json=body, timeout=120
            ).json()
            answers.append(response["choices"][0]["message"]["content"])
    assert answers[0] == answers[1]


def test_several_samples_equal_single_engine(deployment: Deployment) -> None:
    prompt = "Three samples. " + LONG[:1500]
    options = {"n": 3, "temperature": 0.8, "seed": 7}
    assert complete(deployment.proxy, prompt, **options) == complete(
        deployment.single, prompt, **options
    )


def test_producer_gives_every_lease_back(deployment: Deployment) -> None:
    complete(deployment.proxy, "Another prompt. " + LONG[:700])
    # The producer counts what was released when its engine steps next.
    complete(deployment.producer, "A step.")
    granted = metric(deployment.producer, "leases_granted_total")
    released = metric(deployment.producer, "leases_closed_total")
    assert granted > 0
    assert released == granted


def test_engines_do_not_warn_that_transfer_parameters_are_ignored(deployment: Deployment) -> None:
    complete(deployment.proxy, "Quiet. " + SHORT)
    for server in (deployment.producer, deployment.consumer):
        assert "Disabling KVTransfer" not in server.log.read_text()


@pytest.mark.parametrize(
    "garbage",
    [
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"vllm_xargs": {"kv_transfer_params": ["do_remote_prefill"]}},
        {"kv_transfer_params": {"do_remote_prefill": 7, "remote_host": [], "remote_port": "x"}},
        {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True, "x": None}},
        {"kv_transfer_params": "x"},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("role", ["producer", "consumer"])
def test_kv_transfer_params_of_a_wrong_type_do_not_end_the_engine(
    deployment: Deployment, role: str, garbage: dict[str, Any]
) -> None:
    server: ForkedEngine = getattr(deployment, role)
    body = {"model": "tiny", "prompt": "Garbage. " + SHORT, "max_tokens": 4, **garbage}
    response = requests.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code in (200, 400, 422), response.text
    prompt = f"After the garbage of {role}. " + SHORT
    assert complete(server, prompt) == complete(deployment.single, prompt)

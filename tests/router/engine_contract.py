# SPDX-License-Identifier: Apache-2.0
"""What the router relies on in an engine, as checks on its URL."""

from __future__ import annotations

import json
import secrets
from typing import Any

import requests

from vllm_ascend_pd.router.apis import has_token

PROMPT = "The contract of an engine. " * 40
PATIENCE_S = 300
"""An engine's first chat on a busy machine."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def check_producer(url: str) -> dict[str, Any]:
    """Answers for operators and for prefill legs; the parameters for a consumer."""
    assert requests.get(f"{url}/health", timeout=10).status_code == 200
    models = requests.get(f"{url}/v1/models", timeout=10).json()
    assert [model["id"] for model in models["data"]] == ["tiny"]
    assert requests.get(f"{url}/metrics", timeout=10).status_code == 200
    tokens = requests.post(
        f"{url}/tokenize", json={"model": "tiny", "prompt": PROMPT}, timeout=10
    ).json()["tokens"]
    assert all(isinstance(token, int) for token in tokens)
    answer = _complete(url, kv_transfer_params=PREFILL, max_tokens=1).json()
    params: dict[str, Any] = answer["kv_transfer_params"]
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert {"remote_engine_id", "remote_host", "remote_port", "remote_key", "transfer_id"} <= set(
        params
    )
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    return params


def check_release(url: str) -> None:
    """What a producer keeps under an id is kept until somebody who knows the id gives it back."""
    chosen, early = secrets.token_hex(16), secrets.token_hex(16)
    assert _prefill(url, chosen)["transfer_id"] == chosen
    assert _prefill(url, chosen) is None  # in use
    _release(url, chosen)
    assert _prefill(url, chosen)["transfer_id"] == chosen
    _release(url, chosen)
    _release(url, early)
    assert _prefill(url, early)["transfer_id"] == early  # for nobody, and no failure
    _release(url, early)


def check_consumer(url: str, params: dict[str, Any]) -> None:
    """Answers for decode legs: whole, streamed, several samples, chat, and a wrong request."""
    with_params = _complete(url, kv_transfer_params=params).json()
    alone = _complete(url).json()
    assert _texts(with_params) == _texts(alone)
    assert _counts(with_params["usage"]) == _counts(alone["usage"])

    streamed = _complete(url, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert streamed.headers["Transfer-Encoding"] == "chunked"
    assert streamed.content.endswith(b"data: [DONE]\n\n")
    events = [json.loads(e[6:]) for e in streamed.content.split(b"\n\n") if e[:7] == b"data: {"]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == _texts(alone)[0]
    assert _counts(events[-1]["usage"]) == _counts(alone["usage"])

    assert len(_texts(_complete(url, n=2, temperature=0.8, seed=1).json())) == 2

    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    answer = requests.post(f"{url}/v1/chat/completions", json=chat, timeout=PATIENCE_S).json()
    assert isinstance(answer["choices"][0]["message"]["content"], str)

    responses = {"model": "tiny", "input": PROMPT, "max_output_tokens": 4, "ignore_eos": True}
    answer = _post(url, "/v1/responses", **responses, request_id="resp_mine").json()
    assert answer["id"] == "resp_mine"
    assert answer["usage"]["output_tokens"] == 4
    events = _post(url, "/v1/responses", **responses, stream=True).content
    assert not has_token(events.partition(b"event: response.output")[0])
    assert has_token(events)
    streamed = _post(url, "/v1/messages", **{**chat, "stream": True})
    assert streamed.content.startswith(b"event: message_start\ndata: {")

    wrong = _complete(url, max_tokens="many")
    assert wrong.status_code == 400
    assert {"message", "type", "param", "code"} <= set(wrong.json()["error"])


def _prefill(url: str, transfer_id: str) -> Any:
    params = {**PREFILL, "transfer_id": transfer_id}
    answer = _complete(url, kv_transfer_params=params, max_tokens=1).json()
    return answer.get("kv_transfer_params")


def _release(url: str, transfer_id: str) -> None:
    params = {"release_transfer_id": transfer_id}
    answer = _complete(url, kv_transfer_params=params, max_tokens=1)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


def _complete(url: str, **fields: Any) -> requests.Response:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields}
    body["ignore_eos"] = True
    return requests.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)


def _post(url: str, path: str, **body: Any) -> requests.Response:
    return requests.post(url + path, json=body, timeout=PATIENCE_S)


def _counts(usage: dict[str, Any]) -> list[int]:
    return [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]


def _texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]

# SPDX-License-Identifier: Apache-2.0
"""A stream that goes on at a real ``vllm serve``: what its front end makes of the known tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import Launcher
from tests.e2e.servers import free_port
from vllm_ascend_pd.resume import ResumeKey
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_OUTPUT = 12
CHAT = {"messages": [{"role": "user", "content": "Tell me a very long story."}]}
COMPLETION = {"prompt": "Tell me a very long story."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seed": {"temperature": 0.9, "seed": 11, "ignore_eos": True},
    "json": {"structured_outputs": {"json": SCHEMA}},
}


@dataclass
class Stream:
    """All that a stream has said."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_first: int = 0
    """Tokens of its first chunk that has any."""
    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)


def read(
    url: str, body: dict[str, Any], began: Callable[[str, Stream], None] | None = None
) -> Stream:
    """All of it; ``began`` is told the id of the answer once it has tokens."""
    path = "chat/completions" if "messages" in body else "completions"
    sent = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": NUM_OUTPUT,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **body,
    }
    stream = Stream()
    with requests.post(f"{url}/v1/{path}", json=sent, stream=True, timeout=120) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            stream.error = chunk.get("error") or stream.error
            stream.usage = chunk.get("usage") or stream.usage
            for choice in chunk.get("choices", ()):
                prompt = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids")
                stream.prompt_token_ids = prompt or stream.prompt_token_ids
                token_ids = choice.get("token_ids") or []
                stream.num_first = stream.num_first or len(token_ids)
                stream.token_ids += token_ids
                stream.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                stream.finish_reason = choice["finish_reason"] or stream.finish_reason
                if began is not None and stream.token_ids:
                    began(chunk["id"], stream)
                    began = None
    return stream


@pytest.fixture(scope="module")
def url(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("resume")
    make_tiny_model(folder / "model")
    config = {"kv_connector": "InEngine", "kv_role": "kv_both", "kv_port": 0}
    options = ["--kv-transfer-config", json.dumps(config), "--max-model-len", "1024"]
    engine = launched.engine("resume", folder / "model", folder, free_port(), *options)
    engine.start()
    engine.wait_ready()
    return engine.url


def cut(stream: Stream, num_tokens: int) -> dict[str, Any]:
    known = stream.token_ids[:num_tokens]
    signed = ResumeKey(None).sign("cmpl-1", stream.prompt_token_ids, known)
    return {"kv_transfer_params": {"resume": signed.to_params()}}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_stream_that_was_cut_says_all_of_it_again_and_goes_on(
    url: str, body: dict[str, Any], sampling: str
) -> None:
    request = {**body, **SAMPLING[sampling]}
    whole = read(url, request)
    assert whole.prompt_token_ids
    for num_tokens in range(1, len(whole.token_ids) + 1):
        resumed = read(url, {**request, **cut(whole, num_tokens)})
        assert resumed.num_first >= num_tokens
        assert resumed.token_ids == whole.token_ids, num_tokens
        assert resumed.text == whole.text, num_tokens
        assert resumed.finish_reason == whole.finish_reason
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert resumed.usage[name] == whole.usage[name]


def test_stop_string_across_the_cut(url: str) -> None:
    plain = read(url, {**CHAT, "ignore_eos": True})
    middle = len(plain.text) // 2
    request = {**CHAT, "ignore_eos": True, "stop": [plain.text[middle : middle + 6]]}
    whole = read(url, request)
    assert whole.finish_reason == "stop"
    for num_tokens in range(1, len(whole.token_ids) + 1):
        resumed = read(url, {**request, **cut(whole, num_tokens)})
        assert (resumed.text, resumed.finish_reason) == (whole.text, "stop"), num_tokens


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_stream_that_is_refused_says_so_and_begins_nothing(url: str, body: dict[str, Any]) -> None:
    whole = read(url, {"prompt": "Tell me another story.", "ignore_eos": True})
    sent = {**body, **cut(whole, 3)}
    refused = read(url, sent)
    assert refused.error["code"] == 409
    assert refused.error["message"] == "kv_transfer_params.resume is refused: other_prompt"
    assert (refused.token_ids, refused.text) == ([], "")
    path = "chat/completions" if "messages" in body else "completions"
    whole_answer = requests.post(f"{url}/v1/{path}", json={"model": "tiny", **sent}, timeout=60)
    assert whole_answer.status_code == 409
    assert whole_answer.json()["error"]["message"] == refused.error["message"]

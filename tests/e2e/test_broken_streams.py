# SPDX-License-Identifier: Apache-2.0
"""Streams of real engines, one of which is killed within all of them: the router goes on with each
from the other engine, and the client gets what one engine gives."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import ROLES, routing, scraped, until
from tests.e2e.servers import free_port
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_TOKENS = 240
NUM_BEFORE = 12
"""Chunks that each client has when the engine is killed."""
PARSER = ("--tool-call-parser", "hermes")
CHAT = {"messages": [{"role": "user", "content": "Tell me a very long story."}]}
TEXT = {"prompt": "Tell me a very long story."}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "minLength": 150, "maxLength": 200}},
            "required": ["q"],
        },
    },
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: dict[str, dict[str, Any]] = {
    "completion": {**TEXT, **GREEDY},
    "token ids": {**TEXT, **GREEDY, **USAGE, "return_token_ids": True},
    "chat": {**CHAT, **GREEDY, **USAGE},
    "seed": {**CHAT, **GREEDY, "temperature": 0.9, "seed": 11},
    "penalties": {**TEXT, **GREEDY, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "regex": {**TEXT, **GREEDY, "structured_outputs": {"regex": "[a-z ]{150,230}"}},
    "tool": {
        **CHAT,
        **GREEDY,
        **USAGE,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    },
}


@dataclass
class Stream:
    """What a client has of one."""

    ids: set[str] = field(default_factory=set)
    num_chunks: int = 0
    text: str = ""
    calls: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    """``[DONE]``, or an error."""

    def add(self, data: bytes) -> None:
        chunk = {"ends": "[DONE]"} if data == b"[DONE]" else json.loads(data)
        if end := chunk.get("ends") or chunk.get("error"):
            self.ends.append(end)
            return
        self.num_chunks += 1
        self.ids.add(chunk["id"])
        if not chunk["choices"]:
            self.num_tokens.append(chunk["usage"]["completion_tokens"])
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            self.text += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self.calls += call["function"].get("name") or ""
                self.calls += call["function"].get("arguments") or ""
            self.token_ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])


def follow(url: str, body: dict[str, Any], stream: Stream, has_begun: threading.Event) -> Stream:
    path = "chat/completions" if "messages" in body else "completions"
    sent = {"model": "tiny", "stream": True, **body}
    with requests.post(f"{url}/v1/{path}", json=sent, stream=True, timeout=240) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line:
                stream.add(line.removeprefix(b"data: "))
            if stream.num_chunks == NUM_BEFORE or stream.ends:
                has_begun.set()
    return stream


def read(url: str, body: dict[str, Any]) -> Stream:
    return follow(url, body, Stream(), threading.Event())


@pytest.fixture(scope="module")
def engines(
    launched: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ForkedEngine]:
    folder = tmp_path_factory.mktemp("broken")
    make_tiny_model(folder / "model")
    made = {}
    for name in ("p0", "d0", "d1"):
        config = {"kv_connector": "InEngine", "kv_port": 0, "kv_role": ROLES[name[0]]}
        options = ["--kv-transfer-config", json.dumps(config)]
        options += ["--enable-auto-tool-choice", *PARSER]
        made[name] = launched.engine(name, folder / "model", folder, free_port(), *options)
    for name in ("p0", "d1"):
        made[name].start()
    for name in ("p0", "d1"):
        made[name].wait_ready()
    return made


def core_of(engine: ForkedEngine) -> int:
    """Process id of the engine's core, which its API server outlives for a moment."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(c.pid for c in children if "EngineCore" in "".join(c.cmdline()))


@pytest.mark.parametrize("victim", ["engine", "core"])
def test_streams_of_an_engine_that_is_killed_go_on(
    engines: dict[str, ForkedEngine], tmp_path: Path, victim: str
) -> None:
    dying, other = engines["d0"], engines["d1"]
    dying.start()
    expected = {name: read(other.url, body) for name, body in REQUESTS.items()}
    plain = expected["chat"].text
    stop = plain[len(plain) // 2 :][:6]
    bodies = {**REQUESTS, "stop string": {**CHAT, **GREEDY, "stop": [stop]}}
    expected["stop string"] = read(other.url, bodies["stop string"])
    bodies["logprobs"] = {**TEXT, **GREEDY, "logprobs": 1}
    dying.wait_ready()
    instances = [
        {"id": name, "url": engine.url, "role": "prefill" if name == "p0" else "decode"}
        for name, engine in engines.items()
    ]
    taken_on = scraped(other.url, "pd_resumes_total")
    with routing(tmp_path, instances[:2], *PARSER) as url, ThreadPoolExecutor(len(bodies)) as pool:
        began = {name: threading.Event() for name in bodies}
        streams = {
            name: pool.submit(follow, url, body, Stream(), began[name])
            for name, body in bodies.items()
        }
        for event in began.values():
            assert event.wait(120)
        os.killpg(dying.pid, signal.SIGSTOP)
        (listed,) = tmp_path.glob("*.json")
        listed.write_text(json.dumps({"instances": instances}))
        until(lambda: other.url in requests.get(f"{url}/instances", timeout=10).text)
        if victim == "engine":
            dying.kill()
        else:
            os.kill(core_of(dying), signal.SIGKILL)
            os.killpg(dying.pid, signal.SIGCONT)
        got = {name: stream.result() for name, stream in streams.items()}
        resumed = scraped(url, 'pd_router_resumes_total{kind="exact",outcome="ok"}')
        not_resumed = scraped(url, 'pd_router_not_resumed_total{cause="logprobs"}')
    dying.kill()
    refused = got.pop("logprobs")
    assert "message" in refused.ends[0]
    assert not_resumed == (victim == "engine")  # the core's death the API server tells itself
    assert resumed >= len(got) - 1  # one may have ended before
    for name, stream in got.items():
        one = expected[name]
        assert stream.ends == ["[DONE]"], name
        assert len(stream.ids) == 1, name
        assert (stream.text, stream.calls) == (one.text, one.calls), name
        assert stream.token_ids == one.token_ids, name
        assert stream.finish_reasons == one.finish_reasons, name
        assert stream.num_tokens == one.num_tokens, name
    assert scraped(other.url, "pd_resumes_total") == taken_on + resumed
    assert got["tool"].calls.startswith("look_up{")
    assert scraped(other.url, "num_requests_running") == 0

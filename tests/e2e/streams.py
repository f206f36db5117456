# SPDX-License-Identifier: Apache-2.0
"""Streams of clients, which are followed to their end and compared with those of one engine."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from tests.e2e.forked_engines import ForkedEngine

NUM_TOKENS = 240
NUM_BEFORE = 12
"""Chunks that each client has when all streams have begun. A busy host's have many tokens each."""
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
    reasoning: str = ""
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
            self.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or ():
                self.calls += call["function"].get("name") or ""
                self.calls += call["function"].get("arguments") or ""
            self.token_ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])


Streams = dict[str, Stream]


def read(
    url: str,
    body: dict[str, Any],
    has_begun: threading.Event | None = None,
    num_before: int = NUM_BEFORE,
) -> Stream:
    stream = Stream()
    path = "chat/completions" if "messages" in body else "completions"
    sent = {"model": "tiny", "stream": True, **body}
    with requests.post(f"{url}/v1/{path}", json=sent, stream=True, timeout=240) as response:
        assert response.status_code == 200, response.text
        for line in response.iter_lines():
            if line:
                stream.add(line.removeprefix(b"data: "))
            if has_begun is not None and (stream.num_chunks == num_before or stream.ends):
                has_begun.set()
    return stream


@contextlib.contextmanager
def begun(
    url: str,
    bodies: Mapping[str, dict[str, Any]],
    num_before: int = NUM_BEFORE,
    slow: Iterable[ForkedEngine] = (),
) -> Iterator[Callable[[], Streams]]:
    """A stream of each, all of which have begun; called, it waits for their ends. These engines are
    ``slow`` until then."""
    with ThreadPoolExecutor(len(bodies)) as pool, contextlib.ExitStack() as slowed:
        for engine in slow:
            slowed.enter_context(engine.slow())
        began = {name: threading.Event() for name in bodies}
        streams = {
            n: pool.submit(read, url, body, began[n], num_before) for n, body in bodies.items()
        }
        for event in began.values():
            assert event.wait(240)

        def ended() -> Streams:
            slowed.close()
            return {name: stream.result() for name, stream in streams.items()}

        yield ended


def read_all(url: str, bodies: Mapping[str, dict[str, Any]]) -> Streams:
    """All at once."""
    with begun(url, bodies) as ended:
        return ended()


def assert_whole(got: Streams, expected: Streams) -> None:
    """No client has noticed anything: each stream is what one engine gives."""
    for name, stream in got.items():
        one = expected[name]
        assert stream.ends == ["[DONE]"], name
        assert len(stream.ids) == 1, name
        assert (stream.text, stream.calls) == (one.text, one.calls), name
        assert stream.reasoning == one.reasoning, name
        assert stream.token_ids == one.token_ids, name
        assert stream.finish_reasons == one.finish_reasons, name
        assert stream.num_tokens == one.num_tokens, name

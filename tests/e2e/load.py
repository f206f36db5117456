# SPDX-License-Identifier: Apache-2.0
"""Requests that are in progress while something is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

STORY = " ".join(f"This is sentence {i} of a story." for i in range(150))
NUM_REQUESTS = 32


@dataclass(frozen=True)
class Answered:
    prompt: str
    text: str | None
    """``None`` if the stream broke after it had begun."""
    streamed: bool


class Load:
    """32 completions at once, half of them streams. All must be answered."""

    def __init__(self, url: str, tag: str) -> None:
        self._url = f"{url}/v1/completions"
        self._prompts = [f"{tag} {i}. " + STORY[: 300 + 20 * i] for i in range(NUM_REQUESTS)]
        self._barrier = threading.Barrier(NUM_REQUESTS + 1)
        self._pool = ThreadPoolExecutor(NUM_REQUESTS)
        self._futures = [self._pool.submit(self._one, i) for i in range(NUM_REQUESTS)]

    def start(self) -> None:
        self._barrier.wait()

    @property
    def is_running(self) -> bool:
        return not all(future.done() for future in self._futures)

    def _one(self, index: int) -> Answered:
        prompt, stream = self._prompts[index], index % 2 == 0
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 48,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        self._barrier.wait()
        with requests.post(self._url, json=body, timeout=120, stream=stream) as response:
            assert response.status_code == 200, response.text
            if not stream:
                return Answered(prompt, response.json()["choices"][0]["text"], False)
            events = [line[6:] for line in response.iter_lines() if line]
        if events[-1] != b"[DONE]":
            assert len(events) > 1, "it broke before its first token"
            assert "error" in json.loads(events[-1])
            return Answered(prompt, None, True)
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        return Answered(prompt, text, True)

    def check(self, alone: Callable[[str], str], *, may_break: bool = True) -> None:
        """Each answer is what ``alone`` says. Streams that had begun ``may_break``."""
        answers = [future.result() for future in self._futures]
        self._pool.shutdown()
        broken = [answer for answer in answers if answer.text is None]
        assert not broken or (may_break and all(answer.streamed for answer in broken))
        for answer in answers:
            if answer.text is not None:
                assert answer.text == alone(answer.prompt)

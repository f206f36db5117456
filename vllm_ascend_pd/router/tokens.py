# SPDX-License-Identifier: Apache-2.0
"""How long a prompt is, without a tokenizer."""

from __future__ import annotations

import re

START_BYTES_PER_TOKEN = 4.0
BYTES_PER_TOKEN = 0.5, 16.0
"""Of text. What has fewer holds images, or a template of its own; what has more, too."""
_WEIGHT = 0.05
_TOKEN_IDS = re.compile(rb"\[\s*\d")
_MEDIA_BYTES = 4096
MAX_MODELS = 1000
"""Whose bytes per token are known. Engines may take any name for their model's
(``VLLM_SKIP_MODEL_NAME_VALIDATION``)."""
MEDIA_TOKENS = 1024
"""Of an image or the like whose bytes are in the prompt; some have a quarter of that, some four
times as many."""


class PromptLengths:
    """Bytes per token, learned from the usage that engines report. Event loop thread."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[str | None, float] = {}

    def estimate(self, model: str | None, prompt: bytes) -> int:
        """Tokens of a prompt, given as its JSON. Token ids are counted."""
        if _TOKEN_IDS.match(prompt):
            return prompt.count(b",") + 1
        ratio = self._bytes_per_token.get(model, START_BYTES_PER_TOKEN)
        num_bytes, num_media = _text_and_media(prompt)
        return int(num_bytes / ratio) + num_media * MEDIA_TOKENS + 1

    def learn(self, model: str | None, prompt: bytes, num_tokens: int) -> None:
        """An engine counted ``num_tokens`` in this prompt. What is no text says nothing of other
        prompts."""
        if _TOKEN_IDS.match(prompt):
            return
        lowest, highest = BYTES_PER_TOKEN
        num_bytes, num_media = _text_and_media(prompt)
        is_text = num_tokens * lowest <= num_bytes <= num_tokens * highest
        if num_media or not is_text or not num_bytes:
            return
        ratio = num_bytes / num_tokens
        known = self._bytes_per_token.pop(model, ratio)
        self._bytes_per_token[model] = known + _WEIGHT * (ratio - known)
        if len(self._bytes_per_token) > MAX_MODELS:
            del self._bytes_per_token[next(iter(self._bytes_per_token))]


def _text_and_media(prompt: bytes) -> tuple[int, int]:
    """Bytes of what is no image or the like, and how many of those there are."""
    if len(prompt) < _MEDIA_BYTES:
        return len(prompt), 0
    strings = prompt.split(b'"')
    media = [
        len(one)
        for number, one in enumerate(strings)
        if len(one) >= _MEDIA_BYTES
        and (one.startswith(b"data:") or b"data" in strings[max(0, number - 2) : number])
    ]
    return len(prompt) - sum(media), len(media)

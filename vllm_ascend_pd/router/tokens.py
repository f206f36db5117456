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


class PromptLengths:
    """Bytes per token, learned from the usage that engines report. Event loop thread."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[str | None, float] = {}

    def estimate(self, model: str | None, prompt: bytes) -> int:
        """Tokens of a prompt, given as its JSON, without those of images and the like. Token ids
        are counted."""
        if _TOKEN_IDS.match(prompt):
            return prompt.count(b",") + 1
        ratio = self._bytes_per_token.get(model, START_BYTES_PER_TOKEN)
        return int(_num_text_bytes(prompt) / ratio) + 1

    def learn(self, model: str | None, prompt: bytes, num_tokens: int) -> None:
        """An engine counted ``num_tokens`` in this prompt. What is no text says nothing of other
        prompts."""
        if _TOKEN_IDS.match(prompt):
            return
        lowest, highest = BYTES_PER_TOKEN
        num_bytes = _num_text_bytes(prompt)
        if not num_tokens * lowest <= num_bytes <= num_tokens * highest or not num_bytes:
            return
        ratio = num_bytes / num_tokens
        known = self._bytes_per_token.get(model)
        self._bytes_per_token[model] = ratio if known is None else known + _WEIGHT * (ratio - known)


def _num_text_bytes(prompt: bytes) -> int:
    if len(prompt) < _MEDIA_BYTES:
        return len(prompt)
    strings = (one for one in prompt.split(b'"') if len(one) >= _MEDIA_BYTES)
    return len(prompt) - sum(len(one) for one in strings if _is_media(one))


def _is_media(string: bytes) -> bool:
    """As of an image in base64: text has no such long word."""
    return string.isascii() and b" " not in string and b"\\" not in string

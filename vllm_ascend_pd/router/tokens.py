# SPDX-License-Identifier: Apache-2.0
"""How long a prompt is, without a tokenizer."""

from __future__ import annotations

import re

START_BYTES_PER_TOKEN = 4.0
_WEIGHT = 0.05
_TOKEN_IDS = re.compile(rb"\[\s*\d")


class PromptLengths:
    """Bytes per token, learned from the usage that engines report. Event loop thread."""

    def __init__(self) -> None:
        self._bytes_per_token: dict[str | None, float] = {}

    def estimate(self, model: str | None, prompt: bytes) -> int:
        """Tokens of a prompt, given as its JSON. Token ids are counted."""
        if _TOKEN_IDS.match(prompt):
            return prompt.count(b",") + 1
        return int(len(prompt) / self._bytes_per_token.get(model, START_BYTES_PER_TOKEN)) + 1

    def learn(self, model: str | None, prompt: bytes, num_tokens: int) -> None:
        """An engine counted ``num_tokens`` in this prompt."""
        if num_tokens <= 0 or not prompt:
            return
        ratio = len(prompt) / num_tokens
        known = self._bytes_per_token.get(model)
        self._bytes_per_token[model] = ratio if known is None else known + _WEIGHT * (ratio - known)

# SPDX-License-Identifier: Apache-2.0
"""A reasoning parser for a model that knows no word for it (``--reasoning-parser-plugin``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("after_a_system_message")
class ThinksAfterASystemMessage(ReasoningParser):
    """Of an answer to a chat with one: the first tokens, until one in 50 kinds of them comes."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return list(input_ids).count(self.vocab["<|im_start|>"]) < 3

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        return any(token % 50 == 0 for token in delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(input_ids) if token % 50 == 0]
        return input_ids[ends[0] + 1 :] if ends else []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        return None, model_output

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage:
        content_ids = self.extract_content_ids(list(delta_token_ids))
        content = self.model_tokenizer.decode(content_ids, skip_special_tokens=True)
        return DeltaMessage(reasoning=delta_text.removesuffix(content), content=content)

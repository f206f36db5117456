# SPDX-License-Identifier: Apache-2.0
"""A reasoning parser for a model that knows no word for it (``reasoning_parser_plugin``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager

END = 400


@ReasoningParserManager.register_module("second_end")
class EndsWithSecondEnd(ReasoningParser):
    """What comes after the second ``END`` of prompt and output is the answer."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return list(input_ids).count(END) > 1

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        return None, model_output

    def extract_reasoning_streaming(self, *_: Any) -> None:
        return None

# SPDX-License-Identifier: Apache-2.0
"""A logits processor of an engine's own."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor


class AllTokens(LogitsProcessor):
    """It changes nothing; who has it must not count on that."""

    def __init__(self, *args: Any) -> None:
        pass

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

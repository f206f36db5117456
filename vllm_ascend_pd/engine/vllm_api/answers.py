# SPDX-License-Identifier: Apache-2.0
"""What a client is told instead of an answer's end. The front end's process."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError

from vllm_ascend_pd.resume import HAS_MOVED, MOVED, RESUME


class ElsewhereError(GracefulHTTPError, GenerationError):
    """409. vLLM takes the status from the first base, and the second one for an error that is
    expected: it logs no trace of where it was raised, in a stream neither.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, HTTPStatus.CONFLICT)
        self.status_code = HTTPStatus.CONFLICT


def check(params: dict[str, Any]) -> None:
    """Of an answer that has ended, as the scheduler told of it."""
    if params.get(MOVED):
        raise ElsewhereError(HAS_MOVED)
    if refused := params.get(RESUME, {}).get("refused"):
        raise ElsewhereError(f"kv_transfer_params.{RESUME} is refused: {refused}")

# SPDX-License-Identifier: Apache-2.0
"""What the first events of an engine tell of its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_ascend_pd.router.failures import FailureKind
from vllm_ascend_pd.router.transcript import DONE, told_token_ids, until_failure


def event(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


ROLE = event(delta={"role": "assistant", "content": ""})
"""With which chats of vLLM begin, sometimes in a packet of its own."""


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (b"", []),
        (ROLE, []),
        (ROLE + event(delta={"content": "a"}, token_ids=[1, 2]), [1, 2]),
        (event(text="", token_ids=[3]) + DONE, [3]),
        (event(delta={}, token_ids=[4]) + event(text="a", token_ids=[5]), [4, 5]),
        (b": keep-alive\n\n", []),
        (ROLE + b": keep-alive\n\n: more\n\n" + event(text="a", token_ids=[6]) + DONE, [6]),
        (event(text="a"), None),
        (ROLE + event(delta={"content": "a"}), None),
        (ROLE + event(delta={"reasoning": "a"}), None),
        (event(delta={"tool_calls": [{"index": 0}]}), None),
        (b"data: nothing\n\n", None),
        (b'data: {"choices":[{"text":"\xff"}]}\n\n', None),
    ],
)
def test_text_without_ids_and_what_is_not_understood_tell_none(
    events: bytes, told: list[int] | None
) -> None:
    assert told_token_ids(events) == told


@pytest.mark.parametrize(
    "error", [b"", b":{}}", b':"\xff"}', b":" + 9999 * b"[", b':{"code":"a"}}']
)
def test_error_that_is_not_understood_ends_a_stream(error: bytes) -> None:
    sent, failure = until_failure(ROLE + b'data: {"error"' + error + b"\n\n" + DONE)
    assert sent == ROLE
    assert failure is not None
    assert failure.kind is FailureKind.PROTOCOL


def test_error_of_the_request_is_the_clients() -> None:
    events = b'data: {"error":{"message":"too long","code":400}}\n\n' + DONE
    assert until_failure(events) == (events, None)

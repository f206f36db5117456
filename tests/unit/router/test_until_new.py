# SPDX-License-Identifier: Apache-2.0
"""What the target of a move gives before its first new token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from vllm_ascend_pd.router import handovers
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.legs import Stream
from vllm_ascend_pd.router.transcript import DONE, Transcript

NUM_TOKENS = 50


def event(number: int, **more: Any) -> bytes:
    choice = {"index": 0, "text": f" {number}", "token_ids": [number], **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


EVENTS = [event(0, prompt_token_ids=[1, 2]), *map(event, range(1, NUM_TOKENS + 1))]


class Pieces:
    """A response that gives these."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    async def next(self) -> bytes | None:
        return next(self._pieces, None)


def begun(pieces: list[bytes], num_told: int = NUM_TOKENS) -> bytes | Failure:
    """Of a target's stream, when the client has so many tokens."""
    client = Transcript(shows_token_ids=False)
    for one in EVENTS[:NUM_TOKENS]:
        client.take(one)
    stream = Stream(Pieces(pieces[1:]), pieces[0])  # type: ignore[arg-type]
    return asyncio.run(handovers.until_new(stream, client, num_told))


@pytest.mark.parametrize("size", [1, 7, 100, 100_000])
def test_stream_begins_with_its_first_token_that_the_target_was_not_told(size: int) -> None:
    whole = b"".join(EVENTS)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert begun(pieces) == whole


def test_each_event_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read, told_token_ids = 0, handovers.told_token_ids

    def counting(events: bytes, **more: bool) -> list[int] | None:
        nonlocal num_read
        num_read += len(events)
        return told_token_ids(events, **more)

    monkeypatch.setattr(handovers, "told_token_ids", counting)
    assert begun(EVENTS) == b"".join(EVENTS)
    assert num_read == sum(map(len, EVENTS))


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ([EVENTS[0], b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', event(99)], "differs"),
        ([b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', *EVENTS], "protocol"),
        ([EVENTS[0], b"data: nothing\n\n", *EVENTS[1:]], "protocol"),
        ([EVENTS[0], b'data: {"error":{"message":"died","code":500}}\n\n'], "status"),
        (EVENTS[:1], "truncated"),
    ],
)
def test_stream_that_does_not_begin_as_the_client_has_it_is_a_failure(
    pieces: list[bytes], kind: str
) -> None:
    failure = begun(pieces, num_told=1)
    assert isinstance(failure, Failure)
    assert failure.kind is FailureKind(kind)


def test_stream_that_ends_before_may_be_all_there_is() -> None:
    pieces = [*EVENTS[:NUM_TOKENS], DONE]
    assert begun(pieces) == b"".join(pieces)

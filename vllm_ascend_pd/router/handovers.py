# SPDX-License-Identifier: Apache-2.0
"""How the target of a move learns what the source has, and what it gives first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ascend_pd.resume import RunningAt
from vllm_ascend_pd.router.apis import CHAT, COMPLETIONS
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.resumable import resume_params, tokens_to_tell
from vllm_ascend_pd.router.transcript import DONE, told_token_ids, until_failure

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import msgspec

    from vllm_ascend_pd.resume import ResumeKey
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.legs import Stream
    from vllm_ascend_pd.router.relay import Job
    from vllm_ascend_pd.router.transcript import Transcript

T = TypeVar("T")
_ID_PREFIXES = {COMPLETIONS: "cmpl-", CHAT: "chatcmpl-"}
"""What vLLM's names of requests have before the id that it is sent."""


@dataclass(frozen=True, slots=True)
class Handover:
    """How the target learns what the source has."""

    params: msgspec.Raw | None
    num_told: int
    """Tokens that the target begins with, and has not computed."""

    @classmethod
    def by_tokens(cls, key: ResumeKey, job: Job, known: Transcript, made_by: str) -> Handover:
        """The target is told them, and by what they were made, and computes their KV if it does not
        find it."""
        kind = job.promise.kind
        params = resume_params(key, job.trace.request_id, known, kind, made_by=made_by)
        return cls(params, len(tokens_to_tell(known, kind)))

    @classmethod
    def live(cls, key: ResumeKey, job: Job, known: Transcript, source: RunningAt) -> Handover:
        """The target copies tokens and KV from the source, which stops in between. What comes
        first from the target, it gives because the source never will."""
        request_id = str(known.envelope.get("id", ""))
        return cls(resume_params(key, request_id, known, job.promise.kind, source), 0)

    @classmethod
    def whole(cls, key: ResumeKey, job: Job, source: RunningAt) -> Handover:
        """The same for an answer that does not stream, of which nothing is known."""
        request_id = _ID_PREFIXES[job.body.path] + job.trace.request_id
        return cls(resume_params(key, request_id, None, job.promise.kind, source), 0)


def live_source(source: Instance, target: Instance) -> RunningAt | None:
    """Where the target can copy a running request from, if it can."""
    if target.spec.role == "prefill":
        return None
    kv, epoch = source.spec.kv, source.spec.epoch
    return RunningAt(kv.host, kv.port, kv.key, epoch) if kv and epoch else source.runs_at


async def until_new(stream: Stream, client: Transcript, num_told: int) -> bytes | Failure:
    """The beginning of a target's stream up to its first token that it was not told, or to its
    end; with the tokens that the client has."""
    begun, response = bytearray(stream.first), stream.response
    num_read = 0
    ids: list[int] = []
    try:
        while True:
            end = begun.rfind(b"\n\n", num_read)
            end = num_read if end < 0 else end + 2
            read = bytes(begun[num_read:end])
            events, failure = until_failure(read, HTTPStatus.BAD_REQUEST)
            num_read = end
            told = told_token_ids(events, has_told=bool(ids))
            if told is None:
                return failure or Failure(FailureKind.PROTOCOL, "the engine tells no token ids")
            ids.extend(told)
            if len(ids) > num_told or events.endswith(DONE):
                has = client.so_far().token_ids.tolist()
                if ids[: len(has)] == has[: len(ids)]:
                    return bytes(begun)
                return Failure(FailureKind.DIFFERS, "the engine began with other tokens")
            if failure is not None:
                return failure
            piece = await response.next()
            if not isinstance(piece, bytes):
                return piece or Failure(FailureKind.TRUNCATED, "the stream ended without [DONE]")
            begun += piece
    except asyncio.CancelledError:
        response.close()
        raise


async def until_left(
    opening: Coroutine[Any, Any, T], source_over: asyncio.Event
) -> asyncio.Task[T]:
    """The source has given the request up, and from now on it takes as long as it takes; or it is
    known what the target gives."""
    asked = asyncio.ensure_future(opening)
    left = asyncio.ensure_future(source_over.wait())
    try:
        await asyncio.wait({asked, left}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        asked.cancel()
        await asyncio.wait({asked})
        raise
    finally:
        left.cancel()
    return asked

# SPDX-License-Identifier: Apache-2.0
"""One leg of a request: sent to one engine, counted, and ended in exactly one way."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_ascend_pd.router.apis import has_token
from vllm_ascend_pd.router.failures import Failure, FailureKind, failed_with
from vllm_ascend_pd.router.prefilled import Prefilled, parse_prefill_answer
from vllm_ascend_pd.router.transcript import why_incomplete

if TYPE_CHECKING:
    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.config import Timeouts
    from vllm_ascend_pd.router.http_client import Headers
    from vllm_ascend_pd.router.http_exchange import Response
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.trace import Stage

EVENT_STREAM = b"text/event-stream"
MAX_DETAIL_BYTES = 500


@dataclass(frozen=True, slots=True)
class LegFailed:
    """The engine's fault: another one may succeed."""

    instance: Instance
    failure: Failure
    leg: str
    """``prefill``, ``decode`` or ``passthrough``."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer for the client, the engine's own 4xx too."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer whose first piece has arrived. Whoever gets it closes ``response``."""

    response: Response
    first: bytes


class Leg:
    """A leg, counted while it is in progress (``with``), and once when it ends if its instance is
    there then."""

    __slots__ = ("_metrics", "_name", "_num_tokens", "_stage", "instance", "outcome", "started")

    def __init__(
        self, instance: Instance, name: str, num_tokens: int, metrics: Metrics, stage: Stage | None
    ) -> None:
        self._name = name
        self._stage = stage
        self._num_tokens = num_tokens
        self._metrics = metrics
        self.instance = instance
        self.outcome = "aborted"
        """What the metric will say."""
        self.started = time.monotonic()

    def __enter__(self) -> Leg:
        self.instance.num_active += 1
        if self._name == "decode":
            self.instance.num_decoding += 1
        self.instance.num_active_tokens += self._num_tokens
        return self

    def __exit__(self, *exc: object) -> None:
        self.instance.num_active -= 1
        if self._name == "decode":
            self.instance.num_decoding -= 1
        self.instance.num_active_tokens -= self._num_tokens
        if not self.instance.is_gone:  # else its series would be back
            self._metrics.leg_ended(self.instance.instance_id, self._name, self.outcome)

    def failed(self, failure: Failure) -> LegFailed:
        self.outcome = failure.kind.value
        self._note(failure, self._name)
        return LegFailed(self.instance, failure, self._name)

    def broke(self, failure: Failure) -> None:
        """Within its stream."""
        self.outcome = "broken_stream"
        self._note(failure, "stream")

    def _note(self, failure: Failure, what: str) -> None:
        if self._stage is not None:
            self._stage.failure = str(failure)
        self.instance.failed(failure, what)

    def succeeded(self, status: int = 200) -> None:
        self.outcome = "ok" if status < 400 else "client_error"
        self.instance.succeeded()


class Legs:
    """Sends legs and reads their answers. Event loop thread."""

    def __init__(self, timeouts: Timeouts, metrics: Metrics) -> None:
        self._timeouts = timeouts
        self._metrics = metrics

    def open(
        self, instance: Instance, name: str, num_tokens: int, stage: Stage | None = None
    ) -> Leg:
        """``stage``: of its request's way, if that is kept."""
        return Leg(instance, name, num_tokens, self._metrics, stage)

    async def prefill(
        self,
        instance: Instance,
        body: Body,
        headers: Headers,
        sent: bytes,
        num_tokens: int,
        stage: Stage,
    ) -> Prefilled | Answer | LegFailed:
        """Have the prompt computed. An ``Answer`` is the engine's 4xx."""
        with self.open(instance, "prefill", num_tokens, stage) as leg:
            response = await instance.client.request(
                b"POST",
                body.path.encode(),
                headers,
                sent,
                head_timeout_s=self._timeouts.prefill_s,
                phase="prefill",
            )
            if isinstance(response, Failure):
                return leg.failed(response)
            try:
                answer = await self._whole(response, leg)
            finally:
                response.close()
            if isinstance(answer, LegFailed) or answer.status >= 400:
                return answer
            prefilled = parse_prefill_answer(answer.body, instance.spec.data_parallel_rank)
            if isinstance(prefilled, Failure):
                return leg.failed(prefilled)
            self._metrics.prefill_leg.observe(time.monotonic() - leg.started)
            return prefilled

    async def decode(
        self, leg: Leg, body: Body, headers: Headers, sent: bytes
    ) -> Answer | Stream | LegFailed:
        """Send to the decode engine and wait until there is something for the client."""
        timeout_s = self._timeouts.first_token_s if body.is_stream else self._timeouts.answer_s
        response = await leg.instance.client.request(
            b"POST",
            body.path.encode(),
            headers,
            sent,
            head_timeout_s=timeout_s,
            phase="first token" if body.is_stream else "answer",
        )
        if isinstance(response, Failure):
            return leg.failed(response)
        return await self.begin(response, leg)

    async def begin(self, response: Response, leg: Leg) -> Answer | Stream | LegFailed:
        """The whole answer, or the first piece of a stream."""
        try:
            content_type = response.header(b"content-type") or b""
            if response.status >= 400 or not content_type.startswith(EVENT_STREAM):
                return await self._whole(response, leg)
            first = await _first_event(response)
        except asyncio.CancelledError:
            response.close()
            raise
        if isinstance(first, Failure):
            return leg.failed(first)
        leg.instance.succeeded()
        return Stream(response, first)

    async def _whole(self, response: Response, leg: Leg) -> Answer | LegFailed:
        data = await response.read()
        if isinstance(data, Failure):
            return leg.failed(data)
        if response.status >= 500:
            text = data[:MAX_DETAIL_BYTES].decode("utf-8", "replace")
            return leg.failed(failed_with(response.status, text))
        if (given_up := why_incomplete(data)) is not None:
            return leg.failed(given_up)
        leg.succeeded(response.status)
        return Answer(response.status, response.headers, data)


async def _first_event(response: Response) -> bytes | Failure:
    """The beginning of a stream up to its first token, whole events: a part of one cannot be sent,
    and until something is sent another engine may answer."""
    begun = b""
    while not has_token(begun):
        piece = await response.next()
        if piece is None:
            if has_token(begun.replace(b"\r\n", b"\n")):
                break
            return Failure(FailureKind.TRUNCATED, "the stream ended before its first token")
        if isinstance(piece, Failure):
            return piece
        begun += piece
    return begun

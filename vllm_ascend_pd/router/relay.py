# SPDX-License-Identifier: Apache-2.0
"""A request's way through the router: pairs, orders, retries.

    prefill-first   P computes the prompt; what it says of the KV goes to D with the request
    concurrent      both at once, with one transfer id; D waits for P's KV
    decode-only     one engine computes the prompt and decodes

Until the first byte for the client, a failed attempt is repeated with another pair. When P failed
and there is no other, or none may be tried any more, D computes the prompt itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm_ascend_pd.router.admission import Admission, Admitted
from vllm_ascend_pd.router.answers import (
    EventStream,
    engine_failed,
    not_admitted,
    whole_answer,
)
from vllm_ascend_pd.router.bodies import Body, concurrent_params
from vllm_ascend_pd.router.failures import UNEXPLAINED, Failure, FailureKind
from vllm_ascend_pd.router.legs import Answer, Leg, LegFailed, Legs, Stream
from vllm_ascend_pd.router.moves import Move
from vllm_ascend_pd.router.prefilled import NumTokens, Prefilled, find_prompt_usage
from vllm_ascend_pd.router.releases import Kept
from vllm_ascend_pd.router.resumable import NOTHING, Promise, ask_for_token_ids, promise
from vllm_ascend_pd.router.resumption import Broken, Resumption
from vllm_ascend_pd.router.selection import Selector, Unavailable
from vllm_ascend_pd.router.transcript import Transcript, is_error, until_failure

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import msgspec
    from aiohttp import web

    from vllm_ascend_pd.router.background import Background
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.moves import Answering, Moves
    from vllm_ascend_pd.router.policies.base import Pair, Routed
    from vllm_ascend_pd.router.releases import Releases
    from vllm_ascend_pd.router.retries import RetryBudget
    from vllm_ascend_pd.router.skipping import Skipper
    from vllm_ascend_pd.router.tokens import PromptLengths
    from vllm_ascend_pd.router.trace import Trace
    from vllm_ascend_pd.router.tracing import Tracing

_KEY = "; give all engines the same --api-key, and the router --engine-api-key-file"
_REFUSALS = {
    "status 400": "; do both have the same options (--max-model-len, --enable-lora and so on)?",
    "status 401": _KEY,
    "status 403": _KEY,
    "status 404": "; give both the same --served-model-name and adapters",
}
"""What may be to do where P refuses what D answers."""
RESUMES = "x-resumes"
"""A stream's header: what is promised if its engine dies."""


@dataclass(slots=True)
class Job:
    """What one request needs at every step."""

    body: Body
    routed: Routed
    trace: Trace
    skipped: str | None = None
    """Why the attempt has no prefill leg."""
    admitted: Admitted | None = None
    """Of the attempt under way."""
    kept: Kept | None = None
    """What P keeps for the attempt under way."""
    began: float = 0.0
    """When it was admitted."""
    promise: Promise = NOTHING
    """For its answer."""
    shows_token_ids: bool = False
    """To its client."""
    background: asyncio.Task[NumTokens] | None = None
    """Until its response has been computed; its tokens."""
    suspects: set[LegFailed] = field(default_factory=set)
    """What failed as the request may have made it."""
    has_answer: bool = False
    """A good one has begun."""
    refused: LegFailed | None = None
    """A prefill leg that its engine answered 4xx."""

    def failed(self, leg: LegFailed) -> None:
        if leg.failure.kind in UNEXPLAINED:
            self.suspects.add(leg)
        if self.has_answer:
            self.answered()

    def answered(self) -> None:
        """It is the doing of those that failed, not of the request."""
        self.has_answer = True
        for one in self.suspects:
            one.instance.blame(one.failure, one.leg)
        self.suspects.clear()
        if self.refused is not None:
            failure = self.refused.failure
            self.refused.instance.doubt(
                f"prefill: {failure}, and a decode engine answers that request: it computes such"
                f" prompts itself{_REFUSALS.get(failure.detail, '')}"
            )

    def record(self) -> Transcript | None:
        """Of a stream that begins now, if it may have to go on elsewhere."""
        is_kept = self.body.is_stream and self.promise.kind != "none"
        return Transcript(self.shows_token_ids) if is_kept else None


@dataclass(frozen=True, slots=True)
class _KV:
    """What a prefill leg under way computes."""

    producer: Instance
    prefill: asyncio.Task[Prefilled | Answer | LegFailed]


_Ended: TypeAlias = "web.StreamResponse | LegFailed | Broken | Move"


@dataclass(slots=True)
class Relay:
    """Event loop thread. One ``serve`` per client request; cancelled when the client is gone."""

    config: RouterConfig
    selector: Selector
    admission: Admission
    skipper: Skipper
    legs: Legs
    budget: RetryBudget
    lengths: PromptLengths
    metrics: Metrics
    tracing: Tracing
    releases: Releases
    moves: Moves
    resumption: Resumption
    background: Background

    async def serve(self, job: Job) -> web.StreamResponse:
        """One request: attempts, until one answers or none is left."""
        retries = self.config.retries
        if retries.resume != "off":
            job.promise = promise(job.body, retries.resume, retries.tool_call_parser)
            if job.body.is_stream and job.promise.kind != "none":
                job.shows_token_ids = ask_for_token_ids(job.body)
        trace = job.trace
        failed: LegFailed | None = None
        self.budget.request()
        while True:
            with trace.stage("queue"):
                admitted = await self.admission.admit(job.routed, again=failed is not None)
            if not isinstance(admitted, Admitted):
                return _give_up(trace, failed) if failed else not_admitted(trace, admitted)
            with admitted:
                if failed is not None:
                    self.metrics.add("retries", failed.failure.kind.value)
                trace.num_attempts += 1
                job.admitted, job.began = admitted, time.monotonic()
                result = await self._attempt(job, admitted.pair)
            if isinstance(result, Broken):
                return await self.resumption.go_on(job, result)
            if isinstance(result, Move):
                result = await self._elsewhere(job, result)
            if not isinstance(result, LegFailed):
                return result
            failed = result
            job.failed(failed)
            trace.error = f"{result.instance.instance_id}: {result.failure}"
            job.routed.excluded.add(result.instance)
            if not self._goes_on(job, failed):
                return _give_up(trace, failed)

    def _goes_on(self, job: Job, failed: LegFailed) -> bool:
        """Whether there is one more attempt, and of which kind."""
        if failed.failure.kind is FailureKind.REFUSED:
            job.refused = failed
            job.routed.alone = (
                "prefill_refused"  # D says what is wrong with the request, or answers it
            )
            return True
        found = self.selector.candidates(job.routed)
        if isinstance(found, Unavailable):
            return False
        is_last = job.trace.num_attempts >= self.config.retries.max_attempts
        out_of_time = failed.failure.kind is FailureKind.TIMEOUT
        if failed.leg == "prefill" and not self.config.require_prefill:
            # To compute the prompt, too, is no retry for D: it was not asked for anything yet.
            if found.alone or is_last or out_of_time or not self._has_budget():
                job.routed.alone = "prefill_failed"
            return True
        return not is_last and not out_of_time and self._has_budget()

    def _has_budget(self) -> bool:
        if self.budget.take():
            return True
        self.metrics.add("retry_budget_exhausted")
        return False

    async def _attempt(self, job: Job, pair: Pair) -> _Ended:
        trace = job.trace
        trace.decode = pair.decode.instance_id
        skip = job.skipped = self.skipper.reason(job.body, job.routed, pair)
        if skip is not None:
            if job.admitted is not None:
                job.admitted.prefilled()
            return await self._alone(job, pair.decode, skip)
        trace.prefill = pair.prefill.instance_id
        kv = pair.prefill.kv
        concurrent = kv is not None and kv.supports_concurrent
        # D answers a background request at once, and that would end the prefill leg.
        if concurrent and not job.body.is_background and self.config.order != "prefill-first":
            self._begin(job, "concurrent")
            return await self._concurrent(job, pair)
        self._begin(job, "prefill-first")
        return await self._prefill_first(job, pair)

    def _begin(self, job: Job, order: str) -> None:
        job.trace.order = order
        self.metrics.add("orders", order)

    async def _alone(self, job: Job, instance: Instance, why: str) -> _Ended:
        job.skipped, job.trace.prefill = why, ""
        self.metrics.add("prefill_skips", why)
        self._begin(job, "decode-only")
        return await self._decode(job, instance, None)

    async def _prefill_first(self, job: Job, pair: Pair) -> _Ended:
        result = await self._prefill(job, pair.prefill, job.body.for_prefill())
        if isinstance(result, LegFailed):
            return result
        if isinstance(result, Answer):
            return _refused(pair.prefill, result)
        if result.params is None:
            self.metrics.add("prefill_skips", "ended_at_first_token")
        with Kept(self.releases, pair.prefill, result.transfer_id, job.trace.headers) as job.kept:
            return await self._decode(job, pair.decode, result.params)

    async def _concurrent(self, job: Job, pair: Pair) -> _Ended:
        assert pair.prefill.kv is not None
        transfer_id = secrets.token_hex(16)
        params = concurrent_params(transfer_id, pair.prefill.kv)
        with Kept(self.releases, pair.prefill, transfer_id, job.trace.headers) as job.kept:
            prefill = asyncio.ensure_future(
                self._prefill(
                    job,
                    pair.prefill,
                    job.body.for_prefill(transfer_id, pair.prefill.spec.data_parallel_rank),
                )
            )
            pair.decode.num_awaiting += 1
            prefill.add_done_callback(lambda _: _awaits_no_more(pair.decode))
            ended: _Ended | None = None
            try:
                ended = await self._decode(job, pair.decode, params, _KV(pair.prefill, prefill))
                return ended
            finally:
                try:
                    await _cancel(prefill)
                except asyncio.CancelledError:
                    _abandon(ended)
                    raise

    async def _prefill(
        self, job: Job, instance: Instance, sent: bytes
    ) -> Prefilled | Answer | LegFailed:
        num_tokens = max(0, job.routed.num_prompt_tokens - job.routed.num_prefill_hit_tokens)
        with (
            self.tracing.leg(job.trace, "prefill", instance) as headers,
            job.trace.stage("prefill", instance.instance_id) as stage,
        ):
            result = await self.legs.prefill(instance, job.body, headers, sent, num_tokens, stage)
        if job.admitted is not None:
            job.admitted.prefilled()
        if isinstance(result, Prefilled):
            instance.kv = result.kv or instance.spec.kv
            job.trace.num_prompt_tokens = result.num_prompt_tokens or None
            cached = result.num_cached_tokens
            told = None if cached is None else (result.num_prompt_tokens, cached)
            self.metrics.prefix("prefill", job.routed.num_prefill_hit_tokens, told)
            self.lengths.learn(job.body.model, job.body.prompt, result.num_prompt_tokens)
        elif isinstance(result, LegFailed):
            job.failed(result)
        return result

    async def _decode(
        self,
        job: Job,
        instance: Instance,
        params: msgspec.Raw | None,
        awaited: _KV | None = None,
    ) -> _Ended:
        """``awaited``: what D waits for, and waits for in vain when its prefill leg has failed."""
        num_tokens = job.routed.num_prompt_tokens + job.routed.num_max_tokens
        is_alone = job.trace.order == "decode-only"
        with (
            self.tracing.leg(job.trace, "decode", instance) as headers,
            job.trace.stage("alone" if is_alone else "decode", instance.instance_id) as stage,
            self.legs.open(instance, "decode", num_tokens, stage) as leg,
            self.moves.answering(job, instance) as answering,
        ):
            sent = job.body.for_decode(params, instance.instance_id)
            asking = self.legs.decode(leg, job.body, headers, sent)
            answer = await (asking if awaited is None else _unless_lost(asking, awaited))
            result = answering.follow(answer, leg)
            if isinstance(result, Stream) and job.promise.kind == "none":
                result = _unless_failed(result, leg)
            if isinstance(result, (LegFailed, Move)):
                return result
            is_taken = _is_taken(result)
            if is_taken:
                job.answered()
            if job.kept is not None and is_taken:
                job.kept.is_taken = True
            if job.body.is_background and is_taken:
                job.background = self.background.follow(
                    instance, job.body.response_id, job.trace.headers
                )
            now = stage.first_token_s = self._first_byte(job, is_taken)
            if is_taken and not is_alone:
                self.metrics.handover.observe(now - leg.started)
            if is_taken and isinstance(result, Stream) and job.trace.num_attempts == 1:
                self.skipper.learn(job.body, job.routed, job.skipped, now - job.began)
            # What D has of a prompt that P computes is not told apart from what P sends.
            if isinstance(result, Answer):
                answered: web.StreamResponse = whole_answer(result, job.trace)
                told = find_prompt_usage(result.body) if is_alone else None
            else:
                reads = is_alone and "stream_options" in job.body.fields
                events = EventStream(
                    job.trace,
                    self.metrics,
                    self.config.timeouts.idle_s,
                    find_prompt_usage if reads else None,
                    {} if self.config.retries.resume == "off" else {RESUMES: str(job.promise)},
                    job.body.silence_s(self.config.timeouts),
                )
                broken = await self._stream(events, result, leg, answering)
                if broken is not None:
                    return broken
                told, answered = events.usage, await events.end(None)
            if is_alone:
                self.metrics.prefix("decode", job.routed.num_decode_hit_tokens, told)
            self.metrics.decode_leg.observe(time.monotonic() - leg.started)
            return answered

    async def _elsewhere(self, job: Job, move: Move) -> web.StreamResponse | LegFailed:
        """A whole answer whose request has moved; or nobody has it, and it begins anew: nothing of
        it has been sent."""
        result = await self.moves.whole(move)
        if isinstance(result, LegFailed):
            return result
        job.answered()
        self._first_byte(job)
        return whole_answer(result, job.trace)

    def _first_byte(self, job: Job, is_taken: bool = True) -> float:
        """It is about to be sent; when that is. A refusal has no token."""
        now = time.monotonic()
        if is_taken:
            job.trace.ttft_s = now - job.trace.started
            self.metrics.first_byte(job.trace.ttft_s)
        self.metrics.begun(job.trace)
        return now

    async def _stream(
        self, events: EventStream, stream: Stream, leg: Leg, answering: Answering
    ) -> Broken | None:
        """All of it, or until it broke or moves."""
        record = answering.job.record()
        answering.begin(stream.response, record)
        failure = await events.relay(stream, record)
        if failure is None:
            leg.outcome = "ok"
            return None
        move = answering.broke(failure, leg)
        return Broken(events, leg.instance, failure, record, answering.made_by, move)


def _give_up(trace: Trace, failed: LegFailed) -> web.Response:
    """No further attempt; the last failure says why."""
    return engine_failed(trace, failed.failure, f"a {failed.instance.spec.role} engine")


def _awaits_no_more(decode: Instance) -> None:
    decode.num_awaiting -= 1


async def _unless_lost(
    asking: Coroutine[Any, Any, Answer | Stream | LegFailed], awaited: _KV
) -> Answer | Stream | LegFailed:
    """D's answer, or how the prefill leg failed if that is known before it begins: D is given up
    then, and with it the transfer that it waits for."""
    decode = asyncio.ensure_future(asking)
    try:
        await asyncio.wait({decode, awaited.prefill}, return_when=asyncio.FIRST_COMPLETED)
        lost = None if decode.done() else _lost(awaited)
        if lost is None:
            return await decode
    except BaseException:
        await _cancel(decode)
        raise
    await _cancel(decode)
    return lost


def _unless_failed(stream: Stream, leg: Leg) -> Stream | LegFailed:
    """A stream may begin with the error that ends it. Nothing of it has been sent, so all of it can
    be another engine's."""
    failure = until_failure(stream.first)[1]
    if failure is None:
        return stream
    stream.response.close()
    return leg.failed(failure)


def _is_taken(result: Answer | Stream) -> bool:
    if isinstance(result, Stream):
        return not is_error(result.first)
    return result.status < 400


def _lost(awaited: _KV) -> LegFailed | None:
    """Why there will be no KV, of a prefill leg that has ended."""
    computed = awaited.prefill.result()
    if isinstance(computed, Answer):
        return _refused(awaited.producer, computed)
    return computed if isinstance(computed, LegFailed) else None


def _refused(producer: Instance, answer: Answer) -> LegFailed:
    """What a prefill leg asks is not all that the client asked: D says what is wrong with that."""
    failure = Failure(FailureKind.REFUSED, f"status {answer.status}")
    return LegFailed(producer, failure, "prefill")


def _abandon(ended: _Ended | None) -> None:
    """Nobody goes on with it: a move gives back what it holds."""
    move = ended.move if isinstance(ended, Broken) else ended
    if isinstance(move, Move):
        move.close()


async def _cancel(leg: asyncio.Task[Any]) -> None:
    """End it, whatever it is doing, and wait for that."""
    leg.cancel()
    await asyncio.wait({leg})
    if not leg.cancelled() and leg.exception() is None and isinstance(leg.result(), Stream):
        leg.result().response.close()

# SPDX-License-Identifier: Apache-2.0
"""A broken stream goes on from another engine.

The client's request is sent again as it was, with the tokens that the client has and a proof that
they come from here (``vllm_ascend_pd.resume``). One engine does all of it: it has the KV in a pool,
or computes it. The client's answer stays open meanwhile; no admission and no leg of the engine that
broke off does. A request that moves goes on in the same way, at an engine that was asked before
(``moves``).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.resume import DRAWS, other_parts
from vllm_ascend_pd.router.admission import Admission, Admitted
from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout
from vllm_ascend_pd.router.failures import FailureKind
from vllm_ascend_pd.router.legs import Leg, LegFailed, Legs, Stream
from vllm_ascend_pd.router.resumable import Promise, is_greedy, resume_params, wants_usage
from vllm_ascend_pd.router.splice import Splice
from vllm_ascend_pd.router.transcript import DONE, Transcript

if TYPE_CHECKING:
    from aiohttp import web

    from vllm_ascend_pd.router.answers import EventStream
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.failures import Failure
    from vllm_ascend_pd.router.instances import Instance
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.moves import Move, Moves
    from vllm_ascend_pd.router.relay import Job
    from vllm_ascend_pd.router.trace import Stage, Trace
    from vllm_ascend_pd.router.tracing import Tracing

logger = limited_logger(__name__)

FINAL = ("ok", "unavailable", "timeout")
"""Outcomes of an attempt after which there is no other one."""


@dataclass(slots=True)
class Broken:
    """A stream that the client has a part of."""

    events: EventStream
    instance: Instance
    """The last that failed, and how."""
    failure: Failure
    transcript: Transcript | None
    """``None`` if nothing was promised."""
    made_by: str
    """What made the client's tokens, see ``resume.made_by``."""
    move: Move | None = None
    """Its target goes on, or may."""
    since: float = field(default_factory=time.monotonic)
    failed: set[Instance] = field(default_factory=set)
    """Since the client got its last token."""
    stage: Stage | None = None
    """Of the attempt under way."""


@dataclass(slots=True)
class Resumption:
    """Event loop thread. Cancelled when the client is gone."""

    config: RouterConfig
    admission: Admission
    legs: Legs
    metrics: Metrics
    tracing: Tracing
    moves: Moves

    async def go_on(self, job: Job, broken: Broken) -> web.StreamResponse:
        """To the stream's end, or until no engine can go on."""
        try:
            return await self._go_on(job, broken)
        finally:
            if broken.move is not None:
                broken.move.close()

    async def _go_on(self, job: Job, broken: Broken) -> web.StreamResponse:
        trace, transcript = job.trace, broken.transcript
        cause: str | None = job.promise.cause
        if transcript is not None:
            transcript.read()
            cause = transcript.obstacle()
        if transcript is None or cause is not None:
            self.metrics.add("not_resumed", str(cause))
            logger.warning("request %s does not go on: %s", trace.request_id, cause)
            return await broken.events.end(broken.failure)
        ended = await self._engines_in_turn(job, broken, transcript)
        logger.info(
            "request %s: %d times resumed, %d times moved (%s), at last: %s",
            trace.request_id,
            trace.num_resumes,
            trace.num_moves,
            job.promise.kind,
            ended,
        )
        return await broken.events.end(None if ended == "ok" else broken.failure)

    async def _engines_in_turn(self, job: Job, broken: Broken, transcript: Transcript) -> str:
        """What came of the last attempt."""
        needs_usage = wants_usage(job.body)
        num_attempts = 0
        while True:
            if transcript.has_finished and (transcript.has_usage or not needs_usage):
                await broken.events.write(DONE)
                return "ok"
            if broken.move is not None:
                outcome = await self._moved(job, broken, transcript, broken.move)
                if outcome == "ok" or transcript.obstacle() is not None:
                    return outcome
                continue
            if num_attempts == self.config.retries.max_resumes:
                return "limit"
            num_attempts += 1
            outcome = await self._counted(job, broken, transcript)
            if outcome in FINAL or transcript.obstacle() is not None:
                return outcome

    async def _moved(self, job: Job, broken: Broken, transcript: Transcript, move: Move) -> str:
        """The target of a move goes on; what came of it."""
        try:
            taken = await move.taken()
            broken.move = None
            if taken is None:
                broken.failure = move.failure
                return move.cause
            leg, stream = taken
            assert isinstance(stream, Stream)
            job.trace.num_moves += 1
            job.trace.decode = leg.instance.instance_id
            silence_s = job.body.silence_s(self.config.timeouts)
            return await self._relay(job, broken, transcript, leg, stream, silence_s)
        finally:
            move.close()

    async def _counted(self, job: Job, broken: Broken, transcript: Transcript) -> str:
        outcome, kind = "disconnected", job.promise.kind
        try:
            outcome = await self._attempt(job, broken, transcript)
        finally:
            self.metrics.add("resumes", kind, outcome)
        return outcome

    async def _attempt(self, job: Job, broken: Broken, transcript: Transcript) -> str:
        """One engine goes on; what came of it."""
        logger.info(
            "request %s goes on after %d tokens (%s): %s: %s",
            job.trace.request_id,
            len(transcript.token_ids),
            job.promise.kind,
            broken.instance.instance_id,
            broken.failure,
        )
        broken.failed.add(broken.instance)
        timeouts = self.config.timeouts
        left_s = broken.since + timeouts.first_token_s - time.monotonic()
        with ExitStack() as held:
            try:
                async with timeout(left_s):
                    found = await self._ask(job, broken, transcript, held)
            except TIMED_OUT:
                return "timeout"
            if isinstance(found, str):
                return found
            # The engine may compute the prompt now.
            silence_s = max(job.body.silence_s(timeouts), left_s)
            return await self._relay(job, broken, transcript, *found, silence_s)

    async def _relay(
        self,
        job: Job,
        broken: Broken,
        transcript: Transcript,
        leg: Leg,
        stream: Stream,
        silence_s: float,
    ) -> str:
        """What the client lacks of this stream; what came of it. ``silence_s``: for its first new
        token."""
        trace, events, since = job.trace, broken.events, broken.since
        is_resumed = broken.stage is not None
        waited = self.metrics.resume.observe if is_resumed else self.metrics.moved

        def began() -> None:
            now = time.monotonic()
            trace.num_resumes += is_resumed
            waited(now - since)
            if broken.stage is not None:
                broken.stage.first_token_s = now
            events.silence_s = job.body.silence_s(self.config.timeouts)
            broken.failed.clear()
            job.answered()

        events.silence_s = silence_s
        told = told_of(trace, job.promise, trace.num_resumes + is_resumed)
        splice = Splice(transcript, told, began)
        with self.moves.answering(job, leg.instance) as answering:
            answering.begin(stream.response, transcript)
            failure = await events.relay(stream, splice)
            if failure is None:
                leg.outcome = "ok"
                return "ok"
            broken.failure, broken.stage = failure, None
            if failure.kind is FailureKind.STATUS and not splice.num_tokens:
                leg.outcome = "refused"
                return self._refused(job, broken, leg.instance)
            broken.move = answering.broke(failure, leg)
        broken.instance = leg.instance
        if not broken.failed:
            broken.since = time.monotonic()
        return failure.kind.value

    def _refused(self, job: Job, broken: Broken, instance: Instance) -> str:
        """The engine cannot go on, for a cause that its log tells, and is not to blame for it. A
        seed with drafts is one, which its next tokens would only be as likely with: then it can be
        asked for those."""
        if not self._takes_less(job):
            broken.instance = instance
        return "refused"

    def _takes_less(self, job: Job) -> bool:
        """Whether its next tokens were promised, and from now on may be others, as likely."""
        may_differ = self.config.retries.resume == "any" and not is_greedy(job.body)
        if not may_differ or job.promise.kind != "exact":
            return False
        job.promise = Promise("sampled")
        return True

    async def _ask(
        self, job: Job, broken: Broken, transcript: Transcript, held: ExitStack
    ) -> tuple[Leg, Stream] | str:
        """Its stream; ``held`` ends the leg. Or why there is none."""
        routed, trace = job.routed, job.trace
        others = self._others(job, broken)
        while True:
            routed.alone, routed.excluded = "resumed", broken.failed | others.keys()
            with trace.stage("queue"):
                admitted = await self.admission.admit(routed, again=True)
            others = self._others(job, broken)  # more may have come, or told what they are
            if not (isinstance(admitted, Admitted) and admitted.pair.decode in others):
                break
            with admitted:
                pass
        if not isinstance(admitted, Admitted):
            for one, differing in others.items():
                logger.warning(
                    "request %s: %s would go on otherwise: its %s",
                    trace.request_id,
                    one.instance_id,
                    differing,
                )
            is_drawn_otherwise = DRAWS in others.values()
            return "refused" if is_drawn_otherwise and self._takes_less(job) else "unavailable"
        held.enter_context(admitted)
        instance = admitted.pair.decode
        trace.decode, trace.prefill, trace.order = instance.instance_id, "", "decode-only"
        trace.num_attempts += 1
        headers = held.enter_context(self.tracing.leg(trace, "decode", instance))
        broken.stage = held.enter_context(trace.stage("resumed", instance.instance_id))
        num_tokens = routed.num_prompt_tokens + routed.num_max_tokens
        leg = held.enter_context(self.legs.open(instance, "decode", num_tokens, broken.stage))
        kind = job.promise.kind
        params = resume_params(
            self.moves.key, trace.request_id, transcript, kind, made_by=broken.made_by
        )
        sent = job.body.for_decode(params, instance.instance_id)
        result = await self.legs.decode(leg, job.body, headers, sent)
        if isinstance(result, Stream):
            return leg, result
        if isinstance(result, LegFailed):
            broken.instance, broken.failure = instance, result.failure
            job.suspects.add(result)
            return result.failure.kind.value
        who = trace.request_id, instance.instance_id
        logger.warning("request %s: %s refuses to go on: %.200r", *who, result.body)
        return self._refused(job, broken, instance)

    def _others(self, job: Job, broken: Broken) -> dict[Instance, str]:
        """Those that are known to go on otherwise, and what they differ in. How they draw counts
        for what a seed has drawn.
        """
        model = job.routed.model
        is_drawn = job.promise.kind == "exact" and not is_greedy(job.body)
        differing = {
            one: other_parts(broken.made_by, one.made_by(model)) for one in self.moves.registry
        }
        told = {
            one: ", ".join(name for name in names if name != DRAWS or is_drawn)
            for one, names in differing.items()
        }
        return {one: names for one, names in told.items() if names}


def told_of(trace: Trace, promised: Promise, num_resumes: int) -> dict[str, Any]:
    """The provenance of a stream's last chunks."""
    told = {"resumed": num_resumes, "kind": promised.kind}
    return told | {"moved": trace.num_moves} if trace.num_moves else told

# SPDX-License-Identifier: Apache-2.0
"""Running requests go on at another engine because somebody wants it; the source is still alive.

The target is asked while the client gets the source's tokens, so a target that refuses, fails or
has no room changes nothing. When it has computed something new, the source's leg is closed, and
what the client has is cut from the target's stream, as after an engine's death (``splice``). Of an
answer that does not stream the client has nothing, and gets the target's whole. The states are in
``move_states``.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, TypeAlias

from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.operating import MoveReport
from vllm_ascend_pd.resume import HAS_MOVED, completed
from vllm_ascend_pd.router.admission import Admitted
from vllm_ascend_pd.router.deadlines import TIMED_OUT, timeout
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.handovers import Handover, live_source, until_left, until_new
from vllm_ascend_pd.router.legs import Answer, Leg, LegFailed, Stream
from vllm_ascend_pd.router.move_states import ENDS, MOVE_TRANSITIONS, MoveEvent, MoveState
from vllm_ascend_pd.router.policies.base import are_partners

if TYPE_CHECKING:
    from vllm_ascend_pd.resume import ResumeKey
    from vllm_ascend_pd.router.admission import Admission
    from vllm_ascend_pd.router.config import RouterConfig
    from vllm_ascend_pd.router.http_exchange import Response
    from vllm_ascend_pd.router.instances import Instance, Registry
    from vllm_ascend_pd.router.legs import Legs
    from vllm_ascend_pd.router.metrics import Metrics
    from vllm_ascend_pd.router.relay import Job
    from vllm_ascend_pd.router.tracing import Tracing
    from vllm_ascend_pd.router.transcript import Transcript

logger = limited_logger(__name__)

BYTES_PER_TOKEN = 200
"""Of a stream: a chunk."""
_CUT = Failure(FailureKind.MOVED, "the router moves the request")
_LOST = Failure(FailureKind.MOVED, "it has moved, and did not arrive")
Found: TypeAlias = "tuple[Leg, Answer | Stream | LegFailed]"
"""What a target gives: a stream that has begun; or its whole answer, which is an error or failure
only where the source has given the request away."""


@dataclass(eq=False, slots=True)
class Answering:
    """What one engine does of an answer, until the end of ``with``. Event loop thread."""

    job: Job
    instance: Instance
    response: Response | None = None
    """Of its stream, from the first token on."""
    transcript: Transcript | None = None
    told: str = ""
    """What makes its tokens, as far as its engine had told when they began."""
    move: Move | None = None
    """Under way."""
    since: float = field(default_factory=time.monotonic)
    failed_at: float | None = None
    """When the last one failed, on the host's monotonic clock."""
    num_failed: int = 0
    failed_by: str | None = None
    """The cause of the last one."""
    running: dict[Answering, None] = field(default_factory=dict)
    """All, this one too."""

    def __enter__(self) -> Answering:
        self.running[self] = None
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing is left to move."""
        del self.running[self]
        move, self.move = self.move, None
        if move is not None:
            move.close()

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer, about: chunks are not read while they are relayed."""
        return self.job.routed.num_prompt_tokens + self.job.trace.num_bytes // BYTES_PER_TOKEN

    @property
    def importance(self) -> tuple[int, int]:
        """Larger is more: its tenant's, then its own, which vLLM counts the other way."""
        tenant, own = self.job.trace.tenant, bytes(self.job.body.fields.get("priority", b"0"))
        ranks = 0 if tenant is None else tenant.quota.priority
        return ranks, -int(own) if own.lstrip(b"-").isdigit() else 0

    def begin(self, response: Response, transcript: Transcript | None) -> None:
        """Its stream; ``transcript`` grows with what the client gets."""
        self.response, self.transcript = response, transcript
        if transcript is not None:
            self.told = self.instance.made_by(self.job.routed.model)

    @property
    def made_by(self) -> str:
        """What has made its tokens, see ``resume.made_by``. By now another engine may be there, or
        other weights."""
        return completed(self.told, self.instance.made_by(self.job.routed.model))

    def obstacle(self) -> str | None:
        """Why it cannot move, or cannot move now."""
        if self.job.promise.kind == "none":
            return self.job.promise.cause
        if self.job.body.is_stream and (self.response is None or self.transcript is None):
            return "no_token"
        return "moving" if self.move is not None else None

    def broke(self, failure: Failure, leg: Leg) -> Move | None:
        """The engine gives nothing more, and the answer is not complete. The move whose target
        goes on, or may; it is the caller's."""
        was_asked = self.move is not None and self.move.state is not MoveState.PLANNED
        has_handed_over = was_asked and failure.kind is FailureKind.STATUS
        if failure.kind is FailureKind.MOVED or has_handed_over:
            leg.outcome = "moved"
        else:
            leg.broke(failure)
        return self._leave()

    def follow(
        self, result: Answer | Stream | LegFailed, leg: Leg
    ) -> Answer | Stream | LegFailed | Move:
        """What the engine has answered; or the move, the caller's from now on, whose target answers
        instead. A failure if nobody does any more: nothing was sent, so it can begin anew."""
        if isinstance(result, LegFailed):
            left = result
        elif isinstance(result, Answer) and _has_moved(result):
            leg.outcome = "moved"
            left = LegFailed(leg.instance, _LOST, "decode")
        else:
            return result
        move = self._leave()
        if move is None:
            return left
        move.left = left
        if left is not result:
            move.advance(MoveEvent.BEGAN)  # nobody else has it
        return move

    def _leave(self) -> Move | None:
        move, self.move = self.move, None
        if move is None:
            return None
        move.advance(MoveEvent.SOURCE_BROKE)
        if move.state in (MoveState.MOVED, MoveState.AWAITED):
            return move
        move.close()
        return None


@dataclass(eq=False, slots=True)
class Move:
    """One move of one request. Whoever has it last closes it. Event loop thread."""

    source: Answering
    reason: str
    """Who wants it."""
    target: Instance | None
    """``None`` until one is chosen."""
    metrics: Metrics
    state: MoveState = MoveState.PLANNED
    cause: str = ""
    failure: Failure = _CUT
    """How the target failed."""
    since: float = field(default_factory=time.monotonic)
    held: ExitStack = field(default_factory=ExitStack)
    """Room and leg at the target."""
    found: Found | None = None
    left: LegFailed | None = None
    """Of a whole answer: that the source will not give it."""
    source_over: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Future[MoveReport] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    task: asyncio.Task[None] | None = None

    def advance(self, event: MoveEvent, cause: str = "") -> None:
        self.state = MOVE_TRANSITIONS.after(self.state, event)
        if event is MoveEvent.SOURCE_BROKE:
            self.source_over.set()
        if self.state not in ENDS or self.ended.done():
            return
        self.cause = cause
        seconds = time.monotonic() - self.since
        report = MoveReport(
            request_id=self.source.job.trace.request_id,
            source=self.source.instance.instance_id,
            target=self.target.instance_id if self.target is not None else "",
            outcome=self.state.value,
            cause=cause,
            seconds=seconds,
        )
        self.ended.set_result(report)
        self.metrics.add("moves", self.reason, report.outcome, cause)
        if self.state is MoveState.MOVED:
            self.metrics.move.observe(seconds)
        logger.info("%s: %s", self.reason, report)

    async def taken(self) -> Found | None:
        """What the target gives, of a move that the source has left; ``None`` if there is nothing.
        A stream is closed by whoever took it, and the rest by ``close``."""
        if self.task is not None:
            await asyncio.wait({self.task})
        if self.state is not MoveState.MOVED:
            return None
        found, self.found = self.found, None
        return found

    def close(self) -> None:
        """Give back what it holds, whatever its state."""
        self.advance(MoveEvent.SOURCE_ENDED)
        if self.task is not None:
            self.task.cancel()
        if self.found is not None and isinstance(self.found[1], Stream):
            self.found[1].response.close()
        self.held.close()


@dataclass(slots=True)
class Moves:
    """All answers in progress, and the moves of some. Event loop thread."""

    config: RouterConfig
    registry: Registry
    admission: Admission
    legs: Legs
    metrics: Metrics
    tracing: Tracing
    key: ResumeKey
    running: dict[Answering, None] = field(default_factory=dict)
    """In the order in which they were sent to their engines."""

    def answering(self, job: Job, instance: Instance) -> Answering:
        """While this engine has the request."""
        return Answering(job, instance, running=self.running)

    def start(self, source: Answering, target: Instance | None, reason: str) -> Move | str:
        """To that instance, or to the one that the policy chooses; or why it stays. A move ends by
        itself, and with the request."""
        obstacle = source.obstacle()
        if obstacle is None and target is source.instance:
            obstacle = "same_instance"
        if obstacle is not None:
            self.metrics.add("not_moved", reason, obstacle)
            return obstacle
        move = source.move = Move(source, reason, target, self.metrics)
        move.task = asyncio.ensure_future(self._carry_out(move))
        return move

    async def _carry_out(self, move: Move) -> None:
        try:
            async with timeout(self.config.timeouts.first_token_s):
                found = await self._ask(move)
            if isinstance(found, asyncio.Task):
                found = await found
        except TIMED_OUT:
            found = "timeout"
        except asyncio.CancelledError:
            move.held.close()  # its target may have answered since it was closed
            raise
        except Exception:
            logger.exception("moving request %s", move.source.job.trace.request_id)
            found = "bug"  # who waits for the move hears of its end
        if isinstance(found, str):
            move.advance(MoveEvent.FAILED, found)
            if move.source.move is move:
                move.source.move = None  # there may be another one
                move.source.failed_at = time.monotonic()
                move.source.num_failed += 1
                move.source.failed_by = found
            move.held.close()
            return
        move.found = found
        move.advance(MoveEvent.BEGAN)
        if move.state is MoveState.READY:
            _cut(move.source)

    async def whole(self, move: Move) -> Answer | LegFailed:
        """What the engine answers that has the request at last, for it may move on. The first
        move's source has left it."""
        found: Answer | LegFailed | Move = move
        while isinstance(found, Move):
            move = found
            try:
                found = await self._whole(move)
            finally:
                move.close()
        return found

    async def _whole(self, move: Move) -> Answer | LegFailed | Move:
        """What the target makes of it."""
        job, target, left = move.source.job, move.target, move.left
        assert target is not None
        assert left is not None
        with self.answering(job, target) as answering:
            job.trace.decode = target.instance_id
            taken = await move.taken()
            if taken is None:
                return left
            job.trace.num_moves += 1
            leg, result = taken
            followed = answering.follow(result, leg)
        assert not isinstance(followed, Stream)
        has_refused = isinstance(followed, Answer) and followed.status >= 400
        return left if has_refused else followed

    async def _ask(self, move: Move) -> Found | asyncio.Task[Found | str] | str:
        """What the target gives, or why it gives nothing."""
        source, job = move.source, move.source.job
        if source.transcript is not None:
            obstacle = source.transcript.so_far().obstacle()
            if obstacle is not None:
                return obstacle
        instance = await self._find_room(move)
        if isinstance(instance, str):
            return instance
        move.advance(MoveEvent.ASKED)
        origin = live_source(source.instance, instance)
        if source.transcript is None:
            if origin is None:
                return "not_live"
            handover = Handover.whole(self.key, job, origin)
            return await until_left(self._open(move, instance, handover), move.source_over)
        if origin is not None:
            handover = Handover.live(self.key, job, source.transcript.so_far(), origin)
            found = await self._open(move, instance, handover)
            if not isinstance(found, str):
                return found
            who = job.trace.request_id, instance.instance_id
            logger.info("request %s: %s does not take it while it runs: %s", *who, found)
        if job.promise.kind == "sampled":  # the target's next tokens would be others
            _cut(source)
            await move.source_over.wait()
        handover = Handover.by_tokens(self.key, job, source.transcript.so_far(), source.made_by)
        return await self._open(move, instance, handover)

    async def _open(self, move: Move, instance: Instance, handover: Handover) -> Found | str:
        """What the target gives; its leg is among what the move holds, unless it failed."""
        with ExitStack() as held:
            found: Found | str = await self._send(move, instance, handover, held)
            if not isinstance(found, str):
                move.held.push(held.pop_all())
            return found

    async def _send(
        self, move: Move, instance: Instance, handover: Handover, held: ExitStack
    ) -> Found | str:
        source, job = move.source, move.source.job
        num_tokens = job.routed.num_prompt_tokens + job.routed.num_max_tokens
        headers = held.enter_context(self.tracing.leg(job.trace, "decode", instance))
        stage = held.enter_context(job.trace.stage("moved", instance.instance_id))
        leg = held.enter_context(self.legs.open(instance, "decode", num_tokens, stage))
        sent = job.body.for_decode(handover.params, instance.instance_id)
        result = await self.legs.decode(leg, job.body, headers, sent)
        if source.transcript is None:
            if isinstance(result, Stream):
                result.response.close()
                return FailureKind.PROTOCOL.value
            has_answered = isinstance(result, Answer) and result.status < 400
            if has_answered or move.state is MoveState.MOVED:
                return leg, result
        if isinstance(result, LegFailed):
            move.failure = result.failure
            return result.failure.kind.value
        if isinstance(result, Answer):
            move.failure = Failure(FailureKind.STATUS, f"status {result.status}")
            return "refused"
        assert source.transcript is not None
        begun = await until_new(result, source.transcript, handover.num_told)
        if isinstance(begun, Failure):
            result.response.close()
            leg.outcome, move.failure = "refused", begun
            if begun.kind is not FailureKind.STATUS:
                leg.failed(begun)
            return leg.outcome
        stage.first_token_s = time.monotonic()
        return leg, replace(result, first=begun)

    def may_leave(self, source: Instance) -> bool:
        """Whether what runs there may go elsewhere. Where nobody is used for answers, it stays:
        another engine that switches would send it on, too.
        """
        return not _keeps(source) or any(
            one.is_available and not one.is_switching and are_partners(source, one)
            for one in self.registry
            if one.spec.role != "prefill"
        )

    async def _find_room(self, move: Move) -> Instance | str:
        """At the target; or why it, or any, may not have it."""
        source = move.source.instance
        others = {one for one in self.registry if not are_partners(source, one)}
        excluded = others | {source}
        if move.target is None and _keeps(source):
            excluded |= {one for one in self.registry if one.is_switching}
        routed = replace(
            move.source.job.routed, alone="moved", excluded=excluded, target=move.target
        )
        admitted = await self.admission.admit(routed, again=True)
        if isinstance(admitted, Admitted):
            move.held.enter_context(admitted)
            target = move.target = admitted.pair.decode
            # It may have come, or told what it is, while the request was in line.
            return target if are_partners(source, target) else "incompatible"
        asked = self.registry if move.target is None else (move.target,)
        there = {one for one in asked if one is not source and _answers(one, routed.model)}
        return "incompatible" if there and there <= others else "unavailable"


def _answers(instance: Instance, model: str | None) -> bool:
    """Requests for this model, as far as it is up."""
    return instance.is_available and instance.spec.role != "prefill" and instance.serves(model)


def _keeps(source: Instance) -> bool:
    """What it answers, from others that switch as it does."""
    return source.is_available and source.is_switching


def _has_moved(answer: Answer) -> bool:
    return answer.status == HTTPStatus.CONFLICT and HAS_MOVED.encode() in answer.body


def _cut(source: Answering) -> None:
    """Of what has come the client still gets whole events. Who answers whole ends by itself when it
    has given the request away."""
    if source.response is not None:
        source.response.fail(_CUT)

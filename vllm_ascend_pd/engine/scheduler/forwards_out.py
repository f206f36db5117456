# SPDX-License-Identifier: Apache-2.0
"""Running requests that another engine computes, while their clients stay this engine's: see
``move_states``. So does an engine that is about to end, without a router.

    front end ◄── tokens ── S ◄── told ── T (forwards_in)
                            │ take, more ──►
                            ▲ open, extend, ready / go: the request and its KV (moves_out)

To its front end the request is as it was: what T tells is delivered as if it had been computed
here, so text, stop strings, tool calls, usage and ids are those of S. An end is found here as well,
from the tokens. Where T fails, the request goes on here, with the tokens that are known.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.scheduler.move_states import FORWARDING, Forwarding, ForwardingEvent
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.vllm_api.grammars import accept_tokens
from vllm_ascend_pd.engine.vllm_api.guests import encode_request, what_stays
from vllm_ascend_pd.engine.vllm_api.logprobs import make_logprobs
from vllm_ascend_pd.engine.vllm_api.queues import num_waiting
from vllm_ascend_pd.engine.vllm_api.requests import (
    append_output,
    is_for_consumer,
    is_seeded,
    num_landed_tokens,
    tell_error,
    tell_output,
)
from vllm_ascend_pd.engine.vllm_api.status import is_completed, put_away
from vllm_ascend_pd.engine.vllm_api.status import queue as queue_again
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.net.connection import MAX_FRAME_BYTES
from vllm_ascend_pd.resume import RESUME, RunningAt
from vllm_ascend_pd.types import Cause
from vllm_ascend_pd.wire import WIRE_VERSION, More, Refused, Take, Told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_ascend_pd.engine.scheduler.resume import Resumes
    from vllm_ascend_pd.engine.vllm_api.types import Request
    from vllm_ascend_pd.resume import ResumeKey
    from vllm_ascend_pd.transfer.control import ControlClient, OpenOutcome
    from vllm_ascend_pd.types import Endpoint
    from vllm_ascend_pd.wire import TokenLogprobs

logger = limited_logger(__name__)

_MAX_ASKED = 4
"""Requests whose KV is copied at the same time."""
_MAX_BYTES = MAX_FRAME_BYTES - (1 << 15)
"""Of a request, in one message."""
_AGAIN_S = 1.0
"""After which a peer is asked again that was busy."""
_IDLE_S = 0.005
_PATIENCE_S = 5.0
"""For an answer of a target, whose step may be long, beside ``transfer.peer_timeout_s``. Its end is
noticed at once."""


@dataclass(slots=True, eq=False)
class _Forward:
    request: Request
    peer: Endpoint
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    """The transfer id."""
    state: Forwarding = Forwarding.ASKED
    told: list[int] = field(default_factory=list)
    """Tokens that its client has not got."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each of them, if it asks for some."""


class ForwardsOut(Part):
    """Scheduler thread."""

    def __init__(
        self,
        common: Common,
        client: ControlClient,
        resumes: Resumes,
        key: ResumeKey,
        source: RunningAt,
        is_ending: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._common = common
        self._scheduler = common.scheduler
        self._client = client
        self._resumes = resumes
        self._key = key
        self._source = source
        self.is_ending = is_ending
        self._peers = common.config.forward.endpoints
        self._vocab_size = common.scheduler.vllm_config.model_config.get_vocab_size()
        self._next_peer = itertools.count()
        self._answers: queue.Queue[OpenOutcome] = queue.Queue()  # waited for: see ``Outcomes``
        self.forwards: dict[str, _Forward] = {}
        """By request id: those that T has, or is to have."""
        self._tried: dict[str, set[Endpoint]] = {}
        """By request id: who cannot have it. All peers where nobody can."""
        self._busy_until: dict[Endpoint, float] = {}

    def settle(self) -> bool:
        for outcome in self._new_answers():
            forward: _Forward = outcome.key
            if self.forwards.get(forward.request.request_id) is forward:
                self._take(forward, outcome.answer)
        if self.is_ending():
            self._ask_for_room()
        return any(forward.told for forward in self.forwards.values())

    def _new_answers(self) -> list[OpenOutcome]:
        """Not those to what is asked on them: a peer that answers at once would hold up all others.

        Where all requests are away a step could do nothing, so for a moment one is waited for.
        """
        forwards, scheduler = self.forwards.values(), self._scheduler
        num_away = sum(f.state is Forwarding.AWAY and not f.told for f in forwards)
        is_idle = num_away and not scheduler.running and num_waiting(scheduler) == num_away
        try:
            first = self._answers.get(timeout=_IDLE_S if is_idle else 0.0)
        except queue.Empty:
            return []
        return [first, *(self._answers.get_nowait() for _ in range(self._answers.qsize()))]

    # A request goes.

    def _ask_for_room(self) -> None:
        asked = sum(f.state is Forwarding.ASKED for f in self.forwards.values())
        for request in list(self._scheduler.running):
            if asked >= _MAX_ASKED:
                return
            if request.request_id not in self.forwards and _decodes(request):
                asked += self._ask(request)

    def _ask(self, request: Request) -> bool:
        tried = self._tried.get(request.request_id)
        if tried is None:
            tried = self._tried[request.request_id] = set()
            feature = self._resumes.what_stays(request, {}, is_forwarded=True)
            feature = feature or what_stays(self._scheduler, request)
            if is_for_consumer(request):  # who has been told of blocks that it would give back
                feature = "do_remote_decode"
            if feature:
                return self._keep(request, feature, "it ends here")
        left = [
            peer
            for peer in self._peers
            if peer not in tried and self._busy_until.get(peer, 0.0) <= self._clock()
        ]
        if not left:
            return False
        forward = _Forward(request, left[next(self._next_peer) % len(left)])
        tried.add(forward.peer)
        # A temperature without a seed: any next token is right. With a seed it is a certain one.
        assert request.sampling_params is not None
        only_exact = is_seeded(request.sampling_params)
        resume = self._key.sign(forward.name, None, (), only_exact, self._source)
        try:
            params = {RESUME: resume.to_params()}
            encoded = encode_request(request, forward.name, params)
        except TransferError as e:
            return self._keep(request, Cause.BAD_PARAMS.value, str(e))
        if len(encoded) > _MAX_BYTES:
            detail = f"it has {len(encoded)} bytes, and at most {_MAX_BYTES} are sent"
            return self._keep(request, "too_large", detail)
        self.forwards[request.request_id] = forward
        fingerprint = self._resumes.maker.fingerprint
        take = Take(forward.name, self._source.epoch, WIRE_VERSION, encoded, fingerprint)
        self._client.ask(forward, forward.peer, take, self._answers, _PATIENCE_S)
        logger.info("request %s: %s is asked to compute it", request.request_id, forward.peer)
        return True

    def _keep(self, request: Request, outcome: str, detail: str) -> bool:
        """No peer can have it."""
        self._tried[request.request_id].update(self._peers)
        self._note(request, outcome, detail)
        return False

    def named(self, name: str) -> Request | None:
        """Which one a target asks for."""
        asked = (f.request for f in self.forwards.values() if f.name == name)
        return next(asked, None)

    def go(self, request: Request) -> None:
        """It has been stopped, and its target computes it from here on."""
        self._advance(self.forwards[request.request_id], ForwardingEvent.GO)
        put_away(self._scheduler, request)

    def holds(self, request: Request) -> bool:
        """Whether another engine computes it."""
        forward = self.forwards.get(request.request_id)
        return forward is not None and forward.state is Forwarding.AWAY

    # Its tokens come.

    def _take(self, forward: _Forward, answer: Any) -> None:
        if isinstance(answer, Refused):
            self._fail(forward, answer.cause, answer.detail)
            return
        if not isinstance(answer, Told):
            detail = f"{type(answer).__name__} is no answer"
            self._fail(forward, Cause.BAD_PARAMS.value, detail)
            return
        num_known = forward.request.num_output_tokens + len(forward.told)
        if forward.state is Forwarding.AWAY:
            new = answer.token_ids[num_known - answer.start :]
            # The target has none of tokens that were sampled here since it was asked for more.
            logprobs = answer.logprobs[max(0, len(answer.logprobs) - len(new)) :]
            if (
                answer.start > num_known
                or not self._are_tokens(new)
                or not self._are_logprobs(forward.request, logprobs, len(new))
            ):
                self._fail(forward, Cause.INCOMPATIBLE.value, "it tells what is no token here")
                return
            forward.told += new
            forward.logprobs += logprobs
        if answer.is_over and not forward.told:
            self._fail(forward, answer.cause or Cause.INCOMPATIBLE.value, "it has ended there")
        else:
            num_known = forward.request.num_output_tokens + len(forward.told)
            more = More(forward.name, self._source.epoch, num_known)
            self._client.ask(forward, forward.peer, more, self._answers, _PATIENCE_S)

    def _are_tokens(self, token_ids: Sequence[int]) -> bool:
        return all(0 <= token_id < self._vocab_size for token_id in token_ids)

    def _are_logprobs(
        self, request: Request, logprobs: Sequence[TokenLogprobs], num_tokens: int
    ) -> bool:
        """Whether these are what the request asks for."""
        assert request.sampling_params is not None
        num_each = request.sampling_params.logprobs
        if num_each is None:
            return not logprobs
        return len(logprobs) == num_tokens and all(
            len(of.token_ids) == len(of.logprobs) == num_each + 1
            and self._are_tokens(of.token_ids)
            and 0 <= of.rank <= self._vocab_size
            for of in logprobs
        )

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        for forward in list(self.forwards.values()):
            if not forward.told:
                continue
            request, told, logprobs = forward.request, forward.told, forward.logprobs
            forward.told, forward.logprobs = [], []
            new, ended = append_output(self._scheduler, request, told)
            if accept_tokens(self._scheduler, request, new):
                with_them = make_logprobs(logprobs[: len(new)]) if logprobs else None
                told_now = tell_output(self._scheduler, request, new, ended, with_them)
            else:  # as with tokens of its own
                logger.error("request %s: its grammar accepts no %s", request.request_id, new)
                told_now = tell_error(self._scheduler, request, {})
            outputs[request.client_index].append(told_now)

    # The end.

    def _fail(self, forward: _Forward, cause: str, detail: str) -> None:
        """It goes on here, or is computed here from now on; another peer may be asked then."""
        was_away = forward.state is Forwarding.AWAY
        self._advance(forward, ForwardingEvent.FAIL)
        self._leave(forward)
        if was_away:
            queue_again(forward.request)
        if cause == Cause.BUSY.value:
            self._tried[forward.request.request_id].discard(forward.peer)
            self._busy_until[forward.peer] = self._clock() + _AGAIN_S
        outcome = f"back_{cause}" if was_away else cause
        self._note(forward.request, outcome, f"{forward.peer}: {detail}")

    def _leave(self, forward: _Forward) -> None:
        del self.forwards[forward.request.request_id]
        self._client.release(forward.peer, forward.name, self._source.epoch)

    def _note(self, request: Request, outcome: str, detail: str) -> None:
        self._common.stats.add("forwards", label=outcome)
        logger.warning("request %s is computed here: %s (%s)", request.request_id, outcome, detail)

    def _advance(self, forward: _Forward, event: ForwardingEvent) -> None:
        forward.state = FORWARDING.after(forward.state, event)

    def finish(self, request: Request, ending: Ending) -> None:
        self._tried.pop(request.request_id, None)
        forward = self.forwards.get(request.request_id)
        if forward is None:
            return
        outcome = Cause.NOT_NEEDED.value
        if forward.state is Forwarding.AWAY:
            outcome = "ended" if is_completed(request) else "aborted"
        self._advance(forward, ForwardingEvent.END)
        self._leave(forward)
        self._common.stats.add("forwards", label=outcome)
        logger.info("request %s: forwarded by %s: %s", request.request_id, forward.peer, outcome)

    def counts(self) -> dict[str, int]:
        return {"forwards": len(self.forwards)}


def _decodes(request: Request) -> bool:
    """Whether nothing of it is computed again, as after a preemption: else it cannot be copied."""
    return bool(request.num_output_tokens) and (
        num_landed_tokens(request) >= request.num_tokens - 1
    )

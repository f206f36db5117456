# SPDX-License-Identifier: Apache-2.0
"""Requests of other engines' clients, which this engine computes: the target of ``forwards_out``.

A guest comes as any request that moves here (``moves_in``). Its tokens are no client's of this
engine's front end: its source asks for them, and is answered when there are more.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.vllm_api.config import computes_in_lock_step
from vllm_ascend_pd.engine.vllm_api.engine import is_paused
from vllm_ascend_pd.engine.vllm_api.grammars import why_other_masks
from vllm_ascend_pd.engine.vllm_api.guests import add_guest, make_guest, read_request
from vllm_ascend_pd.engine.vllm_api.logprobs import read_logprobs
from vllm_ascend_pd.engine.vllm_api.queues import max_running, num_waiting
from vllm_ascend_pd.engine.vllm_api.requests import end_aborted
from vllm_ascend_pd.engine.vllm_api.status import is_completed
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.types import Cause, serves
from vllm_ascend_pd.wire import WIRE_VERSION, More, Refused, Release, Take, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.scheduler.resume import Resumes
    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, LoRARequest, Request
    from vllm_ascend_pd.transfer.control import ControlServer
    from vllm_ascend_pd.wire import TokenLogprobs

logger = limited_logger(__name__)

ANSWER_S = 1.0
"""A source hears of its request at least so often."""


@dataclass(slots=True, eq=False)
class _Guest:
    request: Request
    heard_at: float
    asked: tuple[bytes, Take | More] | None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of each token that was sampled here, if it asks for some."""
    refusal: str = ""
    """Why it does not go on here; set before it ends."""


class ForwardsIn(Part):
    """Scheduler thread; what sources ask comes by the control server's queue."""

    def __init__(
        self,
        common: Common,
        server: ControlServer,
        resumes: Resumes,
        engine_core: Callable[[], EngineCore | None],
        is_ending: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._common = common
        self._server = server
        self._resumes = resumes
        self.engine_core = engine_core
        self.is_ending = is_ending
        self._clock = clock
        self.adapter: Callable[[str], LoRARequest | None] = lambda name: None
        """Of this engine, by name; from ``on_engine_started`` on."""
        self._guests: dict[str, _Guest] = {}
        """By transfer id, which is their request id here."""
        self._outputs: list[dict[int, list[Any]]] = []
        """Of steps, which are complete when ``settle`` is called next."""
        resumes.guests = server.guests

    def settle(self) -> bool:
        self._note_logprobs()
        for _ in range(self._server.of_guests.qsize()):  # they may ask faster than that
            self._take(*self._server.of_guests.get_nowait())
        paused = is_paused(self._common.scheduler)
        for guest in list(self._guests.values()):
            if paused and not guest.request.is_finished():  # its source can go on with it
                end_aborted(self._common.scheduler, guest.request)
                guest.refusal = Cause.BUSY.value
            self._tell(guest)
            if self._clock() - guest.heard_at > self._common.config.transfer.lease_s:
                logger.warning("request %s: its engine is silent", guest.request.request_id)
                self._leave(guest)
        # Who waits for the last tokens of one is told, also where nothing is left to compute.
        return any(guest.request.is_finished() for guest in self._guests.values())

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        if any(_num_logprobs(guest.request) is not None for guest in self._guests.values()):
            self._outputs.append(outputs)

    def _note_logprobs(self) -> None:
        for output in itertools.chain(*(step.get(0, ()) for step in self._outputs)):
            guest = self._guests.get(output.request_id)
            if guest is not None and output.new_logprobs is not None:
                num_logprobs = _num_logprobs(guest.request)
                assert num_logprobs is not None
                guest.logprobs += read_logprobs(output.new_logprobs, num_logprobs)
        self._outputs.clear()

    def _take(self, identity: bytes, message: Take | More | Release) -> None:
        known = self._guests.get(message.transfer_id)
        if isinstance(message, Release):
            if known is not None:
                self._leave(known)
            return
        guest = known or self._begin(message)
        if isinstance(guest, Refused):
            self._server.guests.discard(message.transfer_id)
            self._server.answer(identity, message, guest)
            return
        guest.asked, guest.heard_at = (identity, message), self._clock()

    def _begin(self, message: Take | More) -> _Guest | Refused:
        if isinstance(message, More):
            return _refused(message, Cause.LEASE_EXPIRED, "it is not here any more")
        core = self.engine_core()
        if message.version != WIRE_VERSION:
            return _refused(message, Cause.INCOMPATIBLE, f"wire version {WIRE_VERSION} here")
        if self._common.config.security.secret_file is None:
            return _refused(message, Cause.UNAUTHENTICATED, "no security.secret_file here")
        theirs, ours = message.fingerprint, self._resumes.maker.fingerprint
        if theirs and not serves(theirs, ours):
            detail = f"the engines differ: {theirs} there, {ours} here"
            return _refused(message, Cause.INCOMPATIBLE, detail)
        if core is None or self._resumes.moves is None:
            return _refused(message, Cause.WRONG_ROLE, "kv_role must be kv_both here")
        if computes_in_lock_step(self._common.scheduler.vllm_config):
            return _refused(message, Cause.INCOMPATIBLE, "ranks in lock-step here")
        if self.is_ending():
            return _refused(message, Cause.BUSY, "this engine is about to end itself")
        scheduler = self._common.scheduler
        if is_paused(scheduler):
            return _refused(message, Cause.BUSY, "this engine is paused")
        if len(scheduler.running) + num_waiting(scheduler) >= max_running(scheduler):
            return _refused(message, Cause.BUSY, "as many requests are here as run at once")
        try:
            sent, adapter = read_request(message.request), None
            if detail := why_other_masks(scheduler, sent):
                return _refused(message, Cause.INCOMPATIBLE, detail)
            if (lora := sent.lora_request) is not None:
                adapter = self.adapter(lora.lora_name)
                if adapter is None:
                    detail = f"no adapter {lora.lora_name!r} here"
                    return _refused(message, Cause.NO_ADAPTER, detail)
            request = make_guest(core, message.transfer_id, sent, adapter)
        except TransferError as e:
            return _refused(message, Cause.BAD_PARAMS, str(e))
        add_guest(core, request)
        guest = self._guests[message.transfer_id] = _Guest(request, self._clock(), None)
        logger.info("request %s: taken for another engine's client", request.request_id)
        return guest

    def _tell(self, guest: _Guest) -> None:
        """Its source, if that asks and there is something to say, or nothing was said for long."""
        if guest.asked is None:
            return
        request, (identity, asked) = guest.request, guest.asked
        start, is_over = 0, request.is_finished()
        is_due = isinstance(asked, Take) or self._clock() - guest.heard_at >= ANSWER_S
        new: tuple[int, ...] = ()
        if isinstance(asked, More) and not self._resumes.holds(request):
            start = asked.num_known
            new = tuple(request.output_token_ids[start:])
        if new or is_over or is_due:
            guest.asked = None
            cause = "" if is_completed(request) or not is_over else guest.refusal
            if new:  # what came before them is known
                del guest.logprobs[: -len(new)]
            logprobs = tuple(guest.logprobs) if new else ()
            told = Told(asked.transfer_id, start, new, is_over, cause, logprobs)
            self._server.answer(identity, asked, told)

    def _leave(self, guest: _Guest) -> None:
        """Its source does not want it any more, or is gone."""
        request_id = guest.request.request_id
        del self._guests[request_id]
        self._server.guests.discard(request_id)
        if not guest.request.is_finished():
            end_aborted(self._common.scheduler, guest.request)

    def finish(self, request: Request, ending: Ending) -> None:
        """Before ``Resumes`` forgets why it has refused it."""
        if (guest := self._guests.get(request.request_id)) is not None:
            guest.refusal = self._resumes.refusal_of(request) or Cause.CANCELLED.value

    def counts(self) -> dict[str, int]:
        return {"guests": len(self._guests)}


def _num_logprobs(request: Request) -> int | None:
    params = request.sampling_params
    return params.logprobs if params is not None else None


def _refused(message: Take | More, cause: Cause, detail: str) -> Refused:
    return Refused(message.transfer_id, cause.value, detail)

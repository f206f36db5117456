# SPDX-License-Identifier: Apache-2.0
"""Running requests that another engine takes over: see ``move_states``, of which this is S."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.scheduler.maker import differing
from vllm_ascend_pd.engine.scheduler.move_states import LEAVING, Leaving, LeavingEvent
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.vllm_api.config import computes_in_lock_step
from vllm_ascend_pd.engine.vllm_api.lora import adapters_fit
from vllm_ascend_pd.engine.vllm_api.queues import give_row_back, put_back, take_out
from vllm_ascend_pd.engine.vllm_api.requests import (
    is_seeded,
    named,
    num_landed_tokens,
    params_digest,
    tell_abort,
)
from vllm_ascend_pd.engine.vllm_api.status import is_running, preempt
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.resume import MOVED
from vllm_ascend_pd.transfer.lease_states import ProducerState
from vllm_ascend_pd.types import Cause, TransferId
from vllm_ascend_pd.wire import Extend, Extended, Go, Open, Opened, Ready, Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut
    from vllm_ascend_pd.engine.scheduler.maker import Maker
    from vllm_ascend_pd.engine.scheduler.producer import Producer
    from vllm_ascend_pd.engine.vllm_api.types import Request, SchedulerOutput
    from vllm_ascend_pd.transfer.control import ControlServer
    from vllm_ascend_pd.transfer.leases import Lease, LeaseBook
    from vllm_ascend_pd.wire import Answer, AskOfRunning

logger = limited_logger(__name__)

_NUM_REMEMBERED = 256


@dataclass(slots=True, eq=False)
class _Move:
    request: Request
    lease: Lease
    forward: str
    """Its name where it is forwarded."""
    state: Leaving = Leaving.COPYING
    place: int = 0
    """In the running queue, before it was stopped."""
    stopped_until: float = 0.0
    asked: tuple[bytes, Extend] | None = None
    """Who is answered when nothing is in flight any more."""
    num_told: int = 0
    """Of its output tokens."""


class MovesOut(Part):
    """Scheduler thread; what others ask comes by the control server's queue.

    All that happens to a request happens between steps, in ``settle``. It is stopped by taking it
    out of the running queue, as it is: with its blocks, and its row in the worker's memory.
    """

    def __init__(
        self,
        common: Common,
        producer: Producer,
        book: LeaseBook,
        server: ControlServer,
        maker: Maker,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._common = common
        self._scheduler = common.scheduler
        self._producer = producer
        self._book = book
        self._server = server
        self._maker = maker
        self._clock = clock
        self.forwards: ForwardsOut | None = None
        """Of an engine that has peers to forward to."""
        self._moves: dict[str, _Move] = {}
        """By transfer id."""
        self._gone: list[Request] = []
        """Their clients are told with the step under way."""
        self._over: deque[tuple[str, Cause]] = deque(maxlen=_NUM_REMEMBERED)
        """Why the last ones stayed, for engines that ask once more."""

    def settle(self) -> bool:
        for _ in range(self._server.of_running.qsize()):  # peers may ask faster than it is answered
            identity, message = self._server.of_running.get_nowait()
            answer = self._answer(identity, message)
            if answer is not None:
                self._server.answer(identity, message, answer)
        for move in list(self._moves.values()):
            self._look(move)
        return bool(self._gone) or any(m.state is not Leaving.COPYING for m in self._moves.values())

    def _look(self, move: _Move) -> None:
        """What has become of it since the last look."""
        if move.lease.state is ProducerState.CLOSED:
            self._stay(move, Cause.CANCELLED)
        elif not is_running(move.request):
            self._stay(move, Cause.NOT_RUNNING)
        elif move.forward and not self._is_forwarded(move):
            self._stay(move, Cause.CANCELLED)
        elif move.state is Leaving.STOPPING and not move.request.num_in_flight_tokens:
            self._advance(move, LeavingEvent.DRAINED)
            if move.asked is not None:
                identity, asked = move.asked
                move.asked = None
                self._server.answer(identity, asked, self._extended(move, asked.num_known))
        elif move.state is not Leaving.COPYING and self._clock() >= move.stopped_until:
            self._stay(move, Cause.DEADLINE)

    def _is_forwarded(self, move: _Move) -> bool:
        return self.forwards is not None and self.forwards.named(move.forward) is move.request

    def _answer(self, identity: bytes, message: AskOfRunning) -> Answer | None:
        """``None`` if it follows."""
        if isinstance(message, Open):
            opened = self._open(message)
            if isinstance(opened, Refused):
                self._common.stats.add("moves", label=opened.cause)
            return opened
        if (move := self._moves.get(message.transfer_id)) is not None:
            self._look(move)
        if (move := self._moves.get(message.transfer_id)) is None:
            causes = [cause for name, cause in self._over if name == message.transfer_id]
            return _refused(message, causes[-1] if causes else Cause.LEASE_EXPIRED, "it is over")
        if isinstance(message, Ready):
            return self._go(move, message)
        if message.num_known != move.num_told:
            # What this question was answered with is copied now, and an answer gives it up.
            return _refused(message, Cause.BAD_PARAMS, "it comes again")
        if message.freeze:
            return self._freeze(move, identity, message)
        return self._extended(move, message.num_known)

    def _open(self, message: Open) -> Answer:
        if differing_engines := self._book.differing(message):
            # First: sampling parameters of another version of vLLM have other fields.
            return _refused(message, Cause.INCOMPATIBLE, differing_engines)
        forwarded = self.forwards.named(message.running) if self.forwards is not None else None
        found = named(self._scheduler, message.running) if forwarded is None else [forwarded]
        found = [request for request in found if request not in self._gone]
        if not found:
            return _refused(message, Cause.NOT_NEEDED, "no such request: it has ended")
        request = found[0]
        is_moving = any(move.request is request for move in self._moves.values())
        if len(found) > 1 or is_moving or message.transfer_id in self._book:
            return _refused(message, Cause.BUSY, "it moves already, or others have its name")
        params = request.sampling_params
        is_another = params is not None and params_digest(params) != message.sampling_key
        if is_another and forwarded is None:  # whose name is random
            return _refused(message, Cause.NOT_NEEDED, "another request has its name now")
        ours = self._maker.of_running(request, is_forwarded=forwarded is not None)
        if other := differing(request, message.made_by, ours):
            return _refused(message, Cause.INCOMPATIBLE, f"the engines differ in {other}")
        if cause := self._why_it_stays(request):
            return _refused(message, cause, "it cannot be copied")
        lease = self._producer.lend(request, TransferId(message.transfer_id))
        end, answer = lease.span.end, self._book.open(message)
        if not isinstance(answer, Opened) or answer.end != end:
            self._producer.take_back(lease)
            if isinstance(answer, Refused):
                return answer
            return _refused(message, Cause.HASH_MISMATCH, "another prompt")
        name = message.running if forwarded is not None else ""
        move = self._moves[lease.transfer_id] = _Move(request, lease, name)
        logger.info("request %s: another engine copies it", request.request_id)
        return self._extended(move, 0)

    def _why_it_stays(self, request: Request) -> Cause | None:
        params = request.sampling_params
        if (
            not is_running(request)
            or params is None
            or request.resumable
            or num_landed_tokens(request) < request.num_tokens - 1
            or not request.num_output_tokens
            or self._common.loads.is_under(request)
        ):
            return Cause.NOT_RUNNING
        has_drafts = self._scheduler.vllm_config.speculative_config is not None
        if has_drafts and is_seeded(params):
            return Cause.INCOMPATIBLE  # nobody knows how often it drew from the seed
        if has_drafts and self._common.has_states:
            return Cause.INCOMPATIBLE  # its states lie behind drafts, in the order of their columns
        if computes_in_lock_step(self._scheduler.vllm_config):
            return Cause.INCOMPATIBLE  # stopped it does not count: the others would rest without it
        return None

    def _extended(self, move: _Move, num_known: int) -> Extended:
        """What is known of it, and may be read: no block that is still written."""
        request, lease = move.request, move.lease
        end = min(num_landed_tokens(request), request.num_tokens - 1)
        is_frozen = move.state is Leaving.STOPPED
        if not is_frozen:
            end -= end % self._common.block_size
        self._producer.extend(lease, request, end)
        move.num_told = request.num_output_tokens
        return Extended(
            lease.transfer_id,
            self._producer.epoch,
            tuple(request.output_token_ids[num_known:]),
            end,
            tuple(group.first for group in lease.span.groups),
            self._book.admit(lease, end),
            is_frozen,
        )

    def _freeze(self, move: _Move, identity: bytes, message: Extend) -> Extended | None:
        if move.state is Leaving.COPYING:
            move.place = take_out(self._scheduler, move.request)
            move.stopped_until = self._clock() + self._common.config.transfer.max_freeze_s
        self._advance(move, LeavingEvent.FREEZE)
        if move.state is Leaving.STOPPED:
            return self._extended(move, message.num_known)
        move.asked = (identity, message)
        return None

    def _go(self, move: _Move, message: Ready) -> Answer:
        """The point of no return: here it is never computed again."""
        self._advance(move, LeavingEvent.READY)
        if move.state is not Leaving.GONE:
            return _refused(message, Cause.NOT_RUNNING, "it was not stopped")
        del self._moves[move.lease.transfer_id]
        self._producer.take_back(move.lease)
        if self._is_forwarded(move):
            assert self.forwards is not None
            give_row_back(self._scheduler)
            self.forwards.go(move.request)
        else:
            self._gone.append(move.request)
        self._common.stats.add("moves", label="moved")
        logger.info("request %s: has moved to another engine", move.request.request_id)
        return Go(message.transfer_id)

    def _stay(self, move: _Move, cause: Cause) -> None:
        """It goes on where it was, if it still runs; it waits where others run with as many
        adapters as there is room for."""
        was_stopped = move.state is not Leaving.COPYING
        self._advance(move, LeavingEvent.STAY)
        request, transfer_id = move.request, move.lease.transfer_id
        del self._moves[transfer_id]
        self._over.append((transfer_id, cause))
        if move.asked is not None:
            identity, asked = move.asked
            self._server.answer(identity, asked, _refused(asked, cause, "it stays"))
        self._producer.take_back(move.lease)
        self._common.stats.add("moves", label=cause.value)
        logger.info("request %s: does not move: %s", request.request_id, cause.value)
        if was_stopped:
            give_row_back(self._scheduler)
            if is_running(request):
                put_back(self._scheduler, request, move.place)
                if not adapters_fit(self._scheduler):
                    preempt(self._scheduler, request, time.monotonic(), drops_output=False)

    def _advance(self, move: _Move, event: LeavingEvent) -> None:
        move.state = LEAVING.after(move.state, event)

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        for move in list(self._moves.values()):
            if not is_running(move.request):  # preempted: its blocks may be another's in this step
                self._stay(move, Cause.NOT_RUNNING)

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        for request in list(self._gone):
            outputs[request.client_index].append(
                tell_abort(self._scheduler, request, {MOVED: True})
            )

    def finish(self, request: Request, ending: Ending) -> None:
        if request in self._gone:
            self._gone.remove(request)
            give_row_back(self._scheduler)
        self._end_move_of(request, Cause.NOT_NEEDED)

    def forsake(self, request: Request) -> None:
        """What it computes from now on is not what the other engine would."""
        self._end_move_of(request, Cause.INCOMPATIBLE)

    def _end_move_of(self, request: Request, cause: Cause) -> None:
        for move in list(self._moves.values()):
            if move.request is request:
                self._stay(move, cause)

    def reset(self, reset_connector: bool) -> None:
        """A request that has stopped is preempted as those are that run; of one that has moved away
        nothing is needed any more.
        """
        for request in self._gone:
            self._common.manager.free(request)
        for move in list(self._moves.values()):
            was_stopped = move.state is not Leaving.COPYING
            self._stay(move, Cause.CANCELLED)
            if was_stopped and is_running(move.request):
                preempt(self._scheduler, move.request, time.monotonic())

    def counts(self) -> dict[str, int]:
        return {"moves_out": len(self._moves) + len(self._gone)}


def _refused(message: AskOfRunning, cause: Cause, detail: str) -> Refused:
    return Refused(message.transfer_id, cause.value, detail)

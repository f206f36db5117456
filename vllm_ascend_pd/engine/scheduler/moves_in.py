# SPDX-License-Identifier: Apache-2.0
"""Requests that run at another engine and move here: see ``move_states``, of which this is T.

The request waits, and is given the other engine's output tokens as they come. What they and the
prompt fill is loaded beside the steps, round by round, and held:

    |<------------- held ------------->|<- missing: this round ->|
    [cached here][loaded by past rounds][ b ][ b ][ b ]          [still written there
    when it has stopped                                  [ b ][tail]

Windows slide meanwhile: what is behind one is given up again, here as there.
"""

from __future__ import annotations

import queue
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.config import NOT_ALLOWED
from vllm_ascend_pd.engine.scheduler.consumer import group_hashes
from vllm_ascend_pd.engine.scheduler.move_states import COMING, Coming, ComingEvent
from vllm_ascend_pd.engine.scheduler.parts import Common, Ending, Part
from vllm_ascend_pd.engine.scheduler.remote_prompt import PeerSource
from vllm_ascend_pd.engine.scheduler.resume import Refusal
from vllm_ascend_pd.engine.scheduler.sources import SourceEvent, SourceState
from vllm_ascend_pd.engine.vllm_api.blocks import cached_block
from vllm_ascend_pd.engine.vllm_api.engine import is_paused
from vllm_ascend_pd.engine.vllm_api.grammars import is_behind_reasoning
from vllm_ascend_pd.engine.vllm_api.requests import append_output, params_digest
from vllm_ascend_pd.engine.vllm_api.status import queue_as, wait_for_kv
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.metrics import Provenance
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.types import Cause, Endpoint, LoadId
from vllm_ascend_pd.wire import WIRE_VERSION, Extend, Extended, Go, Open, Ready, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_ascend_pd.engine.scheduler.consumer import Consumer
    from vllm_ascend_pd.engine.scheduler.resume import Resumes
    from vllm_ascend_pd.engine.vllm_api.types import KVCacheBlock, Request
    from vllm_ascend_pd.kv.load import LoadResult
    from vllm_ascend_pd.kv.span import KVGroup, LoadBlocks, Wanted
    from vllm_ascend_pd.resume import RunningAt
    from vllm_ascend_pd.transfer.control import ControlClient, OpenOutcome
    from vllm_ascend_pd.wire import Ask

logger = limited_logger(__name__)

_EXPECTED = {False: Coming.ASKED, True: Coming.FREEZING}
"""In which state an answer is awaited, by whether it is frozen."""
_MAX_ROUNDS = 8
"""While it runs; when it has stopped there is one more."""
_MAX_MISSING = 2
"""Blocks that are left for when it has stopped, beside the tail."""


@dataclass(slots=True, eq=False)
class _Move:
    request: Request
    status: Any
    """What it goes back to once it is here."""
    peer: Endpoint
    epoch: str
    held: dict[KVGroup, dict[int, KVCacheBlock]]
    """What is here of what it needs to go on, by index, so that none is evicted meanwhile."""
    transfer_id: str = field(default_factory=lambda: secrets.token_hex(16))
    state: Coming = Coming.ASKED
    num_rounds: int = 0
    round: Round | None = None
    num_peer_tokens: int = 0
    provenance: Provenance = field(default_factory=lambda: Provenance(0))


class MovesIn(Part):
    """Scheduler thread. Everything is decided between steps or when a load ends."""

    has_blocks = True

    def __init__(
        self,
        common: Common,
        consumer: Consumer,
        client: ControlClient,
        resumes: Resumes,
    ) -> None:
        self.common = common
        self._blocks = common.manager.block_pool
        self.consumer = consumer
        self._client = client
        self._resumes = resumes
        self._vocab_size = common.scheduler.vllm_config.model_config.get_vocab_size()
        self._answers: queue.SimpleQueue[OpenOutcome] = queue.SimpleQueue()
        self._moves: dict[str, _Move] = {}
        self.open: dict[str, Round] = {}
        """Both by request id: those that come, and the last round of those that are here."""

    def begin(self, request: Request, name: str, source: RunningAt) -> Refusal | None:
        """Ask for it; ``name`` is the request's at ``source``. It waits then."""
        if not self.consumer.allows(source.host):
            detail = f"resume.source: {source.host!r} {NOT_ALLOWED}"
            return Refusal(_label(Cause.PEER_NOT_ALLOWED.value), detail)
        if not source.key and self.common.config.security.secret_file is None:
            return Refusal("malformed", "resume.source: key is empty, and no security.secret_file")
        peer = Endpoint(source.host, source.port, source.key)
        held: dict[KVGroup, dict[int, KVCacheBlock]] = {group: {} for group in self.common.groups}
        move = _Move(request, request.status, peer, source.epoch, held)
        assert request.sampling_params is not None
        end = request.num_prompt_tokens
        message = Open(
            version=WIRE_VERSION,
            fingerprint=self._resumes.maker.fingerprint,
            transfer_id=move.transfer_id,
            epoch=move.epoch,
            end=end,
            groups=tuple(group_hashes(request, g, end, end) for g in self.common.groups),
            sampling_key=params_digest(request.sampling_params),
            running=name,
            made_by=self._resumes.maker.of_running(request),
        )
        self._moves[request.request_id] = move
        wait_for_kv(request)
        self._ask(move, message)
        self._client.keep(peer, move.transfer_id, move.epoch)
        return None

    def holds(self, request: Request) -> bool:
        """Whether it is not here yet."""
        return request.request_id in self._moves

    def settle(self) -> bool:
        while not self._answers.empty():
            outcome = self._answers.get_nowait()
            move: _Move = outcome.key
            answer = outcome.answer
            if isinstance(answer, Extended):
                answer = self.consumer.check_workers(answer)
            if isinstance(answer, Refused):
                self._fail(move, answer.cause, answer.detail)
            elif isinstance(answer, Extended) and move.state is _EXPECTED[answer.is_frozen]:
                self._extended(move, answer)
            elif isinstance(answer, Go) and move.state is Coming.READY:
                self._arrive(move)
            else:
                self._fail(move, Cause.BAD_PARAMS.value, f"{type(answer).__name__} is no answer")
        if self._moves and is_paused(self.common.scheduler):  # its loop may not turn for answers
            for move in list(self._moves.values()):
                if move.state is not Coming.READY:
                    self._fail(move, Cause.BUSY.value, "this engine is paused")
        return False

    def _ask(self, move: _Move, message: Ask) -> None:
        self._client.ask(move, move.peer, message, self._answers)

    def _ask_more(self, move: _Move, freeze: bool) -> None:
        num_known = move.request.num_output_tokens
        self._ask(move, Extend(move.transfer_id, move.epoch, num_known, freeze))

    def _advance(self, move: _Move, event: ComingEvent) -> None:
        move.state = COMING.after(move.state, event)

    def _extended(self, move: _Move, answer: Extended) -> None:
        """More tokens of it are known, and more blocks can be read."""
        request = move.request
        if not all(0 <= token_id < self._vocab_size for token_id in answer.token_ids):
            self._fail(move, Cause.INCOMPATIBLE.value, "it has tokens that are none here")
            return
        _, ended = append_output(self.common.scheduler, request, answer.token_ids)
        num_computed = request.num_tokens - 1
        if (
            ended is not None
            or not 0 <= answer.end <= num_computed
            or (answer.is_frozen and answer.end < num_computed)
            or len(answer.first_blocks) != len(self.common.groups)
        ):
            self._fail(move, Cause.INCOMPATIBLE.value, "what it says would have ended here")
            return
        if answer.is_frozen and self._is_behind_reasoning(request):
            detail = "the blanks between reasoning and answer would come at once with the reasoning"
            self._fail(move, Cause.BEHIND_REASONING.value, detail)
            return
        self._advance(move, ComingEvent.FROZEN if answer.is_frozen else ComingEvent.EXTENDED)
        self._leave_round(move)
        move.round = Round(move, self, answer)
        self._hold(move)
        missing = self.common.phantoms.find_missing(request, move.round, not answer.is_frozen)
        num_missing = len(set(map(self.common.phantoms.unit_of, missing)))
        if answer.is_frozen and not missing and not move.round.num_tail_tokens:
            self._ready(move)
        elif not answer.is_frozen and num_missing <= _MAX_MISSING:
            self._advance(move, ComingEvent.FREEZE)
            self._ask_more(move, freeze=True)
        elif move.num_rounds == _MAX_ROUNDS + answer.is_frozen:
            self._fail(move, Cause.TOO_SLOW.value, f"{len(missing)} blocks are still missing")
        else:
            move.num_rounds += 1
            if not self.common.parking.park(move.round, missing):
                self._fail(move, Cause.NO_MEMORY.value, f"{len(missing)} blocks")

    def _is_behind_reasoning(self, request: Request) -> bool:
        """A guest's tokens go to its own front end, which has these already."""
        is_guest = request.request_id in self._resumes.guests
        return not is_guest and is_behind_reasoning(self.common.scheduler, request)

    def round_ended(self, current: Round, result: LoadResult) -> None:
        """A load has; what it has not brought is loaded in another round."""
        move = current.move
        if move.round is not current or move.state is Coming.OVER:
            return
        move.num_peer_tokens += current.num_parked_tokens
        self._hold(move)
        if move.state is Coming.COPYING:
            self._advance(move, ComingEvent.LOAD_ENDED)
            self._ask_more(move, freeze=False)
        elif result.cause:
            self._advance(move, ComingEvent.FREEZE)
            self._ask_more(move, freeze=True)
        else:
            self._ready(move)

    def _ready(self, move: _Move) -> None:
        self._advance(move, ComingEvent.LOADED)
        self._ask(move, Ready(move.transfer_id, move.epoch))

    def _hold(self, move: _Move) -> None:
        """What is here by now, and no more what its windows have left behind."""
        request = move.request
        end = request.num_tokens - 1
        for group, held in move.held.items():
            wanted = range(group.first_kept(end), end // group.block_size)
            self._blocks.free_blocks([held.pop(index) for index in [*held] if index not in wanted])
            for index in wanted:
                if index in held:
                    continue
                block = cached_block(self._blocks, request, index, group)
                if block is not None:
                    self._blocks.touch([block])
                    held[index] = block

    def _arrive(self, move: _Move) -> None:
        """It is this engine's from here on, and queues as one that was preempted on its blocks."""
        self._advance(move, ComingEvent.GO)
        request, last = move.request, move.round
        assert last is not None
        queue_as(request, move.status)
        last.arrive(move.num_peer_tokens)
        self.open[request.request_id] = last
        self._leave(move)
        self._resumes.tell(request, list(request.output_token_ids))
        logger.info("request %s: has moved here from %s", request.request_id, move.peer)

    def _fail(self, move: _Move, cause: str, detail: str) -> None:
        """It stays where it is, or has ended there."""
        self._advance(move, ComingEvent.FAIL)
        if move.state is Coming.OVER and self._moves.get(move.request.request_id) is move:
            self._leave_round(move)
            self._leave(move)
            self._resumes.refuse(move.request, Refusal(_label(cause), detail))

    def _leave(self, move: _Move) -> None:
        """Nothing more is wanted of the other engine."""
        del self._moves[move.request.request_id]
        self._release_blocks(move)
        self._client.release(move.peer, move.transfer_id, move.epoch)

    def _release_blocks(self, move: _Move) -> None:
        for held in move.held.values():
            self._blocks.free_blocks([held[index] for index in sorted(held, reverse=True)])
            held.clear()

    def _leave_round(self, move: _Move) -> None:
        """What a load of it still brings in is not wanted."""
        if move.round is not None:
            move.round.forsake()
            self.common.parking.leave(move.round)

    def finish(self, request: Request, ending: Ending) -> None:
        if (move := self._moves.get(request.request_id)) is not None:
            self._advance(move, ComingEvent.FAIL)
            self._leave_round(move)
            if move.round is not None:
                move.round.advance(SourceEvent.ABORT)
            self._leave(move)
        if (last := self.open.pop(request.request_id, None)) is not None:
            last.advance(SourceEvent.ABORT)
            ending.provenance = last.provenance

    def forsake(self, request: Request) -> None:
        if (move := self._moves.get(request.request_id)) is not None:
            self._fail(move, Cause.INCOMPATIBLE.value, "the weights have changed")
        if (last := self.open.get(request.request_id)) is not None:
            last.forsake()

    def reset(self, reset_connector: bool) -> None:
        for move in list(self._moves.values()):
            if move.state is Coming.READY:  # it may be nobody else's any more: it is computed here
                self._release_blocks(move)
                self._leave_round(move)
            else:
                self._fail(move, Cause.CANCELLED.value, "the prefix cache is reset")

    def counts(self) -> dict[str, int]:
        return {"moves_in": len(self._moves) + len(self.open)}


class Round(PeerSource):
    """What can be read of the request at one time; the last one is what it is admitted on."""

    parked_only = True

    def __init__(self, move: _Move, moves: MovesIn, answer: Extended) -> None:
        request = move.request
        move.provenance.num_prompt_tokens = request.num_tokens
        super().__init__(request, moves.consumer, move.peer, move.provenance)
        self.move = move
        self._moves = moves
        self._answer = answer
        self.end = answer.end
        self._num_blocks = answer.end // moves.common.block_size
        self._num_tail_tokens = (request.num_tokens - 1) % moves.common.block_size
        self._status_at_arrival = move.status
        self.advance(SourceEvent.FOUND)

    def arrive(self, num_peer_tokens: int) -> None:
        """All of it is here, so many tokens by loads."""
        self.num_parked_tokens = num_peer_tokens
        if self.state is SourceState.READY:
            self.advance(SourceEvent.PLACE)

    @property
    def num_tail_tokens(self) -> int:
        """Also while it is still written there: windows slide with every token."""
        return 0 if self._is_cut else self._num_tail_tokens

    def has_block(self, index: int, group: int = 0) -> bool:
        is_before = self._moves.common.groups[group].unit_of(index) < self.num_blocks
        return is_before and self._answer.first_blocks[group] <= index

    def has_tail(self, index: int) -> bool:
        return self._answer.is_frozen and self.num_tail_tokens > 0 and index == self.num_blocks

    def make_load(
        self,
        load_id: LoadId,
        blocks: tuple[LoadBlocks, ...],
        in_step: bool,
    ) -> LoadSpec:
        assert not in_step
        return LoadSpec(
            load_id=load_id,
            peers=self._answer.workers,
            transfer_id=self.move.transfer_id,
            epoch=self.move.epoch,
            blocks=blocks,
            in_step=False,
            timeout_s=self._moves.common.config.transfer.load_timeout_s,
            num_awaited=self.end,
        )

    def load_ended(
        self, result: LoadResult, places: Mapping[int, Wanted], was_parked: bool
    ) -> None:
        super().load_ended(result, places, was_parked)
        self._moves.round_ended(self, result)

    def count(self, num_local: int, num_external: int, indices: Sequence[int]) -> None:
        super().count(num_local, num_external, indices)
        self.provenance.outcome = "moved"


def _label(cause: str) -> str:
    """Of the metric of resumed requests."""
    return cause if cause == Cause.NOT_NEEDED.value else f"move_{cause}"

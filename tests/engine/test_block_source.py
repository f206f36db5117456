# SPDX-License-Identifier: Apache-2.0
"""Every source of blocks, a peer's prompt, the pool's and a request that moves here, keeps the
contract of ``BlockSource``.

The prompt has 100 tokens: six full blocks, and four tokens in the tail block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.request import Request, RequestStatus

from tests.engine.peer_world import BLOCK_SIZE, make_common, make_manager, make_request
from tests.engine.test_pool_scheduler import World
from vllm_ascend_pd.config import Role
from vllm_ascend_pd.engine.scheduler.consumer import Consumer
from vllm_ascend_pd.engine.scheduler.move_states import Coming
from vllm_ascend_pd.engine.scheduler.moves_in import MovesIn, Round
from vllm_ascend_pd.engine.scheduler.parts import Ending
from vllm_ascend_pd.engine.scheduler.sources import (
    TRANSITIONS,
    BlockSource,
    SourceEvent,
    SourceState,
)
from vllm_ascend_pd.kv.cost import LoadPlan
from vllm_ascend_pd.kv.load import LoadResult
from vllm_ascend_pd.kv.span import LoadBlocks, Wanted
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.pool.messages import Found, Lookup
from vllm_ascend_pd.resume import RunningAt
from vllm_ascend_pd.transfer.control import ControlClient, OpenOutcome
from vllm_ascend_pd.transfer.load import LoadSpec
from vllm_ascend_pd.transfer.tickets import PageServer, TicketKey
from vllm_ascend_pd.types import Cause, Endpoint, LeaseRef, LoadId, Place
from vllm_ascend_pd.wire import Extended, Opened, Refused, RemotePrefill

NUM_TOKENS, NUM_BLOCKS = 100, 6
BLOCK_IDS = tuple(range(20, 20 + NUM_BLOCKS))
PLACES = {block_id: Wanted(index) for index, block_id in enumerate(BLOCK_IDS)}


class Peer:
    """A consumer whose control client is never started: its answers are put into the queue."""

    def __init__(self) -> None:
        self.client = ControlClient(1.0, 1.0, Trust(), 1.0)
        self.common = make_common(make_manager(), Role.CONSUMER)
        self.consumer = Consumer(
            common=self.common,
            client=self.client,
            fingerprint="same",
            sampling_key=lambda request: b"",
            divides_pages=True,
            vocab_size=1000,
        )
        server = PageServer(Endpoint("127.0.0.1", 1), TicketKey())
        self.worker = server.admit(LeaseRef("t", 1), NUM_TOKENS - 1)

    def ask(self) -> BlockSource:
        remote = RemotePrefill(
            remote_engine_id="p",
            remote_host="127.0.0.1",
            remote_port=1,
            remote_key="key",
            transfer_id="t",
            remote_epoch="e",
        )
        request = make_request(list(range(NUM_TOKENS)), remote.to_params())
        assert self.consumer.add(request, remote.to_params()) is None
        source = self.consumer.find(request)
        assert source is not None
        return source

    def ready(self) -> BlockSource:
        source = self.ask()
        self.answer(source, True)
        return source

    def answer(self, source: Any, found: bool) -> None:
        answer = (
            Opened("t", NUM_TOKENS - 1, (self.worker,), "e")
            if found
            else Refused("t", Cause.LEASE_EXPIRED.value, "gone")
        )
        self.client.outcomes.put(OpenOutcome(source.key, answer))
        self.consumer.collect()

    def end(self, request: Request) -> None:
        source = self.consumer.find(request)
        assert source is not None
        source.aborted()

    def close(self) -> None:
        self.client.stop()


class Move(Peer):
    """A request that moves here, which has stopped where it has run."""

    def __init__(self) -> None:
        super().__init__()
        model = SimpleNamespace(get_vocab_size=lambda: 1000)
        self.common.scheduler.vllm_config = SimpleNamespace(model_config=model)
        maker = SimpleNamespace(fingerprint="same", of_running=lambda request: "")
        resumes: Any = SimpleNamespace(maker=maker)  # all that counts before it is here
        self.moves = MovesIn(self.common, self.consumer, self.client, resumes)

    def ready(self) -> BlockSource:
        request = make_request(list(range(NUM_TOKENS)), {})
        there = RunningAt("127.0.0.1", 1, "key", "e")
        assert self.moves.begin(request, "theirs", there) is None
        return self.next_round(request)

    def next_round(self, request: Request) -> BlockSource:
        move = self.moves._moves[request.request_id]
        move.state = Coming.FINISHING
        answer = Extended("t", "e", (), NUM_TOKENS - 1, (0,), (self.worker,), True)
        move.round = Round(move, self.moves, answer)
        return move.round

    def end(self, request: Request) -> None:
        self.moves.finish(request, Ending())


class Pool:
    def __init__(self) -> None:
        self.world = World()

    def ask(self) -> BlockSource:
        request = self.world.request(NUM_TOKENS)
        self.world.source.add(request)
        source = self.world.source.find(request)
        assert source is not None
        return source

    def ready(self) -> BlockSource:
        source = self.ask()
        self.answer(source, True)
        return source

    def answer(self, source: BlockSource, found: bool) -> None:
        (lookup,) = self.world.take(Lookup)
        places = bytes([Place.DRAM if found else Place.NOWHERE] * NUM_BLOCKS)
        self.world.source.on_found(Found(lookup.lookup_id, places, True), self.world.now)

    def end(self, request: Request) -> None:
        self.world.source.finish(request)

    def close(self) -> None: ...


@pytest.fixture(params=[Peer, Pool, Move])
def subject(request: pytest.FixtureRequest) -> Iterator[Any]:
    subject = request.param()
    yield subject
    subject.close()


@pytest.fixture
def ready(subject: Any) -> BlockSource:
    source: BlockSource = subject.ready()
    return source


of_one_request = pytest.mark.parametrize("subject", [Peer, Pool], indirect=True)
"""Those that are asked for it; of a move there is one for each answer."""


def park(source: BlockSource) -> None:
    source.advance(SourceEvent.PARK)
    source.load_started()


def place(source: BlockSource, loads: bool = True) -> None:
    if loads and source.parked_only:
        pytest.skip("nothing of it is loaded in a step")
    source.advance(SourceEvent.PLACE)
    if loads:
        source.load_started()


def end_load(source: BlockSource, cause: str = "", was_parked: bool = False) -> None:
    source.load_ended(LoadResult(LoadId(1), cause, 600, 1.0), PLACES, was_parked)


def admit(source: BlockSource) -> None:
    source.admit(0, NUM_BLOCKS * BLOCK_SIZE, list(range(NUM_BLOCKS)))


def counted(source: BlockSource) -> dict[str, int]:
    origin = source.provenance
    return {
        "local": origin.num_local_tokens,
        "external": origin.num_peer_tokens
        + origin.pool_tokens["dram"]
        + origin.pool_tokens["remote"]
        + origin.pool_tokens["ssd"],
        "computed": origin.num_computed_tokens,
    }


ALL_LOADED = {"local": 0, "external": NUM_BLOCKS * BLOCK_SIZE, "computed": 4}
ALL_COMPUTED = {"local": 0, "external": 0, "computed": NUM_TOKENS}


@of_one_request
def test_request_waits_for_the_answer(subject: Any) -> None:
    asked = subject.ask()
    assert asked.request.status is RequestStatus.WAITING_FOR_KV
    assert asked.pending
    assert asked.holds_back()
    assert not asked.offers


def test_what_was_found_is_offered(ready: BlockSource) -> None:
    assert ready.offers
    assert not ready.holds_back()
    assert ready.num_blocks == NUM_BLOCKS
    assert [ready.has_block(index) for index in range(8)] == [True] * 6 + [False] * 2
    assert ready.load_ms([Wanted(0)])[0] > 0
    assert ready.queued_status is RequestStatus.WAITING


@of_one_request
def test_where_nothing_is_found_the_next_source_is_asked(subject: Any) -> None:
    asked = subject.ask()
    subject.answer(asked, False)
    assert asked.state is SourceState.FAILED
    assert asked.hands_on
    assert not asked.offers
    assert not asked.holds_back()


@pytest.mark.parametrize("in_step", [True, False])
def test_load_names_the_blocks_that_it_fills(ready: BlockSource, in_step: bool) -> None:
    if in_step and ready.parked_only:
        pytest.skip("nothing of it is loaded in a step")
    load = ready.make_load(LoadId(7), (LoadBlocks(0, (1, 4), (21, 24)),), in_step)
    assert (load.load_id, load.block_ids, load.in_step) == (7, (21, 24), in_step)
    parts = load.blocks if isinstance(load, LoadSpec) else (load,)
    assert not any(part.has_tail for part in parts)
    assert load.timeout_s > 0


def test_parked_load_holds_the_request_back_until_it_has_ended(ready: BlockSource) -> None:
    park(ready)
    assert ready.parked
    assert ready.holds_back()
    assert not ready.offers
    end_load(ready, was_parked=True)
    assert not ready.holds_back()
    assert ready.offers
    admit(ready)
    assert ready.state is SourceState.DONE
    assert counted(ready) == ALL_LOADED


def test_parked_load_that_failed_hands_the_request_on(ready: BlockSource) -> None:
    park(ready)
    end_load(ready, Cause.CHECKSUM.value, was_parked=True)
    assert ready.hands_on
    assert not ready.holds_back()
    assert ready.provenance.outcome == Cause.CHECKSUM.value


def test_source_that_is_given_up_is_left_when_its_parked_load_has_ended(
    ready: BlockSource,
) -> None:
    park(ready)
    ready.give_up(Cause.DEADLINE)
    assert ready.holds_back()
    assert not ready.offers
    end_load(ready, was_parked=True)
    assert ready.state is SourceState.FAILED
    assert not ready.holds_back()


def test_load_in_the_step_that_admits_is_the_last_thing(ready: BlockSource) -> None:
    place(ready)
    admit(ready)
    assert ready.state is SourceState.ADMITTED
    end_load(ready)
    assert ready.state is SourceState.DONE
    assert counted(ready) == ALL_LOADED


def test_with_nothing_to_load_admission_is_the_last_thing(ready: BlockSource) -> None:
    place(ready, loads=False)
    ready.admit(96, 0, [])
    assert ready.state is SourceState.DONE
    assert counted(ready) == {"local": 96, "external": 0, "computed": 4}


def test_load_that_fails_after_admission_is_computed(ready: BlockSource) -> None:
    place(ready)
    admit(ready)
    end_load(ready, Cause.TRANSFER_FAILED.value)
    assert ready.hands_on
    assert counted(ready) == ALL_COMPUTED


def test_request_that_is_admitted_again_is_counted_once(ready: BlockSource) -> None:
    park(ready)
    end_load(ready, was_parked=True)
    admit(ready)
    ready.request.num_preemptions += 1
    ready.admit(32, 0, [])
    assert counted(ready) == ALL_LOADED
    assert ready.queued_status is RequestStatus.PREEMPTED


def test_request_whose_source_failed_is_admitted_without_it(ready: BlockSource) -> None:
    ready.give_up(Cause.DEADLINE)
    ready.admit(16, 0, [])
    assert counted(ready) == {"local": 16, "external": 0, "computed": 84}


def test_only_what_was_decided_is_used(ready: BlockSource) -> None:
    ready.use(LoadPlan(num_blocks=2, parks=False, load_ms=1.0), NUM_BLOCKS)
    assert ready.num_blocks == 2
    assert not ready.has_block(2)
    assert not ready.has_tail(2)
    assert ready.plan is not None


def test_computing_is_not_considered_before_it_has_been_measured(ready: BlockSource) -> None:
    assert ready.compute_ms == 0.0


@pytest.mark.parametrize("prepare", [lambda source: None, park, place])
def test_forsaken_source_gives_nothing_more(
    ready: BlockSource, prepare: Callable[[BlockSource], None]
) -> None:
    prepare(ready)
    ready.forsake()
    assert ready.is_stale
    assert not ready.offers
    if ready.num_loads:
        end_load(ready, was_parked=ready.parked)
    assert ready.state is SourceState.FAILED


@pytest.mark.parametrize("was_parked", [True, False])
@pytest.mark.parametrize("cause", ["", Cause.CANCELLED.value])
def test_load_may_end_after_its_request(
    subject: Any, ready: BlockSource, was_parked: bool, cause: str
) -> None:
    (park if was_parked else place)(ready)
    subject.end(ready.request)
    assert ready.state is SourceState.ABORTED
    end_load(ready, cause, was_parked)
    assert ready.state is SourceState.ABORTED
    assert ready.num_loads == 0


@pytest.mark.parametrize("subject", [Move], indirect=True)
def test_rounds_of_a_move_are_counted_together(subject: Move, ready: BlockSource) -> None:
    park(ready)
    end_load(ready, Cause.CHECKSUM.value, was_parked=True)
    last = subject.next_round(ready.request)
    park(last)
    end_load(last, was_parked=True)
    admit(last)
    assert counted(last) == ALL_LOADED
    assert (last.provenance.num_peer_bytes, last.provenance.outcome) == (1200, "moved")


# The table.


def test_table_names_every_state() -> None:
    assert set(TRANSITIONS.table) == set(SourceState)


@pytest.mark.parametrize("state", [state for state in SourceState if not state.final])
def test_every_wait_can_be_aborted_and_given_up(state: SourceState) -> None:
    assert TRANSITIONS.after(state, SourceEvent.ABORT) is SourceState.ABORTED
    given_up = TRANSITIONS.after(state, SourceEvent.GIVE_UP)
    assert given_up in (SourceState.FAILED, SourceState.LEAVING)


def test_final_states_have_no_way_out() -> None:
    ends = {state for state, row in TRANSITIONS.table.items() if set(row.values()) == {state}}
    assert ends == {state for state in SourceState if state.final}


@given(st.lists(st.integers(0, 20), max_size=12))
def test_every_way_through_the_table_ends_at_most_once(choices: list[int]) -> None:
    state, num_ends = SourceState.ASKED, 0
    for choice in choices:
        events = sorted(TRANSITIONS.table[state], key=lambda event: event.value)
        after = TRANSITIONS.after(state, events[choice % len(events)])
        num_ends += after.final and not state.final
        state = after
    assert num_ends == state.final

# SPDX-License-Identifier: Apache-2.0
"""Every transfer ends once, and nothing is left, whatever the network and the processes do.

Hypothesis drives two producers and a consumer (``peer_world``) through any order of prefills,
requests, loads, frames that are delivered, lost, doubled or overtaken, broken connections, time,
aborts, and processes that die and start again. At the end everybody goes on as usual for some
time: requests end, clocks tick. Then there must be nothing left.

To add an event, add a rule; if it opens something new, add it to ``_everybody_ends`` and
``_nothing_is_left``.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm.v1.request import Request, RequestStatus

from tests.clock import Clock
from tests.engine.peer_world import (
    ARRIVAL_TIMEOUT_S,
    BLOCK_SIZE,
    HEARTBEAT_S,
    LEASE_S,
    PEER_TIMEOUT_S,
    TRUST,
    ConsumerProcess,
    Network,
    ProducerProcess,
    first_token_of,
)
from vllm_ascend_pd.engine.scheduler.remote_prompt import RemotePrompt
from vllm_ascend_pd.engine.scheduler.sources import SourceState
from vllm_ascend_pd.types import Cause, Endpoint

PORTS = (7001, 7002)
PROMPTS = [
    list(range(2 * BLOCK_SIZE + 9)),
    list(range(3 * BLOCK_SIZE)),  # begins as the first one does
    [*range(2 * BLOCK_SIZE), *range(900, 909)],  # and this one ends otherwise
    list(range(500, 500 + BLOCK_SIZE + 1)),
    [7, 8],
]
OUTCOMES = {cause.value for cause in Cause} | {"loaded", "local", "not_needed", "first_token"}
pick = st.integers(0, 999)
few = st.integers(0, 4)


class Transfers(RuleBasedStateMachine):
    """The rules are what may happen next."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.network = Network()
        self.consumer: ConsumerProcess | None = None
        self.keeps_frames = True
        self.params: list[dict[str, Any]] = []
        self.prompt_of: dict[str, list[int]] = {}
        self.routed: list[tuple[Endpoint, str]] = []
        self.num_added = 0
        self.num_of_the_dead = 0
        self.ended: list[tuple[Request, RemotePrompt, Any]] = []
        self.final_states: dict[RemotePrompt, SourceState] = {}

    # The world.

    @initialize(keeps_frames=st.booleans())
    def begin(self, keeps_frames: bool) -> None:
        self.keeps_frames = keeps_frames
        for port in PORTS:
            ProducerProcess(self.network, self.clock, port)
        self.consumer = ConsumerProcess(self.network, self.clock)

    @property
    def producers(self) -> list[ProducerProcess]:
        return list(self.network.producers.values())

    @property
    def remote_prompts(self) -> list[tuple[Request, RemotePrompt]]:
        """Of requests that have not ended."""
        if self.consumer is None:
            return []
        return [(request, self.consumer.remote(request)) for request in self.consumer.requests]

    def prompts_in(self, *states: SourceState) -> list[tuple[Request, RemotePrompt]]:
        return [(r, s) for r, s in self.remote_prompts if s.state in states]

    # Producers.

    @precondition(lambda self: self.producers)
    @rule(
        which=pick,
        prompt=few,
        ends=st.sampled_from([True, True, False]),
    )
    def prefill(self, which: int, prompt: int, ends: bool) -> None:
        producer = self.producers[which % len(self.producers)]
        request = producer.arrive(PROMPTS[prompt % len(PROMPTS)])
        assert request is not None
        if producer.compute(request) and ends:
            self._end_prefill(producer, request, "completed")

    @rule(which=few, prompt=few)
    def both_are_sent_at_once(self, which: int, prompt: int) -> None:
        """A router chooses the transfer id; which request comes first is not known."""
        transfer_id = f"chosen-{len(self.routed)}"
        tokens = PROMPTS[prompt % len(PROMPTS)]
        endpoint = Endpoint("127.0.0.1", PORTS[which % len(PORTS)], TRUST.key)
        self.routed.append((endpoint, transfer_id))
        self.prompt_of[transfer_id] = tokens
        self.params.append(
            {
                "remote_engine_id": "p",
                "remote_host": endpoint.host,
                "remote_port": endpoint.port,
                "remote_key": endpoint.key,
                "transfer_id": transfer_id,
            }
        )

    @precondition(lambda self: self.routed)
    @rule(recent=few)
    def prefill_arrives(self, recent: int) -> None:
        endpoint, transfer_id = self.routed[-1 - recent % len(self.routed)]
        if producer := self.network.producers.get(endpoint):
            producer.arrive(self.prompt_of[transfer_id], transfer_id)

    @precondition(lambda self: any(p.arrived for p in self.producers))
    @rule(which=pick)
    def prompt_is_computed(self, which: int) -> None:
        arrived = [(p, request) for p in self.producers for request in p.arrived]
        producer, request = arrived[which % len(arrived)]
        producer.compute(request)

    @precondition(lambda self: any(p.running or p.arrived for p in self.producers))
    @rule(which=pick, how=st.sampled_from(["completed", "aborted", "preempted"]))
    def prefill_ends(self, which: int, how: str) -> None:
        running = [(p, r) for p in self.producers for r in [*p.running, *p.arrived]]
        producer, request = running[which % len(running)]
        if request in producer.arrived:
            how = "aborted"
        self._end_prefill(producer, request, how)

    def _end_prefill(self, producer: ProducerProcess, request: Request, how: str) -> None:
        if how == "preempted":
            producer.preempt(request)
            return
        completed = how == "completed"
        status = (
            RequestStatus.FINISHED_LENGTH_CAPPED if completed else RequestStatus.FINISHED_ABORTED
        )
        params = producer.end_prefill(request, status)
        assert params is None or completed
        if params is not None:
            self.params.append(params)
            self.prompt_of[params["transfer_id"]] = list(request.prompt_token_ids or ())

    # Consumer.

    @precondition(lambda self: self.params and self.consumer)
    @rule(recent=few, is_answered=st.booleans())
    def request(self, recent: int, is_answered: bool) -> None:
        params = self.params[-1 - recent % len(self.params)]
        self._add(self.prompt_of[params["transfer_id"]], params, is_answered)

    @precondition(lambda self: self.params and self.consumer)
    @rule(
        recent=few,
        change=st.sampled_from(["prompt", "epoch", "transfer", "port"]),
        other=few,
        is_answered=st.booleans(),
    )
    def request_that_is_wrong(
        self, recent: int, change: str, other: int, is_answered: bool
    ) -> None:
        params = dict(self.params[-1 - recent % len(self.params)])
        prompt = self.prompt_of[params["transfer_id"]]
        if change == "prompt":
            prompt = PROMPTS[other % len(PROMPTS)]
        elif change == "epoch":
            params["remote_epoch"] = "another"
        elif change == "transfer":
            params["transfer_id"] = "another"
        else:
            params["remote_port"] = 7999
        self._add(prompt, params, is_answered)

    def _add(self, prompt: list[int], params: dict[str, Any], is_answered: bool) -> None:
        assert self.consumer is not None
        assert self.consumer.add(prompt, params) is None
        self.num_added += 1
        if is_answered:
            self.everything_arrives()

    @precondition(lambda self: self.consumer)
    @rule()
    def consumer_turn(self) -> None:
        assert self.consumer is not None
        self.consumer.turn()

    @precondition(lambda self: self.prompts_in(SourceState.READY))
    @rule(which=pick, loads=st.booleans())
    def schedule(self, which: int, loads: bool) -> None:
        """The request is scheduled, with a load in its step or with everything at hand."""
        ready = self.prompts_in(SourceState.READY)
        request, _ = ready[which % len(ready)]
        assert self.consumer is not None
        if loads:
            self.consumer.load(request)
        self.consumer.admit(request)

    @precondition(lambda self: self.prompts_in(SourceState.READY))
    @rule(which=pick)
    def load_beside_the_steps(self, which: int) -> None:
        ready = self.prompts_in(SourceState.READY)
        assert self.consumer is not None
        self.consumer.load(ready[which % len(ready)][0])

    @precondition(lambda self: self.prompts_in(SourceState.FAILED))
    @rule(which=pick)
    def schedule_without_its_peer(self, which: int) -> None:
        failed = self.prompts_in(SourceState.FAILED)
        assert self.consumer is not None
        self.consumer.admit(failed[which % len(failed)][0])

    @precondition(lambda self: self.consumer and self.consumer.loading)
    @rule(which=pick, cause=st.sampled_from(["", "", Cause.CHECKSUM.value, Cause.DEADLINE.value]))
    def load_ends(self, which: int, cause: str) -> None:
        assert self.consumer is not None
        loading = self.consumer.loading
        self.consumer.end_load(loading[which % len(loading)], cause)

    @precondition(lambda self: self.consumer and self.consumer.requests)
    @rule(which=pick)
    def request_ends(self, which: int) -> None:
        """By its last token, an abort, or a client that is gone."""
        assert self.consumer is not None
        requests = self.consumer.requests
        self.consumer.finish(requests[which % len(requests)])

    # The network, and time.

    @precondition(lambda self: self.network.under_way())
    @rule(which=pick, fate=st.sampled_from(["delivered", "delivered", "doubled", "lost"]))
    def frame(self, which: int, fate: str) -> None:
        """Any of them, so they overtake each other."""
        if fate == "doubled":
            link, upwards, place = self._choose(which)
            frames = link.up if upwards else link.down
            frames.append(frames[place])
            return
        link, upwards, frame = self._take(which)
        if fate == "delivered":
            link.deliver(upwards, frame)

    @precondition(lambda self: self.network.links)
    @rule(which=pick)
    def connection_breaks_or_that_is_noticed(self, which: int) -> None:
        link = self.network.links[which % len(self.network.links)]
        if link.broken:
            self.network.notice(link)
        else:
            self.network.cut(link)

    @rule()
    def everything_arrives(self) -> None:
        """In order, and all threads have their turns."""
        for _ in range(4):
            if self.consumer is not None:
                self.consumer.turn()
            while self.network.under_way():
                link, upwards, frame = self._take(0)
                link.deliver(upwards, frame)

    @rule(seconds=st.sampled_from([0.5, PEER_TIMEOUT_S, HEARTBEAT_S, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(which=pick)
    def clock_is_looked_at(self, which: int) -> None:
        """By one of the processes."""
        processes = [*self.producers, *([self.consumer] if self.consumer else [])]
        if processes:
            processes[which % len(processes)].tick()

    def _choose(self, which: int) -> tuple[Any, bool, int]:
        under_way = self.network.under_way()
        return under_way[which % len(under_way)]

    def _take(self, which: int) -> tuple[Any, bool, bytes]:
        link, upwards, place = self._choose(which)
        return link, upwards, (link.up if upwards else link.down).pop(place)

    # Processes.

    @rule(kind=st.sampled_from(["reset", "bad block", "producer", "consumer"]), which=few)
    def misfortune(self, kind: str, which: int) -> None:
        """A process dies, or starts again if it is dead; or a producer gives blocks up."""
        if kind == "consumer":
            self._kill_or_start_consumer()
        elif kind == "producer":
            self._kill_or_start_producer(PORTS[which % len(PORTS)])
        elif self.producers:
            producer = self.producers[which % len(self.producers)].producer
            if kind == "reset":
                producer.revoke_all()
            else:
                producer.recovered({1 + which})

    def _kill_or_start_consumer(self) -> None:
        if self.consumer is None:
            self.consumer = ConsumerProcess(self.network, self.clock)
            return
        self.ended += self.consumer.ended
        self.num_of_the_dead += len(self.consumer.requests)
        self.consumer.stop()
        self.consumer = None

    def _kill_or_start_producer(self, port: int) -> None:
        alive = self.network.producers.get(Endpoint("127.0.0.1", port, TRUST.key))
        if alive is None:
            ProducerProcess(self.network, self.clock, port)
        else:
            alive.stop()

    # What always holds.

    @invariant()
    def final_is_final(self) -> None:
        for _, remote in self.remote_prompts:
            if remote in self.final_states:
                assert remote.state is self.final_states[remote]
            elif remote.state.final:
                self.final_states[remote] = remote.state

    @invariant()
    def nobody_reads_another_prompt(self) -> None:
        for request, remote in self.remote_prompts:
            theirs = self.prompt_of.get(remote.remote.transfer_id, [])
            ours = list(request.prompt_token_ids or ())
            num_read = remote.num_blocks * BLOCK_SIZE + remote.num_tail_tokens
            assert ours[:num_read] == theirs[:num_read]
            assert not num_read or remote.remote.remote_epoch != "another"

    @invariant()
    def nobody_takes_the_token_of_another_prompt(self) -> None:
        for request, remote in self.remote_prompts:
            token = first_token_of(request.prompt_token_ids or ())
            assert remote.first_token_id in (None, token)
            assert list(request.output_token_ids) in ([], [token])

    @invariant()
    def what_is_pinned_is_leased(self) -> None:
        for producer in self.producers:
            for prompt in producer.producer._prompts.values():
                assert not prompt.pinned or len(prompt.pinned) == len(prompt.lease.span.block_ids)

    # The end.

    def teardown(self) -> None:
        try:
            if self.network.producers or self.consumer:
                self._everybody_ends()
                self._nothing_is_left()
        finally:
            for process in [*self.producers, *([self.consumer] if self.consumer else [])]:
                process.stop()

    def _everybody_ends(self) -> None:
        """As it does without a fault: requests end, clocks tick, frames arrive (or none does)."""
        for producer in self.producers:
            for request in list(producer.running):
                producer.end_prefill(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            for request in list(producer.arrived):
                producer.end_prefill(request, RequestStatus.FINISHED_ABORTED)
        if self.consumer is not None:
            for remote in list(self.consumer.loading):
                self.consumer.end_load(remote, "")
            self.consumer.turn()
            self.clock.now += ARRIVAL_TIMEOUT_S + PEER_TIMEOUT_S
            self.consumer.tick()
            assert not self.prompts_in(SourceState.ASKED), "a request waits for ever"
            for request in list(self.consumer.requests):
                self.consumer.finish(request)
        for _ in range(2 * int(LEASE_S / HEARTBEAT_S) + 2):
            self._some_time_passes()

    def _some_time_passes(self) -> None:
        if self.consumer is not None:
            self.consumer.tick()
        while self.network.under_way():
            link, upwards, frame = self._take(0)
            if self.keeps_frames:
                link.deliver(upwards, frame)
        for link in [link for link in self.network.links if link.broken]:
            self.network.notice(link)
        for producer in self.producers:
            producer.tick()
        self.clock.now += HEARTBEAT_S

    def _nothing_is_left(self) -> None:
        if self.consumer is not None:
            assert not any(self.consumer.consumer.counts().values())
            assert not any(self.consumer.client.counts().values())
            assert self.consumer.client.outcomes.empty()
            self.ended += self.consumer.ended
        assert len(self.ended) + self.num_of_the_dead == self.num_added
        for _, remote, provenance in self.ended:
            assert remote.state.final
            assert provenance.outcome in OUTCOMES
            total = (
                provenance.num_local_tokens
                + provenance.num_peer_tokens
                + provenance.num_computed_tokens
            )
            assert total in (0, provenance.num_prompt_tokens)
        for producer in self.producers:
            assert not any(producer.producer.counts().values())
            assert producer.server.num_waiting == 0
            assert producer.book.num_released_early == 0
            assert len(producer.grants) == 0
            assert producer.pool.get_num_free_blocks() == producer.num_free
            values = producer.stats.values
            closed = sum(v for name, v in values.items() if name.startswith("leases_closed/"))
            assert closed == values.get("leases_granted", 0)


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_wrong_reference_beside_a_right_one_leaves_no_heartbeat() -> None:
    """Both name one transfer, in different starts of its producer; each is given back as such."""
    world = Transfers()
    world.begin(keeps_frames=True)
    try:
        world.prefill(which=0, prompt=0, ends=True)
        world.request(recent=0, is_answered=True)
        world.request_that_is_wrong(recent=0, change="epoch", other=0, is_answered=False)
        world.schedule(which=0, loads=False)
        world.everything_arrives()
        [producer] = [producer for producer in world.producers if producer.stats.values]
        assert len(producer.book) == 0
    finally:
        world.teardown()


def test_request_without_an_answer_beside_one_with_leaves_no_heartbeat() -> None:
    """Decode first: only an answer says the epoch, and the last user of the lease got none."""
    world = Transfers()
    world.begin(keeps_frames=True)
    try:
        world.both_are_sent_at_once(which=0, prompt=0)
        world.prefill_arrives(recent=0)
        world.request(recent=0, is_answered=True)
        world.request(recent=0, is_answered=False)
        world.consumer_turn()
        world.frame(which=0, fate="lost")
        world.schedule(which=0, loads=False)
        world.time_passes(seconds=HEARTBEAT_S)
        world.clock_is_looked_at(which=len(PORTS))
        assert world.consumer is not None
        assert {remote.state for _, remote in world.remote_prompts} == {
            SourceState.DONE,
            SourceState.FAILED,
        }
        world.consumer_turn()
        assert world.consumer.client.counts()["kept"] == 0
    finally:
        world.teardown()

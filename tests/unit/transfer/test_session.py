# SPDX-License-Identifier: Apache-2.0
"""The transition tables, under every order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_ascend_pd.transfer.session import (
    CONSUMER_TRANSITIONS,
    PRODUCER_TRANSITIONS,
    ConsumerEvent,
    ConsumerState,
    ProducerEvent,
    ProducerState,
    next_consumer_state,
    next_producer_state,
)


class ConsumerMachine(RuleBasedStateMachine):
    """Any event at any time, as the network, the client and the worker send them."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ConsumerState.OPENING
        self.num_final = 0

    @rule(event=st.sampled_from(ConsumerEvent))
    def receive(self, event: ConsumerEvent) -> None:
        after = next_consumer_state(self.state, event)
        if self.state.final:
            assert after is None
        if after is not None:
            self.num_final += after.final
            self.state = after

    @invariant()
    def is_final_at_most_once(self) -> None:
        assert self.num_final == self.state.final


class ProducerMachine(RuleBasedStateMachine):
    """Any event at any time, from both threads."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ProducerState.OPEN
        self.num_closed = 0
        self.was_finished = False

    @rule(event=st.sampled_from(ProducerEvent))
    def receive(self, event: ProducerEvent) -> None:
        after = next_producer_state(self.state, event)
        if self.state is ProducerState.CLOSED:
            assert after is None
        if after is None:
            return
        if after is ProducerState.LEASED:
            assert not self.was_finished, "a prompt was finished twice"
            self.was_finished = True
        self.num_closed += after is ProducerState.CLOSED
        self.state = after

    @invariant()
    def is_closed_at_most_once(self) -> None:
        assert self.num_closed == (self.state is ProducerState.CLOSED)


TestConsumer = ConsumerMachine.TestCase
TestConsumer.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestProducer = ProducerMachine.TestCase
TestProducer.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)


def test_tables_name_every_state() -> None:
    assert set(CONSUMER_TRANSITIONS) == set(ConsumerState)
    assert set(PRODUCER_TRANSITIONS) == set(ProducerState)


@pytest.mark.parametrize("state", [s for s in ConsumerState if not s.final])
def test_every_wait_of_a_consumer_can_be_aborted(state: ConsumerState) -> None:
    assert next_consumer_state(state, ConsumerEvent.ABORT) is ConsumerState.ABORTED


@pytest.mark.parametrize("state", [s for s in ProducerState if s is not ProducerState.CLOSED])
def test_every_lease_can_be_revoked(state: ProducerState) -> None:
    assert next_producer_state(state, ProducerEvent.REVOKED) is ProducerState.CLOSED


def test_final_states_have_no_way_out() -> None:
    ends = [s for s in ConsumerState if not CONSUMER_TRANSITIONS[s]]
    assert ends == [s for s in ConsumerState if s.final]

# SPDX-License-Identifier: Apache-2.0
"""The states of a lease, under every order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_ascend_pd.transfer.lease_states import (
    PRODUCER_TRANSITIONS,
    ProducerEvent,
    ProducerState,
)


class ProducerMachine(RuleBasedStateMachine):
    """Any event at any time, from both threads."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ProducerState.OPEN
        self.num_closed = 0
        self.was_finished = False

    @rule(event=st.sampled_from(ProducerEvent))
    def receive(self, event: ProducerEvent) -> None:
        if self.state is ProducerState.LEASED and event is ProducerEvent.FINISHED:
            return  # its owner ends once
        after = PRODUCER_TRANSITIONS.after(self.state, event)
        if after is self.state:
            return
        if after is ProducerState.LEASED:
            assert not self.was_finished, "a prompt was finished twice"
            self.was_finished = True
        self.num_closed += after is ProducerState.CLOSED
        self.state = after

    @invariant()
    def is_closed_at_most_once(self) -> None:
        assert self.num_closed == (self.state is ProducerState.CLOSED)


TestProducer = ProducerMachine.TestCase
TestProducer.settings = settings(max_examples=60, stateful_step_count=15)


def test_table_names_every_state() -> None:
    assert set(PRODUCER_TRANSITIONS.table) == set(ProducerState)


@pytest.mark.parametrize("state", [s for s in ProducerState if s is not ProducerState.CLOSED])
def test_every_lease_can_be_revoked(state: ProducerState) -> None:
    assert PRODUCER_TRANSITIONS.after(state, ProducerEvent.REVOKED) is ProducerState.CLOSED


@pytest.mark.parametrize("event", ProducerEvent)
def test_closed_lease_stays_closed(event: ProducerEvent) -> None:
    assert PRODUCER_TRANSITIONS.after(ProducerState.CLOSED, event) is ProducerState.CLOSED

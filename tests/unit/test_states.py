# SPDX-License-Identifier: Apache-2.0
"""Tables of states, and events that cannot be."""

from __future__ import annotations

from enum import Enum, auto

import pytest

from vllm_ascend_pd import envs
from vllm_ascend_pd.errors import StateError
from vllm_ascend_pd.states import Transitions, impossible


class Door(Enum):
    OPEN = auto()
    SHUT = auto()


class Push(Enum):
    IN = auto()
    OUT = auto()


DOORS = Transitions({Door.OPEN: {Push.IN: Door.SHUT}, Door.SHUT: {Push.IN: Door.SHUT}})


def test_event_leads_to_the_next_state_or_comes_too_late() -> None:
    assert DOORS.after(Door.OPEN, Push.IN) is Door.SHUT
    assert DOORS.after(Door.SHUT, Push.IN) is Door.SHUT


def test_impossible_event_raises_in_tests() -> None:
    with pytest.raises(StateError, match="Door OPEN knows no OUT"):
        DOORS.after(Door.OPEN, Push.OUT)


def test_impossible_event_is_counted_and_changes_nothing_in_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(envs.STATE_ERRORS)
    impossible.take()
    assert DOORS.after(Door.OPEN, Push.OUT) is Door.OPEN
    assert DOORS.after(Door.SHUT, Push.OUT) is Door.SHUT
    assert impossible.take() == {"states": 2}
    assert impossible.take() == {}
    assert "Door OPEN knows no OUT" in caplog.text

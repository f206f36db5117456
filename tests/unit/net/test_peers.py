# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.net.peers import OPEN_WITHIN_S, Peers
from vllm_ascend_pd.net.trust import Trust
from vllm_ascend_pd.types import Cause, Endpoint


def test_peer_that_could_not_be_connected_to_is_lost_to_all_that_is_sent_until_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else who was connected a moment later would be told that it is lost."""
    later: list[Callable[[], None]] = []
    lost: list[tuple[Endpoint, Cause]] = []
    reactor: Any = SimpleNamespace(submit=later.append, at_end=[])
    peers = Peers(
        reactor, Trust(), lambda *frame: None, lambda peer, cause, text: lost.append((peer, cause))
    )
    connection = SimpleNamespace(send=lambda payload: True, is_open=True, is_ended=False)
    outcomes: list[Any] = [OSError(errno.EMFILE, "Too many open files"), connection]

    def connect(peer: Endpoint) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    monkeypatch.setattr(peers, "_connect", connect)
    peer = Endpoint("127.0.0.1", 1, "key")
    assert peers.send(peer, b"one")
    assert peers.send(peer, b"two")
    assert not peers.connections
    (tell,) = later
    tell()
    assert lost == [(peer, Cause.PEER_UNREACHABLE)]
    assert peers.send(peer, b"three")
    assert list(peers.connections) == [peer]


class Known:
    """A connection that is open, and counts how often it is looked at."""

    is_open = True
    used_at = math.inf

    def __init__(self) -> None:
        self.num_looks = 0

    @property
    def is_ended(self) -> bool:
        self.num_looks += 1
        return False

    def send(self, payload: bytes) -> bool:
        return True


def test_many_peers_are_not_looked_at_on_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("vllm_ascend_pd.net.peers.time.monotonic", lambda: now)
    reactor: Any = SimpleNamespace(submit=list, at_end=[])
    peers = Peers(reactor, Trust(), lambda *frame: None, lambda *lost: None)
    monkeypatch.setattr(peers, "_connect", lambda peer: Known())
    for port in range(1, 51):
        peers.send(Endpoint("127.0.0.1", port, "key"), b"one")
    found: list[Any] = list(peers.connections.values())
    before = [one.num_looks for one in found]
    for _ in range(100):
        assert peers.tidy() is None
    assert [one.num_looks for one in found] == [count + 1 for count in before]
    opens: Any = SimpleNamespace(is_open=False, is_ended=False, made_at=now, send=bool)
    monkeypatch.setattr(peers, "_connect", lambda peer: opens)
    peers.send(Endpoint("127.0.0.1", 99, "key"), b"one")
    assert peers.tidy() == OPEN_WITHIN_S
    opens.is_open, opens.used_at = True, math.inf
    now += 1.0
    assert peers.tidy() is None
    assert [one.num_looks for one in found] == [count + 4 for count in before]

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.net.peers import Peers
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

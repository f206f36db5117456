# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest

from vllm_ascend_pd.net.names import Address, Names, Question


def test_nobody_is_asked_where_an_address_is_that_nobody_wants_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that waits behind a name server that is gone may be given up before its turn."""
    answers = threading.Event()
    asked: list[str] = []

    def look_up(host: str, *_: object) -> list[Any]:
        asked.append(host)
        assert answers.wait(20)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, 1))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found: queue.SimpleQueue[Address | Exception] = queue.SimpleQueue()
    given_up: set[str] = set()
    names = Names()
    for host in ("one", "two", "three"):
        question = Question(host, 1, socket.AF_INET, found.put, lambda h=host: h in given_up)
        assert names.ask(question)
    given_up.add("two")
    answers.set()
    assert [found.get(timeout=20), found.get(timeout=20)] == [("one", 1), ("three", 1)]
    assert asked == ["one", "three"]
    names.stop()

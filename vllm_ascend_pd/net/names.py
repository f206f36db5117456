# SPDX-License-Identifier: Apache-2.0
"""Names of hosts, looked up beside a reactor."""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Address: TypeAlias = "tuple[Any, ...]"
"""As a socket takes it, without a name."""

_MAX_WAITING = 512


def is_address(host: str) -> bool:
    """Whether nobody has to be asked where that is."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Question:
    """``found`` is called on the thread of `Names`, unless it ``is_given_up`` before its turn."""

    host: str
    port: int
    family: int
    found: Callable[[Address | Exception], None]
    is_given_up: Callable[[], bool]


class Names:
    """Looks names up one after another on a thread of its own, for who asks may take seconds."""

    def __init__(self) -> None:
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pd-names", daemon=True)

    def ask(self, question: Question) -> bool:
        """``False`` when too many wait already, or nobody can look. One thread; returns at once."""
        if self._questions.qsize() >= _MAX_WAITING:
            return False
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as e:
                logger.warning("no thread is left to look names up: %s", e)
                return False
        self._questions.put(question)
        return True

    def stop(self) -> None:
        """A name server that does not answer is left behind."""
        self._questions.put(None)

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            if not question.is_given_up():
                question.found(_look_up(question))


def _look_up(question: Question) -> Address | Exception:
    try:
        found = socket.getaddrinfo(
            question.host, question.port, question.family, socket.SOCK_STREAM
        )
    except (OSError, ValueError) as e:  # there is none; it is none
        return e
    return found[0][4]

# SPDX-License-Identifier: Apache-2.0
"""Opens that came before their prompt."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_ascend_pd.wire import Open


class EarlyOpen(NamedTuple):
    """``identity``: of the connection that it came by; ``until``: when it is refused."""

    identity: bytes
    request: Open
    until: float


class EarlyOpens:
    """In order of their ends, which is that in which they came. The control server's thread, but
    for ``len``.
    """

    def __init__(self) -> None:
        self._opens: dict[int, EarlyOpen] = {}
        self._of: dict[str, dict[int, None]] = {}
        """By transfer id: keys of the other one."""
        self._numbers = itertools.count()
        self.num_hashes = 0

    def __len__(self) -> int:
        return len(self._opens)

    def add(self, identity: bytes, request: Open, until: float) -> int:
        """Its number; none ends before those that are there."""
        number = next(self._numbers)
        self._opens[number] = EarlyOpen(identity, request, until)
        self._of.setdefault(request.transfer_id, {})[number] = None
        self.num_hashes += num_hashes(request)
        return number

    def remove(self, number: int) -> None:
        request = self._opens.pop(number).request
        self.num_hashes -= num_hashes(request)
        numbers = self._of[request.transfer_id]
        del numbers[number]
        if not numbers:
            del self._of[request.transfer_id]

    def release(self, identity: bytes, transfer_id: str) -> None:
        """Who came by this connection waits no more."""
        for number, one in self.of(transfer_id):
            if one.identity == identity:
                self.remove(number)

    def of(self, transfer_id: str) -> list[tuple[int, EarlyOpen]]:
        """Those that wait for one prompt, and their numbers."""
        return [(number, self._opens[number]) for number in self._of.get(transfer_id, ())]

    def all(self) -> list[tuple[int, EarlyOpen]]:
        return list(self._opens.items())

    def over(self, now: float) -> Iterator[tuple[int, EarlyOpen]]:
        """Those that have waited long enough; each is to be removed before the next."""
        while self._opens:
            number, first = next(iter(self._opens.items()))
            if first.until > now:
                return
            yield number, first

    @property
    def next_end(self) -> float | None:
        first = next(iter(self._opens.values()), None)
        return None if first is None else first.until


def num_hashes(request: Open) -> int:
    return sum(len(group.block_hashes) for group in request.groups)

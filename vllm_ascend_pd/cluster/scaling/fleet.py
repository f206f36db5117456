# SPDX-License-Identifier: Apache-2.0
"""What the reconciler needs of a cluster: places for engines, and word of what becomes of them."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec


class Phase(str, Enum):
    """Of one engine. Only the last two end it, and each is told once."""

    WAITING = "waiting"
    """No node has room for it; ``note`` says what is lacking."""
    STARTING = "starting"
    READY = "ready"
    """It answers. Whether it gets requests is the router's to say."""
    ENDING = "ending"
    ENDED = "ended"
    """Its process is over; ``note`` says how."""
    LOST = "lost"
    """Its node is gone, or what kept it there."""


class Member(msgspec.Struct, frozen=True):
    """One engine of a fleet, as it stands."""

    name: str
    phase: Phase
    note: str = ""
    """Why, for a person."""
    node: str = ""
    """Address of its node, once it has one."""

    @property
    def is_over(self) -> bool:
        return self.phase in (Phase.ENDED, Phase.LOST)


class Fleet(Protocol):
    """Called from one event loop, which no call blocks.

    A name is used once. What a member held, its place and its processes, is given back before
    ``look`` tells of its end; of one that is lost, as far as its node can be reached.
    """

    async def start(self, name: str) -> None:
        """Ask for one more engine. It may wait for its place as long as it takes."""

    async def look(self) -> tuple[Member, ...]:
        """All that were asked for, in that order, but those whose end was told before."""

    async def end(self, name: str) -> None:
        """Have it end in good order; again, or when it has ended, without effect."""

    async def close(self) -> None:
        """End all, and wait for it; again without effect. The last call."""

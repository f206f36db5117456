# SPDX-License-Identifier: Apache-2.0
"""How many engines of each role there should be. Pure: counts in, one decision out.

Every engine is ``kv_both``, so a role costs nothing to change, and the ratio can be kept whatever
number of engines there is. Of ``n`` engines, ``split(n)`` is the division that is nearest to the
ratio with one engine of each role at least. With one engine more, ``split`` has one more of one
role and as many of the other: engines that come one by one never make a switch necessary.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from vllm_ascend_pd.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

Job = Literal["prefill", "decode"]
"""What an engine is used for."""


DRAIN_S = 600.0


class Counts(NamedTuple):
    """Of engines: that compute prompts, that answer."""

    prefill: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def plus(self, other: Counts) -> Counts:
        return Counts(self.prefill + other.prefill, self.decode + other.decode)

    def with_one(self, job: Job) -> Counts:
        return self.plus(Counts(1, 0) if job == "prefill" else Counts(0, 1))


class Ratio(NamedTuple):
    """``prefill`` to ``decode``, each at least 1."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``1:2``; ``ConfigError`` names the option."""
        match = re.fullmatch(r"([1-9]\d{0,5}):([1-9]\d{0,5})", text)
        if match is None:
            raise ConfigError(
                f"--pd-ratio: {text!r} is not two positive numbers such as 1:2, one P for two D"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a service is to have."""

    ratio: Ratio
    maximum: int
    """Of engines; there may be less room."""
    generation: int = 0
    """Engines that were asked for under an earlier one are replaced."""
    drain_s: float = DRAIN_S
    """An engine that is to go and not empty by then ends with the requests that it has."""

    def __post_init__(self) -> None:
        if self.ratio.prefill < 1 or self.ratio.decode < 1:
            raise ConfigError(f"--pd-ratio: {self.ratio} has a role without an engine")
        if self.maximum < 2:
            raise ConfigError(
                f"--max-instances: {self.maximum} is less than one P and one D; give 2 or more"
            )


def split(num_engines: int, ratio: Ratio) -> Counts:
    """The division of so many that is nearest to the ratio; half an engine goes to P."""
    if num_engines < 2:
        return Counts(num_engines, 0)
    parts = sum(ratio)
    prefill = (2 * num_engines * ratio.prefill + parts) // (2 * parts)
    prefill = min(max(prefill, 1), num_engines - 1)
    return Counts(prefill, num_engines - prefill)


def next_role(have: Counts, pending: Counts, ratio: Ratio, maximum: int) -> Job | None:
    """What the next engine is for; ``None``: there are enough, with those on their way."""
    counted = have.plus(pending)
    if counted.total >= maximum:
        return None
    wanted = split(counted.total + 1, ratio)
    return "prefill" if wanted.prefill > counted.prefill else "decode"


def next_switch(have: Counts, starting: Counts, ratio: Ratio) -> Job | None:
    """The role that one of the other role's engines is to change to, if any.

    ``starting`` have their place and will be up. A role that nobody does is not left to them.
    """
    if have.total < 2:
        return None
    if not have.prefill:
        return "prefill"
    if not have.decode:
        return "decode"
    counted = have.plus(starting)
    wanted = split(counted.total, ratio)
    if counted.prefill < wanted.prefill and have.decode > 1:
        return "prefill"
    if counted.decode < wanted.decode and have.prefill > 1:
        return "decode"
    return None


def next_stop(have: Counts, ratio: Ratio, maximum: int) -> Job | None:
    """The role that one engine too many has; ``None``: there are not too many."""
    if have.total <= maximum:
        return None
    return "prefill" if have.prefill > split(have.total - 1, ratio).prefill else "decode"

# SPDX-License-Identifier: Apache-2.0
"""Several tiers as one: the first is the fastest, the last keeps the most.

put     ──► every tier                     the last ones keep what the first ones evict
lookup  ──► first, then what it lacks of the second, …
get     ──► first, then what it lacks of the second, …;  what a lower one had ──► those above
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.pool.tier import Opening, Status, Tier, Value
from vllm_ascend_pd.types import Place

if TYPE_CHECKING:
    from collections.abc import Sequence

# What is decided: which tier is asked next, where copies go, and what is said of several answers.


def goes_on(status: Status) -> bool:
    """Whether the next tier is read into the same buffer. After a failure that one may still be
    written to.
    """
    return status in (Status.MISSING, Status.DAMAGED)


def stored(statuses: Sequence[Status]) -> Status:
    """Of a put that went to every tier: one that has it is enough."""
    for status in (Status.OK, Status.FULL):
        if status in statuses:
            return status
    return Status.FAILED


class CompositeTier(Tier):
    """Any thread, as its tiers. What it does to one of them does not wait for another thread."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = list(tiers)

    @classmethod
    def open(cls, opening: Opening) -> CompositeTier:
        raise ConfigError("pool.tiers names the tiers themselves")

    def register(self, addr: int, num_bytes: int) -> None:
        for tier in self.tiers:
            tier.register(addr, num_bytes)

    def unregister(self, addr: int) -> None:
        for tier in self.tiers:
            tier.unregister(addr)

    def lookup(self, keys: Sequence[str]) -> list[Place]:
        places = [Place.NOWHERE] * len(keys)
        left = list(range(len(keys)))
        for tier in self.tiers:
            if left and tier.is_healthy():
                for i, place in zip(left, tier.lookup([keys[i] for i in left]), strict=True):
                    places[i] = place
                left = [i for i in left if not places[i]]
        return places

    def put(self, values: Sequence[Value]) -> list[Status]:
        return [
            stored(each) for each in zip(*(tier.put(values) for tier in self.tiers), strict=True)
        ]

    def get(self, values: Sequence[Value]) -> list[Status]:
        statuses = [Status.FAILED] * len(values)  # unless a tier is asked
        left = list(range(len(values)))
        damaged: list[list[str]] = [[] for _ in self.tiers]
        for number, tier in enumerate(self.tiers):
            if not left:
                break
            if not tier.is_healthy():
                continue
            for i, status in zip(left, tier.get([values[i] for i in left]), strict=True):
                statuses[i] = status
            found = [values[i] for i in left if statuses[i] is Status.OK]
            for above in range(number) if found else ():
                # A put changes nothing where there is a value, be it damaged.
                keys = {value.key for value in found}
                self.tiers[above].remove([key for key in damaged[above] if key in keys])
                tenants = tier.tenants([value.key for value in found])
                self.tiers[above].put(
                    [replace(v, tenant=t) for v, t in zip(found, tenants, strict=True)]
                )
            damaged[number] = [values[i].key for i in left if statuses[i] is Status.DAMAGED]
            left = [i for i in left if goes_on(statuses[i])]
        return statuses

    @property
    def num_over_share(self) -> int:  # type: ignore[override]
        return sum(tier.num_over_share for tier in self.tiers)

    @property
    def num_file_errors(self) -> int:  # type: ignore[override]
        return sum(tier.num_file_errors for tier in self.tiers)

    def remove(self, keys: Sequence[str]) -> None:
        for tier in self.tiers:
            tier.remove(keys)

    def is_healthy(self) -> bool:
        return any(tier.is_healthy() for tier in self.tiers)

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

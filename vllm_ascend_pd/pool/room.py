# SPDX-License-Identifier: Apache-2.0
"""What goes for a new value: what was used least recently, and of a tenant that has its share, what
it used least recently itself."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from vllm_ascend_pd.pool.keys import tenant_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_ascend_pd.config import PoolConfig


Gone: TypeAlias = tuple[str, int, str]
"""The key of a value, its bytes and tenant."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How much of a tier's room blocks of a tenant take at most."""

    default: float = 1.0
    of_tenants: Mapping[str, float] = field(default_factory=dict)
    """Of those that have one of their own."""

    @classmethod
    def of(cls, config: PoolConfig) -> Shares:
        own = {tenant_of(name): share for name, share in config.tenant_shares.items()}
        return cls(1.0 if config.tenant_share is None else config.tenant_share, own)

    def num_bytes(self, tenant: str, capacity_bytes: int) -> int:
        return int(capacity_bytes * self.of_tenants.get(tenant, self.default))


class Room:
    """The values of one tier, by key. Bookkeeping only; under its owner's lock."""

    def __init__(self, capacity_bytes: int, shares: Shares | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self._shares = shares or Shares()
        self._values: OrderedDict[str, tuple[int, str]] = OrderedDict()
        """Bytes and tenant, the least recently used first; so is each of ``_keys_of``."""
        self._keys_of: defaultdict[str, OrderedDict[str, None]] = defaultdict(OrderedDict)
        self._used_by: Counter[str] = Counter()
        self.used_bytes = 0
        """With what is reserved; ``_used_by`` likewise."""
        self.num_over_share = 0
        """Values that went because their tenant had its share."""

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def all_keys(self) -> list[str]:
        return list(self._values)

    def entry(self, key: str) -> tuple[int, str] | None:
        """Bytes and tenant: another object each time that a value is kept."""
        return self._values.get(key)

    def tenant(self, key: str) -> str:
        return self._values.get(key, (0, ""))[1]

    def _bytes_of(self, tenant: str) -> int:
        """That it may have."""
        return self._shares.num_bytes(tenant, self.capacity_bytes)

    def fits(self, num_bytes: int, tenant: str) -> bool:
        """At all."""
        return num_bytes <= self._bytes_of(tenant)

    def touch(self, key: str) -> None:
        """It is used, if it is there."""
        if key in self._values:
            self._values.move_to_end(key)
            self._keys_of[self.tenant(key)].move_to_end(key)

    def reserve(self, num_bytes: int, tenant: str) -> list[Gone]:
        """Room for a value, until ``keep`` or ``release``; what goes for it."""
        evicted: list[Gone] = []
        own, most_bytes = self._keys_of[tenant], self._bytes_of(tenant)
        while own and self._used_by[tenant] + num_bytes > most_bytes:
            key = next(iter(own))
            evicted.append((key, *self._values[key]))
            self.pop(key)
            self.num_over_share += most_bytes < self.capacity_bytes
        evicted += self.make_room(num_bytes)
        self._add(num_bytes, tenant)
        return evicted

    def make_room(self, num_bytes: int) -> list[Gone]:
        """What goes for it, whosever it is."""
        evicted: list[Gone] = []
        while self._values and self.used_bytes + num_bytes > self.capacity_bytes:
            key, entry = next(iter(self._values.items()))
            evicted.append((key, *entry))
            self.pop(key)
        return evicted

    def keep(self, key: str, num_bytes: int, tenant: str) -> None:
        """It is there, in the room that was reserved."""
        if key in self._values:
            self.release(num_bytes, tenant)
        else:
            self._values[key] = num_bytes, tenant
            self._keys_of[tenant][key] = None

    def put_back(self, key: str, num_bytes: int, tenant: str) -> None:
        """What went is there after all, even if its room has been given away meanwhile."""
        self._add(num_bytes, tenant)
        self.keep(key, num_bytes, tenant)

    def release(self, num_bytes: int, tenant: str) -> None:
        """What was reserved is not used."""
        self._add(-num_bytes, tenant)

    def pop(self, key: str) -> str | None:
        """Forget it; whose it was, if it was there."""
        if key not in self._values:
            return None
        num_bytes, tenant = self._values.pop(key)
        del self._keys_of[tenant][key]
        self._add(-num_bytes, tenant)
        return tenant

    def _add(self, num_bytes: int, tenant: str) -> None:
        self.used_bytes += num_bytes
        self._used_by[tenant] += num_bytes
        if not self._used_by[tenant] and not self._keys_of[tenant]:
            del self._used_by[tenant], self._keys_of[tenant]  # tenants come and go

# SPDX-License-Identifier: Apache-2.0
"""Who may get a request, kept in order of load while instances change: a choice among very many is
a search, and not a pass over all of them."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from vllm_ascend_pd.router.instances import Instance, Kind, Registry


def queued_tokens(instance: Instance) -> float:
    """Work in front of a new request: what this router sent, and what the engine says it queues."""
    return instance.num_active_tokens + WAITING_TOKENS * instance.load.num_waiting


WAITING_TOKENS = 512
"""A request in an engine's queue that another router may have sent counts as so many tokens."""


def load(instance: Instance) -> tuple[float, float]:
    """Smaller is better."""
    # Full KV makes an engine preempt: worse than any queue.
    full = max(0.0, instance.load.kv_usage - 0.95)
    return (queued_tokens(instance) * (1 + 20 * full), instance.load.kv_usage)


def affinity_key(text: str) -> int:
    """64 bits, the same in every router."""
    raw = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(raw, "little")


_ROW = [("affinity_key", "u8"), ("slot", "i8"), ("queued", "f8")]
"""What the policies that weigh every instance go by. Arrays of them, because a pass over a thousand
in Python would take longer than all else that a request costs. NumPy is imported where it is needed
first: a router with another policy does without."""


def _row(instance: Instance) -> tuple[int, int, float]:
    index = instance.prefix_index
    return instance.affinity_key, 0 if index is None else index.slot, queued_tokens(instance)


def rows(instances: Sequence[Instance]) -> npt.NDArray[np.void]:
    """One of each instance, in their order."""
    import numpy as np

    if isinstance(instances, (Ranking, Others)):
        return instances.rows()
    return np.array([_row(instance) for instance in instances], _ROW)


def least(instances: Sequence[Instance], turn: int) -> Instance:
    """With the least load; of equals each in turn, or the first one would get every request of a
    quiet time."""
    if isinstance(instances, (Ranking, Others)):
        return instances.least(turn)
    start = turn % len(instances)
    return min((*instances[start:], *instances[:start]), key=load)


class Group(NamedTuple):
    """Instances that are alike to a request."""

    fingerprint: str | None
    models: tuple[str, ...]


class Ranking(Sequence["Instance"]):
    """Of one group, in the order of the registry and in that of their loads."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._by_load: list[tuple[float, float, int]] = []
        self._of: dict[int, tuple[Instance, tuple[float, float, int]]] = {}
        self._rows: npt.NDArray[np.void] | None = None
        """Once a policy has asked for them."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._of[number][0] for number in self._numbers[index]]
        return self._of[self._numbers[index]][0]

    def put(self, instance: Instance) -> None:
        """One more, or one whose load may have changed."""
        number, rank = instance.number, (*load(instance), instance.number)
        known = self._of.get(number)
        if known is None:
            position = self.position(number)
            self._numbers.insert(position, number)
            if self._rows is not None:
                import numpy as np

                self._rows = np.insert(self._rows, position, np.zeros(1, _ROW))
        if self._rows is not None:
            self._rows[self.position(number)] = _row(instance)
        if known is not None:
            if known[1] == rank:
                return
            del self._by_load[bisect_left(self._by_load, known[1])]
        insort(self._by_load, rank)
        self._of[number] = instance, rank

    def remove(self, instance: Instance) -> None:
        _, rank = self._of.pop(instance.number)
        position = self.position(instance.number)
        del self._numbers[position]
        del self._by_load[bisect_left(self._by_load, rank)]
        if self._rows is not None:
            import numpy as np

            self._rows = np.delete(self._rows, position)

    def without(self, instance: Instance) -> Sequence[Instance]:
        """The others, if there are any."""
        return Others(self, instance) if len(self) > 1 and instance.number in self._of else self

    def least(self, turn: int) -> Instance:
        return self.least_from(self._numbers[turn % len(self)])

    def least_from(self, start: int, but: int = -1) -> Instance:
        """Of those with the least load the first one, counted from the number ``start``; that with
        the number ``but`` is left out."""
        ranks = self._by_load
        first = ranks[ranks[0][2] == but]
        at = bisect_left(ranks, (*first[:2], start))
        at += at < len(ranks) and ranks[at][2] == but
        is_equal = at < len(ranks) and ranks[at][:2] == first[:2]
        return self._of[ranks[at][2] if is_equal else first[2]][0]

    def rows(self) -> npt.NDArray[np.void]:
        if self._rows is None:
            self._rows = rows([self._of[number][0] for number in self._numbers])
        return self._rows

    def position(self, number: int) -> int:
        return bisect_left(self._numbers, number)


class Others(Sequence["Instance"]):
    """All of a ranking but one."""

    def __init__(self, ranking: Ranking, one: Instance) -> None:
        self._ranking, self._number = ranking, one.number
        self._position = ranking.position(one.number)

    def __len__(self) -> int:
        return len(self._ranking) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._ranking[index + (index >= self._position)]

    def rows(self) -> npt.NDArray[np.void]:
        import numpy as np

        return np.delete(self._ranking.rows(), self._position)

    def least(self, turn: int) -> Instance:
        return self._ranking.least_from(self[turn % len(self)].number, self._number)


class Rankings:
    """Of all groups of a registry, for both kinds of work. Event loop thread."""

    def __init__(self, registry: Registry, admits: Callable[[Kind, Instance], bool]) -> None:
        self._admits = admits
        self._registry = registry
        registry.follow(self._sort)
        self._groups: dict[Kind, dict[Group, Ranking]] = {"prefill": {}, "decode": {}}
        self._of: dict[Kind, dict[Instance, Group]] = {"prefill": {}, "decode": {}}

    def find(self, kind: Kind, model: str | None) -> tuple[Group, Ranking] | None:
        """Who may get a request for it, if all of them are alike."""
        self._registry.settle()
        found = None
        for group, ranking in self._groups[kind].items():
            if model is None or not group.models or model in group.models:
                if found is not None:
                    return None
                found = group, ranking
        return found

    def _sort(self, instance: Instance) -> None:
        self._sort_by("prefill", instance)
        self._sort_by("decode", instance)

    def _sort_by(self, kind: Kind, instance: Instance) -> None:
        groups, known = self._groups[kind], self._of[kind].get(instance)
        group = None
        if self._admits(kind, instance):
            group = Group(instance.told_fingerprint, instance.models)
        if known is not None and known != group:
            groups[known].remove(instance)
            if not groups[known]:
                del groups[known]
            del self._of[kind][instance]
        if group is not None:
            if group not in groups:
                groups[group] = Ranking()
            groups[group].put(instance)
            self._of[kind][instance] = group

# SPDX-License-Identifier: Apache-2.0
"""Which engines serve a model, found without a look at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm_ascend_pd.router.instances import Instance

_number = attrgetter("number")


@dataclass(frozen=True, eq=False, slots=True)
class Servers:
    """Engines that serve the same models, in the order of the registry. One object for all models
    that no other engine serves."""

    instances: tuple[Instance, ...]


class ServedModels:
    """Of a registry's instances. Event loop thread."""

    def __init__(self) -> None:
        self._models: dict[Instance, tuple[str, ...]] = {}
        self._groups: list[list[Instance]] = []
        """Instances that told of the same models."""
        self._groups_of: dict[str, list[int]] | None = None
        """By model; ``None``: something has changed."""
        self._untold: list[Instance] = []
        self._found: dict[tuple[int, ...], Servers] = {}
        self._all = Servers(())

    def sort(self, instance: Instance, *, is_known: bool) -> None:
        """It may serve others than before, or be new, or gone."""
        models = instance.models if is_known else None
        if self._models.get(instance) == models:
            return
        if models is None:
            del self._models[instance]
        else:
            self._models[instance] = models
        self._groups_of = None

    @property
    def names(self) -> Collection[str]:
        """Of all models that an engine told of."""
        return self._sorted().keys()

    def of(self, model: str | None) -> Servers:
        """Who may get requests for it: those that told of it, and those that told of none. All
        that there are for a request that names none."""
        groups_of = self._sorted()
        return self._all if model is None else self._servers(tuple(groups_of.get(model, ())))

    def _servers(self, groups: tuple[int, ...]) -> Servers:
        found = self._found.get(groups)
        if found is None:
            members = chain(self._untold, *(self._groups[index] for index in groups))
            found = self._found[groups] = Servers(tuple(sorted(members, key=_number)))
        return found

    def _sorted(self) -> dict[str, list[int]]:
        if self._groups_of is None:
            by_models: dict[tuple[str, ...], list[Instance]] = {}
            for instance, models in self._models.items():
                by_models.setdefault(models, []).append(instance)
            self._untold = by_models.pop((), [])
            self._groups = list(by_models.values())
            self._groups_of = {}
            for index, models in enumerate(by_models):
                for model in dict.fromkeys(models):
                    self._groups_of.setdefault(model, []).append(index)
            self._found = {}
            self._all = Servers(tuple(sorted(self._models, key=_number)))
        return self._groups_of

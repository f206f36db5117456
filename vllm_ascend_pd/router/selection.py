# SPDX-License-Identifier: Apache-2.0
"""Who may serve a request now, and the answer when nobody can."""

from __future__ import annotations

import math
import time
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm_ascend_pd.router import stored
from vllm_ascend_pd.router.policies.base import Pair, Policy, Routed, may_serve
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.ranking import Rankings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_ascend_pd.router.instances import Instance, Kind, Registry
    from vllm_ascend_pd.router.serving import Servers

UNKNOWN_RETRY_AFTER_S = 5
JUST_STARTED = "this router has just started, and an engine for this may not have registered yet"


@dataclass(frozen=True, slots=True)
class Unavailable:
    """No pair; sent as 503."""

    message: str
    retry_after_s: int
    status: ClassVar = 503
    kind: ClassVar = "service_unavailable"
    outcome: ClassVar = "unavailable"


@dataclass(frozen=True, slots=True)
class Full:
    """There are engines, and none has room; or those with room may not have told of themselves
    yet."""


class Labels(NamedTuple):
    """Values of the label ``model`` that a role's instances must have; empty: any."""

    prefill: frozenset[str] = frozenset()
    decode: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Candidates:
    """Who may get a request now. With ``alone`` one of ``decodes`` does all of it, and
    ``prefills`` is empty."""

    prefills: Sequence[Instance]
    decodes: Sequence[Instance]
    alone: str | None = None
    """Why there is no prefill leg."""


@dataclass(slots=True)
class Selector:
    """Event loop thread."""

    registry: Registry
    policy: Policy
    labels: Labels
    _: KW_ONLY
    require_prefill: bool = False
    """No engine computes a prompt alone for lack of another one."""
    max_requests: int = 1024
    """For which an instance has room."""
    hears_all_at: float = 0.0
    """When those engines that are up have told of themselves, on the monotonic clock."""
    _rankings: Rankings = field(init=False)
    _questions: LeastLoaded = field(default_factory=LeastLoaded, init=False)

    def __post_init__(self) -> None:
        self._rankings = Rankings(self.registry, self._admits)

    def choose(self, request: Routed) -> Pair | Unavailable | Full:
        """A pair, or one engine for all of it if there is no other, or if ``alone`` says why; the
        one that has the response which the request goes on from, if there is one."""
        owner = self._owner(request)
        if owner is not None:
            if isinstance(owner, Unavailable):
                return owner
            return Pair(owner, owner, request.alone) if self._with_room((owner,)) else Full()
        if self._may_be_anothers(request):
            return Full()
        ranked = self._choose_ranked(request)
        if ranked is not None:
            return ranked
        found = self.candidates(request)
        if isinstance(found, Unavailable):
            return found
        decodes = self._with_room(found.decodes)
        if found.alone is not None:
            if not decodes:
                return Full()
            instance = self.policy.choose_decode(request, decodes)
            return Pair(instance, instance, found.alone)
        prefills = _with_partner(self._with_room(found.prefills), decodes)
        return self.policy.choose(request, prefills, decodes) if prefills else Full()

    def _choose_ranked(self, request: Routed) -> Pair | None:
        """What a look at all would find, where nobody is missing and those who can get the request
        are alike."""
        if request.target is not None or request.excluded:
            return None
        decodes = self._rankings.find("decode", request.model)
        if decodes is None:
            return None
        if request.alone is not None:
            instance = self.policy.choose_decode(request, decodes[1])
            return Pair(instance, instance, request.alone)
        prefills = self._rankings.find("prefill", request.model)
        if prefills is None:
            return None
        if not may_serve(prefills[0].fingerprint, decodes[0].fingerprint):
            return None
        return self.policy.choose(request, prefills[1], decodes[1])

    def _admits(self, kind: Kind, instance: Instance) -> bool:
        """Whether a request for one of its models may be given to it now."""
        return (
            instance.num_admitted < self.max_requests
            and self._may(kind, instance)
            and instance.does(kind)
            and self.registry.get(instance.instance_id) is instance
        )

    def _may(self, kind: Kind, instance: Instance) -> bool:
        """Whether it can do this, and gets requests."""
        can = instance.spec.role in (kind, "both") and instance.is_available
        return can and self._is_chosen(kind, instance)

    def _is_chosen(self, kind: Kind, instance: Instance) -> bool:
        """By its label, for this kind of work."""
        labels: frozenset[str] = getattr(self.labels, kind)
        return not labels or instance.spec.labels.get("model") in labels

    def _is_left_out(self, instance: Instance) -> bool:
        """By its label, of all that it can do."""
        kinds: tuple[Kind, ...] = ("prefill", "decode")
        can = [kind for kind in kinds if instance.spec.role in (kind, "both")]
        return not any(self._is_chosen(kind, instance) for kind in can)

    def decode(self, request: Routed) -> Instance | Unavailable:
        """One engine, for what needs no room."""
        owner = self._owner(request)
        if owner is not None:
            return owner
        if self._may_be_anothers(request):
            return Unavailable(JUST_STARTED, UNKNOWN_RETRY_AFTER_S)
        found = self.candidates(replace(request, alone="passed on"))
        if isinstance(found, Unavailable):
            return found
        return self.policy.choose_decode(request, found.decodes)

    def to_ask(self, model: str | None) -> Instance | Unavailable:
        """One engine for a question about a request; whose turn it is to get one stays."""
        found = self.candidates(Routed(model=model, alone="a question"))
        if isinstance(found, Unavailable):
            return found
        return self._questions.choose_decode(Routed(), found.decodes)

    def _owner(self, request: Routed) -> Instance | Unavailable | None:
        """Who has the response that a request goes on from, if it is one of these."""
        if request.previous_response is None:
            return None
        owner = stored.owner(request.previous_response, self.registry)
        if owner is None:
            return None
        usable = owner.may_be_asked and owner not in request.excluded
        return owner if usable else self._unavailable(owner.spec.role, (owner,), request.model)

    @property
    def may_hear(self) -> bool:
        """Of engines that are up and have not told of themselves yet."""
        return time.monotonic() < self.hears_all_at

    def _may_be_anothers(self, request: Routed) -> bool:
        """Whether a request without an owner may be for an engine that has not told of itself yet:
        none that has could serve it, has told of its model, or has the response that it is about.
        """
        if not self.may_hear:
            return False
        is_of_unknown = request.model is not None and self.known(request.model) is None
        if is_of_unknown or request.previous_response is not None:
            return True
        return isinstance(self.candidates(request), Unavailable)

    def known(self, model: str | None) -> str | None:
        """The model, if an engine told of it."""
        return model if model is not None and model in self.registry.models else None

    def _with_room(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        return [i for i in instances if i.num_admitted < self.max_requests]

    def candidates(self, request: Routed) -> Candidates | Unavailable:
        """Changes nothing, not even whose turn it is."""
        found = self._candidates(request)
        return self._why_none(request) if found is None else found

    def _candidates(self, request: Routed) -> Candidates | None:
        prefills = self._usable("prefill", request)
        decodes = self._usable("decode", request)
        alone = request.alone
        if alone is None:
            matched = _with_partner(prefills, decodes)
            if matched:
                return Candidates(matched, decodes)
            if self.require_prefill:
                return None
            alone = "no_partner" if prefills and decodes else "no_prefill"
        if decodes:
            return Candidates((), decodes, alone)
        if prefills and not self.require_prefill:
            return Candidates((), prefills, "no_decode")
        return None

    def _why_none(self, request: Routed) -> Unavailable:
        model = request.model
        if not self.require_prefill:
            return self._unavailable("prefill or decode", tuple(self.registry), model)
        if request.alone is not None:
            return self._unavailable("decode", self.registry.decodes, model)
        prefills, decodes = self._usable("prefill", request), self._usable("decode", request)
        return self._no_pair(prefills, decodes, model)

    def by_model(self) -> dict[str | None, str | None]:
        """Of each model that an engine told of, or of ``None`` if none did: why no pair would get a
        request for it now, ``unavailable`` if nobody would. Models of the same engines are looked
        at once."""
        why: dict[Servers, str | None] = {}
        found: dict[str | None, str | None] = {}
        for model in sorted(self.registry.models) or (None,):
            servers = self.registry.serving(model)
            if servers not in why:
                candidates = self._candidates(Routed(model=model))
                why[servers] = "unavailable" if candidates is None else candidates.alone
            found[model] = why[servers]
        return found

    def obstacle(self, model: str | None) -> str:
        """Why no pair would get a request for it now, for a person."""
        request = Routed(model=model)
        prefills, decodes = self._usable("prefill", request), self._usable("decode", request)
        return self._no_pair(prefills, decodes, model).message

    def degraded(self) -> dict[str, str]:
        """Models that no pair serves now, and why; ``""`` stands for all if no engine told of
        one."""
        return {model or "": why for model, why in self.by_model().items() if why is not None}

    def _usable(self, kind: Kind, request: Routed) -> list[Instance]:
        """Those that are used for it; those that could be, if there is none."""
        can = self._available(request.model, kind, request)
        # A name that nobody serves is the engine's to refuse; one that somebody serves is his.
        if not can and self.known(request.model) is None:
            can = self._available(None, kind, request)
        return [one for one in can if one.does(kind)] or can

    def _available(self, model: str | None, kind: Kind, request: Routed) -> list[Instance]:
        return [
            one
            for one in self.registry.serving(model).instances
            if request.target in (None, one)
            and one not in request.excluded
            and self._may(kind, one)
        ]

    def _no_pair(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance], model: str | None
    ) -> Unavailable:
        if not prefills:
            return self._unavailable("prefill", self.registry.prefills, model)
        if not decodes:
            return self._unavailable("decode", self.registry.decodes, model)
        return Unavailable(
            "no prefill instance can exchange KV with a decode instance: they differ in model,"
            " drafter, dtype, block size or version, see /instances",
            UNKNOWN_RETRY_AFTER_S,
        )

    def _unavailable(
        self, role: str, instances: Sequence[Instance], model: str | None
    ) -> Unavailable:
        if not instances:
            return Unavailable(f"no {role} instance is known", UNKNOWN_RETRY_AFTER_S)
        waits = [i.breaker.backoff_s for i in instances if i.spec.state == "ready"]
        after = max(1, math.ceil(min(waits))) if waits else UNKNOWN_RETRY_AFTER_S
        what = f" for model {model!r}" if any(i.models for i in instances) else ""
        found = (
            f"no {role} instance{what} is available: {len(instances)} known,"
            f" {sum(i.spec.state == 'draining' for i in instances)} draining,"
            f" {sum(not i.may_be_asked for i in instances)} away"
        )
        if num_left_out := sum(map(self._is_left_out, instances)):
            options = "--prefill-model-labels or --decode-model-labels"
            found += f", {num_left_out} without a label 'model' that {options} names"
        return Unavailable(found, after)


def _with_partner(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> Sequence[Instance]:
    """Those whose KV one of ``decodes`` can read, as ``are_partners`` says of two."""
    theirs = {decode.told_fingerprint for decode in decodes}
    if None in theirs:
        return prefills
    return [
        prefill
        for prefill in prefills
        if any(may_serve(prefill.told_fingerprint, one) for one in theirs)
    ]

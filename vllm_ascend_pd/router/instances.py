# SPDX-License-Identifier: Apache-2.0
"""One engine as the router sees it, and all of them."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import msgspec

from vllm_ascend_pd.kv.breaker import Breaker
from vllm_ascend_pd.registration import EngineDescription, Role, is_loopback
from vllm_ascend_pd.resume import made_by
from vllm_ascend_pd.router.failures import BLAMELESS, UNEXPLAINED, Failure, FailureKind
from vllm_ascend_pd.router.ranking import affinity_key
from vllm_ascend_pd.router.serving import ServedModels, Servers
from vllm_ascend_pd.router.snapshot import NUM_RECENT_ERRORS, RecentError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from vllm_ascend_pd.resume import RunningAt
    from vllm_ascend_pd.router.http_client import EngineClient
    from vllm_ascend_pd.router.prefix.index import PrefixIndex

logger = logging.getLogger(__name__)

Kind = Literal["prefill", "decode"]
"""Of work: a prompt for another engine, or an answer."""


class InstanceSpec(EngineDescription, frozen=True, kw_only=True):
    """What discovery knows of an instance."""

    instance_id: str
    source: str
    epoch: str = ""

    @property
    def engine(self) -> tuple[str, int | None, str]:
        """With another one it is another engine."""
        return self.url, self.data_parallel_rank, self.epoch

    @classmethod
    def of(
        cls, engine: EngineDescription, instance_id: str, source: str, epoch: str = ""
    ) -> InstanceSpec:
        known = {name: getattr(engine, name) for name in EngineDescription.__struct_fields__}
        return cls(instance_id=instance_id, source=source, epoch=epoch, **known)


def _server_of(url: str) -> tuple[str, int]:
    """This host has several names, each of which is as good."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return "localhost" if is_loopback(host) else host, port


class Word(msgspec.Struct, frozen=True):
    """What an operator says of an instance, whatever it says of itself."""

    drained: bool = False
    epoch: str = ""
    """Of the engine that is drained; its successor is not."""
    until: float | None = None
    """On the host's monotonic clock; then it is drained no more."""
    role: Role = "both"
    """What it is used for, if it can do both."""

    def after(self, now: float) -> Word:
        """What is left of it."""
        if self.drained and (self.until is None or now < self.until):
            return self
        return Word(role=self.role)

    def applied_to(self, spec: InstanceSpec) -> InstanceSpec:
        if self.drained and self.epoch == spec.epoch:
            spec = msgspec.structs.replace(spec, state="draining")
        return spec


Words = dict[str, Word]
"""By instance."""


@dataclass(slots=True)
class EngineLoad:
    """What the engine's own ``/metrics`` said last."""

    num_running: float = 0
    num_waiting: float = 0
    kv_usage: float = 0
    """0 to 1."""
    prefix_queries: float = 0
    """Tokens looked up in the engine's prefix cache since it started."""
    prefix_hits: float = 0
    read_at: float = 0


class HitRate:
    """Of an engine's prefix cache in the last ``HIT_RATE_S``, by what it counts since its start."""

    def __init__(self) -> None:
        self._loads: deque[EngineLoad] = deque()

    def note(self, load: EngineLoad) -> None:
        if self._loads and load.prefix_queries < self._loads[-1].prefix_queries:
            self._loads.clear()  # it has started again
        self._loads.append(load)
        while len(self._loads) > 2 and self._loads[1].read_at <= load.read_at - HIT_RATE_S:
            self._loads.popleft()

    @property
    def value(self) -> float | None:
        """``None``: nothing was looked up."""
        if not self._loads:
            return None
        first, last = self._loads[0], self._loads[-1]
        num_queries = last.prefix_queries - first.prefix_queries
        return (last.prefix_hits - first.prefix_hits) / num_queries if num_queries else None


class TokensMadeBy(msgspec.Struct, frozen=True):
    """What decides which tokens an engine gives: as in its registration, if it registers."""

    sampling: dict[str, str] = {}
    grammars: str = ""
    adapters: dict[str, str] = {}


MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 8.0
HIT_RATE_S = 60.0
PROCESS_ENDED = (FailureKind.CONNECT, FailureKind.DISCONNECT, FailureKind.DOWN)
"""What fails when its process ends."""
MAX_UNEXPLAINED = 10
"""Requests in a row that an engine fails so, before it is its own doing in any case."""


class Instance:
    """State of one engine. Event loop thread."""

    def __init__(self, spec: InstanceSpec, client: EngineClient, failure_threshold: int) -> None:
        self.watch(set())
        self.number = 0
        """Of a registry's instances a later one has a greater one."""
        self.spec = spec
        """Another one of the same id, when discovery knows more."""
        self.instance_id = spec.instance_id
        self.affinity_key = affinity_key(spec.instance_id)
        self.server = _server_of(spec.url)
        self.client = client
        self.breaker = Breaker(failure_threshold, MIN_BACKOFF_S, MAX_BACKOFF_S)
        self.breaker.on_change = lambda: self._changed.add(self)
        self.models = spec.models
        """As registered, or as ``/v1/models`` said."""
        self.adapter_names: frozenset[str] = frozenset()
        """Which of them are adapters, as ``/v1/models`` said."""
        self.kv = spec.kv
        """Of a producer that can be asked in concurrent order."""
        self.runs_at: RunningAt | None = None
        """Of an engine that has not registered: where its own metrics say that its running requests
        are copied from."""
        self.fingerprint: str | None = None
        """The same of what it is."""
        self.tokens_made_by = TokensMadeBy()
        """The same."""
        self.num_admitted = 0
        """Requests that have room here, whether a leg of theirs has begun or not."""
        self.num_active = 0
        """Legs in progress."""
        self.num_active_tokens = 0
        """Tokens of their prompts and answers, as far as the router can tell; of prompts for others
        without those that it is expected to have cached."""
        self.num_decoding = 0
        """Of them, those that answer."""
        self.num_to_answer = self.num_awaiting = 0
        """Requests that have room here for their answer, whether that has begun or not; and those
        of them that were sent here although another engine computes their prompts yet."""
        self._num_unexplained = 0
        """Requests in a row that it failed, and that may be to blame."""
        self.num_background = 0
        """Responses that it has answered, and computes yet."""
        self.used_for: Role = "both"
        """By an operator's word, if it can do both."""
        self.is_gone = False
        """From the registry; what is in progress goes on."""
        self.num_failures = 0
        self.load = EngineLoad()
        self.hit_rate = HitRate()
        self.prefix_index: PrefixIndex | None = None
        """What its KV events said, if the policy listens to them."""
        self.errors: deque[RecentError] = deque(maxlen=NUM_RECENT_ERRORS)
        self._doubts: set[str] = set()
        """As they were told."""

    def watch(self, changed: set[Instance]) -> None:
        """Be in this set, from now on after every change."""
        object.__setattr__(self, "_changed", changed)
        changed.add(self)

    def __setattr__(self, name: str, value: object, _set: Any = object.__setattr__) -> None:
        _set(self, name, value)
        self._changed.add(self)

    _changed: set[Instance]

    def is_at(self, other: Instance) -> bool:
        """Whether one engine would get what is sent to both."""
        ranks = self.spec.data_parallel_rank, other.spec.data_parallel_rank
        return self.server == other.server and (None in ranks or ranks[0] == ranks[1])

    @property
    def told_fingerprint(self) -> str | None:
        """What it is, as far as it told, in its registration or its metrics."""
        return self.spec.fingerprint or self.fingerprint

    @property
    def is_available(self) -> bool:
        """May get one more request."""
        return self.spec.state == "ready" and self.may_be_asked

    @property
    def may_be_asked(self) -> bool:
        """By one more, as far as it has failed: one that is tried waits for the request that tries
        it, whether its leg has begun or not."""
        return self.breaker.allows(self.num_admitted or self.num_active)

    @property
    def is_leaving(self) -> bool:
        """What it answers is to go on elsewhere."""
        return self.is_switching or self.spec.state == "draining"

    @property
    def is_switching(self) -> bool:
        """What it answers is to go on at one that is used for answers, if there is one."""
        return self.spec.role == "both" and self.used_for == "prefill"

    def does(self, kind: Kind) -> bool:
        """Whether it gets requests of this kind, if it can do it. Who switches from answers to
        prompts has none of either until its last answer has moved or ended."""
        if self.spec.role != "both" or self.used_for == "both":
            return True
        return self.used_for == kind and not (kind == "prefill" and self.num_answers)

    @property
    def num_answers(self) -> int:
        """That it gives, or is to give yet to prompts that others compute."""
        return max(self.num_decoding, self.num_to_answer)

    def serves(self, model: str | None) -> bool:
        """An unknown model goes to any engine, which answers 404 itself."""
        return model is None or not self.models or model in self.models

    def made_by(self, model: str | None) -> str:
        """What decides the tokens that it gives for this model, as far as it told."""
        spec, told, name = self.spec, self.tokens_made_by, model or ""
        parts = {
            **(spec.sampling or told.sampling),
            "adapter": spec.adapters.get(name) or told.adapters.get(name, ""),
            "grammars": spec.grammars or told.grammars,
        }
        return made_by(self.told_fingerprint or "", **parts)

    def doubt(self, text: str) -> None:
        """Nothing fails, and yet it is not used as it should be; told once, until it was away."""
        if text not in self._doubts:
            self._doubts.add(text)
            self.errors.append(RecentError(time.time(), text))
            logger.warning("%s: %s", self.instance_id, text)

    def was_away(self) -> None:
        """It may come back as another engine, and with other weights."""
        self._doubts.clear()
        if not self.breaker.closed:
            self.fingerprint, self.tokens_made_by = None, TokensMadeBy()

    def failed(self, failure: Failure, what: str) -> None:
        """A leg or a probe failed. Where the request may be to blame, who sent it says so when it
        knows (``blame``), but for an engine that answers nothing else."""
        self.num_failures += 1
        if failure.kind in PROCESS_ENDED:
            self.kv = self.spec.kv  # it may come back as another engine
        self.errors.append(RecentError(time.time(), f"{what}: {failure}"))
        may_differ = what == "stream" and failure.kind is FailureKind.DIFFERS
        if failure.kind in UNEXPLAINED:
            self._num_unexplained += 1
            may_differ = self._num_unexplained < MAX_UNEXPLAINED
        if not (failure.kind in BLAMELESS or may_differ):
            self.blame(failure, what)

    def blame(self, failure: Failure, what: str) -> None:
        """It counts against it."""
        unreachable = failure.kind in (FailureKind.CONNECT, FailureKind.DOWN)
        if self.breaker.failed(unreachable=unreachable):
            logger.warning("%s is out: %s: %s", self.instance_id, what, failure)

    def succeeded(self) -> None:
        if self._num_unexplained:
            self._num_unexplained = 0
        if self.breaker.succeeded():
            logger.info("%s is in again", self.instance_id)


@dataclass(slots=True)
class Registry:
    """All instances, by id. Discovery changes it; the relay and the policies read it."""

    make: Callable[[InstanceSpec], Instance]
    on_added: Callable[[Instance], None] = lambda instance: None
    on_removed: Callable[[Instance], None] = lambda instance: None
    on_events_moved: Callable[[Instance], None] = lambda instance: None
    """Its KV events are published elsewhere now, or no more."""
    _instances: dict[str, Instance] = field(default_factory=dict)
    _told: dict[str, InstanceSpec] = field(default_factory=dict)
    """As discovery told it, before an operator's words."""
    _words: Words = field(default_factory=dict)
    _by_server: dict[tuple[str, int], dict[Instance, None]] = field(default_factory=dict)
    _by_kind: dict[Kind, tuple[Instance, ...]] = field(default_factory=dict)
    """As far as somebody has asked since the last change."""
    _changed: set[Instance] = field(default_factory=set)
    """New, gone, or in any way other than before."""
    _followers: list[Callable[[Instance], None]] = field(default_factory=list)
    _served: ServedModels = field(default_factory=ServedModels)
    _num_added: int = 0

    def __iter__(self) -> Iterator[Instance]:
        return iter(tuple(self._instances.values()))

    def get(self, instance_id: str) -> Instance | None:
        return self._instances.get(instance_id)

    @property
    def prefills(self) -> tuple[Instance, ...]:
        """Those that can compute prompts for others, ready or not."""
        return self._that_can("prefill")

    @property
    def decodes(self) -> tuple[Instance, ...]:
        return self._that_can("decode")

    def _that_can(self, kind: Kind) -> tuple[Instance, ...]:
        if kind not in self._by_kind:
            instances = self._instances.values()
            self._by_kind[kind] = tuple(i for i in instances if i.spec.role in (kind, "both"))
        return self._by_kind[kind]

    @property
    def models(self) -> Collection[str]:
        """All that an engine told of."""
        self.settle()
        return self._served.names

    def serving(self, model: str | None) -> Servers:
        """Who may get requests for it: see ``ServedModels``."""
        self.settle()
        return self._served.of(model)

    def follow(self, sort: Callable[[Instance], None]) -> None:
        """Have ``sort`` called by ``settle`` for each instance that has changed."""
        self._followers.append(sort)

    def settle(self) -> None:
        """What is kept in order of what instances are now is in order after this."""
        while self._changed:
            changed = self._changed.pop()
            self._served.sort(changed, is_known=self.get(changed.instance_id) is changed)
            for sort in self._followers:
                sort(changed)

    def word(self, instance_id: str) -> Word:
        """What an operator says of it."""
        return self._words.get(instance_id, Word())

    def obey(self, words: Words) -> None:
        """These are all of an operator's words that hold now."""
        if words == self._words:
            return
        self._words = words
        for spec in tuple(self._told.values()):
            self.put(spec)
        for instance in self:
            role = self.word(instance.instance_id).role
            if instance.used_for != role:
                logger.info("%s is used for %s", instance.instance_id, role)
            instance.used_for = role

    def put(self, spec: InstanceSpec) -> None:
        """Add an instance, or change what is known of it; it may be another engine now."""
        told, spec = spec, self.word(spec.instance_id).applied_to(spec)
        known = self._instances.get(spec.instance_id)
        if known is not None and known.spec.engine != spec.engine:
            self.remove(spec.instance_id, "its url, rank or epoch changed")
            known = None
        self._told[spec.instance_id] = told
        if known is not None:
            if known.spec != spec:
                self._update(known, spec)
            return
        instance = self.make(spec)
        beside = self._by_server.setdefault(instance.server, {})
        for other in beside:
            if other.is_at(instance):
                logger.warning(
                    "%s and %s are one engine at %s, and taken for two: neither its load nor what"
                    " is left on it is told right; give it once",
                    *(other.instance_id, spec.instance_id, spec.url),
                )
        self._instances[spec.instance_id] = instance
        beside[instance] = None
        self._num_added += 1
        instance.number = self._num_added
        instance.watch(self._changed)
        instance.used_for = self.word(spec.instance_id).role
        self._by_kind.clear()
        logger.info("added %s %s at %s (%s)", spec.role, spec.instance_id, spec.url, spec.source)
        self.on_added(instance)

    def remove(self, instance_id: str, why: str) -> None:
        """Requests in progress go on; new ones go elsewhere."""
        self._told.pop(instance_id, None)
        instance = self._instances.pop(instance_id, None)
        if instance is not None:
            instance.is_gone = True
            beside = self._by_server[instance.server]
            del beside[instance]
            if not beside:
                del self._by_server[instance.server]
            self._by_kind.clear()
            self._changed.add(instance)
            logger.info("removed %s: %s", instance_id, why)
            self.on_removed(instance)

    def replace(self, source: str, specs: Iterable[InstanceSpec]) -> None:
        """Make these all of the instances that ``source`` knows."""
        specs = tuple(specs)
        kept = {spec.instance_id for spec in specs}
        for instance in tuple(self._instances.values()):
            if instance.spec.source == source and instance.instance_id not in kept:
                self.remove(instance.instance_id, f"gone from {source}")
        for spec in specs:
            is_there = spec.instance_id in self._instances
            if not is_there or self._told.get(spec.instance_id) != spec:
                self.put(spec)

    def _update(self, instance: Instance, spec: InstanceSpec) -> None:
        before, instance.spec = instance.spec, spec
        if before.state != spec.state:
            logger.info("%s is %s", spec.instance_id, spec.state)
        if before.models != spec.models:  # else it may have told of more at ``/v1/models``
            instance.models = spec.models or instance.models
        if before.kv != spec.kv:
            instance.kv = spec.kv
        self._by_kind.clear()
        if before.kv_events != spec.kv_events:
            self.on_events_moved(instance)

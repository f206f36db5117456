# SPDX-License-Identifier: Apache-2.0
"""A choice by rank is the one that a look at all instances would make, whatever has happened to
them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.unit.router.test_policies import instance
from tests.unit.router.test_prefix_index import BLOCK, CLEARED, batch, stored
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.instances import EngineLoad, Instance, Registry, Word
from vllm_ascend_pd.router.policies import POLICIES, Policy, Routed
from vllm_ascend_pd.router.policies.base import Pair, partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.policies.power_of_two import PowerOfTwo
from vllm_ascend_pd.router.policies.prefix_aware import PrefixAware
from vllm_ascend_pd.router.policies.session_affinity import SessionAffinity
from vllm_ascend_pd.router.prefix.index import PrefixIndex
from vllm_ascend_pd.router.ranking import affinity_key, queued_tokens
from vllm_ascend_pd.router.selection import Labels, Selector

if TYPE_CHECKING:
    from collections.abc import Sequence

ROLES = ("prefill", "decode", "both")
MAX_REQUESTS = 3
CLIENT = EngineClient("http://127.0.0.1:1", connect_timeout_s=1)


class LooksAtAll(Selector):
    def _choose_ranked(self, request: Routed) -> Pair | None:
        return None

    def serving(self, model: str | None) -> Sequence[Instance]:
        return [one for one in self.registry if one.serves(model)]

    def known(self, model: str | None) -> str | None:
        return model if any(model in one.models for one in self.registry) else None


class OneByOne(PrefixAware):
    def _best(
        self, request: Routed, instances: Sequence[Instance], hits: Any, weight: float, turn: int
    ) -> tuple[Instance, int]:
        def hit(one: Instance) -> int:
            return 0 if one.prefix_index is None else int(hits[one.prefix_index.slot])

        def cost(one: Instance) -> float:
            return queued_tokens(one) + weight * (request.num_prompt_tokens - hit(one))

        start = turn % len(instances)
        best = min((*instances[start:], *instances[:start]), key=cost)
        return best, hit(best)


class HashedOneByOne(SessionAffinity):
    def choose(
        self, request: Routed, prefills: Sequence[Instance], decodes: Sequence[Instance]
    ) -> Pair:
        if request.session is None:
            return super().choose(request, prefills, decodes)
        session = affinity_key(request.session)

        def weight(one: Instance) -> int:
            mixed = affinity_key(one.instance_id) ^ session
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                mixed = (mixed ^ mixed >> 33) * factor % 2**64
            return mixed ^ mixed >> 33

        prefill = max(prefills, key=weight)
        return Pair(prefill, max(partners(prefill, decodes), key=weight))


class World:
    """A registry to which things happen. The more ``kinds`` there are the less the engines are
    alike."""

    def __init__(self, seed: int, policy: str, kinds: int) -> None:
        self.random = random.Random(seed)
        self.kinds = kinds
        self.registry = Registry(lambda spec: Instance(spec, CLIENT, 3), self.added, self.removed)
        made = self.policies(policy)
        self.num_events = self.num_hits = 0
        labels = Labels(decode=frozenset({"d"})) if seed % 5 == 4 else Labels()
        self.ranked, self.by_a_look = (
            selector(self.registry, one, labels, max_requests=MAX_REQUESTS)
            for selector, one in zip((Selector, LooksAtAll), made, strict=True)
        )
        self.legs: list[tuple[Instance, int, bool]] = []
        self.words: dict[str, Word] = {}
        for _ in range(self.random.randint(1, 30)):
            self.add()

    def policies(self, name: str) -> list[Policy]:
        """One that is given rankings, and one that looks at each instance by itself."""
        prefix_aware = PrefixAware()
        self.holders = prefix_aware.subscriber.holders
        match name:
            case "power-of-two":
                return [PowerOfTwo(seed=1), PowerOfTwo(seed=1)]
            case "prefix-aware":
                plain = OneByOne()
                plain.subscriber = prefix_aware.subscriber
                return [prefix_aware, plain]
            case "session-affinity":
                return [SessionAffinity(), HashedOneByOne()]
        return [POLICIES[name]() for _ in range(2)]

    def added(self, one: Instance) -> None:
        one.prefix_index = PrefixIndex(self.holders)

    def removed(self, one: Instance) -> None:
        assert one.prefix_index is not None
        one.prefix_index.close()
        one.prefix_index = None

    def prompt(self) -> list[int]:
        return [t for t in self.random.choices(range(2), k=5) for _ in range(BLOCK)]

    def publishes(self, one: Instance) -> None:
        index, tokens = one.prefix_index, self.prompt()
        assert index is not None
        names = [bytes(tokens[: at + BLOCK]) for at in range(0, len(tokens), BLOCK)]
        event = CLEARED if self.random.random() < 0.05 else stored(names, None, tokens)
        self.num_events += 1
        index._next_seq = self.num_events
        index.receive(self.num_events, batch(event))

    def add(self) -> None:
        rng = self.random
        fingerprint = rng.choice(("one", None, "one draft=it", "two")[: self.kinds])
        spec = instance(f"i{rng.randrange(24)}", fingerprint, rng.choice(ROLES)).spec
        models = rng.choice((("m",), ("m", "n"), ())[: self.kinds])
        labels = {"model": rng.choice(("d", "d", "p"))}
        spec = msgspec.structs.replace(
            spec, models=models, labels=labels, state=rng.choice(("ready", "ready", "draining"))
        )
        self.registry.put(msgspec.structs.replace(spec, epoch=rng.choice(("", "", "another"))))

    def happens(self) -> None:
        rng = self.random
        there = list(self.registry)
        if not there:
            self.add()
            return
        one = rng.choice(there)
        match rng.randrange(16):
            case 0:
                self.add()
            case 1 if len(there) > 12:
                self.registry.remove(one.instance_id, "")
            case 2:
                kv_usage = rng.choice((0.1, 0.5, 0.97, 1.0))
                one.load = EngineLoad(num_waiting=rng.randrange(3), kv_usage=kv_usage)
            case 3:
                if one.spec.role == "both":
                    self.words[one.instance_id] = Word(role=rng.choice(ROLES))
                    self.registry.obey(dict(self.words))
            case 4:
                kind = rng.choice((FailureKind.CONNECT, FailureKind.STATUS))
                one.failed(Failure(kind, "why"), "prefill")
            case 5:
                one.breaker.probe_answered()
            case 6:
                one.succeeded()
            case 7:
                one.models = rng.choice((("m",), ("n", "m"), ("n",))[: self.kinds])
            case 8 | 9 | 10 | 11:
                self.publishes(one)
            case _ if self.legs:
                self.end(*self.legs.pop(rng.randrange(len(self.legs))))

    def end(self, one: Instance, num_tokens: int, decodes: bool) -> None:
        one.num_admitted -= 1
        one.num_active -= 1
        one.num_active_tokens -= num_tokens
        one.num_decoding -= decodes

    def begin(self, pair: Pair) -> None:
        for one in {pair.prefill, pair.decode}:
            num_tokens = self.random.choice((8, 8, 16))
            one.num_admitted += 1
            one.num_active += 1
            one.num_active_tokens += num_tokens
            one.num_decoding += one is pair.decode
            self.legs.append((one, num_tokens, one is pair.decode))

    def asks(self) -> None:
        rng = self.random
        there = list(self.registry)
        fields: dict[str, Any] = {"model": rng.choice((None, "m", "m", "n", "nobody's"))}
        if rng.random() < 0.2:
            fields["alone"] = "short_prompt"
        if there and rng.random() < 0.1:
            fields["excluded"] = {rng.choice(there)}
        if there and rng.random() < 0.05:
            fields["target"] = rng.choice(there)
        if rng.random() < 0.5:
            fields["session"] = f"s{rng.randrange(40)}"
        if rng.random() < 0.8:
            fields["token_ids"] = tuple(self.prompt())
        requests = [Routed(5 * BLOCK, 16, **fields) for _ in range(2)]
        found = self.ranked.choose(requests[0])
        assert found == self.by_a_look.choose(requests[1])
        assert requests[0] == requests[1]  # what the policy said of its hits
        self.num_hits += bool(requests[0].num_prefill_hit_tokens)
        if isinstance(found, Pair):
            self.begin(found)


@pytest.mark.parametrize("kinds", [1, 3, 4])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_by_rank_is_chosen_what_a_look_at_all_would_choose(
    policy: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    num_hits = 0
    choose = Selector._choose_ranked

    def counting(self: Selector, request: Routed) -> Pair | None:
        pair = choose(self, request)
        found.append(pair is not None)
        return pair

    monkeypatch.setattr(Selector, "_choose_ranked", counting)
    for seed in range(30):
        world = World(seed, policy, kinds)
        for _ in range(80):
            for _ in range(world.random.randrange(3)):
                world.happens()
            world.asks()
        num_hits += world.num_hits
    assert (num_hits > 50) == (policy == "prefix-aware")
    assert sum(found) > len(found) / (6 if kinds == 1 else 30)


def test_nothing_is_looked_at_but_what_has_changed() -> None:
    registry = Registry(lambda spec: Instance(spec, CLIENT, 3))
    for number in range(200):
        registry.put(instance(f"i{number}", "one", ROLES[number % 2]).spec)
    selector = Selector(registry, LeastLoaded(), Labels())
    selector.choose(Routed())
    looked_at = []
    admits = selector._rankings._admits

    def admitting(kind: Any, one: Instance) -> bool:
        looked_at.append(one)
        return admits(kind, one)

    selector._rankings._admits = admitting
    for _ in range(50):
        pair = selector.choose(Routed())
        assert isinstance(pair, Pair)
        pair.prefill.num_active_tokens += 7
        pair.decode.num_active_tokens += 9
    assert len(looked_at) <= 50 * 2 * 2

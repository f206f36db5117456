# SPDX-License-Identifier: Apache-2.0
"""A choice by rank is the one that a look at all instances would make, whatever has happened to
them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.router.failures import Failure, FailureKind
from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.instances import EngineLoad, Instance, Registry, Word
from vllm_ascend_pd.router.policies import POLICIES, Policy, Routed
from vllm_ascend_pd.router.policies.base import Pair
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.policies.power_of_two import PowerOfTwo
from vllm_ascend_pd.router.selection import Labels, Selector

ROLES = ("prefill", "decode", "both")
MAX_REQUESTS = 3
CLIENT = EngineClient("http://127.0.0.1:1", connect_timeout_s=1)


class LooksAtAll(Selector):
    def _choose_ranked(self, request: Routed) -> Pair | None:
        return None


class World:
    """A registry to which things happen. The more ``kinds`` there are the less the engines are
    alike."""

    def __init__(self, seed: int, policy: str, kinds: int) -> None:
        self.random = random.Random(seed)
        self.kinds = kinds
        self.registry = Registry(lambda spec: Instance(spec, CLIENT, 3))
        made = [self.policy(policy) for _ in range(2)]
        labels = Labels(decode=frozenset({"d"})) if seed % 5 == 4 else Labels()
        self.ranked, self.by_a_look = (
            selector(self.registry, one, labels, max_requests=MAX_REQUESTS)
            for selector, one in zip((Selector, LooksAtAll), made, strict=True)
        )
        self.legs: list[tuple[Instance, int, bool]] = []
        self.words: dict[str, Word] = {}
        for _ in range(self.random.randint(1, 30)):
            self.add()

    @staticmethod
    def policy(name: str) -> Policy:
        return PowerOfTwo(seed=1) if name == "power-of-two" else POLICIES[name]()

    def add(self) -> None:
        rng = self.random
        fingerprint = rng.choice(("one", None, "two")[: self.kinds])
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
        match rng.randrange(12):
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
            fields["session"] = f"s{rng.randrange(4)}"
        found = self.ranked.choose(Routed(100, 16, **fields))
        assert found == self.by_a_look.choose(Routed(100, 16, **fields))
        if isinstance(found, Pair):
            self.begin(found)


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_by_rank_is_chosen_what_a_look_at_all_would_choose(
    policy: str, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
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

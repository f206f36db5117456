# SPDX-License-Identifier: Apache-2.0
"""Which pair each policy takes, and the promises that all of them keep."""

from __future__ import annotations

from collections import Counter

import pytest

from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.registration import Role
from vllm_ascend_pd.router.http_client import EngineClient
from vllm_ascend_pd.router.instances import EngineLoad, Instance, InstanceSpec
from vllm_ascend_pd.router.policies import POLICIES, Routed, make_policy
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.policies.power_of_two import PowerOfTwo
from vllm_ascend_pd.router.policies.round_robin import RoundRobin


def instance(name: str, fingerprint: str | None = None, role: Role = "both") -> Instance:
    url = "http://127.0.0.1:1"
    spec = InstanceSpec(
        instance_id=name, url=url, role=role, source="static", fingerprint=fingerprint
    )
    return Instance(spec, EngineClient(spec.url, connect_timeout_s=1), 3)


def request(session: str | None = None) -> Routed:
    return Routed(100, 16, session)


ALL = pytest.mark.parametrize("name", sorted(POLICIES))


@ALL
def test_pair_is_of_partners(name: str) -> None:
    prefills = [instance("p1", "1"), instance("p2", "2 draft=it"), instance("p3", None)]
    decodes = [instance("d1", "1"), instance("d2", "2"), instance("d3", "2 draft=it")]
    partners = {"p1": {"d1"}, "p2": {"d2", "d3"}, "p3": {"d1", "d2", "d3"}}
    policy = make_policy(name)
    for i in range(50):
        pair = policy.choose(request(f"s{i}"), prefills, decodes)
        assert pair.decode.instance_id in partners[pair.prefill.instance_id]


@ALL
def test_engine_that_does_both_is_not_paired_with_itself_while_there_are_others(name: str) -> None:
    both = [instance(f"b{i}") for i in range(3)]
    policy = make_policy(name)
    for i in range(50):
        pair = policy.choose(request(f"s{i}"), both, both)
        assert pair.prefill is not pair.decode
    pair = policy.choose(request(), both[:1], both[:1])
    assert pair.prefill is pair.decode


@ALL
def test_all_instances_get_requests(name: str) -> None:
    prefills = [instance(f"p{i}") for i in range(3)]
    decodes = [instance(f"d{i}") for i in range(4)]
    policy = make_policy(name)
    seen: Counter[str] = Counter()
    for i in range(200):
        pair = policy.choose(request(f"s{i}"), prefills, decodes)
        for one in (pair.prefill, pair.decode):
            seen[one.instance_id] += 1
            one.num_active_tokens += 10
    assert set(seen) == {one.instance_id for one in (*prefills, *decodes)}


def test_unknown_policy_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="least-loaded"):
        make_policy("best")


@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(1, 2), (2, 2), (2, 3), (3, 1), (4, 2)])
def test_round_robin_meets_every_pair_equally(num_prefills: int, num_decodes: int) -> None:
    prefills = [instance(f"p{i}") for i in range(num_prefills)]
    decodes = [instance(f"d{i}") for i in range(num_decodes)]
    policy = RoundRobin()
    met = Counter(
        (pair.prefill.instance_id, pair.decode.instance_id)
        for pair in (
            policy.choose(request(), prefills, decodes)
            for _ in range(10 * num_prefills * num_decodes)
        )
    )
    assert set(met.values()) == {10}
    assert len(met) == num_prefills * num_decodes


def test_least_loaded_counts_own_tokens_the_engines_queue_and_full_caches() -> None:
    busy, queued, full, idle = (instance(name) for name in ("busy", "queued", "full", "idle"))
    busy.num_active_tokens = 1000
    queued.load = EngineLoad(num_waiting=3)
    full.num_active_tokens = 800
    full.load = EngineLoad(kv_usage=1.0)
    idle.num_active_tokens = 900
    chosen = LeastLoaded().choose(request(), [busy], [busy, queued, full, idle])
    assert chosen.decode is idle


def test_least_loaded_spreads_when_all_are_equal() -> None:
    decodes = [instance(f"d{i}") for i in range(4)]
    policy = LeastLoaded()
    seen = Counter(policy.choose(request(), decodes, decodes).prefill for _ in range(40))
    assert set(seen.values()) == {10}


@pytest.mark.parametrize("name", ["least-loaded", "power-of-two", "prefix-aware"])
def test_request_for_one_engine_goes_to_the_least_loaded(name: str) -> None:
    busy, idle = instance("busy"), instance("idle")
    busy.num_active_tokens = 1000
    policy = make_policy(name)
    for _ in range(4):
        assert policy.choose_decode(request(), [busy, idle]) is idle


def test_request_for_one_engine_goes_to_that_of_its_session() -> None:
    prefills, decodes = [instance("p0")], [instance(f"d{i}") for i in range(3)]
    policy = make_policy("session-affinity")
    for session in (f"session {i}" for i in range(20)):
        pair = policy.choose(request(session), prefills, decodes)
        assert policy.choose_decode(request(session), decodes) is pair.decode


def test_power_of_two_avoids_the_worst() -> None:
    decodes = [instance(f"d{i}") for i in range(5)]
    decodes[0].num_active_tokens = 10_000
    policy = PowerOfTwo(seed=1)
    chosen = {policy.choose(request(), decodes[1:], decodes).decode for _ in range(200)}
    assert decodes[0] not in chosen


def test_session_keeps_its_instances_and_few_move() -> None:
    prefills = [instance(f"p{i}") for i in range(4)]
    decodes = [instance(f"d{i}") for i in range(4)]
    policy = make_policy("session-affinity")
    names = [f"session {i}" for i in range(400)]
    before = {s: policy.choose(request(s), prefills, decodes).decode for s in names}
    assert before == {s: policy.choose(request(s), prefills, decodes).decode for s in names}
    after = {s: policy.choose(request(s), prefills, decodes[1:]).decode for s in names}
    moved = [s for s in names if before[s] is not after[s]]
    assert all(before[s] is decodes[0] for s in moved)

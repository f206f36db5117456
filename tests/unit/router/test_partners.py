# SPDX-License-Identifier: Apache-2.0
"""Which prefill engines are candidates: those that can exchange KV with a decode engine."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.router.test_policies import instance
from vllm_ascend_pd.router.instances import Instance, Registry
from vllm_ascend_pd.router.policies.base import Routed, are_partners
from vllm_ascend_pd.router.policies.least_loaded import LeastLoaded
from vllm_ascend_pd.router.selection import Candidates, Labels, Selector

FINGERPRINTS = (None, "weights=a", "weights=b", "weights=a draft=eagle-1")


@pytest.mark.parametrize("theirs", list(itertools.product(FINGERPRINTS, repeat=2)))
@pytest.mark.parametrize("ours", list(itertools.product(FINGERPRINTS, repeat=2)))
def test_a_prefill_engine_is_a_candidate_if_one_decode_engine_is_its_partner(
    ours: tuple[str | None, ...], theirs: tuple[str | None, ...]
) -> None:
    engines = {f"p{i}": instance(f"p{i}", f, "prefill") for i, f in enumerate(ours)}
    engines |= {f"d{i}": instance(f"d{i}", f, "decode") for i, f in enumerate(theirs)}
    registry = Registry(lambda spec: engines[spec.instance_id])
    for engine in engines.values():
        registry.put(engine.spec)
    found = Selector(registry, LeastLoaded(), Labels()).candidates(Routed())
    assert isinstance(found, Candidates)

    def has_partner(prefill: Instance) -> bool:
        return any(are_partners(prefill, decode) for decode in registry.decodes)

    expected = [prefill for prefill in registry.prefills if has_partner(prefill)]
    assert list(found.prefills) == expected
    assert (found.alone is None) == bool(expected)


def test_only_who_has_the_drafter_serves_one_that_drafts() -> None:
    plain, drafting = (instance(name, name) for name in ("weights=a", "weights=a draft=eagle-1"))
    assert are_partners(drafting, plain)
    assert not are_partners(plain, drafting)

# SPDX-License-Identifier: Apache-2.0
"""A topology against what runs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from tests.unit.cluster.doctor.scripted_engine import ScriptedEngine, with_engines
from vllm_ascend_pd.cluster.doctor import examine
from vllm_ascend_pd.cluster.doctor.deployment import (
    Complete,
    Expected,
    Master,
    expected_engines,
    router_url,
)
from vllm_ascend_pd.cluster.doctor.engines import Engine, Web
from vllm_ascend_pd.cluster.doctor.findings import Finding, Verdict
from vllm_ascend_pd.cluster.topology import Topology, parse

pytestmark = pytest.mark.slow

POOL = {"extra_config": {"pool": {"dram_size": 1 << 20}}}
TWO_HOSTS = {
    "hosts": {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}},
    "router": {"host": "a", "port": 8800},
    "prefill": [{"host": "a"}],
    "decode": [{"host": "b", "count": 2}],
}


def topology(**more: Any) -> Topology:
    return parse({"model": "m", **more})


def verdicts(findings: Sequence[Finding]) -> list[Verdict]:
    return [finding.verdict for finding in findings]


def test_every_engine_has_the_address_that_up_gives_it() -> None:
    two = topology(**TWO_HOSTS)
    assert router_url(two) == "http://10.0.0.1:8800"
    assert expected_engines(two) == [
        Expected("prefill-0", "prefill", "a", "http://10.0.0.1:8100"),
        Expected("decode-0", "decode", "b", "http://10.0.0.2:8101"),
        Expected("decode-1", "decode", "b", "http://10.0.0.2:8102"),
    ]
    one = topology(decode=[{"port": 8200}])
    assert [e.url for e in expected_engines(one)] == [None, "http://127.0.0.1:8200"]


def test_each_data_parallel_rank_is_expected() -> None:
    expected = expected_engines(topology(decode=[{"port": 7, "args": {"data-parallel-size": 2}}]))
    prefill = Engine("http://h:1", "prefill", "prefill-0")
    first = Engine("http://127.0.0.1:7", "decode", "decode-0-dp0", 0)
    [finding] = asyncio.run(Complete(expected, [prefill, first]).run())
    assert finding.verdict is Verdict.FAIL
    assert "does not know decode-0-dp1 " in finding.found
    assert "see its decode-0.log" in finding.fix
    whole = Engine("http://127.0.0.1:7", "decode", "127.0.0.1:7")  # balanced by its front end
    assert verdicts(asyncio.run(Complete(expected, [prefill, whole]).run())) == [Verdict.OK]


def test_engines_that_are_missing_and_engines_too_many() -> None:
    expected = expected_engines(topology(decode=[{"count": 2}]))
    listed = [Engine("http://h:1", "prefill", "prefill-0"), Engine("http://h:2", "decode", "old")]
    first, second, third = asyncio.run(Complete(expected, listed).run())
    assert verdicts([first, second, third]) == [Verdict.FAIL, Verdict.FAIL, Verdict.WARN]
    assert "decode-0" in first.found
    assert "vllm-pd up --config" in first.fix
    assert "decode-1" in second.found
    assert "old" in third.found
    listed = [Engine(f"http://h:{i}", e.role, e.name) for i, e in enumerate(expected)]
    assert verdicts(asyncio.run(Complete(expected, listed).run())) == [Verdict.OK]


def test_a_pooling_model_beside_the_topology() -> None:
    expected = expected_engines(topology())
    listed = [Engine(f"http://h:{i}", e.role, e.name) for i, e in enumerate(expected)]
    listed.append(Engine("http://h:9", "both", "embedder", generates=False))
    found = asyncio.run(Complete(expected, listed).run())
    assert verdicts(found) == [Verdict.SKIPPED, Verdict.OK]


def test_engines_are_known_by_their_urls_too() -> None:
    expected = expected_engines(topology(**TWO_HOSTS))
    listed = [Engine(str(e.url), e.role, "other name") for e in expected]
    assert verdicts(asyncio.run(Complete(expected, listed).run())) == [Verdict.OK]


def master(plan: Topology, *engines: ScriptedEngine) -> Sequence[Finding]:
    async def use(web: Web, known: list[Engine]) -> Sequence[Finding]:
        return await Master(web, plan, known).run()

    return with_engines([("both", engine) for engine in engines], use)


@pytest.mark.parametrize("extra", [{}, {"pool": {"tiers": ["dram"], "dram_size": "64MiB"}}])
def test_no_pool_of_mooncake_no_master(extra: dict[str, Any]) -> None:
    found = master(topology(extra_config=extra), ScriptedEngine())
    assert verdicts(found) == [Verdict.SKIPPED]


def test_master_that_all_engines_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        engine = ScriptedEngine(pool_master=address)
        [finding] = master(topology(**POOL), engine, engine)
        assert (finding.verdict, finding.found) == (Verdict.OK, f"{address} accepts connections")
        answers, other = master(topology(**POOL), engine, ScriptedEngine())
        assert answers.verdict is Verdict.OK
        assert other.verdict is Verdict.FAIL
        assert "both-1 uses none" in other.found


def test_etcd_that_knows_the_master_and_is_partly_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        etcd = f"etcd://127.0.0.1:1;{address}"
        [finding] = master(topology(**POOL), ScriptedEngine(pool_master=etcd))
    assert (finding.verdict, finding.found) == (Verdict.OK, f"{address} accepts connections")


def test_master_that_is_gone() -> None:
    [finding] = master(topology(**POOL), ScriptedEngine(pool_master="127.0.0.1:1"))
    assert finding.verdict is Verdict.FAIL
    assert finding.found.startswith("127.0.0.1:1: ")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_all_of_a_topology_is_examined(role: str) -> None:
    """An engine that the router does not know is asked, too, if the topology says where it is."""

    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        engine, router = known
        port = int(engine.url.rpartition(":")[2])
        groups = {"prefill": [{"count": 1}], "decode": [{"count": 1}]}
        groups[role] = [{"port": port}]
        subject = examine.Subject(router=router.url, topology=topology(**groups), measure=False)
        return await examine.examine(subject, lambda finding: None)

    findings = with_engines([("both", ScriptedEngine()), ("both", ScriptedEngine())], use)
    missing = [f for f in findings if f.check == "topology"]
    assert verdicts(missing) == [Verdict.FAIL, Verdict.FAIL]
    assert any(f.check == "engines" and f"{role}-0: vLLM" in f.found for f in findings)


def test_on_ray_no_engine_is_expected_by_name() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        subject = examine.Subject(
            router=known[0].url, topology=topology(), on_ray=True, measure=False
        )
        return await examine.examine(subject, lambda finding: None)

    findings = with_engines([("both", ScriptedEngine())], use)
    assert [f for f in findings if f.check == "topology"] == []
    assert [f.verdict for f in findings if f.check == "master"] == [Verdict.SKIPPED]


def test_router_that_does_not_answer_hides_no_engine() -> None:
    async def use(web: Web, known: list[Engine]) -> list[Finding]:
        port = int(known[0].url.rpartition(":")[2])
        plan = topology(prefill=[{"port": port}])
        subject = examine.Subject(router="http://127.0.0.1:1", topology=plan, measure=False)
        return await examine.examine(subject, lambda finding: None)

    findings = with_engines([("both", ScriptedEngine())], use)
    assert any(f.check == "router" and f.verdict is Verdict.FAIL for f in findings)
    assert any(f.check == "engines" and "prefill-0: vLLM" in f.found for f in findings)

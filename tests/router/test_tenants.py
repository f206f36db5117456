# SPDX-License-Identifier: Apache-2.0
"""Tenants share the engines: quotas, weights, priorities, and prefixes of their own."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clock import Clock
from tests.router.harness import FAST, Deployment, deployed, run, until
from tests.router.test_admission import busy, end, limited, queued
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.policies.base import Routed
from vllm_ascend_pd.router.tenants import Tenants


def sharing(tmp_path: Path, config: RouterConfig = FAST, **fields: Any) -> RouterConfig:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"header": "X-Tenant", **fields}))
    path.chmod(0o600)
    return replace(config, tenants_file=path)


def of(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"X-Tenant": name}}


def key(secret: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer {secret}"}}


def came(d: Deployment) -> list[str]:
    return [request.json["prompt"] for request in d.decodes[0].received]


def test_who_has_used_its_tokens_gets_429_and_others_do_not(tmp_path: Path) -> None:
    config = sharing(
        tmp_path, tenants={"a": {"keys": ["one", "two"], "tokens_per_minute": 60}, "b": {}}
    )

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            ask = {"prompt": [1] * 20, "max_tokens": 20}
            assert (await d.post(**key("one"), **ask))[0] == 200
            status, headers, body = await d.post(**key("two"), **ask)
            assert status == 429
            assert 15 <= int(headers["Retry-After"]) <= 20  # 20 tokens of 60 a minute are missing
            error = json.loads(body)["error"]
            assert (error["type"], "tenant a " in error["message"]) == ("too_many_requests", True)
            assert (await d.post(**of("b"), **ask))[0] == 200
            assert (await d.post(**key("three"), **ask))[0] == 200
            assert d.count("tenant_requests_total", tenant="a", outcome="ok") == 1
            assert d.count("tenant_requests_total", tenant="a", outcome="refused") == 1
            assert d.count("tenant_requests_total", tenant="others", outcome="ok") == 1
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 20
            assert d.count("tenant_tokens_total", tenant="a", part="answer") == 20

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_answers_are_counted(tmp_path: Path, stream: bool) -> None:
    config = sharing(tmp_path, tenants={"a": {}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            ask = {"prompt": [1] * 10, "max_tokens": 20, "stream": stream}
            assert (await d.post(**of("a"), **ask))[0] == 200
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 10
            assert d.count("tenant_tokens_total", tenant="a", part="answer") == 20

    run(test)


def test_what_an_answer_did_not_use_comes_back(tmp_path: Path) -> None:
    path = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 100}}).tenants_file
    assert path is not None
    tenants = Tenants(path, Counted(), clock=Clock(0.0))  # type: ignore[arg-type]
    tenant = tenants.get("a")
    assert tenant is not None
    routed = Routed(10, 60, tenant=tenant)
    assert tenant.take(70) is None
    tenants.settle(routed, 20)
    assert tenant.take(71) is not None
    assert tenant.take(70) is None
    tenants.settle(routed, 0)  # nobody answered
    assert tenant.take(71) is not None
    assert tenant.take(70) is None
    tenants.settle(routed, 90)  # more than it asked for
    refused = tenant.take(1)
    assert refused is not None
    assert refused.retry_after_s == 19  # 31 tokens


def test_a_request_that_nobody_answers_costs_nothing(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 100}})

    async def test() -> None:
        async with deployed(0, 0, config, ready=False) as d:
            for _ in range(3):
                assert (await d.post(**of("a"), prompt=[1] * 10, max_tokens=80))[0] == 503
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 0

    run(test)


def test_who_has_enough_in_progress_gets_429_until_one_has_ended(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"max_requests": 1}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, **of("a"))
            status, headers, _ = await d.post(**of("a"))
            assert (status, headers["Retry-After"]) == (429, "1")
            assert (await d.post(**of("b")))[0] == 200
            await end(first)
            assert (await d.post(**of("a")))[0] == 200

    run(test)


def test_tenants_take_turns_however_many_one_of_them_has_in_line(tmp_path: Path) -> None:
    config = sharing(tmp_path, limited(), tenants={"a": {}, "b": {"weight": 2}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, prompt="first", max_tokens=4)
            ask = {"max_tokens": 4}
            waiting = [await queued(d, prompt=f"a{i}", **of("a"), **ask) for i in range(4)]
            waiting += [await queued(d, prompt=f"b{i}", **of("b"), **ask) for i in range(4)]
            await end(first)
            assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 8
            assert came(d) == ["first", "a0", "b0", "b1", "a1", "b2", "b3", "a2", "a3"]

    run(test)


def test_whoever_left_the_line_costs_its_tenant_no_turn(tmp_path: Path) -> None:
    config = sharing(tmp_path, limited(), tenants={"a": {}, "b": {}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, prompt="first", max_tokens=4)
            ask = {"max_tokens": 4}
            for left in [await queued(d, prompt="gone", **of("a"), **ask) for _ in range(8)]:
                await end(left)
            await until(lambda: d.router.admission.num_queued == 0)
            waiting = [await queued(d, prompt=f"b{i}", **of("b"), **ask) for i in range(2)]
            waiting += [await queued(d, prompt=f"a{i}", **of("a"), **ask) for i in range(2)]
            await end(first)
            await asyncio.gather(*waiting)
            assert came(d) == ["first", "b0", "a0", "b1", "a1"]

    run(test)


def test_a_higher_priority_goes_first(tmp_path: Path) -> None:
    config = sharing(tmp_path, limited(), tenants={"a": {}, "b": {"priority": 1}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, prompt="first")
            waiting = [await queued(d, prompt=f"{t}{i}", **of(t)) for i in "01" for t in "ab"]
            await end(first)
            await asyncio.gather(*waiting)
            assert came(d) == ["first", "b0", "b1", "a0", "a1"]

    run(test)


def test_prefixes_of_tenants_are_salted_apart(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            for more in (of("a"), {**of("a"), "cache_salt": "b"}, {"cache_salt": "a/b"}):
                assert (await d.post(**more))[0] == 200
            salts = [request.json["cache_salt"] for request in d.decodes[0].received]
            assert salts == ["a/", "a/b", "others/a/b"]

    run(test)


def test_the_access_log_says_whose_request_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(sharing(tmp_path, tenants={"a": {"keys": ["secret"]}}), access_log="text")

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            await d.post(**key("secret"))

    with caplog.at_level("INFO"):
        run(test)
    assert " tenant=a" in caplog.text
    assert "secret" not in caplog.text


class Counted:
    """Metrics that nobody asks for."""

    def add(self, name: str, *labels: str, by: float = 1) -> None: ...


def test_tokens_come_back_evenly_and_a_huge_request_waits_for_a_full_minute(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 600}})
    clock = Clock(0.0)
    assert config.tenants_file is not None
    tenants = Tenants(config.tenants_file, Counted(), share=2, clock=clock)  # type: ignore[arg-type]
    tenant = tenants.get("a")
    assert tenant is not None
    assert tenant.take(300) is None  # all that one of two processes has
    refused = tenant.take(50)
    assert refused is not None
    assert refused.retry_after_s == 10
    clock.now += 10
    assert tenant.take(50) is None
    clock.now += 59
    assert tenant.take(5000) is not None
    clock.now += 1
    assert tenant.take(5000) is None
    clock.now += 60 * (5000 - 300) / 300
    assert tenant.take(1) is not None
    clock.now += 1
    assert tenant.take(1) is None


def test_a_file_that_changes_is_read_again_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    path = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 100}}).tenants_file
    assert path is not None
    tenants = Tenants(path, Counted())  # type: ignore[arg-type]
    tenant = tenants.get("a")
    assert tenant is not None
    assert tenant.take(80) is None
    sharing(tmp_path, tenants={"a": {"tokens_per_minute": 130}, "other": {}})
    tenants.refresh()
    assert tenants.get("a") is tenant
    assert tenant.take(60) is not None  # 80 of 130 are used
    assert tenant.take(40) is None
    path.write_text("{")
    tenants.refresh()
    assert tenants.get("other") is not None
    assert tenants.get("others") is not None
    assert tenants.get("b") is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"\['tenants'\] is missing"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a.weight must be positive"),
        ({"tenants": {"a": {"max_requests": 0}}}, "tenants.a.max_requests must be at least 1"),
        ({"tenants": {"a/b": {}}}, "tenants.a/b: not a name"),
        ({"tenants": {"others": {}}}, "tenants.others: not a name"),
        ({"tenants": {"a": {"keys": ["k"]}, "b": {"keys": ["k"]}}}, "tenants.b.keys.0. is a's"),
        ({"tenants": {}, "quota": 1}, r"unknown keys \['quota'\]"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_field(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    path = sharing(tmp_path, **fields).tenants_file
    assert path is not None
    with pytest.raises(ConfigError, match=f"--tenants-file.*{message}"):
        Tenants(path, Counted())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--tenants-file"):
        Tenants(tmp_path / "none", Counted())  # type: ignore[arg-type]

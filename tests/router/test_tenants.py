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
from tests.router.harness import FAST, JSON_TYPE, Deployment, deployed, run, until
from tests.router.scripted_answers import queued_responses
from tests.router.test_admission import busy, end, limited, queued
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import background
from vllm_ascend_pd.router.apis import RESPONSES
from vllm_ascend_pd.router.config import RouterConfig
from vllm_ascend_pd.router.policies.base import Routed
from vllm_ascend_pd.router.tenants import Tenants
from vllm_ascend_pd.router.turns import Turns


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


def test_a_stream_comes_token_by_token_whatever_its_tenant_says(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            assert (await d.post(**of("a"), stream=True, stream_interval=1000))[0] == 200
            for engine in (*d.prefills, *d.decodes):
                assert "stream_interval" not in engine.received[0].json
        async with deployed(1, 1) as d:
            await d.post(stream=True, stream_interval=1000)
            assert d.decodes[0].received[0].json["stream_interval"] == 1000

    run(test)


@pytest.mark.parametrize(
    ("limit", "found", "num_paid"),
    [
        ({"max_output_tokens": 500}, {"status": "incomplete", "usage": {"output_tokens": 30}}, 30),
        ({}, {"status": "completed", "usage": {"output_tokens": 590}}, 590),
        ({"max_output_tokens": 500}, {"status": "cancelled", "usage": None}, 500),
    ],
)
def test_a_background_response_costs_what_it_came_to(
    tmp_path: Path,
    limit: dict[str, int],
    found: dict[str, Any],
    num_paid: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "LOOK_S", 0.01)
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 600}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            body = {"input": "Hello", "background": True, **limit}
            with queued_responses():
                status, _, told = await d.post(RESPONSES, **of("a"), **body)
            assert status == 200
            status, _, _ = await d.post(RESPONSES, **of("a"), **body)
            assert status == (429 if limit else 200)  # what it asks for, until it has ended
            (instance,) = d.router.registry
            await until(lambda: instance.num_background == 1)
            response_id = json.loads(told)["id"]
            d.decodes[0].stored[response_id] |= found
            await until(lambda: instance.num_background == 0)
            num_told = num_paid if limit else 16 + num_paid
            assert d.count("tenant_tokens_total", tenant="a", part="answer") == num_told
            status, _, _ = await d.post(RESPONSES, **of("a"), **body)
            assert status == (429 if num_paid > 100 else 200)

    run(test)


def test_what_an_answer_did_not_use_comes_back(tmp_path: Path) -> None:
    path = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 100}}).tenants_file
    assert path is not None
    tenants = Tenants(path, Counted(), clock=Clock(0.0))  # type: ignore[arg-type]
    tenant = tenants.get("a")
    assert tenant is not None
    routed = Routed(10, 60, tenant=tenant, num_charged_tokens=70)
    assert tenant.take(70) is None
    tenants.settle(routed, 20)
    assert tenant.take(71) is not None
    assert tenant.take(70) is None
    tenants.settle(routed, None)  # nobody has taken it
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


def test_a_request_whose_client_leaves_before_the_answer_costs_its_prompt(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 600}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            await end(await busy(d, **of("a"), prompt=[1] * 500, max_tokens=60))
            await until(lambda: d.router.metrics.num_requests == 0)
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 500
            assert d.count("tenant_tokens_total", tenant="a", part="answer") == 0
            assert (await d.post(**of("a"), prompt=[1] * 200, max_tokens=60))[0] == 429
            assert (await d.post(**of("a"), prompt=[1] * 40, max_tokens=60))[0] == 200

    run(test)


class Asked:
    """A tokenizer that never answers."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def token_ids(self, *question: Any) -> None:
        self.num_asked += 1
        await asyncio.Event().wait()


def test_a_client_that_leaves_while_its_tokens_are_counted_costs_nothing(tmp_path: Path) -> None:
    config = sharing(
        tmp_path, replace(FAST, policy="prefix-aware"), tenants={"a": {"tokens_per_minute": 600}}
    )

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            d.router.generation.tokenizer = asked = Asked()
            leaving = asyncio.ensure_future(d.post(**of("a"), max_tokens=500))
            await until(lambda: asked.num_asked == 1)
            await end(leaving)
            await until(lambda: d.router.metrics.num_requests == 0)
            assert d.router.tenants.get("a").take(600) is None

    run(test)


def test_a_salt_that_is_none_costs_nothing(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 600}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            for _ in range(3):
                assert (await d.post(**of("a"), max_tokens=500, cache_salt=1))[0] == 400
            assert d.router.tenants.get("a").take(600) is None

    run(test)


def test_refused_requests_change_nothing_of_a_quota(tmp_path: Path) -> None:
    """The length of a text is known only when an engine has told its tokens."""
    config = sharing(
        tmp_path, replace(FAST, policy="prefix-aware"), tenants={"a": {"tokens_per_minute": 600}}
    )

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            assert (await d.post(**of("a"), prompt=[1] * 500, max_tokens=50))[0] == 200
            d.decodes[0].script("status(400), status(400), status(400)")
            for i in range(3):
                assert (await d.post(**of("a"), prompt="x" * 40 + str(i), max_tokens=1))[0] == 400
            assert (await d.post(**of("a"), prompt=[1] * 100, max_tokens=10))[0] == 429
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 500

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
            for more in (of("a"), {**of("a"), "cache_salt": "b"}, {"cache_salt": "a|b"}):
                assert (await d.post(**more))[0] == 200
            salts = [request.json["cache_salt"] for request in d.decodes[0].received]
            assert salts == ["a|", "a|b", "others|a|b"]

    run(test)


@pytest.mark.parametrize(
    "odd", [{"n": 2}, {"n": "1"}, {"stream": True}, {"tools": [{}]}, {"messages": 0}], ids=str
)
def test_no_batch_of_a_tenant_goes_whole_to_an_engine(tmp_path: Path, odd: dict[str, Any]) -> None:
    config = sharing(tmp_path, tenants={"a": {}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            body = {"messages": [[{"role": "user", "content": "One"}]], **odd}
            status, _, answer = await d.post("/v1/chat/completions/batch", **of("a"), **body)
            assert (status, json.loads(answer)["error"]["param"]) == (400, next(iter(odd)))
            assert not d.decodes[0].received

    run(test)


@pytest.mark.parametrize("n", [None, 1, 1.0])
def test_each_chat_of_a_batch_is_its_tenants(tmp_path: Path, n: float | None) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 60}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            body = {"messages": [[{"role": "user", "content": "One"}]], "max_tokens": 30, "n": n}
            for expected in (200, 429):
                status, _, _ = await d.post("/v1/chat/completions/batch", **of("a"), **body)
                assert status == expected
            assert [one.json["cache_salt"] for one in d.decodes[0].received] == ["a|"]

    run(test)


def test_chats_of_a_batch_count_as_requests_in_progress(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"max_requests": 3}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, **of("a"))
            d.decodes[0].script("hang, hang")
            body = {"messages": [[{"role": "user", "content": "One"}]] * 8, "prompt": None}
            path = "/v1/chat/completions/batch"
            posting = asyncio.ensure_future(d.post(path, **of("a"), **body))
            await until(lambda: d.decodes[0].num_in_progress == 3)
            assert (await d.post(**of("a")))[0] == 429
            await end(first)
            assert (await d.post(**of("a")))[0] == 200
            await end(posting)
            assert (await d.post(path, **of("a"), **body))[0] == 200
            assert d.decodes[0].most_in_progress == 3
            await until(lambda: d.router.tenants.get("a").num_requests == 0)

    run(test)


def test_salts_that_are_long_have_room(tmp_path: Path) -> None:
    name = "a" * 63
    config = sharing(tmp_path, tenants={name: {}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            for salt in ("x" * 64, "x" * 65, "y" * 128):
                assert (await d.post(**of(name), cache_salt=salt))[0] == 200
            salts = [request.json["cache_salt"] for request in d.decodes[0].received]
            assert salts[0] == f"{name}|{'x' * 64}"
            assert len(set(salts)) == 3
            assert all(salt.startswith(f"{name}|") for salt in salts)

    run(test)
    path = sharing(tmp_path, tenants={name + "a": {}}, cache_salts=True).tenants_file
    assert path is not None
    with pytest.raises(ConfigError, match=rf"tenants\.{name}a: .* at most 63"):
        Tenants(path, Counted())  # type: ignore[arg-type]


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


def test_a_bound_that_is_added_begins_with_a_full_minute(tmp_path: Path) -> None:
    path = sharing(tmp_path, tenants={"a": {}}).tenants_file
    assert path is not None
    clock = Clock(0.0)
    tenants = Tenants(path, Counted(), clock=clock)  # type: ignore[arg-type]
    tenant = tenants.get("a")
    assert tenant is not None
    asked = [Routed(10, 60, tenant=tenant) for _ in range(3)]
    assert [tenant.take(70) for _ in asked] == [None] * 3
    tenants.settle(asked[0], 5000)
    clock.now += 90
    sharing(tmp_path, tenants={"a": {"tokens_per_minute": 100}})
    tenants.refresh()
    assert tenant.take(100) is None
    tenants.settle(asked[1], None)  # what was not taken does not come back
    tenants.settle(asked[2], 5000)
    refused = tenant.take(10)
    assert refused is not None
    assert refused.retry_after_s == 6


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


@pytest.mark.parametrize(
    ("quota", "num_places"),
    [({}, 2), ({"weight": 3}, 3), ({"priority": 1}, 4), ({"priority": -1}, 0)],
    ids=str,
)
def test_a_tenant_that_fills_the_line_keeps_nobody_out(
    tmp_path: Path, quota: dict[str, int], num_places: int
) -> None:
    config = sharing(tmp_path, limited(max_queued=4), tenants={"a": {}, "b": quota})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            first = await busy(d, **of("a"), max_tokens=4)
            waiting = [await queued(d, **of("a"), max_tokens=4) for _ in range(4)]
            for _ in range(num_places):
                waiting.insert(0, asyncio.ensure_future(d.post(**of("b"), max_tokens=4)))
                status, headers, body = await waiting.pop()
                assert (status, headers["Retry-After"].isdigit()) == (429, True)
                assert "another tenant" in json.loads(body)["error"]["message"]
            for tenant in "ab":
                assert (await d.post(**of(tenant)))[0] == 429
            assert d.count("refused_total", reason="full") == num_places + 2
            await end(first)
            assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 4

    run(test)


def test_who_was_served_more_than_it_asked_for_waits_for_longer(tmp_path: Path) -> None:
    path = sharing(tmp_path, tenants={"a": {}, "b": {}}).tenants_file
    assert path is not None
    tenants, turns = Tenants(path, Counted()), Turns()  # type: ignore[arg-type]

    def served(name: str, num_answer_tokens: int | None) -> None:
        routed = Routed(10, 16, tenant=tenants.get(name))
        turns.admitted(turns.next(routed, again=False))
        tenants.settle(routed, num_answer_tokens)

    def first() -> str:
        asking = [(turns.next(asked, again=False), asked) for asked in map(asked_by, "ab")]
        for turn, asked in asking:
            turns.left(asked, turn)
        _, asked = min(asking, key=lambda one: one[0])
        assert asked.tenant is not None
        return asked.tenant.name

    def asked_by(name: str) -> Routed:
        return Routed(10, 16, tenant=tenants.get(name))

    served("a", 5000)  # it did not say how long its answer may be
    for _ in range(192):
        assert first() == "b"
        served("b", 16)
    served("b", 16)
    assert first() == "a"
    served("a", None)  # which an engine refused
    assert first() == "a"


def image(name: str, num_bytes: int) -> dict[str, Any]:
    url = f"data:image/png;base64,{'iVBORw0KGgo/' * (num_bytes // 12)}"
    return {"type": "image_url", "image_url": {"url": url}, "uuid": name}


@pytest.mark.parametrize("num_prefills", [0, 1])
def test_a_prompt_costs_what_engines_count_and_not_what_it_looks_like(
    tmp_path: Path, num_prefills: int
) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 40000}})

    async def test() -> None:
        async with deployed(num_prefills, 1, config) as d:
            chat = [{"role": "user", "content": [image("x", 120000)]}]
            num_tokens = len(json.dumps(chat)) // 4
            for i, stream in enumerate((True, False), 1):
                ask = {"messages": chat, "max_tokens": 4, "stream": stream}
                if stream and not num_prefills:  # else nobody tells
                    ask["stream_options"] = {"include_usage": True}
                assert (await d.post("/v1/chat/completions", **of("a"), **ask))[0] == 200
                assert d.count("tenant_tokens_total", tenant="a", part="prompt") == i * num_tokens
            status, _, _ = await d.post("/v1/chat/completions", **of("a"), **ask)
            assert status == 429  # for what the first two had

    run(test)


def test_what_media_are_called_is_each_tenants_own(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}}, cache_salts=True)

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            parts = [image("x", 12), {"type": "text", "text": '"uuid"'}, image("", 12)]
            chat = [{"role": "system", "content": "uuid"}, {"role": "user", "content": parts}]
            spelled = json.dumps({"model": "tiny", "messages": chat}).replace("uuid", "\\u0075uid")
            url = d.url + "/v1/chat/completions"
            headers = of("a")["headers"] | JSON_TYPE
            async with d.http.post(url, data=spelled, headers=headers) as response:
                assert response.status == 200
            for engine in (*d.prefills, *d.decodes):
                [request] = engine.received
                system, user = request.json["messages"]
                assert system == chat[0]
                assert [part.get("uuid") for part in user["content"]] == ["a|x", None, "a|"]
                assert user["content"][1] == parts[1]

    run(test)


@pytest.mark.parametrize(
    ("name", "is_list"), [("data_2", True), ("documents", True), ("items", False), ("query", False)]
)
def test_what_media_are_called_that_are_scored_is_each_tenants_own(
    tmp_path: Path, name: str, is_list: bool
) -> None:
    config = sharing(tmp_path, tenants={"a": {}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            scored = [{"content": [image("x", 12)]}, "text"]
            body = {"model": "tiny", "data_1": scored[1], name: scored if is_list else scored[0]}
            async with d.http.post(d.url + "/score", json=body, **of("a")) as response:
                assert response.status == 200
            [request] = d.decodes[0].received
            told = request.json[name]
            assert (told[0] if is_list else told)["content"] == [image("a|x", 12)]

    run(test)


def test_what_is_only_passed_on_is_salted_too(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}}, cache_salts=True)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            for path in ("/v1/embeddings", "/pooling", "/v1/score", "/v1/systemone", "/v1/else"):
                body = {"model": "tiny", "input": "x", "cache_salt": "b|"}
                async with d.http.post(d.url + path, json=body, **of("a")) as response:
                    assert response.status == 200
            salts = [request.json["cache_salt"] for request in d.decodes[0].received]
            assert salts == ["a|b|", "a|b|", "a|b|", "a|b|", "b|"]

    run(test)


def test_what_a_tenant_invokes_is_charged_or_refused(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            for body, expected in (({"prompt": "x", "max_tokens": 3}, 200), ({"input": "x"}, 400)):
                async with d.http.post(f"{d.url}/invocations", json=body, **of("a")) as response:
                    assert response.status == expected
            assert [one.path for one in d.decodes[0].received] == ["/v1/completions"]
            assert d.count("tenant_tokens_total", tenant="a", part="answer") == 3

    run(test)


def test_a_stored_response_is_its_tenants(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {}, "b": {}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            _, _, body = await d.post(RESPONSES, **of("a"), input="Hello")
            response_id = json.loads(body)["id"]
            assert response_id in d.decodes[0].stored
            url = f"{d.url}{RESPONSES}/{response_id}"
            for tenant, expected in (("a", 200), ("b", 404), ("nobody", 404)):
                async with d.http.get(url, **of(tenant)) as response:
                    assert response.status == expected
                async with d.http.post(url + "/cancel", **of(tenant)) as response:
                    assert response.status == expected
                ask = {"input": "And?", "previous_response_id": response_id}
                status, _, body = await d.post(RESPONSES, **of(tenant), **ask)
                assert status == expected
                assert (status == 200) or f"'{response_id}' not found" in str(json.loads(body))

    run(test)


def test_a_tenant_sees_its_own_requests_and_the_operator_all(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("the token")
    token.chmod(0o600)
    keys = tmp_path / "keys"
    keys.write_text("sk-a\nsk-b\n")
    keys.chmod(0o600)
    config = sharing(tmp_path, tenants={"a": {"keys": ["sk-a"]}, "b": {"keys": ["sk-b"]}})
    config = replace(config, registration_token_file=token, api_keys_file=keys)

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            d.decodes[0].script("status(500), status(500), status(500), ok")
            for tenant in "ab":
                headers = {**key(f"sk-{tenant}")["headers"], "X-Request-Id": f"of-{tenant}"}
                await d.post(headers=headers)
            told = {}
            for name in ("sk-a", "sk-b", "the token"):
                async with d.http.get(d.url + "/status", **key(name)) as response:
                    found = await response.json()
                async with d.http.get(d.url + "/instances", **key(name)) as response:
                    [instance] = await response.json()
                ids = [timeline["request_id"] for timeline in found["timelines"]]
                errors = found["instances"][0]["errors"]
                told[name] = found["tenant"], ids, bool(errors), bool(instance["last_error"])
            assert told == {
                "sk-a": ("a", ["of-a"], False, False),
                "sk-b": ("b", ["of-b"], False, False),
                "the token": (None, ["of-a", "of-b"], True, True),
            }
            async with d.http.get(d.url + "/status") as response:
                assert response.status == 401

    run(test)


def test_a_prompt_that_was_computed_is_paid_for_also_if_the_rest_is_refused(tmp_path: Path) -> None:
    config = sharing(tmp_path, tenants={"a": {"tokens_per_minute": 600}})

    async def test() -> None:
        async with deployed(1, 1, config) as d:
            d.decodes[0].script("status(400), status(400)")
            for expected in (400, 429):
                assert (await d.post(**of("a"), prompt=[1] * 500, max_tokens=50))[0] == expected
            assert len(d.prefills[0].received) == 1
            assert d.count("tenant_tokens_total", tenant="a", part="prompt") == 500

    run(test)


def test_what_is_computed_in_the_background_is_in_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LOOK_S", 0.01)
    config = sharing(tmp_path, tenants={"a": {"max_requests": 1}})

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            ask = {"input": "Hello", "background": True}
            with queued_responses():
                status, _, told = await d.post(RESPONSES, **of("a"), **ask)
            assert status == 200
            assert (await d.post(RESPONSES, **of("a"), **ask))[0] == 429
            d.decodes[0].stored[json.loads(told)["id"]]["status"] = "completed"
            (instance,) = d.router.registry
            await until(lambda: instance.num_background == 0)
            assert (await d.post(**of("a")))[0] == 200

    run(test)


def test_whether_a_prompt_was_tokenized_lately_is_known_to_its_tenant_alone(tmp_path: Path) -> None:
    config = sharing(
        tmp_path,
        replace(FAST, policy="prefix-aware"),
        tenants={"a": {}, "b": {}},
        cache_salts=True,
    )

    async def test() -> None:
        async with deployed(0, 1, config) as d:
            told = []
            for tenant in "aabb":
                assert (await d.post(**of(tenant)))[0] == 200
                told.append(d.decodes[0].num_tokenized)
            assert told == [1, 1, 2, 2]

    run(test)

# SPDX-License-Identifier: Apache-2.0
"""Two models behind one router: a request reaches an engine of its model, on every path."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.router.harness import FAST, Deployment, deployed, run, until
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.router import health
from vllm_ascend_pd.router.config import Queueing
from vllm_ascend_pd.router.instances import InstanceSpec
from vllm_ascend_pd.router.models import MAX_NAME, MAX_PARTS

PASSED = ("/v1/embeddings", "/v1/messages/count_tokens", "/v1/what/ever")


async def two_models(d: Deployment) -> None:
    """``d1`` serves another one, with an adapter; ``d0`` and all others ``tiny``."""
    d.decodes[1].models = ("large", "large-adapter")
    instance = next(i for i in d.router.registry if i.spec.url == d.decodes[1].url)
    await until(lambda: "large" in instance.models, "models read again")


def served(d: Deployment) -> list[int]:
    return [len(engine.received) for engine in d.decodes]


@pytest.mark.parametrize("path", PASSED)
@pytest.mark.parametrize(
    ("model", "index"), [("tiny", 0), ("large", 1), ("large-adapter", 1)], ids=str
)
def test_json_goes_to_its_model(path: str, model: str, index: int) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            await two_models(d)
            for _ in range(4):
                async with d.http.post(d.url + path, json={"model": model}) as response:
                    assert response.status == 200
            assert served(d)[index] == 4

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_request_without_a_model_gets_no_other_one_that_comes_while_it_is_in_line(
    path: str,
) -> None:
    async def test() -> None:
        config = replace(FAST, queueing=Queueing(max_requests=1))
        async with deployed(0, 1, config, token_s=0.05) as d:
            first = asyncio.ensure_future(d.post(max_tokens=10))
            await until(lambda: d.decodes[0].num_in_progress == 1)
            waiting = asyncio.ensure_future(d.post(path, model=None))
            await until(lambda: d.router.metrics.num_queued() == 1)
            other = ScriptedEngine("other", models=("large",))
            await other.start()
            d.router.registry.put(
                InstanceSpec(
                    url=other.url,
                    role="decode",
                    models=other.models,
                    instance_id="other",
                    source="registered",
                )
            )
            assert (await waiting)[0] == 200
            assert (await first)[0] == 200
            assert not other.received
            await other.stop()

    run(test)


@pytest.mark.parametrize("quoted", [True, False])
def test_form_goes_to_its_model(quoted: bool) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            await two_models(d)
            for _ in range(4):
                form = aiohttp.FormData(quote_fields=quoted, default_to_multipart=True)
                form.add_field("file", b'\r\n--x\r\nname="model"\r\n\r\ntiny', filename="a.wav")
                form.add_field("model", "large")
                url = f"{d.url}/v1/audio/transcriptions"
                async with d.http.post(url, data=form) as response:
                    assert response.status == 200
            assert served(d) == [0, 4]
            assert b'filename="a.wav"' in d.decodes[1].received[0].body

    run(test)


def test_form_chooses_no_peer() -> None:
    async def test() -> None:
        async with deployed() as d:
            for xargs, status in (
                ({"kv_transfer_params": {"remote_host": "evil"}}, 400),
                ({"other": 1}, 200),
            ):
                form = aiohttp.FormData(default_to_multipart=True)
                form.add_field("vllm_xargs", json.dumps(xargs))
                url = f"{d.url}/v1/audio/transcriptions"
                async with d.http.post(url, data=form) as response:
                    assert response.status == status, await response.text()
            assert len(d.decodes[0].received) == 1

    run(test)


XARGS = '{"kv_cache_report_mode": "full"}'


def form_of(*parts: tuple[str, str]) -> bytes:
    """Of what stands behind ``form-data;`` and the value of each part."""
    lines = [
        f"--B\r\nContent-Disposition: form-data; {told}\r\n\r\n{value}\r\n" for told, value in parts
    ]
    return "".join([*lines, "--B--\r\n"]).encode()


@pytest.mark.parametrize(
    ("parameters", "body"),
    [
        ("boundary=B", form_of(('name="vllm_xargs"', XARGS))),
        ("boundary=B", form_of(("name=vllm_xargs", XARGS))),
        ("boundary=B", form_of(('name="vllm_xargs"', '{"a": "--B", "kv_cache_report_mode": "f"}'))),
        ("boundary=A; boundary=B", form_of(('name="vllm_xargs"', XARGS))),
        ("boundary=B", form_of(('name="x"; name="vllm_xargs"', XARGS))),
        ("boundary=B", form_of(("name*=utf-8''vllm%5Fxargs", XARGS))),
        ("boundary*=us-ascii''B; boundary=A", form_of(('name="vllm_xargs"', XARGS))),
        ("boundary=B", form_of(('name="vllm_xargs"', '{"kv_cache_\\u0072eport_mode": "full"}'))),
        ("boundary=B; charset=utf-16", form_of(('name="vllm_xargs"', XARGS))),
        ("boundary=B", form_of((f'name="{";" * 40_000}"', ""))),
        ("boundary=B", form_of(*[("name=x", "")] * (MAX_PARTS + 1))),
        ("boundary=B", b"no form"),
        ("", form_of(('name="model"', "tiny"))),
    ],
)
def test_form_that_engines_might_read_otherwise_reaches_none(
    parameters: str, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with deployed() as d:
            url, kind = f"{d.url}/v1/audio/transcriptions", f"multipart/form-data; {parameters}"
            async with d.http.post(url, data=body, headers={"Content-Type": kind}) as response:
                assert response.status == 400, await response.text()
            assert not d.decodes[0].received
        assert not [one for one in caplog.records if one.name.startswith("python_multipart")]

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", *PASSED])
def test_request_without_a_model_needs_one_that_all_serve(path: str) -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            body: dict[str, Any] = {"prompt": "x", "input": "x"}
            async with d.http.post(d.url + path, json=body) as response:
                assert response.status == 200
            await two_models(d)
            for model in ({}, {"model": None}, {"model": ""}):
                async with d.http.post(d.url + path, json=body | model) as response:
                    assert response.status == 400
                    error = (await response.json())["error"]
                assert error["param"] == "model"
                assert "large, large-adapter, tiny" in error["message"]

    run(test)


def test_request_without_a_model_has_a_prefill_leg_where_engines_call_theirs_otherwise() -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            d.prefills[0].models = ("/mnt/tiny",)
            (instance,) = d.router.registry.prefills
            await until(lambda: "/mnt/tiny" in instance.models, "models read again")
            assert (await d.post(model=None))[0] == 200
            assert len(d.prefills[0].received) == len(d.decodes[0].received) == 1

    run(test)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_name_that_no_model_can_have_is_neither_kept_nor_sent_on(path: str) -> None:
    async def test() -> None:
        async with deployed(1, 1) as d:
            status, _, body = await d.post(path, model="x" * (MAX_NAME + 1))
            error = json.loads(body)["error"]
            assert (status, error["param"], len(error["message"]) < 100) == (400, "model", True)
            assert not d.decodes[0].received
            assert not d.router.metrics.snapshot().timelines

    run(test)


def test_adapter_is_known_though_its_engine_tells_something_else_of_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does when it has read the files of one, or made its first grammar."""

    async def test() -> None:
        async with deployed(0, 2) as d:
            await two_models(d)
            registry = d.router.registry
            (instance,) = (i for i in registry if "large" in i.models)
            monkeypatch.setattr(health, "MODELS_EVERY", 1_000_000)
            told = msgspec.structs.replace(instance.spec, models=("large",))
            registry.put(told)
            assert instance.models == ("large",)
            instance.models = ("large", "large-adapter")
            registry.put(msgspec.structs.replace(told, adapters={"large-adapter": "d"}))
            for _ in range(4):
                assert (await d.post(model="large-adapter"))[0] == 200
            assert served(d) == [0, 4]

    run(test)


def test_model_that_nobody_serves_is_404_and_no_engines_fault() -> None:
    async def test() -> None:
        async with deployed(1, 2) as d:
            await two_models(d)
            for _ in range(4):
                status, _, body = await d.post("/v1/responses", input="x", model="none")
                assert status == 404
                assert "`none` does not exist" in json.loads(body)["error"]["message"]
            assert all(i.is_available for i in d.router.registry)

    run(test)


def test_an_engine_that_has_started_again_may_serve_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "MODELS_EVERY", 1_000_000)

    async def test() -> None:
        async with deployed(0, 2) as d:
            again, _ = d.decodes
            (instance,) = (one for one in d.router.registry if one.spec.url == again.url)
            await again.stop()
            await until(lambda: not instance.is_available, "down")
            again.models = ("other",)
            await again.start()
            await until(lambda: instance.is_available, "up")
            assert (await d.post(model="other"))[0] == 200
            for _ in range(4):
                assert (await d.post())[0] == 200
            assert served(d) == [1, 4]

    run(test)

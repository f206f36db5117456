# SPDX-License-Identifier: Apache-2.0
"""What a producer keeps, and no decode engine takes, is given back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest

from tests.router.harness import FAST, STRICT, Deployment, deployed, run, until
from vllm_ascend_pd.router.releases import Kept

ORDERS = {"prefill-first": replace(FAST, order="prefill-first"), "concurrent": FAST}


def kept_ids(deployment: Deployment) -> list[str]:
    """Those that decode engines were told."""
    engines = deployment.decodes
    return [
        one.params["transfer_id"] for engine in engines for one in engine.received if one.params
    ]


async def expect_given_back(deployment: Deployment, num: int = 1) -> None:
    (producer,) = deployment.prefills
    await until(lambda: len(producer.released) == num, f"given back: {producer.released}")
    assert set(producer.released) <= set(kept_ids(deployment))
    await until(lambda: deployment.count("releases_total", outcome="ok") == num, "counted")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", ["status(400)", "status(500)", "reset", "hang"])
def test_prompt_that_the_decode_engine_does_not_take_is_given_back(order: str, fault: str) -> None:
    async def test() -> None:
        config = replace(ORDERS[order], retries=replace(FAST.retries, max_attempts=1))
        async with deployed(config=config, supports_concurrent=True) as deployment:
            await deployment.post()  # the router learns of the producer
            deployment.decodes[0].script(fault)
            status, _, _ = await deployment.post()
            assert status >= 400
            await expect_given_back(deployment)
            assert deployment.prefills[0].released == kept_ids(deployment)[-1:]

    run(test)


@pytest.mark.parametrize("order", ORDERS)
def test_prompt_of_a_stream_that_begins_with_a_refusal_is_given_back(order: str) -> None:
    async def test() -> None:
        async with deployed(config=ORDERS[order], supports_concurrent=True) as deployment:
            await deployment.post()
            deployment.decodes[0].script("refused(0)")
            status, _, body = await deployment.post(stream=True)
            assert (status, b'"code":400' in body) == (200, True)
            await expect_given_back(deployment)

    run(test)


@pytest.mark.parametrize("order", ORDERS)
def test_prompt_is_given_back_before_another_pair_is_asked(order: str) -> None:
    async def test() -> None:
        config = replace(ORDERS[order], require_prefill=True)
        async with deployed(1, 2, config, supports_concurrent=True) as deployment:
            await deployment.post()
            for engine in deployment.decodes:
                engine.script("reset")
            status, _, _ = await deployment.post()
            assert status == 502
            await expect_given_back(deployment, 2)

    run(test)


@pytest.mark.parametrize("order", ORDERS)
def test_prompt_of_a_client_that_has_left_is_given_back(order: str) -> None:
    async def test() -> None:
        async with deployed(config=ORDERS[order], supports_concurrent=True) as deployment:
            await deployment.post()
            (decode,) = deployment.decodes
            decode.script("hang")
            with pytest.raises((TimeoutError, asyncio.TimeoutError)):
                async with deployment.http.post(
                    deployment.url + "/v1/completions",
                    json={"model": "tiny", "prompt": "left", "max_tokens": 4},
                    timeout=aiohttp.ClientTimeout(total=0.5),
                ):
                    pass
            await expect_given_back(deployment)

    run(test)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_is_taken_is_not_given_back(order: str, stream: bool) -> None:
    async def test() -> None:
        async with deployed(config=ORDERS[order], supports_concurrent=True) as deployment:
            for _ in range(3):
                status, _, _ = await deployment.post(stream=stream)
                assert status == 200
            assert deployment.prefills[0].released == []

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_for_a_model_that_nobody_has_is_given_back_without_a_warning(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=True) as deployment:
            await deployment.post()
            status, _, _ = await deployment.post(model="nobodys", stream=stream)
            assert status == 404
            await expect_given_back(deployment)
            assert "could not be told" not in caplog.text

    run(test)


def test_producer_that_knows_no_release_is_asked_for_none() -> None:
    async def test() -> None:
        async with deployed(config=STRICT) as deployment:
            deployment.decodes[0].script("status(400)")
            status, _, _ = await deployment.post()
            assert status == 400
            assert deployment.prefills[0].released == []
            assert len(deployment.prefills[0].received) == 1

    run(test)


def test_client_cannot_give_a_prompt_back() -> None:
    async def test() -> None:
        async with deployed(supports_concurrent=True) as deployment:
            params = {"release_transfer_id": "somebody's"}
            for fields in (
                {"kv_transfer_params": params},
                {"vllm_xargs": {"kv_transfer_params": params}},
            ):
                status, _, _ = await deployment.post(**fields)
                assert status == 200
            engines = (*deployment.prefills, *deployment.decodes)
            assert not any(engine.released for engine in engines)

    run(test)


def test_log_names_the_transfer_that_a_producer_could_not_be_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        async with deployed() as deployment:
            [producer] = [i for i in deployment.router.registry if i.spec.role == "prefill"]
            await deployment.prefills[0].stop()
            with Kept(deployment.router.relay.releases, producer, "mine", ()):
                pass
            await until(lambda: any("transfer mine (" in text for text in caplog.messages))

    run(test)

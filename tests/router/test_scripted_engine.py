# SPDX-License-Identifier: Apache-2.0
"""The scripted engine answers as the router expects of an engine."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.router.engine_contract import check_consumer, check_producer, check_release
from tests.router.harness import STRICT, deployed, run
from tests.router.scripted_engine import ScriptedEngine


def test_scripted_engine_passes_the_contract_of_engines() -> None:
    async def test() -> None:
        producer, consumer = ScriptedEngine("p"), ScriptedEngine("d")
        for engine in (producer, consumer):
            await engine.start()
        params = await asyncio.to_thread(check_producer, producer.url)
        await asyncio.to_thread(check_release, producer.url)
        await asyncio.to_thread(check_consumer, consumer.url, params)
        for engine in (producer, consumer):
            await engine.stop()

    run(test)


def test_unknown_fault_is_an_error() -> None:
    with pytest.raises(ValueError, match="not a fault"):
        ScriptedEngine().script("ok, explode-")


def test_connection_that_it_closes_is_no_stale_one_however_late_the_loop_is() -> None:
    async def hold_up_the_loop() -> None:
        while True:
            await asyncio.sleep(0.003)
            time.sleep(0.3)

    async def test() -> None:
        async with deployed(config=STRICT, supports_concurrent=False) as d:
            await d.post()
            d.prefills[0].script("close")
            holding_up = asyncio.ensure_future(hold_up_the_loop())
            assert (await d.post())[0] == 502  # the router did not ask again
            holding_up.cancel()

    run(test)

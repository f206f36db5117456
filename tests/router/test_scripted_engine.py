# SPDX-License-Identifier: Apache-2.0
"""The scripted engine answers as the router expects of an engine."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.engine_contract import check_consumer, check_producer, check_release
from tests.router.harness import run
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

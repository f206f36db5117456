# SPDX-License-Identifier: Apache-2.0
"""What the start of a scheduler side opens."""

from __future__ import annotations

import threading

import pytest

from tests.schedulers.harness import Engines
from tests.unit.engine.test_registrar import Web
from tests.unit.engine.test_registrar import until as wait_until
from vllm_ascend_pd.errors import ConfigError


def test_an_engine_registers_with_each_of_its_routers(engines: Engines) -> None:
    routers = [Web(), Web()]
    try:
        link = {"url": ",".join(web.url for web in routers), "http_url": routers[0].url}
        engine = engines.make("kv_both", router=link)
        for web in routers:
            wait_until(lambda web=web: "ready" in web.states(), 20)
        engine.scheduler.shutdown()
        assert [web.states()[-1] for web in routers] == ["DELETE", "DELETE"]
    finally:
        for web in routers:
            web.close()


def test_what_was_opened_is_closed_where_the_rest_cannot_be_made(engines: Engines) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="http_url is missing"):
        engines.make("kv_both", router={"url": "http://127.0.0.1:1"})
    assert set(threading.enumerate()) <= before

# SPDX-License-Identifier: Apache-2.0
"""Real engines with a pool, one of which has no memory for all that it answers: what it preempts
goes on at the other one, from the pool's blocks, and each client gets what one engine gives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import Launcher
from tests.e2e.router_cluster import routing, scraped, undrain, until, until_all_ok
from tests.e2e.servers import free_port
from tests.e2e.streams import GREEDY, USAGE, assert_whole, begun, read
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.router.rebalance import STALLED_S
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

OPTIONS = {**GREEDY, **USAGE, "return_token_ids": True}
FIRST = {"first": {**OPTIONS, "prompt": "Tell me a long story.", "max_tokens": 1950}}
SECOND = {"second": {**OPTIONS, "prompt": [100 + i % 1000 for i in range(1500)], "max_tokens": 500}}
"""It is preempted when both have some 300 tokens, and goes on when the first has ended."""
POOL_LOADS = 'pd_pool_loads_total{engine="0",model_name="tiny",outcome="ok"}'
MEMORY = ["--block-size", "32", "--num-gpu-blocks-override", "66", "--max-model-len", "2048"]
"""Of each engine: for little more than one of these requests at its end."""


@pytest.fixture
def master() -> Iterator[str]:
    """The address of the pool's."""
    master = EmbeddedMaster()
    yield master.address
    master.stop()


def test_request_that_an_engine_preempts_goes_on_at_another_one(
    launched: Launcher, tmp_path: Path, master: str
) -> None:
    make_tiny_model(tmp_path / "model")
    pool = {"master": master, "dram_size": "64MiB", "load": "all", "lookup_timeout_ms": 20_000}
    config: dict[str, Any] = {"kv_connector": "InEngine", "kv_role": "kv_both", "kv_port": 0}
    config |= {"kv_connector_extra_config": {"pool": pool}}
    options = ["--kv-transfer-config", json.dumps(config), *MEMORY]
    full, other = (
        launched.engine(name, tmp_path / "model", tmp_path, free_port(), *options)
        for name in ("full", "other")
    )
    for engine in full, other:
        engine.start()
    for engine in full, other:
        engine.wait_ready()
    instances = [
        {"id": engine.name, "url": engine.url, "role": "decode"} for engine in (full, other)
    ]
    preempted = 'pd_router_moves_total{cause="",outcome="moved",reason="preempted"}'
    with routing(tmp_path, instances, "--rebalance", "load") as url:
        requests.put(f"{url}/registry/instances/other/drain", json={"seconds": None}, timeout=10)
        with begun(url, FIRST, 1) as first_ended, begun(url, SECOND, 1) as second_ended:
            # Both have begun. vLLM counts a preemption when the request goes on.
            until(lambda: scraped(full.url, "num_requests_waiting") > 0)
            with full.slow():
                time.sleep(2 * STALLED_S)  # until the router sees it
                loaded = scraped(other.url, POOL_LOADS)
                undrain(url, "other")
                until(lambda: scraped(url, preempted) > 0)
            got = {**first_ended(), **second_ended()}
        assert scraped(other.url, POOL_LOADS) > loaded
        until_all_ok(url, len(got))
    assert_whole(got, {name: read(other.url, sent) for name, sent in {**FIRST, **SECOND}.items()})
    for engine in full, other:
        assert scraped(engine.url, "num_requests_running") == 0

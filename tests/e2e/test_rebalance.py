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
from tests.e2e.router_cluster import routing, scraped, until, until_all_ok
from tests.e2e.servers import free_port
from tests.e2e.streams import GREEDY, USAGE, assert_whole, begun, read
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.router.rebalance import STALLED_S
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

BODIES = {
    f"{i}": {
        **GREEDY,
        **USAGE,
        "prompt": f"{i}. Tell me a long story.",
        "max_tokens": 1900,
        "return_token_ids": True,
    }
    for i in range(4)
}
POOL_LOADS = 'pd_pool_loads_total{engine="0",model_name="tiny",outcome="ok"}'
MEMORY = ["--max-model-len", "2048", "--block-size", "32", "--num-gpu-blocks-override", "66"]
"""Of each engine: for little more than one of these answers at its end."""


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
    pool = {"master": master, "dram_size": "64MiB", "load": "all", "lookup_timeout_ms": 2000}
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
        with begun(url, BODIES) as ended:
            until(lambda: scraped(full.url, "num_preemptions_total") > 0)
            time.sleep(2 * STALLED_S)  # until the router sees it
            loaded = scraped(other.url, POOL_LOADS)
            requests.delete(f"{url}/registry/instances/other/drain", timeout=10)
            got = ended()
        assert scraped(url, preempted) > 0
        assert scraped(other.url, POOL_LOADS) > loaded
        until_all_ok(url, len(BODIES))
    assert_whole(got, {name: read(other.url, body) for name, body in BODIES.items()})
    for engine in full, other:
        assert scraped(engine.url, "num_requests_running") == 0

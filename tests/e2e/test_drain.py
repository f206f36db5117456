# SPDX-License-Identifier: Apache-2.0
"""Real engines, one of which is drained with 32 streams running: all of them go on at the others,
and each client gets what one engine gives."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import ROLES, routing, scraped, until
from tests.e2e.servers import free_port
from tests.e2e.test_broken_streams import PARSER, REQUESTS, Stream, follow, read
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_STREAMS = 32
VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))


@pytest.fixture(scope="module")
def engines(
    launched: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ForkedEngine]:
    folder = tmp_path_factory.mktemp("drain")
    make_tiny_model(folder / "model")
    made = {}
    for name in ("p0", "d0", "d1"):
        config = {"kv_connector": "InEngine", "kv_port": 0, "kv_role": ROLES[name[0]]}
        options = ["--kv-transfer-config", json.dumps(config), "--max-num-seqs", "64"]
        options += ["--enable-auto-tool-choice", *PARSER]
        made[name] = launched.engine(name, folder / "model", folder, free_port(), *options)
        made[name].start()
    for engine in made.values():
        engine.wait_ready()
    return made


def bodies() -> dict[str, dict[str, Any]]:
    """32 requests of all kinds that move, with prompts of their own where they are text."""
    kinds = list(REQUESTS.items())
    made = {}
    for number in range(NUM_STREAMS):
        kind, body = kinds[number % len(kinds)]
        prompt = {"prompt": f"{number}. {body['prompt']}"} if "prompt" in body else {}
        made[f"{number} {kind}"] = {**body, **prompt}
    return made


def run_drain(url: str, *options: str) -> str:
    command = [VLLM_PD, "drain", "d0", "--router", url, *options]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_drained_engine_is_empty_and_no_client_notices(
    engines: dict[str, ForkedEngine], tmp_path: Path
) -> None:
    instances = [
        {"id": name, "url": engine.url, "role": "prefill" if name == "p0" else "decode"}
        for name, engine in engines.items()
    ]
    sent = bodies()
    with routing(tmp_path, instances, *PARSER) as url, ThreadPoolExecutor(NUM_STREAMS) as pool:
        # All of them run on one engine before it is drained.
        requests.put(f"{url}/registry/instances/d1/drain", json={"seconds": None}, timeout=10)
        began = {name: threading.Event() for name in sent}
        streams = {
            name: pool.submit(follow, url, body, Stream(), began[name])
            for name, body in sent.items()
        }
        for event in began.values():
            assert event.wait(240)
        assert scraped(engines["d0"].url, "num_requests_running") > 0
        requests.delete(f"{url}/registry/instances/d1/drain", timeout=10)
        told = run_drain(url)
        assert told.endswith("d0 is empty: it may be stopped\n"), told
        until(lambda: scraped(engines["d0"].url, "num_requests_running") == 0)
        assert run_drain(url) == "d0 is empty: it may be stopped\n"
        got = {name: stream.result() for name, stream in streams.items()}
        moved = scraped(url, 'pd_router_moves_total{cause="",outcome="moved",reason="drain"}')
        failed = scraped(url, 'pd_router_requests_total{outcome="ok"}') - len(sent)
        assert "gets requests again" in run_drain(url, "--undo")
    assert failed == 0
    assert moved > NUM_STREAMS / 4  # others may have ended before
    expected = {name: read(engines["p0"].url, body) for name, body in sent.items()}
    for name, stream in got.items():
        one = expected[name]
        assert stream.ends == ["[DONE]"], name
        assert len(stream.ids) == 1, name
        assert (stream.text, stream.calls) == (one.text, one.calls), name
        assert stream.token_ids == one.token_ids, name
        assert stream.finish_reasons == one.finish_reasons, name
        assert stream.num_tokens == one.num_tokens, name
    for engine in engines.values():
        assert scraped(engine.url, "num_requests_running") == 0

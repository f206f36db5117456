# SPDX-License-Identifier: Apache-2.0
"""Streams of real engines, one of which is drained or killed within all of them: they go on at
another one, and each client gets what one engine gives."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e import reasoning_plugin
from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.load import STORY
from tests.e2e.router_cluster import ROLES, routing, scraped, undrain, until, until_all_ok
from tests.e2e.servers import free_port
from tests.e2e.streams import (
    CHAT,
    GREEDY,
    NUM_TOKENS,
    PARSER,
    REQUESTS,
    TEXT,
    USAGE,
    assert_whole,
    begun,
    read,
    read_all,
)
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.testing.tiny_lora import make_tiny_lora
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_STREAMS = 32
POOL_LOADS = 'pd_pool_loads_total{engine="0",model_name="tiny",outcome="ok"}'
VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))
LORA = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
"""On CPUs vLLM computes requests that name no adapter with the last place, which so is empty."""
THINKING = {
    **GREEDY,
    **USAGE,
    "messages": [{"role": "system", "content": "You think."}, *CHAT["messages"]],
}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 150, "maxLength": 200}},
    "required": ["a"],
    "additionalProperties": False,
}
CHOICE = ["one " * 40 + "or more", "one " * 40 + "or two", "two " * 40]
KINDS: dict[str, dict[str, Any]] = {
    **REQUESTS,
    "json": {
        **CHAT,
        **GREEDY,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "said", "schema": SCHEMA},
        },
    },
    "choice": {**TEXT, **GREEDY, "structured_outputs": {"choice": CHOICE}},
    "adapter": {**CHAT, **GREEDY, **USAGE, "model": "adapter"},
    "reasoning": THINKING,
    "regex after reasoning": {**THINKING, "structured_outputs": {"regex": "[a-z ]{150,230}"}},
}


@pytest.fixture(scope="module")
def started(
    launched: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ForkedEngine]]:
    """What is in the pool is in p0's memory."""
    folder = tmp_path_factory.mktemp("streams")
    make_tiny_model(folder / "model")
    make_tiny_lora(folder / "adapter", folder / "model")
    master = EmbeddedMaster()
    made = {}
    for name in ("p0", "d0", "d1"):
        pool = {"master": master.address, "dram_size": "64MiB" if name == "p0" else 0}
        pool |= {"load": "all", "lookup_timeout_ms": 2000}
        config = {"kv_connector": "InEngine", "kv_port": 0, "kv_role": ROLES[name[0]]}
        config |= {"kv_connector_extra_config": {"pool": pool}}
        options = ["--kv-transfer-config", json.dumps(config), "--max-num-seqs", "64"]
        options += ["--enable-auto-tool-choice", *PARSER]
        options += ["--lora-modules", f"adapter={folder / 'adapter'}", *LORA]
        options += ["--reasoning-parser-plugin", str(reasoning_plugin.__file__)]
        options += ["--reasoning-parser", "after_a_system_message"]
        made[name] = launched.engine(name, folder / "model", folder, free_port(), *options)
        made[name].start()
    yield made
    for engine in made.values():
        engine.kill()
    master.stop()


@pytest.fixture
def engines(started: dict[str, ForkedEngine]) -> dict[str, ForkedEngine]:
    """A test may kill d0."""
    if not psutil.pid_exists(started["d0"].pid):
        started["d0"].start()
    for engine in started.values():
        engine.wait_ready()
    return started


@pytest.fixture
def instances(engines: dict[str, ForkedEngine]) -> list[dict[str, Any]]:
    return [
        {"id": name, "url": engine.url, "role": "prefill" if name == "p0" else "decode"}
        for name, engine in engines.items()
    ]


def bodies() -> dict[str, dict[str, Any]]:
    """32 requests of all kinds that move, with prompts of their own where they are text. They last
    longer than a command takes to start, on a busy host too."""
    kinds = list(KINDS.items())
    made = {}
    for number in range(NUM_STREAMS):
        kind, body = kinds[number % len(kinds)]
        prompt = {"prompt": f"{number}. {body['prompt']}"} if "prompt" in body else {}
        made[f"{number} {kind}"] = {**body, **prompt, "max_tokens": 2 * NUM_TOKENS}
    return made


def run_drain(url: str, *options: str) -> str:
    command = [VLLM_PD, "drain", "d0", "--router", url, *options]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stderr
    return told.stdout


def test_drained_engine_is_empty_and_no_client_notices(
    engines: dict[str, ForkedEngine], instances: list[dict[str, Any]], tmp_path: Path
) -> None:
    sent = bodies()
    with routing(tmp_path, instances, *PARSER) as url:
        # All of them run on one engine before it is drained.
        requests.put(f"{url}/registry/instances/d1/drain", json={"seconds": None}, timeout=10)
        with begun(url, sent, 2, slow=[engines["d0"]]) as ended:
            assert scraped(engines["d0"].url, "num_requests_running") > 0
            undrain(url, "d1")
            told = run_drain(url)
            assert told.endswith("d0 is empty: it may be stopped\n"), told
            until(lambda: scraped(engines["d0"].url, "num_requests_running") == 0)
            assert run_drain(url) == "d0 is empty: it may be stopped\n"
            got = ended()
        moved = scraped(url, 'pd_router_moves_total{cause="",outcome="moved",reason="drain"}')
        assert_whole(got, read_all(engines["p0"].url, sent))
        until_all_ok(url, len(sent))
        assert "gets requests again" in run_drain(url, "--undo")
    assert moved > NUM_STREAMS / 4  # others may have ended before
    for engine in engines.values():
        assert scraped(engine.url, "num_requests_running") == 0


def core_of(engine: ForkedEngine) -> int:
    """Process id of the engine's core, which its API server outlives for a moment."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return next(c.pid for c in children if "EngineCore" in "".join(c.cmdline()))


@pytest.mark.parametrize("victim", ["engine", "core"])
def test_streams_of_an_engine_that_is_killed_go_on(
    engines: dict[str, ForkedEngine],
    instances: list[dict[str, Any]],
    tmp_path: Path,
    victim: str,
) -> None:
    dying, other = engines["d0"], engines["d1"]
    expected = read_all(other.url, KINDS)
    plain = expected["chat"].text
    stop = plain[len(plain) // 2 :][:6]
    bodies = {**KINDS, "stop string": {**CHAT, **GREEDY, "stop": [stop]}}
    expected["stop string"] = read(other.url, bodies["stop string"])
    bodies["from the pool"] = {"prompt": f"{victim}. {STORY}", **GREEDY}
    expected["from the pool"] = read(engines["p0"].url, bodies["from the pool"])
    bodies["logprobs"] = {**TEXT, **GREEDY, "logprobs": 1}
    taken_on = scraped(other.url, "pd_resumes_total")
    loaded = scraped(other.url, POOL_LOADS)
    with (
        routing(tmp_path, instances[:2], *PARSER) as url,
        begun(url, bodies, slow=[dying]) as ended,
    ):
        os.killpg(dying.pid, signal.SIGSTOP)
        (listed,) = tmp_path.glob("*.json")
        listed.write_text(json.dumps({"instances": instances}))
        until(lambda: other.url in requests.get(f"{url}/instances", timeout=10).text)
        had_ended = scraped(url, 'pd_router_requests_total{outcome="ok"}')
        if victim == "engine":
            dying.kill()
        else:
            os.kill(core_of(dying), signal.SIGKILL)
            os.killpg(dying.pid, signal.SIGCONT)
        got = ended()
        resumed = scraped(url, 'pd_router_resumes_total{kind="exact",outcome="ok"}')
        not_resumed = scraped(url, 'pd_router_not_resumed_total{cause="logprobs"}')
    dying.kill()
    until(lambda: not psutil.pid_exists(dying.pid))
    refused = got.pop("logprobs")
    assert "message" in refused.ends[0]
    assert not_resumed == 1
    assert resumed >= len(got) - max(1, had_ended)
    assert_whole(got, expected)
    assert scraped(other.url, "pd_resumes_total") == taken_on + resumed
    assert scraped(other.url, POOL_LOADS) > loaded
    assert got["tool"].calls.startswith("look_up{")
    assert got["adapter"].text != got["chat"].text
    assert got["reasoning"].reasoning
    assert got["reasoning"].text
    assert re.match("[a-z ]{150}", got["regex after reasoning"].text)
    assert scraped(other.url, "num_requests_running") == 0

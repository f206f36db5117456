# SPDX-License-Identifier: Apache-2.0
"""A stream moves from one real ``vllm serve`` to another one while it runs."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.servers import free_port
from tests.e2e.test_resume_over_http import CHAT, COMPLETION, Stream, read
from vllm_ascend_pd.resume import ResumeKey, RunningAt
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

NUM_OUTPUT = 400
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "seed": {"temperature": 0.9, "seed": 11, "ignore_eos": True},
    "regex": {"structured_outputs": {"regex": "(abc|abx){180}"}},
}


@pytest.fixture(scope="module")
def engines(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> list[ForkedEngine]:
    folder = tmp_path_factory.mktemp("moves")
    make_tiny_model(folder / "model")
    extra = {"transfer": {"max_freeze_s": 30, "peer_timeout_s": 30}}
    config = {
        "kv_connector": "InEngine",
        "kv_role": "kv_both",
        "kv_port": 0,
        "kv_connector_extra_config": extra,
    }
    options = ["--kv-transfer-config", json.dumps(config), "--max-model-len", "512"]
    engines = [
        launched.engine(name, folder / "model", folder, free_port(), *options)
        for name in ("source", "target")
    ]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_ready()
    return engines


@pytest.fixture(scope="module")
def at(engines: list[ForkedEngine]) -> RunningAt:
    """Where requests of the first engine are taken over."""
    sent = {"model": "tiny", "prompt": "where?", "max_tokens": 1}
    sent["kv_transfer_params"] = {"do_remote_decode": True}
    answer = requests.post(f"{engines[0].url}/v1/completions", json=sent, timeout=60)
    found = answer.json()["kv_transfer_params"]
    return RunningAt(
        found["remote_host"], found["remote_port"], found["remote_key"], found["remote_epoch"]
    )


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_stream_moves_while_it_runs(
    engines: list[ForkedEngine], at: RunningAt, body: dict[str, Any], sampling: str
) -> None:
    source, target = engines
    request = {**body, **SAMPLING[sampling], "max_tokens": NUM_OUTPUT}
    whole = read(source.url, request)
    moved: list[Future[Stream]] = []
    with ThreadPoolExecutor(1) as other:

        def move(request_id: str, stream: Stream) -> None:
            """To the other engine, which asks the first one for it."""
            resume = ResumeKey(None).sign(request_id, stream.prompt_token_ids, [], source=at)
            kv = {"kv_transfer_params": {"resume": resume.to_params()}}
            moved.append(other.submit(read, target.url, {**request, **kv}))

        with source.slow():
            left = read(source.url, request, move)
        right = moved[0].result()
    assert (left.finish_reason, left.error.get("code")) == ("", 409)
    assert 0 < len(left.token_ids) < len(whole.token_ids)
    assert left.token_ids == whole.token_ids[: len(left.token_ids)]
    assert right.num_first >= len(left.token_ids)
    assert right.token_ids == whole.token_ids
    assert (right.text, right.finish_reason) == (whole.text, whole.finish_reason)
    assert right.usage["completion_tokens"] == whole.usage["completion_tokens"]

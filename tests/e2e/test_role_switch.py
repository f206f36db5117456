# SPDX-License-Identifier: Apache-2.0
"""Real engines that can do both, and say so to the router: their streams and whole answers move
between them, and one that answers computes prompts a moment later."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import routing, scraped, undrain, until, until_all_ok
from tests.e2e.servers import free_port
from tests.e2e.streams import PARSER, REQUESTS, assert_whole, begun, read_all
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

LONG = {"max_tokens": 700}
ENDED_BY = {"structured_outputs", "tools"}
VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))
MOVED = 'pd_router_moves_total{{cause="",outcome="moved",reason="{}"}}'
COPIED = 'pd_moves_total{engine="0",model_name="tiny",outcome="moved"}'


@pytest.fixture(scope="module")
def router_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def engines(
    launched: Launcher, tmp_path_factory: pytest.TempPathFactory, router_port: int
) -> dict[str, ForkedEngine]:
    folder = tmp_path_factory.mktemp("roles")
    make_tiny_model(folder / "model")
    made = {}
    for name in ("e0", "e1", "e2"):
        router = {"url": f"http://127.0.0.1:{router_port}", "instance_id": name}
        config = {"kv_connector": "InEngine", "kv_port": 0, "kv_role": "kv_both"}
        config |= {"kv_connector_extra_config": {"router": router}}
        options = ["--kv-transfer-config", json.dumps(config), "--max-num-seqs", "64"]
        options += ["--enable-auto-tool-choice", *PARSER, "--shutdown-timeout", "150"]
        made[name] = launched.engine(name, folder / "model", folder, free_port(), *options)
        made[name].start()
    for engine in made.values():
        engine.wait_ready()
    return made


def run(url: str, command: str, *words: str) -> str:
    line = [VLLM_PD, command, *words, "--router", url]
    told = subprocess.run(line, capture_output=True, text=True, timeout=240)
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


def long_ones() -> dict[str, dict[str, Any]]:
    """Requests of all kinds, longer where nothing but their number of tokens ends them."""
    return {
        name: body if ENDED_BY & body.keys() else {**body, **LONG}
        for name, body in REQUESTS.items()
    }


@contextlib.contextmanager
def stumbling(port: int) -> Iterator[None]:
    """The router of this port stops again and again, for a moment."""
    children = psutil.Process().children()
    live = [one for one in children if one.status() != psutil.STATUS_ZOMBIE]
    (router,) = (one for one in live if {"router", str(port)} <= set(one.cmdline()))
    is_over = threading.Event()

    def stumble() -> None:
        while not is_over.wait(0.1):
            router.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            router.send_signal(signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        stumbled = pool.submit(stumble)
        try:
            yield
        finally:
            is_over.set()
            stumbled.result()


def test_streams_move_to_and_fro_and_their_engine_gets_another_role(
    engines: dict[str, ForkedEngine], tmp_path: Path, router_port: int
) -> None:
    sent = long_ones()
    with routing(tmp_path, [], *PARSER, port=router_port) as url:
        until(lambda: len(requests.get(f"{url}/instances", timeout=10).json()) == 3)
        for name, role in (("e0", "prefill"), ("e1", "decode"), ("e2", "decode")):
            assert f"{name} is used for {role}" in run(url, "role", name, role)
        expected = read_all(engines["e0"].url, sent)
        with begun(url, sent, slow=(engines["e1"], engines["e2"])) as ended:
            for target in ("e2", "e1"):
                with stumbling(router_port):
                    for one in requests.get(f"{url}/requests", timeout=10).json()["requests"]:
                        if one["instance"] != target:
                            move = f"{url}/requests/{one['request_id']}/move"
                            requests.post(move, json={"to": target}, timeout=120)
            assert run(url, "role", "e2", "prefill").endswith("e2 is used for prefill\n")
            got = ended()
        moved = sum(scraped(url, MOVED.format(reason)) for reason in ("operator", "drain"))
        until_all_ok(url, len(sent))
        resumed = scraped(url, "pd_router_resumes_total")
    assert resumed == 0
    assert moved >= 4
    assert sum(scraped(engine.url, COPIED) for engine in engines.values()) > 0
    assert_whole(got, expected)
    for engine in engines.values():
        assert scraped(engine.url, "num_requests_running") == 0


def answer(url: str, request_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """Of a request that does not stream; what does not depend on when and where."""
    path = "chat/completions" if "messages" in body else "completions"
    sent = {"model": "tiny", **body, "stream_options": None}
    headers = {"x-request-id": request_id}
    response = requests.post(f"{url}/v1/{path}", json=sent, headers=headers, timeout=240)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    for choice in told["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            del call["id"]
    return {name: told[name] for name in ("id", "choices", "usage")}


def test_whole_answers_move_and_their_engine_may_die(
    engines: dict[str, ForkedEngine], tmp_path: Path, router_port: int
) -> None:
    sent = long_ones()
    sent["samples"] = {**sent["seed"], "n": 2}
    num_long = 1 + sum(not ENDED_BY & body.keys() for body in sent.values())
    ids = {name: name.replace(" ", "-") for name in sent}
    stays = 'pd_router_not_moved_total{cause="n",reason="drain"}'
    with routing(tmp_path, [], *PARSER, port=router_port) as url, ThreadPoolExecutor(9) as pool:
        until(lambda: len(requests.get(f"{url}/instances", timeout=10).json()) == 3)
        for name, role in (("e0", "prefill"), ("e1", "decode"), ("e2", "decode")):
            assert f"{name} is used for {role}" in run(url, "role", name, role)
        run(url, "drain", "e2")
        before = scraped(engines["e1"].url, COPIED)
        with engines["e1"].slow():
            got = {name: pool.submit(answer, url, ids[name], body) for name, body in sent.items()}
            until(
                lambda: (
                    len(requests.get(f"{url}/requests", timeout=10).json()["requests"])
                    >= num_long - 1
                )
            )
            until(lambda: scraped(engines["e1"].url, "num_requests_running") >= num_long)
            undrain(url, "e2")
            drained = pool.submit(run, url, "drain", "e1")
            until(lambda: scraped(url, MOVED.format("drain")) >= num_long - 1)
        assert drained.result().endswith("e1 is empty: it may be stopped\n")
        copied = scraped(engines["e1"].url, COPIED) - before
        engines["e1"].kill()
        answers = {name: one.result() for name, one in got.items()}
        alone = {
            name: pool.submit(answer, engines["e0"].url, ids[name], body)
            for name, body in sent.items()
        }
        moved = scraped(url, MOVED.format("drain"))
        until_all_ok(url, len(sent))
        assert scraped(url, stays) == 1
        expected = {name: one.result() for name, one in alone.items()}
    assert copied == moved >= num_long - 1
    assert answers == expected


def test_engine_that_is_told_to_end_hands_its_streams_over_and_ends(
    engines: dict[str, ForkedEngine], tmp_path: Path, router_port: int
) -> None:
    """The last but one, and no operator has drained it."""
    leaving, other = engines["e2"], engines["e0"]
    engines["e1"].kill()
    sent = long_ones()
    expected = read_all(other.url, sent)
    with routing(tmp_path, [], *PARSER, port=router_port) as url:
        until(lambda: len(requests.get(f"{url}/instances", timeout=10).json()) == 2)
        run(url, "drain", "e0")
        with begun(url, sent, slow=[leaving]) as ended:
            assert scraped(leaving.url, "num_requests_running") > 3
            undrain(url, "e0")
            os.kill(leaving.pid, signal.SIGTERM)
            until(lambda: scraped(url, MOVED.format("drain")) > 3)
            got = ended()
        moved = scraped(url, MOVED.format("drain"))
        until_all_ok(url, len(sent))
        resumed = scraped(url, "pd_router_resumes_total")
    assert resumed == 0
    assert moved > 3
    assert_whole(got, expected)
    until(lambda: not psutil.pid_exists(leaving.pid))
    assert scraped(other.url, "num_requests_running") == 0

# SPDX-License-Identifier: Apache-2.0
"""An engine that ends has another one compute its requests, and no router is there: its clients,
who are connected to it, see nothing.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e import streams
from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.router_cluster import scraped
from tests.e2e.servers import free_port
from tests.e2e.streams import CHAT, GREEDY, REQUESTS, TEXT, assert_whole, begun, read_all
from vllm_ascend_pd.backends.mooncake_master import EmbeddedMaster
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

pytestmark = pytest.mark.engine

LONG = {**GREEDY, "max_tokens": 600}
STAYING = {
    "n": {**TEXT, **GREEDY, "temperature": 0.9, "seed": 3, "n": 2},
}
NAMES = ("source", "target")
POOL = {"dram_size": "64MiB"}


class Pair:
    """Two engines, each of which names the other."""

    def __init__(self, launched: Launcher, folder: Path, pool: dict[str, Any]) -> None:
        self.has_pool = bool(pool)
        secret = folder / "secret"
        secret.write_text("of these two engines " * 3)
        secret.chmod(0o600)
        ports = dict(zip(NAMES, (free_port(), free_port()), strict=True))
        self.engines = {}
        for name, other in zip(NAMES, reversed(NAMES), strict=True):
            config = {
                "kv_connector": "InEngine",
                "kv_role": "kv_both",
                "kv_port": ports[name],
                "kv_connector_extra_config": {
                    "security": {"secret_file": str(secret)},
                    "forward": {"peers": [f"127.0.0.1:{ports[other]}"]},
                    "transfer": {
                        "max_freeze_s": 30,
                        "peer_timeout_s": 30,
                        "check_integrity": True,
                    },
                    **pool,
                },
            }
            options = ["--kv-transfer-config", json.dumps(config), "--shutdown-timeout", "150"]
            options += ["--enable-auto-tool-choice", *streams.PARSER]
            self.engines[name] = launched.engine(
                name, folder / "model", folder, free_port(), *options
            )

    def start(self) -> None:
        """Those that do not run."""
        for engine in self.engines.values():
            if not is_alive(engine):
                engine.log.unlink(missing_ok=True)
                engine.start()
        for engine in self.engines.values():
            engine.wait_ready()


def is_alive(engine: ForkedEngine) -> bool:
    return bool(engine.pid) and Path(f"/proc/{engine.pid}").exists()


@pytest.fixture(scope="module", params=["plain"])
def made(
    request: pytest.FixtureRequest, launched: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("forwards")
    make_tiny_model(folder / "model")
    if request.param == "plain":
        yield Pair(launched, folder, {})
        return
    master = EmbeddedMaster()
    pair = Pair(launched, folder, {"pool": {**POOL, "master": master.address}})
    yield pair
    for engine in pair.engines.values():
        if is_alive(engine):
            engine.kill()
    master.stop()


@pytest.fixture
def pair(made: Pair) -> Iterator[list[ForkedEngine]]:
    made.start()
    yield [made.engines[name] for name in NAMES]
    for engine in made.engines.values():  # vLLM's front end may log that its engine core has ended
        of_core = [x for x in engine.log.read_text().splitlines() if x.startswith("(EngineCore")]
        assert not [line for line in of_core if "Traceback" in line or " ERROR " in line]


def end(engine: ForkedEngine) -> None:
    os.kill(engine.pid, signal.SIGTERM)


def wait_until(what: Callable[[], bool], patience_s: float = 60) -> None:
    until = time.monotonic() + patience_s
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def num_logged(engine: ForkedEngine, text: str) -> int:
    return engine.log.read_text().count(text)


def wait_gone(engine: ForkedEngine) -> None:
    wait_until(lambda: not is_alive(engine))


def num_running(engine: ForkedEngine) -> float:
    return scraped(engine.url, "num_requests_running")


def num_begun(engine: ForkedEngine) -> float:
    """Those that have ended too: on a busy machine that may be some, before the last begins."""
    return num_running(engine) + scraped(engine.url, "request_success_total")


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer that is not streamed, without what differs each time."""
    path = "chat/completions" if "messages" in body else "completions"
    answer = requests.post(f"{url}/v1/{path}", json={"model": "tiny", **body}, timeout=240)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return {name: said[name] for name in ("choices", "usage")}


@pytest.mark.parametrize("made", ["plain", "pool"], indirect=True)
def test_streams_and_answers_go_on_elsewhere(made: Pair, pair: list[ForkedEngine]) -> None:
    source, target = pair
    text = read_all(target.url, {"one": {**TEXT, **LONG}})["one"].text
    stop = text[400:408]
    bodies = {**REQUESTS, "stop": {**TEXT, **LONG, "stop": [stop]}}
    one = read_all(target.url, bodies)
    whole = {"text": {**TEXT, **LONG}, "seed": {**CHAT, **LONG, "temperature": 0.9, "seed": 5}}
    expected = {name: ask(target.url, body) for name, body in whole.items()}
    num_before = num_begun(source)
    with (
        ThreadPoolExecutor(len(whole)) as pool,
        begun(source.url, bodies, slow=[source]) as ended,
    ):
        answers = {name: pool.submit(ask, source.url, body) for name, body in whole.items()}
        wait_until(lambda: num_begun(source) - num_before >= len(bodies) + len(whole))
        end(source)
        wait_until(lambda: num_logged(target, "taken for another") >= len(whole) + 2)
        assert_whole(ended(), one)
        assert {name: answer.result() for name, answer in answers.items()} == expected
    wait_gone(source)
    stored = scraped(
        target.url, 'pd_pool_put_blocks_total{engine="0",model_name="tiny",outcome="ok"}'
    )
    assert (stored > 0) is made.has_pool
    assert num_logged(source, ": ended") + num_logged(source, ": aborted") >= len(whole) + 2
    wait_until(lambda: num_running(target) == 0)


@pytest.mark.parametrize("made", ["pool"], indirect=True)
def test_requests_come_back_from_a_target_that_was_killed(pair: list[ForkedEngine]) -> None:
    source, target = pair
    seeded = {**CHAT, **LONG, "temperature": 0.9, "seed": 7}
    regex = {**TEXT, **LONG, "structured_outputs": {"regex": "[a-z ]{700,800}"}}
    bodies = {"text": {**TEXT, **LONG}, "seed": seeded, "regex": regex}
    one = read_all(target.url, bodies)
    with begun(source.url, bodies, slow=pair) as ended:
        end(source)
        wait_until(lambda: num_logged(source, "has moved to another engine") == len(bodies))
        target.kill()
        assert_whole(ended(), one)
    assert num_logged(source, "is computed here: back_peer_unreachable") == len(bodies)
    wait_gone(source)


def test_client_that_leaves_ends_it_there_too(pair: list[ForkedEngine]) -> None:
    source, target = pair
    sent = {"model": "tiny", "stream": True, **TEXT, **LONG, "max_tokens": 3500}
    url = f"{source.url}/v1/completions"
    with target.slow(), requests.post(url, json=sent, stream=True, timeout=240) as response:
        chunks = response.iter_lines()
        next(chunks)
        end(source)
        wait_until(lambda: num_running(target) == 1)
    wait_gone(source)
    assert num_logged(source, ": aborted") == 1
    wait_until(lambda: num_running(target) == 0)


def test_what_cannot_go_is_waited_for(pair: list[ForkedEngine]) -> None:
    source, target = pair
    expected = {name: ask(target.url, body) for name, body in STAYING.items()}
    num_taken = num_logged(target, "taken for another")
    with ThreadPoolExecutor(len(STAYING)) as pool:
        answers = {n: pool.submit(ask, source.url, body) for n, body in STAYING.items()}
        with source.slow():
            wait_until(lambda: num_running(source) == 2)
            end(source)
        assert {name: answer.result() for name, answer in answers.items()} == expected
    wait_gone(source)
    assert num_logged(source, "is computed here: n (") == 2
    assert num_logged(target, "taken for another") == num_taken


def test_two_that_end_keep_their_own(pair: list[ForkedEngine]) -> None:
    bodies = {"text": {**TEXT, **LONG}}
    one = read_all(pair[1].url, bodies)
    with begun(pair[0].url, bodies, slow=pair) as left, begun(pair[1].url, bodies) as right:
        for engine in pair:
            end(engine)
        assert_whole(left(), one)
        assert_whole(right(), one)
    for engine in pair:
        wait_gone(engine)

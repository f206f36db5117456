# SPDX-License-Identifier: Apache-2.0
"""Real engines behind ``vllm-pd router``, shared by the tests of one module."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.forked_engines import ForkedEngine, Launcher
from tests.e2e.servers import free_port
from vllm_ascend_pd.registration import RANK_HEADER
from vllm_ascend_pd.testing.tiny_model import make_tiny_model

SHORT = "Hello, my name is"
LONG = " ".join(f"This is sentence {i} of a story." for i in range(150))
EXPIRED = 'leases_closed_total{cause="expired",engine="0",model_name="tiny"}'
PATIENT = {"transfer": {"arrival_timeout_s": 60.0}}
"""The host may be so busy that a prompt comes to P long after its request came to D."""
ROLES = {"p": "kv_producer", "d": "kv_consumer"}


@dataclass
class Cluster:
    """Two producers, two consumers, a router, and an engine without transfers to compare with."""

    router: str
    engines: dict[str, ForkedEngine]
    instances: list[dict[str, Any]]
    """For ``--instances``."""
    folder: Path

    @property
    def single(self) -> str:
        """A consumer computes what it has no parameters for, as any engine."""
        return self.engines["d1"].url

    def complete(self, url: str, prompt: Any, **options: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            **options,
        }
        response = requests.post(f"{url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def count(self, engines: str, name: str) -> float:
        """Sum of a counter over producers (``p``), consumers (``d``), or one engine's."""
        urls = [engine.url for key, engine in self.engines.items() if key.startswith(engines)]
        return sum(scraped(url, f"pd_{name}") for url in urls)

    def routed(self, name: str) -> float:
        """Of the router's own counters."""
        return scraped(self.router, f"pd_router_{name}")

    def healthy(self) -> set[str]:
        listed = requests.get(f"{self.router}/instances", timeout=10).json()
        urls = {i["url"] for i in listed if i["healthy"]}
        return {name for name, engine in self.engines.items() if engine.url in urls}


def scraped(url: str, name: str) -> float:
    """A metric's value, added up over its labels where ``name`` has none."""
    text = requests.get(f"{url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf"^vllm:{re.escape(name)}(?:\{{.*\}})? (\S+)$", text, re.M)))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def until_all_ok(url: str, num: int) -> None:
    """A router counts an answer just after its client has it."""
    until(lambda: scraped(url, 'pd_router_requests_total{outcome="ok"}') == num)


def undrain(url: str, name: str) -> None:
    """At once: a command of its own may take as long to start as some answers to end."""
    requests.delete(f"{url}/registry/instances/{name}/drain", timeout=10).raise_for_status()


def complete(url: str, prompt: str, rank: int | None = None, **options: Any) -> dict[str, Any]:
    """``rank``: of those behind one front end."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, **options}
    headers = {} if rank is None else {RANK_HEADER: str(rank)}
    response = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


@pytest.fixture(scope="module")
def cluster(launched: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("router")
    model = folder / "model"
    make_tiny_model(model)
    engines: dict[str, ForkedEngine] = {}
    instances: list[dict[str, Any]] = []
    for name in ("p0", "p1", "d0", "d1"):
        config: dict[str, Any] = {"kv_connector": "InEngine", "kv_port": 0}
        config |= {"kv_role": ROLES[name[0]], "kv_connector_extra_config": PATIENT}
        options = ["--kv-transfer-config", json.dumps(config)]
        # With a plain TCP address vLLM's publisher connects instead of listening, and a port
        # that is free now may be taken when it listens.
        replay = f"ipc://{folder}/{name}.replay"
        events = {"endpoint": f"ipc://{folder}/{name}.events", "replay_endpoint": replay}
        publish = {"enable_kv_cache_events": True, "publisher": "zmq", **events}
        options += ["--kv-events-config", json.dumps(publish)]
        options += ["--enable-prompt-tokens-details"]
        engines[name] = launched.engine(name, model, folder, free_port(), *options)
        engines[name].start()
        role = "prefill" if name[0] == "p" else "decode"
        url = engines[name].url
        instances.append({"id": name, "url": url, "role": role, "kv_events": events})
    for engine in engines.values():
        engine.wait_ready()
    with routing(folder, instances) as url:
        yield Cluster(url, engines, instances, folder)


@contextlib.contextmanager
def routing(
    folder: Path, instances: list[dict[str, Any]], *options: str, port: int = 0
) -> Iterator[str]:
    """A router process in front of these, and those that register; its URL."""
    port = port or free_port()
    listed, log = folder / f"{port}.json", folder / f"router-{port}.log"
    listed.write_text(json.dumps({"instances": instances}))
    command = [str(Path(sys.executable).with_name("vllm-pd")), "router", "--port", str(port)]
    command += ["--instances", str(listed), "--probe-interval", "0.5", *options]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if requests.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except requests.RequestException:
                pass
            time.sleep(0.1)
        yield url
    except BaseException:
        print(f"Of the router's log:\n{log.read_text()[-20_000:]}")
        raise
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()[-4000:]


@pytest.fixture(params=["prefill-first", "concurrent"])
def pair(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A router that uses p0 and d0 in this order, and knows that p0 can. No lease runs out."""
    two = [i for i in cluster.instances if i["id"] in ("p0", "d0")]
    with routing(cluster.folder, two, "--order", request.param) as url:
        cluster.complete(url, "Learning. " + SHORT, max_tokens=1)
        run_out = cluster.count("p0", EXPIRED)
        yield url
        assert cluster.count("p0", EXPIRED) == run_out
        order = f'orders_total{{order="{request.param}"}}'
        assert scraped(url, f"pd_router_{order}") > 0


@contextlib.contextmanager
def recording(engine: str, num_posts: int = 1_000) -> Iterator[tuple[str, list[bytes]]]:
    """A URL that passes all on to an engine, and the bodies with which it answered POSTs. More
    than ``num_posts`` fail."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self, body: bytes | None) -> None:
            headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
            url = engine + self.path
            with requests.request(
                self.command, url, data=body, headers=headers, stream=True, timeout=120
            ) as response:
                self.send_response(response.status_code)
                self.send_header("Content-Type", response.headers.get("Content-Type", ""))
                self.send_header("Connection", "close")
                self.end_headers()
                pieces = []
                for piece in response.iter_content(None):
                    pieces.append(piece)
                    self.wfile.write(piece)
            if self.command == "POST":
                bodies.append(b"".join(pieces))

        def do_GET(self) -> None:
            self._pass_on(None)

        def do_POST(self) -> None:
            if len(bodies) == num_posts:
                self.send_error(500)
                return
            self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()

# SPDX-License-Identifier: Apache-2.0
"""``vllm-pd up`` and ``vllm-pd doctor`` as a user runs them: real engines, the real router.

One deployment serves all tests of this file; they run in its order, the last one ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests import zygote
from tests.e2e import observed
from tests.e2e.load import Load
from tests.e2e.servers import START_TIMEOUT_S, free_port
from tests.e2e.streams import CHAT, GREEDY, TEXT, USAGE, assert_whole, begun, read_all
from tests.zygote import forking_plugin, slowable
from vllm_ascend_pd.planner import profile as planner_profile
from vllm_ascend_pd.testing.tiny_model import main as make_model

pytestmark = pytest.mark.engine

VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "COLUMNS": "200"}
ENGINE_ARGS = [
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096"),
    *("--kv-cache-memory-bytes", str(256 << 20)),
]
LONG = " ".join(f"This is sentence {i} of a story." for i in range(120))


class Up:
    """A running ``vllm-pd up``; its output is what a terminal would show."""

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._output = folder / "up.out"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [VLLM_PD, "up", "--log-dir", str(folder / "logs"), *options],
                env={**ENVIRONMENT, **forking_plugin(folder), **slowable(self._output)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def slow(self) -> AbstractContextManager[None]:
        """Its engines do not come to an end of what they answer meanwhile."""
        return zygote.slow(self._output)

    def until(self, condition: Callable[[], object], patience_s: float = START_TIMEOUT_S) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.1)

    def count(self, name: str, state: str) -> int:
        """How often this child has come into this state."""
        return len(re.findall(rf"^\S+  {name} +{state}\b", self.output, re.MULTILINE))

    def pid(self, name: str) -> int:
        return int(re.findall(rf"{name} +starting +pid (\d+)", self.output)[-1])

    def engine_url(self, name: str) -> str:
        return re.findall(rf"{name} +ready +(\S+)", self.output)[-1]

    def pids(self) -> list[int]:
        """Of everything that was started and is still there."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [p.pid for p in psutil.Process(self.process.pid).children(recursive=True)]
        return []

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(90)

    def kill(self) -> None:
        pids = self.pids()
        self.process.kill()
        self.process.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def one_of_each(folder: Path, model: Path, *engine_args: str) -> Up:
    port = free_port()
    options = [str(model), "--served-model-name", "tiny", "--prefill", "1", "--decode", "1"]
    options += ["--port", str(port), "--pool", "64MiB"]
    options += ["--observe"] if observed.PROMETHEUS else []
    return Up(folder, port, *options, "--", *engine_args)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model(["--out", str(path), "--size", "tiny"])
    return path


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Up]:
    up = one_of_each(tmp_path_factory.mktemp("up"), model, *ENGINE_ARGS)
    try:
        up.until(lambda: "\nup after " in up.output)
        yield up
    finally:
        up.kill()


def complete(url: str, prompt: str, **more: Any) -> str:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def doctor(up: Up, *options: str) -> tuple[int, list[dict[str, Any]]]:
    command = [VLLM_PD, "doctor", *(options or ("--router", up.url)), "--no-measure", "--json"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=200, check=False)
    return done.returncode, json.loads(done.stdout)["findings"]


def metric(url: str, name: str) -> float:
    page = requests.get(f"{url}/metrics", timeout=30).text
    lines = [line for line in page.splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_answers_are_those_of_one_engine(up: Up) -> None:
    alone = up.engine_url("prefill-0")
    before = metric(up.engine_url("decode-0"), "vllm:pd_load_bytes_total")
    for prompt in ("Hello, my name is", LONG):
        # The salt keeps what the prefill engine computed for the pair out of its own answer.
        assert complete(up.url, prompt) == complete(alone, prompt, cache_salt="alone")
    assert metric(up.engine_url("decode-0"), "vllm:pd_load_bytes_total") > before


def test_engines_are_registered(up: Up) -> None:
    for name in ("prefill-0", "decode-0"):
        url = up.engine_url(name)
        assert metric(url, "vllm:pd_router_registered") == 1
        assert f'engine_id="{name}"' in requests.get(f"{url}/metrics", timeout=30).text
    listed = requests.get(f"{up.url}/instances", timeout=30).json()
    assert {(i["instance_id"], i["source"], i["state"]) for i in listed} == {
        ("prefill-0", "registered", "ready"),
        ("decode-0", "registered", "ready"),
    }


def test_doctor_finds_nothing_wrong(up: Up) -> None:
    code, findings = doctor(up)
    assert code == 0, findings
    verdicts = {finding["check"]: finding["verdict"] for finding in findings}
    # A host without RDMA cards has nothing to look at, and one engine moves no requests.
    assert {check for check, verdict in verdicts.items() if verdict != "ok"} <= {
        "RDMA cards",
        "move",
    }
    assert verdicts["RDMA cards"] in ("ok", "skipped")
    assert {"P/D request", "router request", "KV layout", "block hashes", "clock", "pool"} <= set(
        verdicts
    )


def test_doctor_examines_all_that_the_topology_says(up: Up, model: Path, tmp_path: Path) -> None:
    plan = {"model": str(model), "served_model_name": "tiny", "router": {"port": up.port}}
    plan |= {"extra_config": {"pool": {"dram_size": "64MiB"}}}
    path = tmp_path / "topology.yaml"
    path.write_text(json.dumps(plan))  # JSON is YAML
    code, findings = doctor(up, "--config", str(path))
    assert code == 0, findings
    verdicts = {finding["check"]: finding["verdict"] for finding in findings}
    assert verdicts["topology"] == verdicts["master"] == verdicts["P/D request"] == "ok"

    path.write_text(json.dumps({**plan, "decode": [{"count": 2}]}))
    code, findings = doctor(up, "--config", str(path))
    assert code == 1
    [failed] = [finding for finding in findings if finding["verdict"] == "fail"]
    assert failed["found"] == "the router does not know decode-1 of host localhost"


def test_a_profile_of_it_plans_how_a_trace_is_served(up: Up, tmp_path: Path) -> None:
    taken, trace = tmp_path / "profile.json", tmp_path / "trace.jsonl"
    words = ["profile", up.url, "--out", str(taken), "--tokens", "32,512", "--batches", "1,2"]
    words += ["--contexts", "32,256", "--rounds", "1", "--both-busy"]
    done = subprocess.run([VLLM_PD, *words], env=ENVIRONMENT, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    profile = planner_profile.load(taken)
    assert profile.model == "tiny"
    assert {(p.num_tokens, p.batch) for p in profile.prefill} == set(
        itertools.product((32, 512), (1, 2))
    )
    assert len(profile.decode) == 4
    assert min(p.seconds for p in (*profile.prefill, *profile.decode)) > 0
    assert profile.decode_kv_tokens >= 4096

    asked = [{"timestamp": 100 * i, "input_length": 300, "output_length": 16} for i in range(100)]
    trace.write_text("\n".join(map(json.dumps, asked)))
    words = ["plan", "--trace", str(trace), "--profile", str(taken), "--gpus", "4"]
    done = subprocess.run([VLLM_PD, *words], env=ENVIRONMENT, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.decode().splitlines()[1:4]]
    assert rows == [["1P", "3D"], ["2P", "2D"], ["3P", "1D"]]


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_there_are(up: Up) -> None:
    complete(up.url, "To be counted. " + LONG)
    declared = observed.declared_metrics(
        [up.url, up.engine_url("prefill-0"), up.engine_url("decode-0")]
    )
    for expression, legend in observed.expressions():
        names = observed.metric_names(expression)
        assert names, expression
        assert names <= declared.keys(), expression
        labels = [declared[name] for name in names]
        if None not in labels:
            asked = observed.asked_labels(expression) | (legend or set())
            assert asked <= set().union(*filter(None, labels)), expression


@observed.needs_prometheus
def test_queries_of_the_dashboard_and_the_alerts_find_what_they_ask_for(up: Up) -> None:
    complete(up.url, "To be observed. " + LONG)
    prometheus = up.engine_url("prometheus")
    assert f"{prometheus}/alerts alerts" in up.output
    up.until(lambda: "vllm:pd_loads_total" in observed.present_metrics(prometheus), 60)
    present = observed.present_metrics(prometheus)
    for expression, labels in observed.expressions():
        names = observed.metric_names(expression)
        if names <= present and labels is not None:
            # A rate is there with the second sample of what has just been counted first.
            up.until(partial(observed.query, prometheus, expression), 60)
            found = observed.query(prometheus, expression)
            assert all(labels <= set(series["metric"]) for series in found), expression


@observed.needs_prometheus
def test_prometheus_knows_each_process_by_its_name(up: Up) -> None:
    prometheus = up.engine_url("prometheus")
    targets = {s["metric"]["instance"]: s["value"][1] for s in observed.query(prometheus, "up")}
    assert targets == dict.fromkeys(("prefill-0", "decode-0", "router"), "1")
    found = observed.query(prometheus, "vllm:pd_router_instance_up")
    assert {s["metric"]["instance"] for s in found} == {"prefill-0", "decode-0"}
    rules = observed.get(prometheus, "rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}


def test_a_killed_engine_is_reported_and_started_again(up: Up) -> None:
    first = up.pid("decode-0")
    cores = [child.pid for child in psutil.Process(first).children(recursive=True)]
    os.kill(first, signal.SIGKILL)
    up.until(lambda: up.count("decode-0", "backoff") == 1)
    assert "killed by SIGKILL; starts again in 1 s" in up.output

    code, findings = doctor(up)
    assert code == 1
    failed = [finding for finding in findings if finding["verdict"] == "fail"]
    assert any("decode" in finding["found"] and finding["fix"] for finding in failed), findings

    up.until(lambda: up.count("decode-0", "ready") == 2)
    assert up.pid("decode-0") != first
    assert not any(psutil.pid_exists(pid) for pid in cores)
    up.until(lambda: requests.get(f"{up.url}/health", timeout=30).json().get("status") == "ok")
    alone = up.engine_url("prefill-0")
    numbers = itertools.count()

    def hands_over() -> bool:
        """A host that stalls may compute a prompt: later ones show whether KV moves again."""
        prompt = f"After the restart, {next(numbers)}. " + LONG
        assert complete(up.url, prompt) == complete(alone, prompt, cache_salt="alone")
        return metric(up.engine_url("decode-0"), "vllm:pd_load_bytes_total") > 0

    up.until(hands_over)


def test_all_engines_are_restarted_and_no_request_fails(up: Up) -> None:
    """Of each role there is one. Long streams go on, and clients come and go."""
    first = {name: up.pid(name) for name in ("prefill-0", "decode-0")}
    bodies = {
        "text": {**TEXT, **GREEDY, **USAGE, "max_tokens": 1500, "return_token_ids": True},
        "chat": {**CHAT, **GREEDY, "max_tokens": 1500, "temperature": 0.9, "seed": 5},
    }
    answers: dict[str, str] = {}
    done = threading.Event()

    def ask(client: int) -> None:
        for number in itertools.count():
            prompt = f"While it restarts, {client} and {number}. {LONG[:600]}"
            answers[prompt] = complete(up.url, prompt)
            if done.wait(1):
                return

    with ThreadPoolExecutor(3) as clients, begun(up.url, bodies) as ended:
        asking = [clients.submit(ask, client) for client in range(3)]
        restart = [VLLM_PD, "restart", "--rolling", "--port", str(up.port)]
        told = subprocess.run(restart, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
        done.set()
        for client in asking:
            client.result()
        streams = ended()
    assert told.returncode == 0, (told, up.output)
    alone = up.engine_url("prefill-0")
    assert_whole(streams, read_all(alone, bodies))
    for name, pid in first.items():
        said = re.findall(rf"{name}: (\w+)", told.stdout)
        assert said == ["draining", "restarting", "up", "ready"]
        assert up.pid(name) != pid
    for prompt in list(answers)[:: len(answers) // 24 + 1]:
        assert answers[prompt] == complete(alone, prompt, cache_salt="alone")


def test_nothing_is_lost_when_the_master_is_killed_under_32_requests(up: Up) -> None:
    alone = up.engine_url("prefill-0")
    load = Load(up.url, "Killing the master")
    with up.slow():
        load.start()
        time.sleep(0.4)
        os.kill(up.pid("master"), signal.SIGKILL)
        assert load.is_running
    load.check(
        lambda prompt: complete(alone, prompt, max_tokens=48, cache_salt="alone"), may_break=False
    )
    up.until(lambda: up.count("master", "ready") == 2)
    prompt = "After the master came back. " + LONG
    assert complete(up.url, prompt) == complete(alone, prompt, cache_salt="alone")


def test_ctrl_c_leaves_nothing(up: Up) -> None:
    pids = up.pids()
    assert len(pids) >= 6  # two front ends, two engine cores at least, the router, the master
    assert up.stop() == 0, up.output
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    for name in ("master", "prefill-0", "decode-0", "router", *observed.PROGRAMS):
        assert up.count(name, "stopped") == 1


def test_an_option_that_vllm_refuses_ends_it_with_the_reason(tmp_path: Path, model: Path) -> None:
    up = one_of_each(tmp_path, model, "--no-such-option")
    assert up.process.wait(120) == 1
    assert "unrecognized arguments: --no-such-option" in up.output
    assert re.search(r"(prefill|decode)-0 did not come up: exited with code", up.output)

# SPDX-License-Identifier: Apache-2.0
"""``ray job submit -- vllm-pd up --ray``, ``vllm-pd scale`` and ``vllm-pd restart`` as a user runs
them: real raylets, engines, router.

One deployment serves all tests of this file; they run in its order.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import ray
import requests
from ray.job_submission import JobStatus, JobSubmissionClient

from tests.e2e.servers import free_port
from tests.e2e.streams import REQUESTS, assert_whole, begun, read_all
from tests.e2e.test_up import ENGINE_ARGS, LONG, complete, metric
from tests.raylets import ADDRESS, Raylets, raylets
from tests.zygote import forking_plugin
from vllm_ascend_pd.testing.tiny_model import main as make_model

pytestmark = pytest.mark.engine

VLLM_PD = str(Path(sys.executable).with_name("vllm-pd"))
PATIENCE_S = 300.0


class UpOnRay:
    """A job that runs ``vllm-pd up --ray``, with room for two engines on two nodes."""

    def __init__(self, cluster: Raylets, folder: Path) -> None:
        self.cluster = cluster
        self.nodes = {host: cluster.add(1, host) for host in ("127.0.0.3", "127.0.0.4")}
        make_model(["--out", str(folder / "model"), "--size", "tiny"])
        self.port, self.logs = free_port(), folder / "logs"
        self.url = f"http://{ADDRESS}:{self.port}"
        command = [VLLM_PD, "up", str(folder / "model"), "--served-model-name", "tiny"]
        command += ["--ray", "auto", "--pd-ratio", "1:1", "--max-instances", "2"]
        command += ["--port", str(self.port), "--log-dir", str(self.logs), "--", *ENGINE_ARGS]
        self.jobs = JobSubmissionClient(cluster.jobs_url)
        patience = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "150"}}
        self.job = self.jobs.submit_job(entrypoint=shlex.join(command), runtime_env=patience)

    @property
    def output(self) -> str:
        log = self.logs / "ray.log"
        return self.jobs.get_job_logs(self.job) + (log.read_text() if log.is_file() else "")

    def stop(self) -> JobStatus:
        """As ``ray job stop``."""
        self.jobs.stop_job(self.job)
        end = time.monotonic() + PATIENCE_S
        while not (status := self.jobs.get_job_status(self.job)).is_terminal():
            assert time.monotonic() < end, self.output
            time.sleep(0.2)
        return status

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert not self.jobs.get_job_status(self.job).is_terminal(), self.output
            assert time.monotonic() < end, self.output
            time.sleep(0.2)

    def instances(self) -> dict[str, dict[str, Any]]:
        """That the router sends requests to, by name."""
        listed = requests.get(f"{self.url}/instances", timeout=30).json()
        up = [one for one in listed if one["state"] == "ready" and one["healthy"]]
        return {one["instance_id"]: one for one in up}

    def roles(self) -> list[str]:
        return sorted(one["used_for"] for one in self.instances().values())

    def tell(self, what: str, *options: str) -> str:
        command = [VLLM_PD, what, "--port", str(self.port), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpOnRay]:
    folder = tmp_path_factory.mktemp("up")
    with raylets(has_jobs=True, **forking_plugin(folder)) as cluster:
        made = UpOnRay(cluster, folder)
        try:
            made.until(lambda: "\nup after " in made.output)
            yield made
        finally:
            made.stop()


def test_tokens_are_those_of_one_engine(up: UpOnRay) -> None:
    up.until(lambda: up.roles() == ["decode", "prefill"])
    urls = {one["used_for"]: one["url"] for one in up.instances().values()}
    before = metric(urls["decode"], "vllm:pd_load_bytes_total")
    for prompt in ("Hello, my name is", LONG):
        assert complete(up.url, prompt) == complete(urls["prefill"], prompt, cache_salt="alone")
    assert metric(urls["decode"], "vllm:pd_load_bytes_total") > before


def test_more_than_there_is_room_for_waits_and_says_for_what(up: UpOnRay) -> None:
    told = up.tell("scale", "--pd-ratio", "1:2", "--max-instances", "3")
    assert "1 P and 1 D serve; wanted are 1:2, 3 engines at most\n" in told
    assert told.endswith("engine-2 waiting: no node has 1 CPU free now\n")
    told = up.tell("scale", "--max-instances", "2")
    assert told.endswith("1 P and 1 D serve; wanted are 1:2, 2 engines at most\n")


class Asking:
    """One request after another, in a thread, while ``with`` lasts. Each has the same answer."""

    def __init__(self, url: str) -> None:
        self.url, self.expected = url, complete(url, LONG)
        self.answers: list[str] = []
        self.failures: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._done.wait(0.4):  # an engine that starts needs the cores, too
            try:
                self.answers.append(complete(self.url, LONG))
            except (AssertionError, requests.RequestException) as e:
                self.failures.append(str(e))

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()
        if exc == (None, None, None):
            assert self.failures == []
            assert set(self.answers) == {self.expected}


def test_requests_are_answered_while_a_node_goes_and_another_comes(up: UpOnRay) -> None:
    (lost,) = [one for one in up.instances().values() if one["used_for"] == "decode"]
    host = urlsplit(lost["url"]).hostname
    streams = {name: REQUESTS[name] for name in ("completion", "chat", "seed")}
    expected = read_all(up.url, streams)
    with Asking(up.url) as asking:
        with begun(up.url, streams) as ended:
            up.cluster.remove(up.nodes[host])
            assert_whole(ended(), expected)
        up.until(lambda: len(up.instances()) == 1 and up.roles() == ["both"])
        count = len(asking.answers)
        up.until(lambda: len(asking.answers) > count + 2)
        up.cluster.add(1, "127.0.0.5")
        up.until(lambda: up.roles() == ["decode", "prefill"])
        count = len(asking.answers)
        up.until(lambda: len(asking.answers) > count + 2)


def test_requests_are_answered_while_every_engine_is_replaced(up: UpOnRay) -> None:
    before = set(up.instances())
    with Asking(up.url):
        told = up.tell("restart", "--all")
    assert "  1 P and 1 D serve; " in told.splitlines()[-1], told
    assert not before & set(up.instances())
    assert up.roles() == ["decode", "prefill"]


def test_at_the_end_nothing_of_it_is_left(up: UpOnRay) -> None:
    model = str(up.logs.parent / "model")

    def processes() -> list[psutil.Process]:
        words = [(one, one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])]
        return [one for one, cmdline in words if model in cmdline and one.pid != os.getpid()]

    def states_of_places() -> list[str]:
        return [one["state"] for one in ray.util.placement_group_table().values()]

    secrets = list(up.logs.glob(".engine-*"))
    assert len(secrets) == 4  # of the two engines that there are now
    assert {path.stat().st_mode & 0o777 for path in secrets} == {0o600}
    assert processes()
    ray.init(address=up.cluster.address, log_to_driver=False)
    try:
        assert states_of_places().count("CREATED") == 2
        assert up.stop() is JobStatus.STOPPED
        assert "router       stopped" in up.output
        assert set(states_of_places()) == {"REMOVED"}
    finally:
        ray.shutdown()
    assert processes() == []
    assert not list(up.logs.glob(".engine-*"))
    assert {path.name for path in up.logs.glob("engine-*.log")} >= {"engine-0.log", "engine-1.log"}

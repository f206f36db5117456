# SPDX-License-Identifier: Apache-2.0
"""What ``deploy/overlays/cpu-demo`` says, run as processes of this host in place of pods: their
commands, environment, volumes, probes and end. Each has a loopback address as a pod has its own.
Of decode pods there are two, as after ``kubectl scale``.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.e2e.test_up import ENVIRONMENT, LONG, complete, metric
from tests.router.fake_kubernetes import FakeKubernetes
from tests.zygote import forking_plugin, slow, slowable

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        shutil.which("kubectl") is None, reason="needs kubectl, for kubectl kustomize"
    ),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRET = "/etc/vllm-pd/secret"
START_S = 400
NUM_TOKENS = 1000
MOVED = 'vllm:pd_router_moves_total{cause="",outcome="moved",reason="drain"}'


def until(found: Callable[[], Any], *meanwhile: Future[str]) -> Any:
    """What is found, once there is something; what goes on ``meanwhile`` may not have ended."""
    end = time.monotonic() + 200
    while not (one := found()):
        for answer in meanwhile:
            assert not answer.done(), f"ended before: {answer.result()}"
        assert time.monotonic() < end
        time.sleep(0.1)
    return one


@dataclass
class Pod:
    """A pod of a Deployment, which is a process group here."""

    name: str
    address: str
    template: dict[str, Any]
    folders: dict[str, Path]
    """In place of its volumes, by where they are mounted."""
    log: Path
    plugin: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        [container] = self.spec["containers"]
        found: dict[str, Any] = container
        return found

    @property
    def url(self) -> str:
        [port] = [p["containerPort"] for p in self.container["ports"] if p["name"] == "http"]
        return f"http://{self.address}:{port}"

    def prepare(self) -> None:
        """The init containers, one after the other."""
        for container in self.spec.get("initContainers", ()):
            subprocess.run(self._words(container), env=ENVIRONMENT, check=True)

    def start(self, *more: str) -> None:
        env = {e["name"]: e["value"] for e in self.container["env"] if "value" in e}
        said = {name: self._in_process(value) for name, value in env.items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*self._words(self.container), *more],
                env={**ENVIRONMENT, **self.plugin, **said, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def answers(self, probe: str) -> bool:
        asked = self.container[probe]["httpGet"]
        assert asked["port"] == "http"
        try:
            return requests.get(self.url + asked["path"], timeout=30).status_code == 200
        except requests.RequestException:
            return False

    def wait_for(self, probe: str) -> None:
        end = time.monotonic() + START_S
        while not self.answers(probe):
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.2)

    def end(self) -> int:
        """As the kubelet does; the exit code."""
        assert self.process is not None
        subprocess.run(self.container["lifecycle"]["preStop"]["exec"]["command"], check=True)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    def _words(self, container: dict[str, Any]) -> list[str]:
        words = [self._in_process(word) for word in (*container["command"], *container["args"])]
        program = shutil.which(words[0], path=str(Path(sys.executable).parent)) or words[0]
        return [program, *words[1:]]

    def _in_process(self, word: str) -> str:
        own = {"POD_IP": self.address, "POD_NAME": self.name, "POD_NAMESPACE": "demo"}
        word = re.sub(r"(?<!\$)\$\((\w+)\)", lambda match: own[match[1]], word)
        for mounted, folder in self.folders.items():
            word = word.replace(mounted, str(folder))
        return self.address if word == "0.0.0.0" else word


class ApiServer:
    """The fake one, on an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._api = FakeKubernetes()
        self._run(self._api.start())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def do(self, change: Callable[[FakeKubernetes], Any]) -> Any:
        async def changed() -> Any:
            return change(self._api)

        return self._run(changed())

    def close(self) -> None:
        self._run(self._api.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    folder = tmp_path_factory.mktemp("pods")
    shutil.copytree(DEPLOY, folder / "deploy")
    (folder / "deploy" / "base" / "secret").write_text("0123456789abcdef" * 4)
    overlay = str(folder / "deploy" / "overlays" / "cpu-demo")
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, check=True)
    objects = list(yaml.safe_load_all(done.stdout))
    [secret] = [one for one in objects if one["kind"] == "Secret"]
    pods: dict[str, Pod] = {}
    plugin = forking_plugin(folder)
    deployments = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Deployment"}
    [scaled] = [name for name in deployments if name.endswith("decode")]
    replicas = [*((name, "x") for name in deployments), (scaled, "y")]
    for number, (deployment, replica) in enumerate(replicas):
        one, name = deployments[deployment], f"{deployment}-{replica}"
        folders = {}
        for mount in one["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]:
            if mount["mountPath"] != "/dev/shm":
                folders[mount["mountPath"]] = folder / name / mount["name"]
                folders[mount["mountPath"]].mkdir(parents=True)
        for key in secret["data"]:
            path = folders[SECRET] / key
            path.write_text("0123456789abcdef" * 4)
            path.chmod(0o400)
        address = f"127.{os.getpid() % 200 + 20}.0.{number + 2}"
        template = one["spec"]["template"]
        log = folder / f"{name}.log"
        own = {**plugin, **slowable(log)}
        pods[name] = Pod(name, address, template, folders, log, own)
    try:
        yield pods
    finally:
        for pod in pods.values():
            if pod.process is not None and pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()
            if pod.log.is_file():
                print(f"the end of the log of {pod.name}:\n{pod.log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServer]:
    api = ApiServer()
    yield api
    api.close()


def test_pods_become_ready_serve_and_end(
    pods: dict[str, Pod], api: ApiServer, tmp_path: Path
) -> None:
    router = pods["vllm-pd-router-x"]
    kubeconfig = api.do(lambda server: server.kubeconfig(tmp_path / "kubeconfig"))
    engines = [pod for pod in pods.values() if "model" in pod.template["metadata"]["labels"]]
    for pod in engines:
        pod.prepare()
        pod.start()
        labels = {**pod.template["metadata"]["labels"], "address": pod.address}
        api.do(lambda server, p=pod, own=labels: server.put(p.name, ready=False, **own))
    router.start("--kubeconfig", str(kubeconfig))  # in a pod, the service account says all that
    router.wait_for("livenessProbe")
    assert not router.answers("readinessProbe")  # nobody answers yet, and a restart would not help
    for pod in engines:
        pod.wait_for("startupProbe")
        assert pod.answers("livenessProbe")
        assert pod.answers("readinessProbe")
        labels = {**pod.template["metadata"]["labels"], "address": pod.address}
        api.do(lambda server, p=pod, own=labels: server.put(p.name, **own))
    router.wait_for("startupProbe")
    router.wait_for("readinessProbe")

    def all_serve() -> bool:
        instances = requests.get(f"{router.url}/instances", timeout=30).json()
        return len(instances) == len(engines) and all(one["healthy"] for one in instances)

    until(all_serve)  # else D answers alone, or there is no other one to move to
    assert requests.get(f"{router.url}/health", timeout=30).json()["status"] == "ok"

    prefill = pods["vllm-pd-prefill-x"]
    decodes = [pods["vllm-pd-decode-x"], pods["vllm-pd-decode-y"]]
    for prompt in ("Hello, my name is", LONG):
        # The salt keeps what the prefill engine computed for the pair out of its own answer.
        assert complete(router.url, prompt) == complete(prefill.url, prompt, cache_salt="alone")
    assert sum(metric(decode.url, "vllm:pd_load_bytes_total") for decode in decodes) > 0
    for decode in decodes:
        page = requests.get(f"{decode.url}/metrics", timeout=30).text
        assert f'engine_id="{decode.name}"' in page

    # An answer that does not stream can only be copied to another engine, with all its KV.
    with ThreadPoolExecutor() as at_once:
        alone = at_once.submit(
            complete, prefill.url, "Once", cache_salt="alone", max_tokens=NUM_TOKENS
        )
        with slow(decodes[0].log), slow(decodes[1].log):
            moved = at_once.submit(complete, router.url, "Once", max_tokens=NUM_TOKENS)
            running = until(
                lambda: requests.get(f"{router.url}/requests", timeout=30).json()["requests"], moved
            )
            [ending] = [pod for pod in decodes if pod.name == running[0]["instance"]]
            labels = {**ending.template["metadata"]["labels"], "address": ending.address}
            api.do(lambda server: server.put(ending.name, ending=True, **labels))
            until(lambda: metric(router.url, MOVED) == 1, moved)
        assert ending.end() == 0, ending.log.read_text()[-4000:]
        assert moved.result() == alone.result()

    # One after the other: here each sees the processes of the others, which no pod does, and vLLM's
    # server fails as it ends where another one that has its port ends in the same moment.
    for pod in (router, *(pod for pod in engines if pod is not ending)):
        assert pod.end() == 0, pod.log.read_text()[-4000:]

# SPDX-License-Identifier: Apache-2.0
"""Discovery of pods, against a server that speaks the API's protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kubernetes.aio import client

from tests.router.fake_kubernetes import FakeKubernetes
from tests.router.harness import STRICT, Deployment, deployed, run, until
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router.config import Kubernetes
from vllm_ascend_pd.router.discovery import kubernetes
from vllm_ascend_pd.router.discovery.kubernetes import KubernetesDiscovery


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Deployment, FakeKubernetes, ScriptedEngine]]:
    """All pods have one address and port, so one engine answers for all of them."""
    engine = ScriptedEngine("pod")
    await engine.start()
    api = FakeKubernetes()
    await api.start()
    config = replace(
        STRICT,
        prefill_labels=("p", "p-large"),
        decode_labels=("d",),
        kubernetes=Kubernetes(
            "engines", "app=vllm", engine.port, api.kubeconfig(folder / "kubeconfig")
        ),
    )
    async with deployed(0, 0, config) as d:
        yield d, api, engine
    await api.stop()  # nobody connects any more, so no connection comes while it ends
    await engine.stop()


def states(d: Deployment) -> dict[str, tuple[str, str]]:
    return {i.instance_id: (i.spec.role, i.spec.state) for i in d.router.registry}


def test_pods_come_change_and_go(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            assert (await d.post())[0] == 503
            api.put("one", "p", app="vllm")
            api.put("two", "d", ready=False, app="vllm")
            api.put("other-role", "x", app="vllm")
            api.put("other-app", "d", app="web")
            await until(lambda: len(states(d)) == 2)
            assert states(d) == {"one": ("prefill", "ready"), "two": ("decode", "starting")}
            assert (await d.post())[0] == 503
            api.put("two", "d", app="vllm")
            await until(lambda: states(d)["two"] == ("decode", "ready"))
            assert (await d.post())[0] == 200
            api.put("two", "d", ending=True, app="vllm")
            await until(lambda: states(d)["two"] == ("decode", "draining"))
            assert (await d.post())[0] == 503
            api.delete("two")
            await until(lambda: "two" not in states(d))
            assert api.num_lists == 1  # the rest came from one watch

    run(test)


def test_pod_of_the_same_name_is_a_new_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p-large", app="vllm")
            await until(lambda: "one" in states(d))
            first = d.router.registry.get("one")
            api.delete("one")
            api.put("one", "p", app="vllm")
            await until(lambda: d.router.registry.get("one") not in (first, None))

    run(test)


def test_watch_that_is_too_old_lists_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            first = d.router.registry.get("one")
            del api.pods["one"]  # nobody is told
            api.put("two", "d", app="vllm")
            api.forget_history()
            await until(lambda: set(states(d)) == {"two"})
            assert api.num_lists == 2
            assert first is not None

    run(test)


def test_instances_outlive_the_api_server(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            api.put("two", "d", app="vllm")
            await until(lambda: len(states(d)) == 2)
            api.is_broken = True
            api._wake()
            assert (await d.post())[0] == 200
            await api.stop()
            assert (await d.post())[0] == 200
            api.is_broken = False
            api.put("three", "d", app="vllm")
            await api.start()
            await until(lambda: "three" in states(d))

    run(test)


def test_list_that_gets_no_answer_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "ANSWER_S", 0.2)

    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            api.is_silent = True
            del api.pods["one"]  # nobody is told
            api.forget_history()
            await until(lambda: api.num_lists == 3)
            assert "one" in states(d)
            api.is_silent = False
            await until(lambda: not states(d))

    run(test)


def test_server_ends_a_watch_before_the_client_gives_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[bool, float] = {}
    """Of a watch, and of a list."""
    request = aiohttp.ClientSession._request

    async def noted(session: aiohttp.ClientSession, method: str, url: Any, **named: Any) -> Any:
        if "/pods?" in str(url):
            limits["watch=true" in str(url)] = named["timeout"]
        return await request(session, method, url, **named)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noted)

    async def test() -> None:
        async with cluster(tmp_path):
            await until(lambda: len(limits) == 2)

    run(test)
    assert limits[False] < kubernetes.WATCH_S < limits[True]


def test_pod_that_changes_its_role_is_used_in_the_new_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            api.put("two", "p", app="vllm")
            await until(lambda: len(states(d)) == 2)
            two = d.router.registry.get("two")
            assert (await d.post())[0] == 503
            api.put("two", "d", app="vllm")
            await until(lambda: states(d)["two"] == ("decode", "ready"))
            assert (await d.post())[0] == 200
            assert d.router.registry.get("two") is two  # the same engine, with what is known of it
            api.put("one", "x", app="vllm")
            await until(lambda: set(states(d)) == {"two"})
            assert (api.num_lists, api.num_watches) == (1, 1)

    run(test)


def test_watch_of_what_cannot_be_read_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            await until(lambda: api.num_watches == 1)
            api.put("bad", "p", app="vllm")
            del api.pods.pop("bad")["metadata"]["uid"]
            await until(lambda: api.num_watches == 2)
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            await until(lambda: api.num_watching == 1)

    run(test)


def test_client_makes_no_objects_of_pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of some hundred it would for seconds, in which the router does nothing else."""
    made: set[object] = set()
    deserialize = client.ApiClient.deserialize

    def noted(api: Any, response_text: str, response_type: str, content_type: str | None) -> Any:
        made.add(response_type)
        return deserialize(api, response_text, response_type, content_type)

    monkeypatch.setattr(client.ApiClient, "deserialize", noted)

    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            await until(lambda: api.num_watches == 1)
            api.put("two", "p", app="vllm")
            await until(lambda: "two" in states(d))

    run(test)
    assert made <= {"object"}


def test_pod_that_no_longer_fits_the_selector_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            api.put("one", "p", app="other")
            await until(lambda: not states(d))
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            assert api.num_lists == 1

    run(test)


def test_a_watch_that_ends_goes_on_from_the_last_bookmark(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            api.put("one", "p", app="vllm")
            await until(lambda: "one" in states(d))
            api.bookmark()
            api.put("else", "p", app="web")  # is not told
            await until(lambda: api.num_watches == 1)
            api.oldest_kept = api.version - 1  # the pod's own version is forgotten
            api.end_watches()
            await until(lambda: api.num_watches == 2)
            api.put("two", "d", app="vllm")
            await until(lambda: "two" in states(d))
            assert api.num_lists == 1

    run(test)


@pytest.mark.parametrize("verb", ["list", "watch"])
def test_missing_right_is_told_and_does_not_flood_the_server(
    verb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as (d, api, _):
            await until(lambda: api.num_watches == 1)
            api.denied = {verb}
            api.forget_history()
            await until(lambda: "allow it to list and watch pods in engines" in caplog.text)
            assert "Kubernetes: 403 Forbidden" in caplog.text
            num_lists = api.num_lists
            api.put("one", "p", app="vllm")
            api.denied = set()
            await until(lambda: "one" in states(d))
            assert api.num_lists <= num_lists + 2

    run(test)


def test_labels_are_needed() -> None:
    config = replace(STRICT, kubernetes=Kubernetes())
    with pytest.raises(ConfigError, match="--prefill-model-labels"):
        KubernetesDiscovery(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("file", "message"), [("none", "k8s: .*none"), (None, "--kubeconfig")])
def test_missing_cluster_is_a_config_error(tmp_path: Path, file: str | None, message: str) -> None:
    async def test() -> None:
        kubernetes = Kubernetes(kubeconfig=tmp_path / file if file else None)
        config = replace(STRICT, prefill_labels=("p",), decode_labels=("d",), kubernetes=kubernetes)
        with pytest.raises(ConfigError, match=message):
            await KubernetesDiscovery(config, None).start()  # type: ignore[arg-type]

    run(test)

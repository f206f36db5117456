# SPDX-License-Identifier: Apache-2.0
"""Options of vLLM's production-stack and of ``vllm serve`` keep their meaning."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.router.harness import FAST, deployed, run, until
from tests.router.scripted_engine import ScriptedEngine
from vllm_ascend_pd.cli.main import app
from vllm_ascend_pd.errors import ConfigError
from vllm_ascend_pd.router import server
from vllm_ascend_pd.router.config import CORS, Backend, Probes, RouterConfig
from vllm_ascend_pd.router.discovery.static import StaticDiscovery
from vllm_ascend_pd.router.instances import Registry

URLS = "http://127.0.0.1:1, http://127.0.0.1:2"
LABELS = ("--prefill-model-labels", "p", "--decode-model-labels", "d")


def command(monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[RouterConfig | None, str]:
    """What the command line makes of these, and what it says."""
    found: list[RouterConfig] = []
    monkeypatch.setattr(server, "serve", lambda config, on_ready: found.append(config))
    result = CliRunner().invoke(app, ["router", *options])
    return (found[0] if found else None), " ".join(result.output.replace("│", " ").split())


def test_static_backends_have_models_and_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--static-backends", URLS, "--static-models", "m,n", "--static-model-labels", "p,d")
    config, said = command(monkeypatch, "--service-discovery", "static", *options, *LABELS)
    assert config is not None, said
    assert config.backends == (
        Backend("http://127.0.0.1:1", "m", "p"),
        Backend("http://127.0.0.1:2", "n", "d"),
    )
    config, _ = command(monkeypatch, "--static-backends", URLS)
    assert config is not None
    assert [backend.model for backend in config.backends] == [None, None]


@pytest.mark.parametrize("option", ["--static-models", "--static-model-labels"])
def test_lists_of_different_lengths_are_refused(
    monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    config, said = command(monkeypatch, "--static-backends", URLS, option, "a,b,c")
    assert config is None
    assert f"{option}: 3 for 2" in said


def test_label_says_the_role_of_a_backend() -> None:
    async def test() -> None:
        engines = [ScriptedEngine(name) for name in "pde"]
        for engine in engines:
            await engine.start()
        p, d, both = (engine.url for engine in engines)
        config = replace(FAST, prefill_labels=("p",), decode_labels=("d",))
        labelled = (Backend(p, "tiny", "p"), Backend(d, "tiny", "d"))
        async with deployed(0, 0, replace(config, backends=labelled)) as deployment:
            specs = [i.spec for i in deployment.router.registry]
            assert [(s.role, s.models) for s in specs] == [
                ("prefill", ("tiny",)),
                ("decode", ("tiny",)),
            ]
            for _ in range(3):
                assert (await deployment.post())[0] == 200
            assert [len(engine.received) for engine in engines] == [3, 3, 0]
        async with deployed(0, 0, replace(FAST, backends=(Backend(both),))) as deployment:
            assert (await deployment.post())[0] == 200
            assert len(engines[2].received) == 1
        for engine in engines:
            await engine.stop()

    run(test)


def test_label_without_a_role_is_an_error_that_names_it() -> None:
    backends = (Backend("http://127.0.0.1:1", None, "other"),)
    config = RouterConfig(backends=backends, prefill_labels=("p",), decode_labels=("d",))
    registry = Registry(lambda spec: pytest.fail("not added"))
    with pytest.raises(ConfigError, match="'other' is none of --prefill-model-labels"):
        StaticDiscovery(config, registry)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ("least-loaded", None)),
        (("--session-key", "x-user"), ("session-affinity", "x-user")),
        (
            ("--session-key", "x-user", "--policy", "session-affinity"),
            ("session-affinity", "x-user"),
        ),
        (("--session-key", "", "--policy", "round-robin"), ("round-robin", "")),
    ],
)
def test_session_key_chooses_the_policy(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    config, _ = command(monkeypatch, *options)
    assert config is not None
    assert (config.policy, config.session_key) == expected


@pytest.mark.parametrize("where", ["header", "body"])
def test_session_is_in_a_header_or_in_the_body(where: str) -> None:
    async def test() -> None:
        config = replace(FAST, policy="session-affinity", session_key="X-Mine")
        async with deployed(1, 4, config) as d:
            for session in "abcdefgh":
                before = [len(engine.received) for engine in d.decodes]
                told: dict[str, Any] = {"X-Mine": session}
                for _ in range(3):
                    sent = {"headers": told} if where == "header" else told
                    assert (await d.post(**sent))[0] == 200
                after = [len(engine.received) for engine in d.decodes]
                assert sorted(a - b for a, b in zip(after, before, strict=True)) == [0, 0, 0, 3]
            assert min(len(engine.received) for engine in d.decodes) < 24

    run(test)


@pytest.mark.parametrize("where", ["header", "body"])
def test_session_of_what_is_passed_on_is_that_of_its_answers(where: str) -> None:
    async def test() -> None:
        config = replace(FAST, policy="session-affinity", session_key="X-Mine")
        async with deployed(1, 4, config) as d:
            for session in "abcdefgh":
                told = {"X-Mine": session}
                sent: dict[str, Any] = {"headers": told} if where == "header" else told
                before = [len(engine.received) for engine in d.decodes]
                assert (await d.post(**sent))[0] == 200
                body = {"model": "tiny", **(told if where == "body" else {})}
                async with d.http.post(
                    f"{d.url}/v1/embeddings", json=body, headers=sent.get("headers")
                ) as response:
                    assert response.status == 200
                after = [len(engine.received) for engine in d.decodes]
                assert sorted(a - b for a, b in zip(after, before, strict=True)) == [0, 0, 0, 2]
            async with d.http.post(
                f"{d.url}/v1/embeddings", json={"model": "tiny", "X-Mine": 7}
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "X-Mine"

    run(test)


@pytest.mark.parametrize(
    ("options", "required"),
    [
        ((), False),
        (("--require-prefill",), True),
        (("--routing-logic", "disaggregated_prefill_orchestrated"), True),
    ],
)
def test_orchestrated_routing_leaves_no_prompt_to_a_decode_engine(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], required: bool
) -> None:
    config, said = command(monkeypatch, "--static-backends", URLS, *options)
    assert config is not None, said
    assert config.require_prefill is required


def test_engine_stats_are_read_as_often_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = command(monkeypatch, "--engine-stats-interval", "30")
    assert config is not None
    assert config.probes.load_interval_s == 30

    async def num_reads(interval_s: float) -> int:
        probes = Probes(interval_s=0.01, timeout_s=1, load_interval_s=interval_s)
        async with deployed(0, 1, replace(FAST, probes=probes)) as d:
            (instance,) = d.router.registry
            await until(lambda: instance.load.read_at > 0)
            read_at = {instance.load.read_at}
            for _ in range(40):
                await asyncio.sleep(0.01)
                read_at.add(instance.load.read_at)
            return len(read_at)

    async def test() -> None:
        assert await num_reads(30.0) == 1
        assert await num_reads(0.0) > 1

    run(test)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--engine-stats-interval", "-1"), "--engine-stats-interval must not be negative"),
        (("--engine-stats-interval", "nan"), "--engine-stats-interval must not be negative"),
        (("--port", "65536"), "--port"),
        (("--k8s-port", "0"), "--k8s-port"),
        (("--max-body-mb", "0"), "--max-body-mb"),
        (("--drain-timeout", "-1"), "--drain-timeout"),
        (("--keep-alive-timeout", "0"), "--keep-alive-timeout must be a positive number"),
        (("--slo-ttft", "1"), "--slo-ttft and --slo-itl are for --profile"),
        (
            ("--session-key", "x-user", "--policy", "round-robin"),
            "--session-key: it is for --policy session-affinity, and round-robin does",
        ),
        (("--k8s-port", "8000"), "--k8s-port: without --service-discovery k8s no pods"),
        (
            ("--k8s-namespace", "default", "--k8s-label-selector", "app=vllm"),
            "--k8s-namespace, --k8s-label-selector: without --service-discovery k8s",
        ),
        (("--kubeconfig", "there"), "--kubeconfig: without --service-discovery k8s"),
    ],
)
def test_option_that_nothing_can_be_done_with_is_refused(
    monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], message: str
) -> None:
    config, said = command(monkeypatch, *option)
    assert config is None
    assert message in said


def test_clients_are_kept_for_longer_than_by_what_is_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config, said = command(monkeypatch)
    assert config is not None, said
    assert config.timeouts.keep_alive_s > 120
    config, said = command(monkeypatch, "--keep-alive-timeout", "620")
    assert config is not None, said
    assert config.timeouts.keep_alive_s == 620


def test_request_stats_are_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = command(monkeypatch, "--request-stats-window", "10")
    assert config is not None
    assert config.stats_window_s == 10
    _, said = command(monkeypatch, "--request-stats-window", "0")
    assert "--request-stats-window 0: must be positive" in said

    async def test() -> None:
        async with deployed(config=replace(FAST, stats_window_s=10.0)) as d:
            for _ in range(5):
                await d.post()
            async with d.http.get(f"{d.url}/status") as response:
                status = await response.json()
            assert status["answers_per_s"] == 0.5
            assert status["ttft_mean_s"] > 0
        async with deployed(config=replace(FAST, stats_window_s=0.01)) as d:
            await d.post()
            await until(lambda: d.router.metrics.snapshot().num_recent == 0)

    run(test)


def test_cross_origin_options_are_those_of_vllm_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = command(monkeypatch)
    assert config is not None
    assert config.cors == CORS()
    options = ("--allowed-origins", '["https://a", "https://b"]', "--allow-credentials")
    config, _ = command(monkeypatch, *options, "--allowed-methods", '["GET"]')
    assert config is not None
    assert config.cors == CORS(("https://a", "https://b"), ("GET",), ("*",), True)
    config, said = command(monkeypatch, "--allowed-origins", "https://a")
    assert config is None
    assert "--allowed-origins 'https://a': a JSON list" in said

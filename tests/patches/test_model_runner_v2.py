# SPDX-License-Identifier: Apache-2.0
"""Our connector object against what the pinned Model Runner V2 calls. No GPU is used.

The runner's source is read, not run: which methods of ``self.kv_connector`` it calls, and with
what, must be accepted by ours.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import DeviceConfig, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, KVConnector, get_kv_connector

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.metadata import StepReport
from vllm_ascend_pd.engine.vllm_api.model_runner_v2 import InEngineKVConnector


class ScriptedStep:
    def __init__(self, events: list[str], wait_all: bool) -> None:
        self._events = events
        self._wait_all = wait_all

    def __enter__(self) -> None:
        self._events.append("wait all" if self._wait_all else "enter")
        if not self._wait_all:
            hooks.current_step = self

    def __exit__(self, *exc: object) -> None:
        self._events.append("exit")
        hooks.current_step = None

    def wait_layer(self, layer_name: str) -> None:
        raise AssertionError("no layer is run here")

    def save_layer(self, layer_name: str) -> None:
        raise AssertionError("no layer is run here")


class ScriptedWorker:
    """A worker side that arms every step."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.output = KVConnectorOutput(kv_connector_worker_meta=StepReport())

    def begin_step(self, scheduler_output: Any) -> None:
        self.events.append("begin")

    def take_armed_step(self, wait_all: bool) -> ScriptedStep | None:
        return ScriptedStep(self.events, wait_all)

    def end_forward(self) -> None:
        self.events.append("end forward")

    def end_drafts(self) -> None:
        self.events.append("drafted")

    @contextmanager
    def step_output(self) -> Iterator[KVConnectorOutput]:
        yield self.output
        self.events.append("report")

    def no_forward(self) -> ModelRunnerOutput:
        self.events.append("no forward")
        return ModelRunnerOutput.with_kv_conn_output_only(self.output)

    def shutdown(self) -> None:
        self.events.append("shutdown")


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig("cpu"))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ScriptedWorker:
    worker = ScriptedWorker()
    monkeypatch.setattr(hooks, "worker", worker)
    monkeypatch.setattr(hooks, "current_step", None)
    return worker


@pytest.fixture
def connector(worker: ScriptedWorker) -> InEngineKVConnector:
    return InEngineKVConnector(worker)  # type: ignore[arg-type]


def runner_source() -> str:
    spec = find_spec("vllm.v1.worker.gpu.model_runner")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


def calls_of_the_runner() -> list[ast.Call]:
    """Every ``self.kv_connector.<method>(…)``."""
    return [
        node
        for node in ast.walk(ast.parse(runner_source()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "self.kv_connector"
    ]


def test_runner_calls_what_this_was_written_for() -> None:
    called = {
        call.func.attr for call in calls_of_the_runner() if isinstance(call.func, ast.Attribute)
    }
    assert called == {
        "pre_forward",
        "finish_forward",
        "post_forward",
        "no_forward",
        "set_disabled",
        "reset_capture_state",
    }


def test_connector_accepts_every_call_of_the_runner() -> None:
    calls = calls_of_the_runner()
    assert len(calls) >= 8
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        signature = inspect.signature(getattr(InEngineKVConnector, call.func.attr))
        keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
        if any(keyword.arg is None for keyword in call.keywords):  # **connector_kwargs
            keywords |= dict.fromkeys(
                ("scheduler_output", "request_state_indices", "request_ids", "num_tokens")
            )
        signature.bind(None, *call.args, **keywords)


def test_keywords_of_pre_forward_are_those_of_the_runner() -> None:
    """The names that the test above puts in for ``**connector_kwargs``."""
    if "connector_kwargs" not in runner_source():
        pytest.skip("this version passes the batch itself")
    (made,) = (
        node.value
        for node in ast.walk(ast.parse(runner_source()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "connector_kwargs"
    )
    assert isinstance(made, ast.Call)
    assert {keyword.arg for keyword in made.keywords} == {
        "scheduler_output",
        "request_state_indices",
        "request_ids",
        "num_tokens",
    }


def test_connector_overrides_with_the_interfaces_parameters() -> None:
    for name, method in inspect.getmembers(KVConnector, inspect.isfunction):
        ours = inspect.signature(getattr(InEngineKVConnector, name))
        names = [
            parameter.name
            for parameter in inspect.signature(method).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        ours.bind(*names)
        ours.bind(names[0], **dict.fromkeys(names[1:]))


def test_worker_is_installed_before_the_connector_is_made() -> None:
    source = runner_source()
    assert source.index("pd_hooks.install_worker(") < source.index(" = get_kv_connector(")


def test_active_worker_gets_our_connector(worker: ScriptedWorker, config: VllmConfig) -> None:
    assert isinstance(get_kv_connector(config, {}), InEngineKVConnector)


def test_inactive_worker_gets_the_stock_no_op(config: VllmConfig) -> None:
    assert not hooks.active()
    assert get_kv_connector(config, {}) is NO_OP_KV_CONNECTOR


def pre_forward(connector: InEngineKVConnector, **more: Any) -> None:
    connector.pre_forward(
        scheduler_output=SimpleNamespace(),  # type: ignore[arg-type]
        request_state_indices=None,
        request_ids=[],
        num_tokens=1,
        **more,
    )


def test_forward_inside_a_context_runs_layer_hooks(
    worker: ScriptedWorker, connector: InEngineKVConnector, config: VllmConfig
) -> None:
    with set_forward_context(None, config):
        pre_forward(connector)
        assert hooks.current_step is not None
    connector.finish_forward()
    assert hooks.current_step is None
    assert connector.post_forward(set()) is worker.output
    assert worker.events == ["begin", "enter", "exit", "end forward", "drafted", "report"]


def test_full_graph_outside_of_any_context_waits_for_all(
    worker: ScriptedWorker, connector: InEngineKVConnector
) -> None:
    pre_forward(connector, attn_metadata={})
    assert hooks.current_step is None
    connector.finish_forward()
    assert worker.events == ["begin", "wait all", "exit", "end forward"]


def test_forward_context_of_the_runner_leaves_the_step_to_pre_forward(
    worker: ScriptedWorker, connector: InEngineKVConnector, config: VllmConfig
) -> None:
    """Both sites are patched; the step is armed after the context is entered."""

    class ArmedOnce(ScriptedWorker):
        armed = False

        def begin_step(self, scheduler_output: Any) -> None:
            super().begin_step(scheduler_output)
            self.armed = True

        def take_armed_step(self, wait_all: bool) -> ScriptedStep | None:
            armed, self.armed = self.armed, False
            return super().take_armed_step(wait_all) if armed else None

    once = ArmedOnce()
    hooks.worker = once
    connector = InEngineKVConnector(once)  # type: ignore[arg-type]
    with set_forward_context({"attn": object()}, config):
        pre_forward(connector)
        assert hooks.current_step is not None
    connector.finish_forward()
    assert once.events == ["begin", "enter", "exit", "end forward"]


def test_step_without_tokens_begins_and_reports(
    worker: ScriptedWorker, connector: InEngineKVConnector
) -> None:
    output = connector.no_forward(SimpleNamespace())  # type: ignore[arg-type]
    assert worker.events == ["begin", "no forward"]
    assert output.kv_connector_output is worker.output


def test_disabled_connector_does_nothing(
    worker: ScriptedWorker, connector: InEngineKVConnector, config: VllmConfig
) -> None:
    """While the runner does dummy runs."""
    connector.set_disabled(True)
    with set_forward_context(None, config):
        pre_forward(connector)
        assert hooks.current_step is None
    connector.finish_forward()
    assert connector.post_forward(set()) is None
    assert connector.no_forward(SimpleNamespace()) is EMPTY_MODEL_RUNNER_OUTPUT  # type: ignore[arg-type]
    assert worker.events == []
    connector.set_disabled(False)
    pre_forward(connector)
    assert worker.events == ["begin", "wait all"]


def test_disabling_ends_the_layer_hooks(
    worker: ScriptedWorker, connector: InEngineKVConnector, config: VllmConfig
) -> None:
    with set_forward_context(None, config):
        pre_forward(connector)
        connector.set_disabled(True)
        assert hooks.current_step is None

# SPDX-License-Identifier: Apache-2.0
"""The patched worker sites of Model Runner V1, driving a scripted worker side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.config import CUDAGraphMode, DeviceConfig, VllmConfig
from vllm.config.kv_transfer import pd_hooks
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.forward_context import is_forward_context_available, set_forward_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.metadata import StepReport

LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


class ScriptedStep:
    """An armed step that writes down what happens to it."""

    def __init__(self, events: list[str], wait_all: bool) -> None:
        self._events = events
        self._wait_all = wait_all

    def __enter__(self) -> None:
        assert is_forward_context_available()
        if self._wait_all:
            self._events.append("wait all")
        else:
            self._events.append("enter")
            hooks.current_step = self

    def __exit__(self, *exc: object) -> None:
        self._events.append("exit")
        hooks.current_step = None

    def wait_layer(self, layer_name: str) -> None:
        self._events.append(f"wait {layer_name}")

    def save_layer(self, layer_name: str) -> None:
        self._events.append(f"save {layer_name}")


class ScriptedWorker:
    """A worker side whose steps are armed by ``begin_step``, as the real one's are."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.armed = False
        self.output = KVConnectorOutput(kv_connector_worker_meta=StepReport())

    def begin_step(self, scheduler_output: Any) -> None:
        self.events.append("begin")
        self.armed = True

    def take_armed_step(self, wait_all: bool) -> ScriptedStep | None:
        if not self.armed:
            return None
        self.armed = False
        return ScriptedStep(self.events, wait_all)

    @contextmanager
    def step_output(self) -> Iterator[KVConnectorOutput]:
        yield self.output
        self.events.append("report")

    def end_drafts(self) -> None:
        self.events.append("drafted")

    def no_forward(self) -> ModelRunnerOutput:
        return ModelRunnerOutput.with_kv_conn_output_only(self.output)

    def shutdown(self) -> None:
        self.events.append("shutdown")


@maybe_transfer_kv_layer
def attention(query: list[str], layer_name: str) -> str:
    """Stands for ``unified_attention_with_output``, which is decorated so."""
    query.append(f"attend {layer_name}")
    return layer_name


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig("cpu"))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> ScriptedWorker:
    worker = ScriptedWorker()
    monkeypatch.setattr(hooks, "worker", worker)
    monkeypatch.setattr(hooks, "current_step", None)
    return worker


def forward(worker: ScriptedWorker, config: VllmConfig, **context: Any) -> KVConnectorOutput | None:
    """A forward as ``execute_model`` runs it."""
    output = SimpleNamespace()
    with (
        set_forward_context({"attn": object()}, config, **context),
        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(output) as kv_output,
    ):
        for layer in LAYERS:
            attention(worker.events, layer)
    return kv_output


def test_patched_engine_uses_the_packages_hooks() -> None:
    assert pd_hooks is hooks


def test_layers_wait_before_and_save_after_their_attention(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    kv_output = forward(worker, config)
    first, second = LAYERS
    assert worker.events == [
        "begin",
        "enter",
        *(f"wait {first}", f"attend {first}", f"save {first}"),
        *(f"wait {second}", f"attend {second}", f"save {second}"),
        "report",
        "exit",
    ]
    assert kv_output is worker.output
    assert hooks.current_step is None


def test_layer_hook_returns_what_attention_returns(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    with set_forward_context({"attn": object()}, config):
        assert attention(worker.events, LAYERS[0]) == LAYERS[0]


def test_full_graph_waits_for_all_and_runs_no_layer_hook(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    forward(worker, config, cudagraph_runtime_mode=CUDAGraphMode.FULL)
    assert worker.events == [
        "begin",
        "wait all",
        *(f"attend {layer}" for layer in LAYERS),
        "report",
        "exit",
    ]


def test_piecewise_graph_runs_the_layer_hooks(worker: ScriptedWorker, config: VllmConfig) -> None:
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    forward(worker, config, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    assert f"wait {LAYERS[1]}" in worker.events
    assert "wait all" not in worker.events


def test_exception_in_the_forward_disarms_the_step(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), set_forward_context({"attn": object()}, config):
        raise ZeroDivisionError
    assert hooks.current_step is None
    assert worker.events == ["begin", "enter", "exit"]
    assert not is_forward_context_available()


def test_second_forward_of_a_step_gets_nothing(worker: ScriptedWorker, config: VllmConfig) -> None:
    """A drafter runs after the model it drafts for, in a context of its own."""
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    forward(worker, config)
    worker.events.clear()
    with set_forward_context({"attn": object()}, config):
        attention(worker.events, LAYERS[0])
    assert worker.events == [f"attend {LAYERS[0]}"]


def test_what_a_step_has_computed_is_complete_behind_the_drafter(worker: ScriptedWorker) -> None:
    """The runner calls it in each step of an engine that speculates, when all drafts are made."""
    KVConnectorModelRunnerMixin.finalize_kv_connector()
    assert worker.events == ["drafted"]


def test_forward_without_metadata_leaves_the_step_armed(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    """A dummy run or an encoder, before the forward that the step is armed for."""
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    with set_forward_context(None, config):
        attention(worker.events, LAYERS[0])
    assert worker.events == ["begin", f"attend {LAYERS[0]}"]
    forward(worker, config)
    assert "enter" in worker.events


def test_forward_of_a_step_that_loads_nothing_runs_no_layer_hook(
    worker: ScriptedWorker, config: VllmConfig
) -> None:
    forward(worker, config)
    assert worker.events == [*(f"attend {layer}" for layer in LAYERS), "report"]


def test_engine_without_a_worker_side_runs_as_stock(config: VllmConfig) -> None:
    events: list[str] = []
    assert not hooks.active()
    with (
        set_forward_context({"attn": object()}, config),
        KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(SimpleNamespace()) as output,
    ):
        attention(events, LAYERS[0])
    assert events == [f"attend {LAYERS[0]}"]
    assert output is None


@pytest.mark.parametrize("method", ["_update_states", "_prepare_inputs"])
def test_runner_arms_the_step_before_anything_else(worker: ScriptedWorker, method: str) -> None:
    output = SimpleNamespace()  # what comes next asks for a field of it
    runner = SimpleNamespace()
    arguments = [runner, output] + ([None] if method == "_prepare_inputs" else [])
    with pytest.raises(AttributeError, match=r"finished_req_ids|total_num_scheduled_tokens"):
        getattr(GPUModelRunner, method)(*arguments)
    assert worker.events == ["begin"]


def test_later_stage_arms_the_step_before_it_waits_for_the_earlier_one(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(**_: Any) -> None:
        worker.events.append("receive")
        raise ConnectionAbortedError

    group = SimpleNamespace(is_first_rank=False, irecv_tensor_dict=receive)
    monkeypatch.setattr(gpu_worker, "get_pp_group", lambda: group)
    monkeypatch.setattr(gpu_worker, "get_tp_group", lambda: None)
    stage = SimpleNamespace(_pp_send_work=[], vllm_config=MagicMock())
    stage.vllm_config.parallel_config.pipeline_parallel_size = 2
    stage.vllm_config.compilation_config.pass_config.enable_sp = False
    with pytest.raises(ConnectionAbortedError):
        gpu_worker.Worker.execute_model(stage, SimpleNamespace(total_num_scheduled_tokens=1))
    assert worker.events == ["begin", "receive"]


def test_step_without_tokens_still_reports(worker: ScriptedWorker) -> None:
    output = hooks.no_forward()
    assert output.kv_connector_output is worker.output
    assert output.req_ids == []


def test_worker_side_ends_with_the_worker(worker: ScriptedWorker) -> None:
    hooks.current_step = ScriptedStep(worker.events, wait_all=False)
    ensure_kv_transfer_shutdown()
    assert worker.events == ["shutdown"]
    assert not hooks.active()
    assert hooks.current_step is None

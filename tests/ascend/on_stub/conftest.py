# SPDX-License-Identifier: Apache-2.0
"""Collected only by test_on_stub.py, which puts the stub and the patched package on the path."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

from vllm_ascend_pd import hooks

if "PD_ASCEND_TREE" in os.environ:
    import torch
    import torch_npu  # noqa: F401

    torch.utils.rename_privateuse1_backend("npu")

    class Absent(types.ModuleType):
        """A module of vllm-ascend that needs scipy, which nothing here uses."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **kwargs: None

    for name in (
        "vllm_ascend.eplb.core.policy.policy_flashlb",
        "vllm_ascend.core.profiling_chunk_predictor",
    ):
        sys.modules[name] = Absent(name)
else:
    collect_ignore_glob = ["test_*.py"]


class ScriptedStep:
    """The armed step: notes what it is called for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def wait_layer(self, layer_name: str) -> None:
        self.events.append(f"wait {layer_name}")

    def save_layer(self, layer_name: str) -> None:
        self.events.append(f"save {layer_name}")


class ScriptedWorker:
    """The installed worker side: notes what it is called for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.has_loads_under_way = False

    def begin_step(self, scheduler_output: Any) -> None:
        self.events.append("begin")

    def loads_under_way(self) -> bool:
        return self.has_loads_under_way

    def no_forward(self) -> str:
        return "report of a step without tokens"


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def step(events: list[str], monkeypatch: pytest.MonkeyPatch) -> ScriptedStep:
    step = ScriptedStep(events)
    monkeypatch.setattr(hooks, "current_step", step)
    return step


@pytest.fixture
def worker(events: list[str], monkeypatch: pytest.MonkeyPatch) -> ScriptedWorker:
    worker = ScriptedWorker(events)
    monkeypatch.setattr(hooks, "worker", worker)
    return worker

# SPDX-License-Identifier: Apache-2.0
"""The hooks before anything is installed, and what importing them brings along."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_ascend_pd import hooks


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout))


def test_importing_hooks_imports_neither_vllm_nor_other_modules_of_ours() -> None:
    loaded = modules_after("import vllm_ascend_pd.hooks")
    ours = {name for name in loaded if name.partition(".")[0] == "vllm_ascend_pd"}
    assert ours == {"vllm_ascend_pd", "vllm_ascend_pd.hooks"}
    assert not {"vllm", "torch", "zmq", "numpy", "msgspec", "mooncake"} & loaded


def test_nothing_is_active_before_a_worker_is_installed() -> None:
    assert not hooks.active()
    assert hooks.current_step is None
    hooks.begin_step(SimpleNamespace())  # type: ignore[arg-type]
    assert hooks.current_step is None


def test_a_fork_of_an_engine_in_process_has_no_worker_and_ends_none() -> None:
    code = """if True:
        import os
        from types import SimpleNamespace
        from vllm_ascend_pd import hooks

        def say(what):
            print(what, os.getpid() == parent, flush=True)

        parent = os.getpid()
        hooks.worker = SimpleNamespace(shutdown=lambda: say("ends"))
        if os.fork():
            os.wait()
        say(hooks.active())
        hooks.shutdown_worker()
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n") == ["False False", "True True", "ends True", ""]


@pytest.mark.parametrize(("loads", "dropped"), [(True, 1), (True, 2), (True, 3), (False, 1)])
def test_what_dropped_samples_drew_is_taken_back(
    monkeypatch: pytest.MonkeyPatch, loads: bool, dropped: int
) -> None:
    """With several samples dropped, steps were under way already when the load of one failed."""
    worker = SimpleNamespace(is_at_risk=lambda: loads, num_under_way=dropped)
    monkeypatch.setattr(hooks, "worker", worker)
    generator = torch.Generator().manual_seed(7)
    request: Any = SimpleNamespace(generator=generator, output_token_ids=[])
    for _ in range(5):
        hooks.keep_generators({"a": request}, ["a"])
        drawn = torch.rand(1, generator=generator).item()
        request.output_token_ids.append(drawn)
    lost = request.output_token_ids[-dropped:]
    del request.output_token_ids[-dropped:]
    hooks.rewind_generator(request)
    again = [torch.rand(1, generator=generator).item() for _ in lost]
    assert (again == lost) is loads


@pytest.mark.parametrize(
    ("sent", "named", "rank"),
    [
        ({"data_parallel_rank": 1}, None, 1),
        ({"data_parallel_rank": 1}, 0, 0),
        ({"data_parallel_rank": "1"}, None, None),
        ({"data_parallel_rank": True}, None, None),
        ({"data_parallel_rank": 1.0}, None, None),
        ({}, None, None),
        ([1], None, None),
        (None, None, None),
    ],
)
def test_rank_is_that_of_the_header_or_an_integer_of_the_parameters(
    sent: Any, named: int | None, rank: int | None
) -> None:
    params = SimpleNamespace(extra_args={"kv_transfer_params": sent})
    for connector, found in (("InEngine", rank), ("NixlConnector", named), (None, named)):
        config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector=connector))
        assert hooks.data_parallel_rank(config, params, named) == found
        assert hooks.data_parallel_rank(config, SimpleNamespace(extra_args=None), named) == named
        assert hooks.data_parallel_rank(config, SimpleNamespace(), named) == named


def test_idle_step_is_the_same_object_each_time() -> None:
    """So it allocates nothing in the engine's hot path."""
    mode = SimpleNamespace(name="FULL")
    steps = {id(hooks.armed_step(metadata, mode)) for metadata in (None, object(), object())}
    assert len(steps) == 1
    with hooks.armed_step(object(), mode):
        assert hooks.current_step is None


def test_shutdown_without_a_worker_does_nothing() -> None:
    hooks.shutdown_worker()
    hooks.shutdown_worker()
    assert not hooks.active()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        (SimpleNamespace(kv_connector=None), False),
        (SimpleNamespace(kv_connector="NixlConnector"), False),
        (SimpleNamespace(kv_connector="inengine"), False),
        (SimpleNamespace(kv_connector="InEngine"), True),
    ],
)
def test_in_engine_is_selected_by_its_reserved_name(config: object, expected: bool) -> None:
    assert hooks.in_engine(config) is expected


def test_other_connectors_get_no_hooks() -> None:
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="NixlConnector"))
    scheduler = SimpleNamespace(vllm_config=config)
    assert hooks.create_scheduler_hooks(scheduler) is None  # type: ignore[arg-type]
    hooks.install_worker(config, None, {})  # type: ignore[arg-type]
    assert not hooks.active()

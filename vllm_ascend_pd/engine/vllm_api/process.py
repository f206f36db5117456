# SPDX-License-Identifier: Apache-2.0
"""The process of an engine core or worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import utils

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig


def vllm_version() -> str:
    """Of the release, without what a build adds to it."""
    from vllm.version import __version__

    return str(__version__).partition("+")[0]


def sleep_while_waiting() -> bool:
    """Have this process sleep for zero seconds (70 us) where it waits for another one, as it does
    on Pythons whose ``sched_yield`` holds the GIL; ``False`` if it does so already.

    Touches:
        vllm/distributed/utils.py:USE_SCHED_YIELD
    """
    was_yielding = bool(utils.USE_SCHED_YIELD)
    utils.USE_SCHED_YIELD = False
    return was_yielding


def from_first_worker(value: Any) -> Any:
    """What the worker of rank 0 has; all workers call it at the same time.

    Touches:
        vllm/distributed/parallel_state.py:GroupCoordinator.broadcast_object
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_pp_group().broadcast_object(get_tp_group().broadcast_object(value))


def from_each_stage(value: Any) -> list[Any]:
    """What the workers of all pipeline stages have; these call it at the same time.

    Touches:
        vllm/distributed/parallel_state.py:GroupCoordinator.cpu_group
        vllm/distributed/parallel_state.py:GroupCoordinator.world_size
    """
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    values: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(values, value, group=group.cpu_group)
    return values


def config_of(worker: Any) -> VllmConfig:
    """What this worker's process was started with.

    Touches:
        vllm/v1/worker/worker_base.py:WorkerBase.vllm_config
    """
    config: VllmConfig = worker.vllm_config
    return config


def loaded_models(worker: Any) -> list[Any]:
    """The ``torch.nn.Module`` of this worker, and its drafter's if it has one.

    Touches:
        vllm/v1/worker/worker_base.py:WorkerBase.model_runner
        vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.get_model
        vllm/v1/worker/gpu_model_runner.py:GPUModelRunner.drafter
        vllm/v1/worker/gpu/model_runner.py:GPUModelRunner.speculator
    """
    runner = worker.model_runner
    drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    drafts = getattr(drafter, "model", None)
    return [runner.get_model()] if drafts is None else [runner.get_model(), drafts]

# SPDX-License-Identifier: Apache-2.0
"""The engine core and its executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreRequestType

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.vllm_api.types import (
        BlockHash,
        EngineCore,
        Executor,
        Request,
        Scheduler,
    )
    from vllm_ascend_pd.hooks import SchedulerHooks


def join_reports(core: EngineCore, num_workers: int) -> None:
    """Hear of all workers, and not, as without a connector, of one only."""
    if num_workers > 1:
        core.model_executor.kv_output_aggregator = KVOutputAggregator(num_workers)


def attach(core: EngineCore, hooks: SchedulerHooks) -> None:
    """Where the patched executor looks for them."""
    executor: Any = core.model_executor
    executor.pd = hooks


def hash_new_requests(core: EngineCore, hasher: Callable[[Request], list[BlockHash]]) -> None:
    """With it instead of vLLM's."""
    core.request_block_hasher = hasher


def forget_encoded(scheduler: Scheduler, executor: Executor) -> None:
    """What encoders have made of images, sounds and videos: who needs some of it still has it made
    anew.

    Touches:
        vllm/v1/core/sched/scheduler.py:Scheduler.max_num_encoder_input_tokens
        vllm/v1/core/sched/scheduler.py:Scheduler.reset_encoder_cache
        vllm/v1/executor/abstract.py:Executor.reset_encoder_cache
    """
    any_scheduler: Any = scheduler
    any_executor: Any = executor
    if any_scheduler.max_num_encoder_input_tokens:
        any_scheduler.reset_encoder_cache()
        any_executor.reset_encoder_cache()


def is_ending(core: EngineCore) -> bool:
    """Whether the engine was asked to end; one that lives in its client's process is not. Any
    thread.

    Touches:
        vllm/v1/engine/core.py:EngineCoreProc.is_running
    """
    return not getattr(core, "is_running", lambda: True)()


def is_paused(scheduler: Scheduler) -> bool:
    """Whether no request is begun at present, and perhaps none goes on.

    Touches:
        vllm/v1/core/sched/interface.py:PauseState.UNPAUSED
        vllm/v1/core/sched/scheduler.py:Scheduler.pause_state
    """
    any_version: Any = scheduler
    return bool(any_version.pause_state != PauseState.UNPAUSED)


def join_wave(core: EngineCore) -> None:
    """Of a data parallel rank in lock-step: take part in the next forward of all, which the others
    have been told to begin for a request that has come here, whether it needs one here or not.

    Touches:
        vllm/v1/engine/core.py:DPEngineCoreProc.engines_running
        vllm/v1/engine/core.py:DPEngineCoreProc.ignore_start_dp_wave
    """
    rank: Any = core
    if not getattr(rank, "ignore_start_dp_wave", True):  # they ignore it while paused, too
        rank.engines_running = True


def wake(core: EngineCore) -> None:
    """Make the engine's loop look for work. Any thread.

    Touches:
        vllm/v1/engine/core.py:EngineCoreProc.input_queue
        vllm/v1/engine/__init__.py:EngineCoreRequestType.WAKEUP
    """
    if (queue := getattr(core, "input_queue", None)) is not None:
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

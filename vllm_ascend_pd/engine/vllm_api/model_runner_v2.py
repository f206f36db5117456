# SPDX-License-Identifier: Apache-2.0
"""All worker sites for Model Runner V2, which talks to one connector object.

Run on a CPU, in Triton's interpreter (docs/testing.md); not yet on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.forward_context import is_forward_context_available
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker.gpu.kv_connector import KVConnector

from vllm_ascend_pd import hooks

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import (
        KVConnectorOutput,
        ModelRunnerOutput,
        SchedulerOutput,
    )
    from vllm_ascend_pd.engine.worker.step import ArmedStep, WorkerSide


class InEngineKVConnector(KVConnector):
    """Drives the worker side; main thread of the worker process."""

    def __init__(self, worker: WorkerSide) -> None:
        self._worker = worker
        self._step: ArmedStep | None = None
        self._disabled = False

    def pre_forward(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> None:
        """Inside the forward context, or outside of any before a FULL graph is replayed. What else
        comes is for connectors that read the batch; before 0.32 it comes by keyword.
        """
        if self._disabled:
            return
        self._worker.begin_step(scheduler_output)
        self._step = self._worker.take_armed_step(wait_all=not is_forward_context_available())
        if self._step is not None:
            self._step.__enter__()

    def finish_forward(self) -> None:
        """The model is launched; sampling and drafts come before ``post_forward``."""
        if self._disabled:
            return
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        self._worker.end_forward()

    def post_forward(
        self, finished_req_ids: set[str], wait_for_save: bool = True
    ) -> KVConnectorOutput | None:
        if self._disabled:
            return None
        self._worker.end_drafts()
        with self._worker.step_output() as output:
            pass
        return output

    def no_forward(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._disabled:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._worker.begin_step(scheduler_output)
        return self._worker.no_forward()

    def set_disabled(self, disabled: bool) -> None:
        """Dummy runs of the runner must not reach the layer hooks."""
        self._disabled = disabled
        if disabled:
            hooks.current_step = None

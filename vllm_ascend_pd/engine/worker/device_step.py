# SPDX-License-Identifier: Apache-2.0
"""The worker side of an engine whose KV caches are on an accelerator.

Steps are as on a CPU, and fences order their copies against the kernels of the model: the host is
ahead of the device by up to a step, so "launched" is not yet "done".

    host     begin step N+1: fence        forward: launch layer 0, 1, …    end of step N+1: mark
    device   … step N computes …                step N+1 computes
    copies                     scatter for N+1 (after step N)     gather of N+1 (after its layer)

What the pool stores once a step has been confirmed waits for the end of the last step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd import hooks
from vllm_ascend_pd.engine.worker.step import WorkerSide

if TYPE_CHECKING:
    from vllm_ascend_pd.backends.device_copy import DeviceBlockCopier, Fence
    from vllm_ascend_pd.engine.vllm_api.types import SchedulerOutput
    from vllm_ascend_pd.engine.worker.step import ArmedStep


class FencedStep:
    """An armed step that moves the fence on behind each layer, before its KV may be fetched."""

    def __init__(self, step: ArmedStep, fence: Fence) -> None:
        self._step = step
        self._fence = fence

    def __enter__(self) -> None:
        self._step.__enter__()
        if hooks.current_step is self._step:
            hooks.current_step = self

    def wait_layer(self, layer_name: str) -> None:
        """Waits on the host for bytes that are in place, so kernels launched next see them."""
        self._step.wait_layer(layer_name)

    def save_layer(self, layer_name: str) -> None:
        self._fence.mark()
        self._step.save_layer(layer_name)

    def __exit__(self, *exc: object) -> None:
        self._step.__exit__(*exc)


class DeviceWorkerSide(WorkerSide):
    """Implements ``hooks.WorkerHooks``: main thread of the worker process."""

    def __init__(self, copier: DeviceBlockCopier, *args: Any, **kwargs: Any) -> None:
        """The arguments after ``copier`` are those of ``WorkerSide``."""
        super().__init__(*args, **kwargs)
        self._copier = copier
        self._fence: Fence | None = None
        self._fenced_meta: object = None

    def begin_step(self, scheduler_output: SchedulerOutput) -> None:
        meta = scheduler_output.pd_metadata
        if meta is not None and meta is not self._fenced_meta:
            self._fenced_meta = meta
            blocks = [block for load in meta.loads for block in load.block_ids]
            blocks += [
                block for grant in meta.grants for group in grant.block_ids for block in group
            ]
            blocks += [block for spec in meta.ahead for block in spec.block_ids]
            self._fence = self._copier.fence(blocks)
        super().begin_step(scheduler_output)

    def take_armed_step(self, wait_all: bool) -> Any:
        step = super().take_armed_step(wait_all)
        if step is None:
            return None
        assert self._fence is not None, "a step is armed by its message, which made a fence"
        return FencedStep(step, self._fence)

    def shutdown(self) -> None:
        super().shutdown()
        self._copier.close()

    def end_drafts(self) -> None:
        # All is launched; what follows here lets peers fetch what it computed. Later steps do not
        # concern these blocks until a message names them again.
        if self._fence is not None:
            self._fence.mark()
            self._fence = None
        self._copier.end_step()
        super().end_drafts()

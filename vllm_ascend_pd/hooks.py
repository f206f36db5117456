# SPDX-License-Identifier: Apache-2.0
"""The only names that a patch of the engine may call.

This module imports neither vLLM nor the rest of the package, so a patched engine file may import
it at its top without a cycle. Until the engine selects the in-engine path with
``kv_connector="InEngine"``, every function returns its neutral value and the engine behaves as the
unpatched one does, but for what is mended in it: ``arrange_accepted_counts``. The engine side of
the package is loaded by name, on first use.

Patched files reach this module as ``vllm.config.kv_transfer.pd_hooks``, which is ``None`` when
the package is not installed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

IN_ENGINE = "InEngine"
"""The reserved ``kv_connector`` name that selects the in-engine path."""


class SchedulerHooks(Protocol):
    """What the patched scheduler calls (EngineCore process, scheduler thread; never blocks)."""

    def on_request_added(self, request: Request) -> None:
        """Called before a new request is queued; may set ``WAITING_FOR_KV``."""

    def try_promote(self, request: Request) -> bool:
        """Whether a ``WAITING_FOR_KV`` request may be scheduled now."""

    def get_external_prefix_cache_blocks(
        self, request: Request, hit: tuple[Any, int, int]
    ) -> tuple[Any, int, int]:
        """Publish external blocks and return the engine's own lookup result, maybe extended."""

    def split_tail(
        self, request: Request, num_local_tokens: int, num_external_tokens: int
    ) -> tuple[int, int]:
        """Split an unaligned hit into aligned local tokens and an external tail."""

    def on_slots_allocated(self, request: Request, new_computed_blocks: KVCacheBlocks) -> None:
        """Attach loads to the blocks that ``allocate_slots`` just committed."""

    def on_scheduling_taken_back(self, request: Request) -> None:
        """The step under way was to compute more of it, and does not: it is about to be preempted
        for a request that comes first."""

    def build_step(self, scheduler_output: SchedulerOutput) -> object | None:
        """This step's message to the worker, or ``None``."""

    def on_step_output(self, model_runner_output: ModelRunnerOutput) -> None:
        """Fold the worker's report in; recover from failed loads before any token is used."""

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        """Add what peers have sampled to the step's outputs, ``{client index: outputs}``."""

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """The request ended; its ``kv_transfer_params`` for the response, if any."""

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request is unfinished."""

    def on_engine_started(self, engine_core: EngineCore) -> None:
        """The engine core is complete; keep what wakes its loop."""

    def reset(self, reset_connector: bool) -> None:
        """The prefix cache is about to be reset: give up every pin that can be given up, and with
        ``reset_connector`` all that the pool has.
        """

    def worker_call(
        self, method: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> AbstractContextManager[object]:
        """Wraps a call of the workers that comes from outside, and may change the weights."""

    def on_lora_loaded(self, lora_request: LoRARequest) -> None:
        """The workers have loaded an adapter, perhaps in place of another content."""

    def before_sleep(self, level: int) -> None:
        """The workers are about to unmap their KV caches, and at level 2 their weights."""

    def after_wake_up(self, tags: list[str] | None) -> None:
        """What these tags name is mapped again; everything with ``None``."""

    def shutdown(self) -> None:
        """The engine stops."""


class StepHooks(Protocol):
    """What the patched model runner calls during one forward (worker process, main thread)."""

    def wait_layer(self, layer_name: str) -> None:
        """Before a layer's attention: its KV has landed, or its load is marked failed."""

    def save_layer(self, layer_name: str) -> None:
        """A layer's new KV is in the cache. The first call for a layer in a forward counts.

        vLLM calls it after the attention; vllm-ascend already once the cache is written, and then
        again.
        """


class WorkerHooks(Protocol):
    """What the functions below delegate to, once a worker has installed it."""

    num_under_way: int
    """Steps that are under way at a time, at most."""

    def begin_step(self, scheduler_output: SchedulerOutput) -> None: ...
    def loads_under_way(self) -> bool: ...
    def is_at_risk(self) -> bool: ...
    def take_armed_step(self, wait_all: bool) -> AbstractContextManager[object] | None: ...
    def step_output(self) -> AbstractContextManager[KVConnectorOutput | None]: ...
    def end_drafts(self) -> None: ...
    def no_forward(self) -> ModelRunnerOutput: ...
    def shutdown(self) -> None: ...


current_step: StepHooks | None = None
"""The armed step while its forward runs, else ``None``. Written by the worker's main thread."""

worker: WorkerHooks | None = None
"""Of this process. Written by the worker's main thread."""

_of_parents: list[WorkerHooks | None] = []
"""Of processes that this one was forked from: kept, as what they hold is not this one's to end."""

_IDLE: AbstractContextManager[object] = nullcontext()


def _begin_in_fork() -> None:
    """Neither its threads nor its engine are here."""
    global worker, current_step
    _of_parents.append(worker)
    worker = current_step = None


os.register_at_fork(after_in_child=_begin_in_fork)


def in_engine(kv_transfer_config: Any) -> bool:
    """Whether this configuration selects the in-engine path (so no connector object is made).

    Touches:
        vllm/config/kv_transfer.py:KVTransferConfig.kv_connector
    """
    return getattr(kv_transfer_config, "kv_connector", None) == IN_ENGINE


def check_config(vllm_config: VllmConfig) -> None:
    """Refuse, in whichever process makes it, a configuration that the in-engine path cannot run.

    Touches:
        vllm/config/kv_transfer.py:KVTransferConfig.kv_connector_extra_config
    """
    transfer = vllm_config.kv_transfer_config
    if in_engine(transfer):
        import_module("vllm_ascend_pd.engine.scheduler.supported").check_config(vllm_config)
    elif _is_among(getattr(transfer, "kv_connector_extra_config", None)):
        import_module("vllm_ascend_pd.engine.scheduler.supported").refuse_among_connectors()


def _is_among(extra_config: Any) -> bool:
    """Whether ``InEngine`` is one of the connectors that another one calls, or that one of these
    calls."""
    found = extra_config.get("connectors") if isinstance(extra_config, dict) else None
    children = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return any(
        one.get("kv_connector") == IN_ENGINE or _is_among(one.get("kv_connector_extra_config"))
        for one in children
    )


def create_scheduler_hooks(scheduler: Scheduler) -> SchedulerHooks | None:
    """The scheduler's hooks, or ``None`` when the in-engine path is not selected."""
    if not in_engine(scheduler.vllm_config.kv_transfer_config):
        return None
    hooks: SchedulerHooks = import_module("vllm_ascend_pd.engine.scheduler.build").create(scheduler)
    return hooks


def check_answer(output: RequestOutput) -> None:
    """Of a request that has ended, in the front end: raises what its client is told where another
    engine has it, or this one cannot go on with it.

    Touches:
        vllm/outputs.py:RequestOutput.kv_transfer_params
    """
    if output.kv_transfer_params:
        answers = import_module("vllm_ascend_pd.engine.vllm_api.answers")
        answers.check(output.kv_transfer_params)


def data_parallel_rank(vllm_config: VllmConfig, params: Any, named: int | None) -> int | None:
    """Which rank gets a request, in the front end: that of the header, or else what the sender of
    both requests of a pair asks for. vLLM refuses one that is none of its own.

    Touches:
        vllm/sampling_params.py:SamplingParams.extra_args
    """
    if named is not None or not in_engine(vllm_config.kv_transfer_config):
        return named
    sent = (getattr(params, "extra_args", None) or {}).get("kv_transfer_params")
    rank = sent.get("data_parallel_rank") if isinstance(sent, dict) else None
    return rank if type(rank) is int else None


def check_params(vllm_config: VllmConfig, params: Any) -> None:
    """Of a request's sampling, in the front end, complete: raises for what would end the engine."""
    if in_engine(vllm_config.kv_transfer_config):
        import_module("vllm_ascend_pd.engine.vllm_api.row_limits").check(vllm_config, params)


def install_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, Any]
) -> None:
    """Called once with the allocated KV caches, in the worker process."""
    global worker
    if in_engine(vllm_config.kv_transfer_config):
        side = import_module("vllm_ascend_pd.engine.worker.side")
        worker = side.create(vllm_config, kv_cache_config, kv_caches)


def make_v2_connector() -> Any:
    """The connector object through which Model Runner V2 drives the installed worker side."""
    return import_module("vllm_ascend_pd.engine.vllm_api.model_runner_v2").InEngineKVConnector(
        worker
    )


def active() -> bool:
    """Whether this worker takes part in transfers."""
    return worker is not None


def begin_step(scheduler_output: SchedulerOutput) -> None:
    """Arm the step: parse its metadata and start its loads. Idempotent per scheduler output."""
    if worker is not None:
        worker.begin_step(scheduler_output)


def peer_tokens(new_request: NewRequestData) -> list[int]:
    """Output tokens of a request that is new to the worker: those that a peer has sampled.

    Touches:
        vllm/v1/core/sched/output.py:NewRequestData.prefill_token_ids
        vllm/v1/core/sched/output.py:NewRequestData.prompt_len
    """
    return (new_request.prefill_token_ids or [])[new_request.prompt_len :]


def draw_again(runner: Any, generator: Any, new_request: NewRequestData) -> None:
    """What a peer has drawn of the same seed for these tokens."""
    if num_tokens := len(peer_tokens(new_request)):
        generators = import_module("vllm_ascend_pd.engine.vllm_api.generators")
        generators.draw_rows(runner, generator, num_tokens)


def keep_generators(requests: dict[str, CachedRequestState], request_ids: list[str]) -> None:
    """Once a step, before it samples: what computes on KV that a step loads may be dropped, also in
    steps that are under way with it. Then what it draws is undone.

    Touches:
        vllm/v1/worker/gpu_input_batch.py:CachedRequestState.generator
        vllm/v1/worker/gpu_input_batch.py:CachedRequestState.output_token_ids
    """
    if worker is None or not worker.is_at_risk():
        return
    for request_id in request_ids:
        request = requests[request_id]
        if request.generator is not None:
            kept = len(request.output_token_ids), request.generator.get_state()
            # All of these may be dropped: they are under way before it is known how a load ended.
            request.pd_kept = (*getattr(request, "pd_kept", ()), kept)[-worker.num_under_way :]


def rewind_generator(request: CachedRequestState) -> None:
    """The request is resumed without its last tokens: draw for the next one as for the first of
    these.
    """
    state = dict(getattr(request, "pd_kept", ())).get(len(request.output_token_ids))
    if state is not None and request.generator is not None:
        request.generator.set_state(state)


def arrange_accepted_counts(runner: Any, scheduler_output: SchedulerOutput) -> None:
    """Model Runner V1, states and speculative decoding, whatever the connector: before a step, the
    counts of accepted drafts of the last one, each in its request's row of this one. A runner for
    which it is called has them come to ``num_accepted_tokens``, and not to its batch.
    """
    if not hasattr(runner, "pd_accepted_counts"):
        module = import_module("vllm_ascend_pd.engine.vllm_api.accepted_counts")
        runner.pd_accepted_counts = module.AcceptedCounts()
    runner.pd_accepted_counts.arrange(runner, scheduler_output)


def overlaps_loads(cudagraph_mode: Any) -> bool:
    """Whether the coming forward should do without a FULL graph, which runs no layer hook.

    True for a step whose KV is still on its way, if the engine has PIECEWISE graphs to run instead.
    ``cudagraph_mode`` is that of the engine's configuration.

    Touches:
        vllm/config/compilation.py:CUDAGraphMode.has_piecewise_cudagraphs
    """
    if worker is None or not worker.loads_under_way():
        return False
    return bool(cudagraph_mode.has_piecewise_cudagraphs())


def armed_step(attn_metadata: object | None, cudagraph_mode: Any) -> AbstractContextManager[object]:
    """Wraps the forward of an armed step; a null context for dummy runs, drafters, idle steps.

    On entry it waits for what the forward may not overlap with, and ``current_step`` is set
    inside.

    Touches:
        vllm/config/compilation.py:CUDAGraphMode.FULL
    """
    if worker is None or attn_metadata is None:
        return _IDLE
    wait_all = getattr(cudagraph_mode, "name", "NONE") == "FULL"
    return worker.take_armed_step(wait_all) or _IDLE


def step_output() -> AbstractContextManager[KVConnectorOutput | None]:
    """Wraps the forward; yields the object that carries the worker's report."""
    assert worker is not None
    return worker.step_output()


def end_drafts() -> None:
    """In a step of an engine that speculates: its drafter has run, unless it had nothing to do."""
    if worker is not None:
        worker.end_drafts()


def no_forward() -> ModelRunnerOutput:
    """The output of a step that computes nothing but may still move KV."""
    assert worker is not None
    return worker.no_forward()


def shutdown_worker() -> None:
    """The worker stops: end every thread and unregister every region."""
    global worker, current_step
    current_step = None
    if worker is not None:
        worker.shutdown()
        worker = None

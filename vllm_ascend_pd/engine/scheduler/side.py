# SPDX-License-Identifier: Apache-2.0
"""The scheduler's hooks: one object per engine, in the EngineCore process. Each delegates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ascend_pd.engine.carrier import PDStats
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.scheduler.admission import Admission
from vllm_ascend_pd.engine.scheduler.integrity import IntegrityCheck
from vllm_ascend_pd.engine.scheduler.parts import COUNTS, Ending, Part, StepDraft
from vllm_ascend_pd.engine.scheduler.recovery import LoadEnds
from vllm_ascend_pd.engine.suspension import resume, suspend
from vllm_ascend_pd.engine.vllm_api.engine import join_wave
from vllm_ascend_pd.engine.vllm_api.queues import keep_order_of_arrival
from vllm_ascend_pd.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from vllm_ascend_pd.engine.scheduler.arrivals import Arrivals
    from vllm_ascend_pd.engine.scheduler.identity import Identity
    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.vllm_api.types import (
        EngineCore,
        KVCacheBlocks,
        LoRARequest,
        ModelRunnerOutput,
        Request,
        SchedulerOutput,
    )


P = TypeVar("P", bound=Part)


class SchedulerSide:
    """Implements ``hooks.SchedulerHooks``. One thread, the scheduler's; decides, never blocks.

    ``build.create`` makes it. ``parts`` are asked in their order.
    """

    identity: Identity  # from on_engine_started on
    engine_core: EngineCore | None = None

    def __init__(
        self,
        common: Common,
        parts: Sequence[Part],
        arrivals: Arrivals,
        on_engine_started: Callable[[SchedulerSide, EngineCore], None],
    ) -> None:
        """``on_engine_started`` adds what only a complete engine can have."""
        self.common = common
        self.parts: list[Part] = []
        self._admission = Admission(common)
        self._arrivals = arrivals
        self._start = on_engine_started
        self._has_arrivals = False
        """Since the last step."""
        self._ends = LoadEnds(common, self.parts, self._admission.hand_on)
        checks = common.config.transfer.check_integrity
        self._integrity = IntegrityCheck(common.stats) if checks else None
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        if part.has_blocks:
            self._admission.parts.append(part)

    def part(self, kind: type[P]) -> P | None:
        """Of this engine, if it has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    # Arrival and waiting.

    def on_request_added(self, request: Request) -> None:
        if self.engine_core is not None:
            self.identity.check(request)
        self._has_arrivals = True
        if not self._arrivals.add(request):
            return
        source = self._admission.source_of(request)
        for part in self.parts:
            part.arrived(request, source)

    def try_promote(self, request: Request) -> bool:
        return self._arrivals.admits(request) and self._admission.try_promote(request)

    # Lookup and allocation.

    def get_external_prefix_cache_blocks(
        self, request: Request, hit: tuple[Any, int, int]
    ) -> tuple[Any, int, int]:
        return self._admission.look_up(request, hit)

    def split_tail(
        self, request: Request, num_local_tokens: int, num_external_tokens: int
    ) -> tuple[int, int]:
        return self._admission.split_tail(request, num_local_tokens, num_external_tokens)

    def on_slots_allocated(self, request: Request, new_computed_blocks: KVCacheBlocks) -> None:
        hits = new_computed_blocks.blocks
        self.common.loads.note_begin(request, len(hits[0]))
        if hits[0] or not self._admission.is_idle:
            self._admission.allocated(request, hits)
            self._arrivals.admitted(request, len(hits[0]) * self.common.block_size)

    # The step and its output.

    def build_step(self, scheduler_output: SchedulerOutput) -> StepMeta | None:
        # Called in every pass of the scheduler.
        for new in scheduler_output.scheduled_new_reqs:
            request = self.common.scheduler.requests[new.req_id]
            # vLLM keeps images of cached blocks from the worker, which is told once. Where their KV
            # is not to be had in the end, or is evicted, they are encoded after all.
            new.mm_features = request.mm_features
            if request.num_output_tokens:  # which another engine has sampled
                new.prefill_token_ids = list(request.all_token_ids)
        if self._has_arrivals and self.engine_core is not None:
            self._has_arrivals = False
            join_wave(self.engine_core)
        draft = StepDraft()
        self._admission.begin_step(scheduler_output)
        for part in self.parts:
            part.begin_step(scheduler_output, draft)
        self._admission.add_loads(draft)
        keep_order_of_arrival(self.common.scheduler)
        meta = draft.finish()
        self._ends.clear_spoiled(scheduler_output, meta)
        return meta

    def on_step_output(self, model_runner_output: ModelRunnerOutput) -> None:
        output = model_runner_output.kv_connector_output
        report = output.kv_connector_worker_meta if output is not None else None
        if isinstance(report, StepReport):
            for part in self.parts:
                part.take_report(report)
            self._ends.fold(report)
        for part in self.parts:
            part.end_step()
        if output is None or not self.common.scheduler.log_stats:
            return
        if values := self.common.stats.take():
            output.kv_connector_stats = PDStats(data=values)

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        for part in self.parts:
            part.deliver_first_tokens(outputs)

    # The end.

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        ending = Ending()
        self._admission.leave(request)
        for part in self.parts:
            part.finish(request, ending)
        return self._arrivals.finish(request, ending)

    def has_pending_work(self) -> bool:
        has_news = [part.settle() for part in self.parts]
        loads = self.common.loads
        pending = loads.num_parked > 0 or loads.num_resting > 0 or any(has_news)
        if self._integrity is not None and not pending and not self.common.scheduler.requests:
            self._integrity.look(self._count())
        return pending

    def on_engine_started(self, engine_core: EngineCore) -> None:
        self.engine_core = engine_core
        self._start(self, engine_core)

    # What the engine computes with has changed.

    def worker_call(
        self, method: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> AbstractContextManager[object]:
        return self.identity.worker_call(method, args, kwargs or {})

    def on_lora_loaded(self, lora_request: LoRARequest) -> None:
        self.identity.on_lora_loaded(lora_request)

    def before_sleep(self, level: int) -> None:
        if len(self.common.loads) or any(part.is_storing for part in self.parts):
            raise TransferError("KV is still loaded or stored: no sleep; try again in a moment")
        if level > 1:
            self.identity.weights_changed()
        assert self.engine_core is not None
        executor = self.engine_core.model_executor
        try:
            executor.collective_rpc(suspend)
        except Exception:  # of one worker; the others have let go, and nobody will wake them
            executor.collective_rpc(resume)
            raise

    def after_wake_up(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            assert self.engine_core is not None
            self.engine_core.model_executor.collective_rpc(resume)

    def identify(self, fingerprint: str) -> None:
        """Of this engine, with its weights as they are from now on."""
        for part in self.parts:
            part.identify(fingerprint)

    def forsake(self, request: Request) -> None:
        """It is about to be hashed anew, so nothing that was meant for it fits any more."""
        for part in self.parts:
            part.forsake(request)
        self._admission.leave(request)

    def reset(self, reset_connector: bool) -> None:
        self.common.phantoms.withdraw_all()
        self.common.parking.drop_tails()
        for part in self.parts:
            part.reset(reset_connector)

    def shutdown(self) -> None:
        for part in self.parts:
            part.stop()

    def counts(self) -> dict[str, int]:
        """What a leak check compares; all but ``free_blocks`` are zero when nothing goes on."""
        self.has_pending_work()
        return self._count()

    def _count(self) -> dict[str, int]:
        return {
            **dict.fromkeys(COUNTS, 0),
            "free_blocks": self.common.manager.block_pool.get_num_free_blocks(),
            "phantoms": len(self.common.phantoms),
            "loads": len(self.common.loads),
            **{name: count for part in self.parts for name, count in part.counts().items()},
        }

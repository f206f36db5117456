# SPDX-License-Identifier: Apache-2.0
"""The scheduler's hooks: one object per engine, in the EngineCore process. Each delegates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from vllm_ascend_pd.engine.carrier import carry
from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
from vllm_ascend_pd.engine.scheduler.integrity import IntegrityCheck, count
from vllm_ascend_pd.engine.scheduler.parts import Ending, Part
from vllm_ascend_pd.engine.scheduler.recovery import LoadEnds
from vllm_ascend_pd.engine.scheduler.supply import Supply
from vllm_ascend_pd.engine.vllm_api.groups import evict_uncomputed
from vllm_ascend_pd.engine.vllm_api.steps import complete_new_requests, drop_padding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from vllm_ascend_pd.engine.scheduler.arrivals import Arrivals
    from vllm_ascend_pd.engine.scheduler.identity import Identity
    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.suspension import Suspension
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
    suspension: Suspension  # from on_engine_started on
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
        self._supply = Supply(common)
        self._arrivals = arrivals
        self._start = on_engine_started
        self._ends = LoadEnds(common, self.parts, self._supply.hand_on)
        checks = common.config.transfer.check_integrity
        self._integrity = IntegrityCheck(common.stats) if checks else None
        for part in parts:
            self.add(part)

    def add(self, part: Part) -> None:
        self.parts.append(part)
        if part.has_blocks:
            self._supply.parts.append(part)

    def part(self, kind: type[P]) -> P | None:
        """Of this engine, if it has one."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    # Arrival and waiting.

    def on_request_added(self, request: Request) -> None:
        if self.engine_core is not None:
            self.identity.check(request)
        if not self._arrivals.add(request):
            return
        source = self._supply.source_of(request)
        for part in self.parts:
            part.arrived(request, source)

    def try_promote(self, request: Request) -> bool:
        return self._arrivals.admits(request) and self._supply.try_promote(request)

    # Lookup and allocation.

    def get_external_prefix_cache_blocks(
        self, request: Request, hit: tuple[Any, int, int]
    ) -> tuple[Any, int, int]:
        return self._supply.look_up(request, hit)

    def split_tail(
        self, request: Request, num_local_tokens: int, num_external_tokens: int
    ) -> tuple[int, int]:
        return self._supply.split_tail(request, num_local_tokens, num_external_tokens)

    def on_slots_allocated(self, request: Request, new_computed_blocks: KVCacheBlocks) -> None:
        hits = new_computed_blocks.blocks
        if self._supply.allocated(request, hits):
            num_hits = self.common.phantoms.num_units(hits)
            self._arrivals.admitted(request, num_hits * self.common.block_size)

    def on_scheduling_taken_back(self, request: Request) -> None:
        evict_uncomputed(self.common.manager, request, self.common.groups)

    # The step and its output.

    def build_step(self, scheduler_output: SchedulerOutput) -> StepMeta | None:
        complete_new_requests(self.common.scheduler, scheduler_output)
        drop_padding(self.common.scheduler, scheduler_output)
        self._arrivals.begin_step(self.engine_core)
        meta = StepMeta()
        self._supply.begin_step(scheduler_output)
        for part in self.parts:
            part.begin_step(scheduler_output, meta)
        self._supply.add_loads(meta)
        self._ends.clear_spoiled(scheduler_output, meta)
        return None if meta.is_empty else meta

    def on_step_output(self, model_runner_output: ModelRunnerOutput) -> None:
        output = model_runner_output.kv_connector_output
        report = output.kv_connector_worker_meta if output is not None else None
        if isinstance(report, StepReport):
            for part in self.parts:
                part.take_report(report)
            self._ends.fold(report)
        for part in self.parts:
            part.end_step()
        if output is not None and self.common.scheduler.log_stats:
            carry(self.common.stats, output)

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        for part in self.parts:
            part.deliver_first_tokens(outputs)

    # The end.

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        ending = Ending()
        self._supply.leave(request)
        for part in self.parts:
            part.finish(request, ending)
        return self._arrivals.finish(request, ending)

    def has_pending_work(self) -> bool:
        has_news = [part.settle() for part in self.parts]
        pending = self.common.loads.need_steps or any(has_news)
        if self._integrity is not None and not pending and not self.common.scheduler.requests:
            self._integrity.look(count(self.common, self.parts))
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
        self.suspension.begin(level)

    def after_wake_up(self, tags: list[str] | None) -> None:
        self.suspension.end(tags)

    def identify(self, fingerprint: str) -> None:
        """Of this engine, with its weights as they are from now on, and with all that its workers
        have told."""
        for part in self.parts:
            part.identify(fingerprint)

    def note_adapters(self, adapters: Mapping[str, str]) -> None:
        for part in self.parts:
            part.note_adapters(adapters)

    def forsake(self, request: Request) -> None:
        """It is about to be hashed anew, so nothing that was meant for it fits any more."""
        for part in self.parts:
            part.forsake(request)
        self._supply.leave(request)

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
        return count(self.common, self.parts)

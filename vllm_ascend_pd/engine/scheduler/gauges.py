# SPDX-License-Identifier: Apache-2.0
"""Parts that say what this engine is, and whether its router knows it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.registrar import Registrar, RegistrarState
from vllm_ascend_pd.engine.scheduler.parts import Part
from vllm_ascend_pd.engine.vllm_api.grammars import grammar_backend, grammars
from vllm_ascend_pd.states import impossible

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_ascend_pd.engine.metadata import StepMeta, StepReport
    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler, SchedulerOutput
    from vllm_ascend_pd.net.trust import Trust


logger = logging.getLogger(__name__)

_FINGERPRINT = 4
"""Its place among the labels of ``engine_info``."""


class _Grammars:
    """What makes them here, from the first request on that has one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._backend: object = None

    def news(self) -> str | None:
        """What it is, if it is another one than at the last call."""
        backend = grammar_backend(self._scheduler)
        if backend is self._backend:
            return None
        self._backend = backend
        return grammars(self._scheduler)


class EngineInfo(Part):
    """What it is, what makes its tokens, and what went wrong in its processes."""

    def __init__(
        self, common: Common, trust: Trust, labels: tuple[str, ...], sampling: Mapping[str, str]
    ) -> None:
        self._trust = trust
        self._grammars = _Grammars(common.scheduler)
        self._told_grammars = ""
        self._adapters: Mapping[str, str] = {}
        self._stats = stats = common.stats
        self._labels = labels
        self._is_told = common.scheduler.log_stats
        self._is_due = True
        stats.set("engine_info", 1, *labels)
        for part, value in sampling.items():
            self._tell(1, part, value)

    def _tell(self, is_so: int, part: str, value: str, adapter: str = "") -> None:
        self._stats.set("tokens_made_by", is_so, part, adapter, value)

    def settle(self) -> bool:
        """A step carries it out, also where nothing else goes on."""
        return self._is_due and self._is_told

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        self._is_due = False

    def take_report(self, report: StepReport) -> None:
        self._stats.add_refused(report.refused_frames)
        self._stats.add_errors(report.errors)

    def end_step(self) -> None:
        self._stats.add_refused(self._trust.take_refused())
        self._stats.add_errors(impossible.take())
        if (made := self._grammars.news()) is not None:
            if self._told_grammars:
                self._tell(0, "grammars", self._told_grammars)
            self._told_grammars = made
            self._tell(1, "grammars", made)

    def note_adapters(self, adapters: Mapping[str, str]) -> None:
        before, self._adapters = self._adapters, adapters
        for name, digest in before.items() - adapters.items():
            self._tell(0, "adapter", digest, name)
        for name, digest in adapters.items() - before.items():
            self._tell(1, "adapter", digest, name)

    def identify(self, fingerprint: str) -> None:
        logger.info("this engine's fingerprint is %s", fingerprint)
        self._stats.set("engine_info", 0, *self._labels)
        before, after = self._labels[:_FINGERPRINT], self._labels[_FINGERPRINT + 1 :]
        self._labels = (*before, fingerprint, *after)
        self._stats.set("engine_info", 1, *self._labels)
        self._is_due = True


class RouterContact(Part):
    """Of one router."""

    def __init__(self, common: Common, registrar: Registrar) -> None:
        self._registrar = registrar
        self._stats = common.stats
        self._is_told = common.scheduler.log_stats
        self._told_state = RegistrarState.NEW
        self._grammars = _Grammars(common.scheduler)

    def settle(self) -> bool:
        return self._is_told and self._registrar.state is not self._told_state

    def end_step(self) -> None:
        if self._registrar.state is not self._told_state:
            self._told_state = self._registrar.state
            is_registered = int(self._told_state.registered)
            self._stats.set("router_registered", is_registered, self._registrar.router)
        if (made := self._grammars.news()) is not None:
            self._registrar.tell(grammars=made)

    def identify(self, fingerprint: str) -> None:
        self._registrar.tell(fingerprint=fingerprint)

    def note_adapters(self, adapters: Mapping[str, str]) -> None:
        self._registrar.tell(adapters=adapters)

    def stop(self) -> None:
        self._registrar.stop()

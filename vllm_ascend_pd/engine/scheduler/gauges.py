# SPDX-License-Identifier: Apache-2.0
"""Parts that say what this engine is, and whether its router knows it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.registrar import Registrar, RegistrarState
from vllm_ascend_pd.engine.scheduler.parts import Part, StepDraft
from vllm_ascend_pd.engine.vllm_api.grammars import grammar_backend, grammars
from vllm_ascend_pd.registration import MAX_ADAPTERS, MAX_TEXT
from vllm_ascend_pd.states import impossible

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.metadata import StepReport
    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.vllm_api.types import SchedulerOutput
    from vllm_ascend_pd.net.trust import Trust


logger = logging.getLogger(__name__)

_FINGERPRINT = 4
"""Its place among the labels of ``engine_info``."""


class EngineInfo(Part):
    """What it is, and what went wrong in its processes."""

    def __init__(self, common: Common, trust: Trust, labels: tuple[str, ...]) -> None:
        self._trust = trust
        self._stats = stats = common.stats
        self._labels = labels
        self._is_told = common.scheduler.log_stats
        self._is_due = True
        stats.set("engine_info", 1, *labels)

    def settle(self) -> bool:
        """A step carries it out, also where nothing else goes on."""
        return self._is_due and self._is_told

    def begin_step(self, output: SchedulerOutput, draft: StepDraft) -> None:
        self._is_due = False

    def take_report(self, report: StepReport) -> None:
        self._stats.add_refused(report.refused_frames)
        self._stats.add_errors(report.errors)

    def end_step(self) -> None:
        self._stats.add_refused(self._trust.take_refused())
        self._stats.add_errors(impossible.take())

    def identify(self, fingerprint: str) -> None:
        logger.info("the weights have changed: %s", fingerprint)
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
        self._scheduler = common.scheduler
        self._grammar_backend: object = None
        """Of which it has been told."""
        self._adapters: dict[str, str] = {}

    def settle(self) -> bool:
        return self._is_told and self._registrar.state is not self._told_state

    def end_step(self) -> None:
        if self._registrar.state is not self._told_state:
            self._told_state = self._registrar.state
            is_registered = int(self._told_state.registered)
            self._stats.set("router_registered", is_registered, self._registrar.router)
        backend = grammar_backend(self._scheduler)
        if backend is not self._grammar_backend:
            self._grammar_backend = backend
            self._registrar.tell(grammars=grammars(self._scheduler))

    def identify(self, fingerprint: str) -> None:
        self._registrar.tell(fingerprint=fingerprint)

    def note_adapter(self, name: str, digest: str) -> None:
        if len(name) <= MAX_TEXT:
            known = {other: what for other, what in self._adapters.items() if other != name}
            self._adapters = dict([*known.items(), (name, digest)][-MAX_ADAPTERS:])
            self._registrar.tell(adapters=self._adapters)

    def stop(self) -> None:
        self._registrar.stop()

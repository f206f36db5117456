# SPDX-License-Identifier: Apache-2.0
"""What a new request asks for in its ``kv_transfer_params``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_pd.engine.vllm_api.engine import join_wave
from vllm_ascend_pd.engine.vllm_api.groups import known_end
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.metrics import Provenance
from vllm_ascend_pd.resume import RESUME
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from vllm_ascend_pd.config import Role
    from vllm_ascend_pd.engine.scheduler.consumer import Consumer
    from vllm_ascend_pd.engine.scheduler.forwards_out import ForwardsOut
    from vllm_ascend_pd.engine.scheduler.parts import Ending
    from vllm_ascend_pd.engine.scheduler.producer import Producer
    from vllm_ascend_pd.engine.scheduler.resume import Resumes
    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, Request
    from vllm_ascend_pd.metrics import Stats


logger = limited_logger(__name__)


class Arrivals:
    """Scheduler thread."""

    def __init__(
        self,
        role: Role,
        stats: Stats,
        resumes: Resumes,
        producer: Producer | None,
        consumer: Consumer | None,
    ) -> None:
        self._role = role
        self._stats = stats
        self._resumes = resumes
        self._producer = producer
        self._consumer = consumer
        self.forwards: ForwardsOut | None = None
        """Of an engine that has peers to forward to."""
        self._has_new = False
        """Since the last step."""
        self._ignored: dict[str, Provenance] = {}
        """By request id: those that are served without the transfer that they ask for."""

    def add(self, request: Request) -> bool:
        """Whether it will be scheduled."""
        self._has_new = True
        params = request.kv_transfer_params
        if isinstance(params, dict) and RESUME in params:
            return self._resumes.add(request, params)
        if params:
            self._add(request, params)
        return True

    def admits(self, request: Request) -> bool:
        """Whether it may be scheduled once nothing else holds it back."""
        if self.forwards is not None and self.forwards.holds(request):
            return False
        return not self._resumes.holds(request)

    def begin_step(self, engine_core: EngineCore | None) -> None:
        if self._has_new and engine_core is not None:
            self._has_new = False
            join_wave(engine_core)

    def _add(self, request: Request, params: object) -> None:
        if not isinstance(params, dict):
            kind = type(params).__name__
            self._ignore(request, Cause.BAD_PARAMS, f"kv_transfer_params is {kind}, not an object")
            return
        if self._producer is not None and "release_transfer_id" in params:
            self._producer.release(params["release_transfer_id"])
            return
        refusals = []
        if params.get("do_remote_prefill"):
            refusals.append(
                self._wrong_role("do_remote_prefill", "kv_consumer or kv_both")
                if self._consumer is None
                else self._consumer.add(request, params)
            )
        if params.get("do_remote_decode"):
            refusals.append(
                self._wrong_role("do_remote_decode", "kv_producer or kv_both")
                if self._producer is None
                else self._producer.expect(request)
            )
        for refusal in filter(None, refusals):
            self._ignore(request, *refusal)

    def _wrong_role(self, name: str, roles: str) -> tuple[Cause, str]:
        detail = f"kv_transfer_params.{name} needs kv_role {roles}, and it is {self._role.value}"
        return Cause.WRONG_ROLE, f"{detail} here"

    def _ignore(self, request: Request, cause: Cause, detail: str) -> None:
        """No transfer for this request; said in the log, the metrics and the response."""
        self._stats.add("requests", label=cause.value)
        num_tokens = known_end(request)
        self._ignored[request.request_id] = Provenance(
            num_tokens, num_computed_tokens=num_tokens, outcome=cause.value
        )
        logger.warning(
            "request %s is served without a transfer: %s (%s)",
            request.request_id,
            cause.value,
            detail,
        )

    def admitted(self, request: Request, num_local: int) -> None:
        """The request is scheduled on so many tokens of the prefix cache."""
        ignored = self._ignored.get(request.request_id)
        # One that was preempted finds what it has computed itself.
        if ignored is not None and not request.num_preemptions:
            ignored.num_local_tokens = num_local
            ignored.num_computed_tokens = ignored.num_prompt_tokens - num_local

    def finish(self, request: Request, ending: Ending) -> dict[str, Any] | None:
        """``kv_transfer_params`` of the response."""
        ignored, provenance = self._ignored.pop(request.request_id, None), ending.provenance
        if ignored is not None:
            provenance = provenance or ignored  # the pool counts, too
            provenance.outcome = ignored.outcome
        asked: Any = request.kv_transfer_params
        if provenance is None or not isinstance(asked, dict) or not asked.get("return_provenance"):
            return ending.params
        return {**(ending.params or {}), "provenance": provenance.as_params()}

# SPDX-License-Identifier: Apache-2.0
"""What decides here which tokens a request gets, to be compared with another engine's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.front_end import parsing
from vllm_ascend_pd.engine.vllm_api.config import logprobs_mode, sampling_parts
from vllm_ascend_pd.engine.vllm_api.grammars import makes_masks
from vllm_ascend_pd.engine.vllm_api.requests import is_seeded
from vllm_ascend_pd.resume import DRAWS, made_by, other_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.vllm_api.types import Request, Scheduler


class Maker:
    """Of one engine. Scheduler thread."""

    def __init__(self, scheduler: Scheduler, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.sampling = {**sampling_parts(scheduler.vllm_config), "parsing": parsing(sys.argv)}
        self._logprobs = logprobs_mode(scheduler.vllm_config)
        self.adapter_of: Callable[[Request], str] = lambda request: ""
        """A digest of what its adapter is."""
        self._scheduler = scheduler

    def of_told(self, request: Request, only_exact: bool = True) -> str:
        """All of it: who is told tokens knows nothing else of the engine that gave them. Tokens
        that are only as likely may be drawn otherwise.
        """
        left_out = () if only_exact else (DRAWS,)
        adapter = self.adapter_of(request)
        return made_by(self.fingerprint, adapter=adapter, **self._of(request, *left_out))

    def of_running(self, request: Request, is_forwarded: bool = False) -> str:
        """What neither fingerprints nor block hashes tell, nor the sampling parameters. Of one that
        ``is_forwarded`` the first engine's server makes the text.
        """
        left_out = ("defaults", "parsing") if is_forwarded else ("defaults",)
        return made_by("", **self._of(request, *left_out))

    def _of(self, request: Request, *left_out: str) -> dict[str, str]:
        """What of it counts for this request."""
        params = request.sampling_params
        left_out += () if params is not None and is_seeded(params) else (DRAWS,)
        parts = {name: value for name, value in self.sampling.items() if name not in left_out}
        has_logprobs = params is not None and params.logprobs is not None
        parts["logprobs"] = self._logprobs if has_logprobs else ""
        parts["grammars"] = makes_masks(self._scheduler, request)
        return parts


def differing(request: Request, theirs: str, ours: str) -> str:
    """The parts in which these differ, for that request, for a person; empty if in none."""
    return ", ".join(other_parts(theirs, ours, request.num_prompt_tokens + request.max_tokens))

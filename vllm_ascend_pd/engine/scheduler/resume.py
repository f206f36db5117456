# SPDX-License-Identifier: Apache-2.0
"""Requests that another engine has begun: their first output tokens are given, and this engine goes
on with the next one as if it had sampled them itself.

    arrived    the tokens are the request's own, its blocks are hashed over them
    told       in the output of the step under way, as one chunk: what the front end makes of
               tokens (text, stop strings, tool calls, usage) it makes of these, too
    admitted   on what the prefix cache or the pool has of prompt and output; the rest is computed.
               The grammar accepts the tokens, the worker draws for them what a seed would have

One that still runs there waits before it is told, while it moves here: see ``moves_in``.

A request that ends with one of them, or is refused, is held back until it has been told so. Kept
are those that have not been told, and those whose grammar has not accepted the tokens yet.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_pd.engine.scheduler.first_token import parent_id
from vllm_ascend_pd.engine.scheduler.maker import differing
from vllm_ascend_pd.engine.scheduler.parts import Ending, Part
from vllm_ascend_pd.engine.vllm_api.config import returns_step_data
from vllm_ascend_pd.engine.vllm_api.grammars import accept_tokens
from vllm_ascend_pd.engine.vllm_api.prefill_stats import count_nothing
from vllm_ascend_pd.engine.vllm_api.requests import (
    append_output,
    is_greedy,
    is_seeded,
    tell_error,
    tell_output,
)
from vllm_ascend_pd.engine.vllm_api.status import wait_for_kv, waits_for_grammar
from vllm_ascend_pd.errors import TransferError
from vllm_ascend_pd.log_limit import limited_logger
from vllm_ascend_pd.resume import RESUME, Resume, prompt_digest
from vllm_ascend_pd.types import Cause

if TYPE_CHECKING:
    from collections.abc import Container

    from vllm_ascend_pd.engine.metadata import StepMeta
    from vllm_ascend_pd.engine.scheduler.maker import Maker
    from vllm_ascend_pd.engine.scheduler.moves_in import MovesIn
    from vllm_ascend_pd.engine.scheduler.parts import Common
    from vllm_ascend_pd.engine.vllm_api.types import Request, SamplingParams, SchedulerOutput
    from vllm_ascend_pd.resume import ResumeKey

logger = limited_logger(__name__)

EXACT = "exact"
SAMPLED = "sampled"
_TRANSFERS = ("do_remote_prefill", "do_remote_decode")
STAYING = (
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "trace_decode_token_ids",
)
"""Fields of ``SamplingParams`` with which a request cannot go on elsewhere; not every version has
all of them. What they ask for the first tokens is gone, or is counted from the start."""


MAX_LOGPROBS = 20
"""Of each token of a request that is forwarded. OpenAI's own limit."""


class Refusal(NamedTuple):
    cause: str
    """The label of the metric."""
    detail: str
    """For a person."""


@dataclass(slots=True)
class _Begun:
    """A request that has not been told its tokens."""

    request: Request
    token_ids: list[int]
    outcome: str
    """How it goes on, or the cause why not."""
    ended: Any = None
    """The status with which it ends with the last one of them."""
    is_refused: bool = False


class Resumes(Part):
    """Scheduler thread."""

    def __init__(self, common: Common, key: ResumeKey, maker: Maker) -> None:
        config = common.scheduler.vllm_config
        self._scheduler = common.scheduler
        self._stats = common.stats
        self._key = key
        self.maker = maker
        self.moves: MovesIn | None = None
        """Of an engine that takes KV from others."""
        self._is_trusting = (
            common.config.security.secret_file is not None
            or ipaddress.ip_address(common.config.host).is_loopback
        )
        self._vocab_size = config.model_config.get_vocab_size()
        self._has_drafts = config.speculative_config is not None
        self._returns_step_data = returns_step_data(config)
        self.guests: Container[str] = ()
        """Ids of requests of other engines' clients."""
        self._untold: dict[str, _Begun] = {}
        self._grammars: dict[str, Request] = {}
        self._outcomes: dict[str, str] = {}
        """These three by request id."""

    def add(self, request: Request, params: dict[str, Any]) -> bool:
        """Whether it will be scheduled."""
        found: Resume | Refusal | None = self._check(request, params)
        if isinstance(found, Resume) and found.source is not None and self.moves is not None:
            found = self.moves.begin(request, found.request_id, found.source)
        if found is None:
            return False
        if isinstance(found, Refusal):
            wait_for_kv(request)
            self.refuse(request, found)
            return False
        token_ids, ended = append_output(self._scheduler, request, found.output_token_ids)
        is_alike = found.only_exact or not differing(
            request, found.made_by, self.maker.of_told(request)
        )
        self.tell(request, token_ids, ended, is_alike)
        return ended is None

    def tell(
        self, request: Request, token_ids: list[int], ended: Any = None, is_alike: bool = True
    ) -> None:
        """Its output so far is given to its client with the step under way, and it goes on unless
        it ``ended`` with it. ``is_alike``: as the first engine would.
        """
        count_nothing(request)  # the engine that began it has counted its prompt
        request_id = request.request_id
        is_exact = is_alike and self._is_exact(request.sampling_params)
        outcome = EXACT if is_exact else SAMPLED
        self._untold[request_id] = _Begun(request, token_ids, outcome, ended)
        self._outcomes[request_id] = outcome
        self._stats.add("resumes", label=outcome)
        if ended is not None:
            wait_for_kv(request)
        elif waits_for_grammar(request):
            self._grammars[request_id] = request

    def holds(self, request: Request) -> bool:
        """Whether it ends before it is scheduled, or is not here yet."""
        if self.moves is not None and self.moves.holds(request):
            return True
        begun = self._untold.get(request.request_id)
        return begun is not None and (begun.is_refused or begun.ended is not None)

    def _check(self, request: Request, params: dict[str, Any]) -> Resume | Refusal:
        try:
            resume = Resume.from_params(params[RESUME])
        except TransferError as e:
            return Refusal("malformed", str(e))
        if not self._is_trusting:
            detail = "kv_ip is not a loopback address: set security.secret_file, also of the router"
            return Refusal("no_secret", detail)
        if not self._key.accepts(resume):
            return Refusal("unsigned", "resume.proof is none of this engine's secret")
        if feature := self.what_stays(request, params, request.request_id in self.guests):
            return Refusal(feature, f"requests with {feature} cannot go on at another engine")
        is_told = resume.source is None or bool(resume.prompt_digest)
        if is_told and prompt_digest(request.prompt_token_ids or ()) != resume.prompt_digest:
            return Refusal("other_prompt", "resume.prompt_digest is not that of this prompt")
        ours = self.maker.of_told(request, resume.only_exact)
        if other := differing(request, resume.made_by, ours):
            detail = f"another engine has made resume.output_token_ids: {other} differ"
            return Refusal("made_otherwise", detail)
        if resume.source is not None and self.moves is None:
            detail = "resume.source: kv_role must be kv_consumer or kv_both"
            return Refusal(f"move_{Cause.WRONG_ROLE.value}", detail)
        if max(resume.output_token_ids, default=0) >= self._vocab_size:
            detail = f"resume.output_token_ids: one is not less than {self._vocab_size}"
            return Refusal("bad_tokens", detail)
        if (num_tokens := len(resume.output_token_ids)) > request.max_tokens:
            detail = f"resume.output_token_ids: {num_tokens} are more than max_tokens"
            return Refusal("bad_tokens", detail)
        if resume.only_exact and not self._is_exact(request.sampling_params):
            return Refusal("not_exact", "a temperature without a seed, or a seed and drafts")
        return resume

    def what_stays(
        self, request: Request, params: dict[str, Any], is_forwarded: bool = False
    ) -> str:
        """The feature with which it cannot go on here, if any. One that is forwarded goes on with
        logprobs: the engine whose client it has gets them with each token.
        """
        sampling = request.sampling_params
        features = {
            "pooling": sampling is None,
            "session": request.resumable,
            "prompt_embeds": request.prompt_token_ids is None or request.prompt_embeds is not None,
            "n": parent_id(request.request_id) is not None,
            "step_data": self._returns_step_data,
            **{name: getattr(sampling, name, None) is not None for name in STAYING},
            **{name: bool(params.get(name)) for name in _TRANSFERS},
        }
        if is_forwarded and sampling is not None and sampling.logprobs is not None:
            features["logprobs"] = not 0 <= sampling.logprobs <= MAX_LOGPROBS
        return next((name for name, is_used in features.items() if is_used), "")

    def _is_exact(self, sampling: SamplingParams | None) -> bool:
        """Whether the next tokens are those that the first engine would have sampled. With drafts
        nobody knows how often it drew from the seed.
        """
        assert sampling is not None
        return is_greedy(sampling) or (is_seeded(sampling) and not self._has_drafts)

    def refuse(self, request: Request, refusal: Refusal) -> None:
        """It ends with an error: without its tokens it would begin anew."""
        request_id = request.request_id
        logger.warning("request %s is not resumed: %s (%s)", request_id, *refusal)
        self._stats.add("resumes", label=refusal.cause)
        self._untold[request_id] = _Begun(request, [], refusal.cause, is_refused=True)

    def settle(self) -> bool:
        """A step tells clients, also of an engine that is paused."""
        return bool(self._untold)

    def begin_step(self, output: SchedulerOutput, meta: StepMeta) -> None:
        if not self._grammars:
            return
        for new in output.scheduled_new_reqs:
            # The engine schedules it once its grammar is compiled.
            request = self._grammars.pop(new.req_id, None)
            if request is None:
                continue
            if not accept_tokens(self._scheduler, request, request.output_token_ids):
                detail = "its grammar does not accept resume.output_token_ids"
                self.refuse(request, Refusal("grammar", detail))

    def refusal_of(self, request: Request) -> str:
        """Why it is refused, if it is: a value of ``Cause``."""
        begun = self._untold.get(request.request_id)
        if begun is None or not begun.is_refused:
            return ""
        cause = begun.outcome.removeprefix("move_")
        return cause if cause in set(Cause) else Cause.INCOMPATIBLE.value

    def deliver_first_tokens(self, outputs: dict[int, list[Any]]) -> None:
        for begun in list(self._untold.values()):
            outputs[begun.request.client_index].append(self._tell(begun))
        self._untold.clear()

    def _tell(self, begun: _Begun) -> Any:
        if begun.is_refused:
            params = {RESUME: {"refused": begun.outcome}}
            return tell_error(self._scheduler, begun.request, params)
        return tell_output(self._scheduler, begun.request, begun.token_ids, begun.ended)

    def identify(self, fingerprint: str) -> None:
        self.maker.fingerprint = fingerprint

    def finish(self, request: Request, ending: Ending) -> None:
        self._untold.pop(request.request_id, None)
        self._grammars.pop(request.request_id, None)
        outcome = self._outcomes.pop(request.request_id, None)
        if outcome is not None:
            ending.params = {**(ending.params or {}), RESUME: {"outcome": outcome}}

    def counts(self) -> dict[str, int]:
        return {"resumes": len(self._outcomes | self._untold | self._grammars)}

# SPDX-License-Identifier: Apache-2.0
"""Structured output, and the reasoning before it. Scheduler thread.

Touches:
    vllm/v1/request.py:Request.structured_output_request
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.sampling_params import RequestOutputKind

from vllm_ascend_pd.engine.digest import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.engine import EngineCoreRequest

    from vllm_ascend_pd.engine.vllm_api.types import Request, Scheduler

MAKING_MASKS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "reasoning_parser",
    "enable_in_reasoning",
)
"""Fields of ``StructuredOutputsConfig`` that decide what a grammar allows, and from when on."""

_REASONING = {
    "thinking": True,
    "enable_thinking": True,
    "thinking_mode": "enabled",
    "reasoning_effort": "high",
}
"""Options of a chat template by which vLLM's parsers look for reasoning where they would not."""


def accept_tokens(scheduler: Scheduler, request: Request, token_ids: Sequence[int]) -> bool:
    """Advance its grammar, if it has one, which is compiled, by these tokens of its output.

    Touches:
        vllm/v1/structured_output/__init__.py:StructuredOutputManager.accept_tokens
        vllm/v1/structured_output/request.py:StructuredOutputRequest.grammar
        vllm/v1/structured_output/backend_types.py:StructuredOutputGrammar.accept_tokens
    """
    structured: Any = cast("Any", request).structured_output_request
    if structured is None:
        return True
    grammar = structured.grammar
    structured.grammar = _OneByOne(grammar)
    try:
        return bool(scheduler.structured_output_manager.accept_tokens(request, list(token_ids)))
    finally:
        structured.grammar = grammar


class _OneByOne:
    """A grammar that takes tokens as steps do: with ``ignore_eos`` more come after its end, which
    some backends refuse only where they come with what is before it."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar

    def accept_tokens(self, request_id: str, token_ids: list[int]) -> bool:
        return all(self._grammar.accept_tokens(request_id, [one]) for one in token_ids)


def makes_masks(scheduler: Scheduler, request: Request) -> str:
    """What of this engine decides which tokens the request's grammar allows; empty without one."""
    return "" if cast("Any", request).structured_output_request is None else grammars(scheduler)


def grammar_backend(scheduler: Scheduler) -> object:
    """That of the engine's first request with structured output, whatever later ones would have
    chosen; ``None`` before.

    Touches:
        vllm/v1/structured_output/__init__.py:StructuredOutputManager.backend
    """
    return scheduler.structured_output_manager.backend


def grammars(scheduler: Scheduler) -> str:
    """What of this engine decides which tokens grammars allow: the backend, and a digest of its
    options.

    Touches:
        vllm/config/vllm.py:VllmConfig.structured_outputs_config
        vllm/config/structured_outputs.py:StructuredOutputsConfig.disable_any_whitespace
        vllm/config/structured_outputs.py:StructuredOutputsConfig.disable_additional_properties
        vllm/config/structured_outputs.py:StructuredOutputsConfig.reasoning_parser
        vllm/config/structured_outputs.py:StructuredOutputsConfig.enable_in_reasoning
    """
    config: Any = cast("Any", scheduler.vllm_config).structured_outputs_config
    options = {name: getattr(config, name) for name in MAKING_MASKS}
    return f"{type(grammar_backend(scheduler)).__name__}-{digest(options)}"


def why_other_masks(scheduler: Scheduler, sent: EngineCoreRequest) -> str:
    """Why this engine's front end would not have sent it, if its structured output is for another
    backend than is configured here; the first such request would make that this engine's.

    Touches:
        vllm/sampling_params.py:StructuredOutputsParams._backend
        vllm/config/structured_outputs.py:StructuredOutputsConfig.backend
    """
    params: Any = sent.sampling_params
    config: Any = scheduler.vllm_config
    configured = config.structured_outputs_config.backend
    if params is None or params.structured_outputs is None:
        return ""
    wanted = params.structured_outputs._backend
    if configured in ("auto", wanted):
        return ""
    return f"structured output is made by {wanted} there, and by {configured} here"


def is_behind_reasoning(scheduler: Scheduler, request: Request) -> bool:
    """Whether it streams, its reasoning has ended, and its answer has nothing yet or only blanks:
    vLLM's reasoning parsers may drop these where they come in one chunk with what is before them,
    as the known tokens do, and perhaps the next one.

    Touches:
        vllm/v1/structured_output/__init__.py:StructuredOutputManager.reasoner_cls
        vllm/v1/structured_output/__init__.py:StructuredOutputManager.tokenizer
        vllm/v1/structured_output/request.py:StructuredOutputRequest.reasoning_parser_kwargs
        vllm/reasoning/abs_reasoning_parsers.py:ReasoningParser.is_reasoning_end
        vllm/sampling_params.py:SamplingParams.output_kind
    """
    manager, params = scheduler.structured_output_manager, cast("Any", request.sampling_params)
    if manager.reasoner_cls is None or params.output_kind is RequestOutputKind.FINAL_ONLY:
        return False
    end = request.num_tokens
    while end > request.num_prompt_tokens and not (
        manager.tokenizer.decode([request.all_token_ids[end - 1]]).strip()
    ):
        end -= 1
    if end == request.num_prompt_tokens:
        return False
    structured: Any = cast("Any", request).structured_output_request
    if structured is not None:
        known = [structured.reasoning_parser_kwargs or {}]
    else:  # only its front end knows them
        known = [{}, {"chat_template_kwargs": _REASONING}]
    token_ids = list(request.all_token_ids[:end])
    reasoners = (manager.reasoner_cls(tokenizer=manager.tokenizer, **it) for it in known)
    return any(
        it.is_reasoning_end(token_ids) and not it.is_reasoning_end(token_ids[:-1])
        for it in reasoners
    )

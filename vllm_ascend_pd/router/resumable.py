# SPDX-License-Identifier: Apache-2.0
"""Which answers can go on from another engine, as far as their requests tell.

exact     the next tokens are those that the first engine would have computed
sampled   they are as likely; only with ``--resume-streams any``
none      a stream ends with an error, as its cause says; neither it nor a whole answer moves
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from vllm_ascend_pd.resume import RESUME
from vllm_ascend_pd.router.apis import CHAT, COMPLETIONS
from vllm_ascend_pd.router.bodies import TRUNCATION

if TYPE_CHECKING:
    from array import array

    from vllm_ascend_pd.resume import ResumeKey, RunningAt
    from vllm_ascend_pd.router.bodies import Body
    from vllm_ascend_pd.router.transcript import Transcript

ResumeMode = Literal["exact", "any", "off"]
RESUME_MODES: tuple[ResumeMode, ...] = get_args(ResumeMode)
Kind = Literal["exact", "sampled", "none"]

GREEDY_BELOW = 1e-5
"""vLLM's own limit of a temperature."""
RETURN_TOKEN_IDS = "return_token_ids"
HARMLESS: dict[str, tuple[bytes, ...]] = {
    "n": (b"null", b"1"),
    "best_of": (b"null", b"1"),
    "use_beam_search": (b"null", b"false"),
    "logprobs": (b"null", b"false"),
    "top_logprobs": (b"null", b"0"),
    "prompt_logprobs": (b"null",),
    "logprob_token_ids": (b"null",),
    "prompt_logprob_token_ids": (b"null",),
    "echo": (b"null", b"false"),
    "include_reasoning": (b"null", b"true"),
    "thinking_token_budget": (b"null", b"-1"),
}
"""Fields with which an answer cannot go on, unless they say this: several answers at once, numbers
or text of tokens that are not computed again, or tokens that the engine does not tell."""
HARMLESS_IF_WHOLE = ("echo", "include_reasoning")
"""An engine makes of all tokens at once what these ask for."""
EXACT_TOOL_PARSERS = frozenset(
    (
        *("glm47", "hermes", "llama4_pythonic", "longcat", "minimax_m2", "olmo3", "pythonic"),
        *("qwen3_coder", "qwen3_xml"),
    )
)
"""Of vLLM's, those that make the same text and calls of the tokens however many come at once; tried
with a cut at every token. Others lose or repeat some of it."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a client can count on when its engine dies."""

    kind: Kind
    cause: str = ""
    """Why nothing is promised."""

    def __str__(self) -> str:
        return f"none; {self.cause}" if self.cause else self.kind


NOTHING = Promise("none", "off")


def promise(body: Body, mode: ResumeMode, tool_call_parser: str) -> Promise:
    """For its answer; ``tool_call_parser`` is the engines', which sees a whole answer at once."""
    if body.path not in (COMPLETIONS, CHAT):
        return Promise("none", "api")
    if body.decode_only not in (None, TRUNCATION):
        return Promise("none", body.decode_only)
    for name, values in HARMLESS.items():
        if name not in body.fields or bytes(body.fields[name]) in values:
            continue
        if body.is_stream or name not in HARMLESS_IF_WHOLE:
            return Promise("none", name)
    if body.is_stream and bytes(body.fields.get("tools", b"null")) not in (b"null", b"[]"):
        tool_choice = bytes(body.fields.get("tool_choice", b"null"))
        if tool_choice == b'"required"':
            return Promise("none", "tool_choice")
        if tool_choice != b'"none"' and tool_call_parser not in EXACT_TOOL_PARSERS:
            return Promise("none", "tool_parser")
    if _is_reproducible(body):
        return Promise("exact")
    return Promise("sampled") if mode == "any" else Promise("none", "sampled")


def _is_reproducible(body: Body) -> bool:
    """A seed with drafts is not, which the engine knows, and refuses."""
    return bytes(body.fields.get("seed", b"null")) not in (b"null", b"-1") or is_greedy(body)


def is_greedy(body: Body) -> bool:
    try:
        return abs(float(bytes(body.fields.get("temperature", b"null")))) < GREEDY_BELOW
    except ValueError:  # what a model's own default is, only its engine knows
        return False


def resume_params(
    key: ResumeKey,
    request_id: str,
    known: Transcript | None,
    kind: Kind,
    source: RunningAt | None = None,
    made_by: str = "",
) -> msgspec.Raw | None:
    """For the engine that goes on with it; nothing if the client has no token yet. The ``source``
    tells tokens itself, and of an answer that comes whole nobody else knows any. ``made_by``: see
    ``resume.made_by``."""
    if known is not None and not known.token_ids:
        return None
    prompt = None if known is None else known.prompt_token_ids
    told = tokens_to_tell(known, kind) if known is not None and source is None else ()
    resume = key.sign(request_id, prompt, told, kind == "exact", source, made_by)
    return msgspec.Raw(msgspec.json.encode({RESUME: resume.to_params()}))


def tokens_to_tell(known: Transcript, kind: Kind) -> array[int]:
    """With which an engine goes on. Those that are only as likely cannot be computed again."""
    return known.to_tell if kind == "exact" else known.token_ids


def ask_for_token_ids(body: Body) -> bool:
    """Of the engine that decodes. Whether the client asked, too."""
    asked = body.is_true(RETURN_TOKEN_IDS)
    body.add(RETURN_TOKEN_IDS, msgspec.Raw(b"true"))
    return asked


def wants_usage(body: Body) -> bool:
    """At the end of the stream."""
    options = msgspec.json.decode(body.fields.get("stream_options", b"null"))
    return isinstance(options, dict) and bool(options.get("include_usage"))

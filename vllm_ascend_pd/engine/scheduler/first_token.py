# SPDX-License-Identifier: Apache-2.0
"""The first token, from the engine that has computed the prompt.

A producer samples a token after each prompt. A consumer that computed it again would need a step
for it, after all KV is in place. Instead it takes the producer's and delivers it at once, while the
KV is still on its way, and begins with the second. Both must sample in the same way: the consumer's
``Open`` carries a key of the request's sampling parameters, and the producer compares.

    arrived    P's answer or its ``FirstToken``      try_promote holds the request back until
    delivered  in the output of the step under way   the token is its own, as any other output token
    admitted   the request has one output token, all KV of its prompt is loaded, none is computed
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_ascend_pd.config import FirstTokenMode
from vllm_ascend_pd.engine.vllm_api import prefill_stats
from vllm_ascend_pd.engine.vllm_api.config import returns_step_data, watermark
from vllm_ascend_pd.engine.vllm_api.requests import append_output, is_seeded, tell_output

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_ascend_pd.engine.vllm_api.config_types import VllmConfig
    from vllm_ascend_pd.engine.vllm_api.types import Request, SamplingParams, Scheduler


SHAPING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "_bad_words_token_ids",
    "thinking_token_budget",
    "watermarking",
)
"""Fields of ``SamplingParams`` that decide which first tokens are likely, beside ``logit_bias`` and
``min_tokens``."""

RULED_OUT = (
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "structured_outputs",
    "trace_decode_token_ids",
    "extra_args",
)
"""Fields that, when set, ask for more than a token, or for what only the consumer knows; not every
version has all of them."""

_CHILD_ID = re.compile(r"\d+_(.+)")
_KV_PARAMS = "kv_transfer_params"


def parent_id(request_id: str) -> str | None:
    """Of a sample of an ``n > 1`` request (``0_id``, ``1_id``, …): the id of that request."""
    child = _CHILD_ID.fullmatch(request_id)
    return child.group(1) if child else None


def make_sampling_key(config: VllmConfig, mode: FirstTokenMode) -> Callable[[Request], bytes]:
    """``sampling_key`` for the requests of one engine."""
    if mode is FirstTokenMode.COMPUTE or returns_step_data(config):
        return lambda request: b""
    processors = tuple(str(it) for it in config.model_config.logits_processors or ())
    return partial(sampling_key, logits_processors=processors, watermark=watermark(config))


def sampling_key(
    request: Request, logits_processors: tuple[str, ...] = (), watermark: str = ""
) -> bytes:
    """Equal where two engines sample the first token in the same way; empty where the token of
    another engine will not do.

    Every sample of an ``n > 1`` request needs a token of its own, and a seed's random numbers
    belong to the engine that continues with them. ``logits_processors`` and ``watermark`` are those
    of the engine.
    """
    params = request.sampling_params
    if params is None or request.resumable or request.prompt_token_ids is None:
        return b""
    if parent_id(request.request_id) is not None or _is_ruled_out(params):
        return b""
    shape = [getattr(params, name) for name in SHAPING]
    shape += [
        sorted((params.logit_bias or {}).items()),
        params.all_stop_token_ids if params.min_tokens else None,
        logits_processors,
    ]
    if watermark and params.watermarking is not False:
        shape.append(watermark)
    encoded = msgspec.json.encode(shape, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def _is_ruled_out(params: SamplingParams) -> bool:
    if is_seeded(params):
        return True
    values = {name: getattr(params, name, None) for name in RULED_OUT}
    others = {k: v for k, v in (params.extra_args or {}).items() if k != _KV_PARAMS}
    values["extra_args"] = others or None
    return any(value is not None for value in values.values())


def deliver(scheduler: Scheduler, request: Request, token_id: int, num_local_tokens: int) -> Any:
    """Make ``token_id`` the waiting request's first output token; what tells the client.

    The request may end with it. ``num_local_tokens`` of its prompt are cached here; the rest is
    counted as transferred, because it is not computed here.
    """
    new_token_ids, ended = append_output(scheduler, request, [token_id])
    prefill_stats.count(request, num_local_tokens, request.num_prompt_tokens - num_local_tokens)
    return tell_output(scheduler, request, new_token_ids, ended)

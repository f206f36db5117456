# SPDX-License-Identifier: Apache-2.0
"""A request as vLLM's front end sends it to its engine core, sent to another engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ascend_pd.errors import TransferError

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, Request, Scheduler


def what_stays(scheduler: Scheduler, request: Request) -> str:
    """The feature with which it cannot be sent, if any.

    Touches:
        vllm/v1/request.py:Request.structured_output_request
        vllm/config/structured_outputs.py:StructuredOutputsConfig.reasoning_parser
    """
    any_request: Any = request
    config: Any = scheduler.vllm_config
    features = {
        "images": bool(request.mm_features),
        "lora": request.lora_request is not None,  # known to the other one by another number
        "reasoning_grammar": any_request.structured_output_request is not None
        and bool(config.structured_outputs_config.reasoning_parser),
    }
    return next((name for name, is_used in features.items() if is_used), "")


def encode_request(request: Request, name: str, kv_transfer_params: dict[str, Any]) -> bytes:
    """What ``add_guest`` takes; ``TransferError`` if it has what is no plain data.

    Touches:
        vllm/v1/request.py:Request.priority
    """
    any_request: Any = request
    params: Any = request.sampling_params
    extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv_transfer_params}
    sent = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=None,
        sampling_params=msgspec.structs.replace(params, extra_args=extra_args),
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=None,
        cache_salt=request.cache_salt,
        data_parallel_rank=None,
        priority=any_request.priority,
        trace_headers=request.trace_headers,
    )
    try:
        (encoded,) = MsgpackEncoder().encode(sent)
    except (TypeError, ValueError, OverflowError) as e:
        raise TransferError(f"the request cannot be sent: {e}") from e
    return bytes(encoded)


def read_request(core: EngineCore, name: str, encoded: bytes) -> Request:
    """The request, under this name. ``TransferError`` if it is none, or this engine's own front end
    could not have sent it.

    Touches:
        vllm/v1/engine/core.py:EngineCore.preprocess_add_request
    """
    any_core: Any = core
    try:
        sent = MsgpackDecoder(EngineCoreRequest).decode(encoded)
        sent.request_id, sent.client_index, sent.current_wave = name, 0, 0
        request, _ = any_core.preprocess_add_request(sent)
    except Exception as e:  # as vLLM does it with those of its front end
        raise TransferError(f"not a request of this engine: {e!r:.300}") from e
    end, limit = request.num_prompt_tokens + request.max_tokens, core.scheduler.max_model_len
    if end > limit:
        raise TransferError(f"it may have {end} tokens, and max_model_len is {limit} here")
    guest: Request = request
    return guest


def add_guest(core: EngineCore, request: Request) -> None:
    """It is this engine's from here on; no client of the front end knows it, so its output is
    dropped there.

    Touches:
        vllm/v1/engine/core.py:EngineCore.add_request
    """
    any_core: Any = core
    any_core.add_request(request)

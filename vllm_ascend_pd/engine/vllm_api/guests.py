# SPDX-License-Identifier: Apache-2.0
"""A request as vLLM's front end sends it to its engine core, sent to another engine's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ascend_pd.engine.vllm_api import row_limits
from vllm_ascend_pd.engine.vllm_api.hashes import hash_anew, salt_of_client
from vllm_ascend_pd.errors import TransferError

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import EngineCore, LoRARequest, Request, Scheduler


_MAX_PLACEHOLDER = 1 << 31
"""What stands for an image may be no token of the model's."""


def what_stays(scheduler: Scheduler, request: Request) -> str:
    """The feature with which it cannot be sent, if any.

    Touches:
        vllm/v1/request.py:Request.structured_output_request
        vllm/multimodal/inputs.py:MultiModalFeatureSpec.data
        vllm/config/structured_outputs.py:StructuredOutputsConfig.reasoning_parser
    """
    any_request: Any = request
    config: Any = scheduler.vllm_config
    features = {
        "images": not _are_whole(any_request.mm_features),
        "reasoning_grammar": any_request.structured_output_request is not None
        and bool(config.structured_outputs_config.reasoning_parser),
    }
    return next((name for name, is_used in features.items() if is_used), "")


def _are_whole(features: list[Any]) -> bool:
    """What is not lies in memory that a front end shares with its workers."""
    return all(feature.data and "address" not in feature.data for feature in features)


def encode_request(request: Request, name: str, kv_transfer_params: dict[str, Any]) -> bytes:
    """What ``add_guest`` takes; ``TransferError`` if it has what is no plain data.

    Touches:
        vllm/v1/request.py:Request.priority
        vllm/v1/request.py:Request.session_id
    """
    any_request: Any = request
    params: Any = request.sampling_params
    extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv_transfer_params}
    sent = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=any_request.mm_features,
        sampling_params=msgspec.structs.replace(params, extra_args=extra_args),
        pooling_params=None,
        arrival_time=request.arrival_time,
        lora_request=request.lora_request,
        cache_salt=salt_of_client(request),
        data_parallel_rank=None,
        priority=any_request.priority,
        trace_headers=request.trace_headers,
        session_id=any_request.session_id,
    )
    try:
        (encoded,) = MsgpackEncoder(size_threshold=sys.maxsize).encode(sent)
    except (TypeError, ValueError, OverflowError) as e:
        raise TransferError(f"the request cannot be sent: {e}") from e
    return bytes(encoded)


def read_request(encoded: bytes) -> EngineCoreRequest:
    """What was sent; ``TransferError`` if it is no request."""
    try:
        # Into tensors, which are written to.
        sent: EngineCoreRequest = MsgpackDecoder(EngineCoreRequest).decode(bytearray(encoded))
    except Exception as e:  # as vLLM does it with those of its front end
        raise TransferError(f"not a request: {e!r:.300}") from e
    return sent


def make_guest(
    core: EngineCore, name: str, sent: EngineCoreRequest, adapter: LoRARequest | None
) -> Request:
    """The request, under this name and with this engine's own adapter. ``TransferError`` if its
    front end could not have sent it.

    Touches:
        vllm/v1/engine/core.py:EngineCore.preprocess_add_request
        vllm/v1/core/sched/scheduler.py:Scheduler.max_num_encoder_input_tokens
        vllm/v1/core/encoder_cache_manager.py:EncoderCacheManager.cache_size
        vllm/sampling_params.py:SamplingParams.verify
    """
    any_core: Any = core
    if name in core.scheduler.requests:
        raise TransferError("a request of this engine has its name")
    try:
        _check(core.scheduler, sent)
        sent.request_id, sent.client_index, sent.current_wave = name, 0, 0
        sent.lora_request = adapter
        # The front end knows what the cache of its own ones has, and what it evicts.
        features, sent.mm_features = sent.mm_features, None
        request, _ = any_core.preprocess_add_request(sent)
        if features:
            request.mm_features = features
            hash_anew(request)
        largest = max((f.mm_position.get_num_embeds() for f in request.mm_features), default=0)
    except Exception as e:  # as above
        raise TransferError(f"not a request of this engine: {e!r:.300}") from e
    scheduler: Any = core.scheduler
    end, limit = request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len
    if end > limit:
        raise TransferError(f"it may have {end} tokens, and max_model_len is {limit} here")
    if not _are_whole(request.mm_features):
        raise TransferError("it has images without their data")
    room = min(scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager.cache_size)
    if largest > room:
        raise TransferError(f"an image of {largest} tokens, and {room} can be encoded here")
    guest: Request = request
    return guest


def _check(scheduler: Scheduler, sent: EngineCoreRequest) -> None:
    """What a front end checks, and its engine core relies on; ``ValueError`` if it is not so."""
    params, token_ids = sent.sampling_params, sent.prompt_token_ids
    if params is None or sent.pooling_params is not None or not token_ids or sent.resumable:
        raise ValueError("it is not one answer to a prompt of tokens")
    config: Any = scheduler.vllm_config
    # Structured output the other engine's front end has checked: that takes a tokenizer.
    params.verify(config.model_config, config.speculative_config, None, None)
    row_limits.check(config, params)
    is_image = bytearray(len(token_ids))
    for feature in sent.mm_features or ():
        start, num_tokens = feature.mm_position.offset, feature.mm_position.length
        if not 0 <= start <= start + num_tokens <= len(token_ids):
            raise ValueError("an image is outside of its prompt")
        is_image[start : start + num_tokens] = b"\1" * num_tokens
    vocab_size = config.model_config.get_vocab_size()
    for token_id, replaced in zip(token_ids, is_image, strict=True):
        if not 0 <= token_id < (_MAX_PLACEHOLDER if replaced else vocab_size):
            raise ValueError(f"{token_id} is no token here")


def add_guest(core: EngineCore, request: Request) -> None:
    """It is this engine's from here on; no client of the front end knows it, so its output is
    dropped there.

    Touches:
        vllm/v1/engine/core.py:EngineCore.add_request
    """
    any_core: Any = core
    any_core.add_request(request)

# SPDX-License-Identifier: Apache-2.0
"""What a step would do with a request, done between steps. Scheduler thread."""

from __future__ import annotations

import hashlib
import re
import time
from typing import TYPE_CHECKING, Any, cast

import msgspec
from vllm.sampling_params import SamplingType
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput
from vllm.v1.request import RequestStatus

from vllm_ascend_pd.engine.vllm_api.queues import remove_waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.outputs import LogprobsLists

    from vllm_ascend_pd.engine.vllm_api.types import Request, SamplingParams, Scheduler


def is_greedy(params: SamplingParams) -> bool:
    return bool(params.sampling_type == SamplingType.GREEDY)


def is_seeded(params: SamplingParams) -> bool:
    """Whether its random numbers are its own."""
    return bool(params.sampling_type == SamplingType.RANDOM_SEED)


def is_for_consumer(request: Request) -> bool:
    """Whether its prompt is computed for another engine."""
    params: object = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def params_digest(params: SamplingParams) -> bytes:
    """Equal where the same is asked for, but for transfers, and whatever the front end notes.

    Touches:
        vllm/sampling_params.py:SamplingParams.structured_outputs
    """
    asked = msgspec.structs.asdict(cast("msgspec.Struct", params))
    if (structured := asked["structured_outputs"]) is not None:
        asked["structured_outputs"] = {k: v for k, v in vars(structured).items() if k[0] != "_"}
    asked["extra_args"] = {
        k: v for k, v in (params.extra_args or {}).items() if k != "kv_transfer_params"
    }
    asked["logit_bias"] = sorted((params.logit_bias or {}).items())
    encoded = msgspec.json.encode(asked, order="deterministic", enc_hook=repr)
    return hashlib.blake2b(encoded, digest_size=16).digest()


def append_output(
    scheduler: Scheduler, request: Request, token_ids: Sequence[int]
) -> tuple[list[int], Any]:
    """The tokens as output of a request that waits, up to that with which it ends: what is new, and
    the status with which it ends, or ``None``. It goes on waiting until ``tell_output``.
    """
    status = request.status
    new, ends = scheduler._update_request_with_output(request, list(token_ids), is_stale=True)
    ended, request.status = request.status, status
    return new, ended if ends else None


def tell_output(
    scheduler: Scheduler,
    request: Request,
    new_token_ids: list[int],
    ended: Any,
    new_logprobs: LogprobsLists | None = None,
) -> EngineCoreOutput:
    """What tells the client of output that no step has computed. With ``ended`` the request, which
    waits, ends with this status.
    """
    _note_scheduled(scheduler, request)
    prefill_stats = request.take_prefill_stats()
    params = None
    if ended is not None:
        request.status = ended
        params, _ = scheduler._free_request(request)
        remove_waiting(scheduler, request)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=new_token_ids,
        finish_reason=None if ended is None else request.get_finished_reason(),
        new_logprobs=new_logprobs,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        prefill_stats=prefill_stats,
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )


def tell_none(scheduler: Scheduler, request: Request) -> EngineCoreOutput:
    """A request that waits ends well, without a token; what tells the client."""
    return tell_output(scheduler, request, [], RequestStatus.FINISHED_LENGTH_CAPPED)


def tell_error(scheduler: Scheduler, request: Request, params: dict[str, Any]) -> EngineCoreOutput:
    """End it with an error, whether it waits or a step has been scheduled with it; what tells the
    client, with these ``kv_transfer_params``.
    """
    return _tell_end(scheduler, request, RequestStatus.FINISHED_ERROR, params)


def tell_abort(scheduler: Scheduler, request: Request, params: dict[str, Any]) -> EngineCoreOutput:
    """End it after the tokens that the client has; what tells the client."""
    return _tell_end(scheduler, request, RequestStatus.FINISHED_ABORTED, params)


def _tell_end(
    scheduler: Scheduler, request: Request, status: Any, params: dict[str, Any]
) -> EngineCoreOutput:
    scheduler.finish_requests(request.request_id, status)
    _note_scheduled(scheduler, request)
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        kv_transfer_params=params,
        trace_headers=request.trace_headers,
    )


def _note_scheduled(scheduler: Scheduler, request: Request) -> None:
    """By now, if not before: else the front end counts the time from the host's start on."""
    if scheduler.log_stats:
        request.record_event(EngineCoreEventType.SCHEDULED, time.monotonic())


def end_aborted(scheduler: Scheduler, request: Request) -> None:
    """Nobody is told."""
    scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def named(scheduler: Scheduler, name: str) -> list[Request]:
    """The requests that a client knows by this name: vLLM appends the place of a prompt in a list
    of prompts, and a random part.

    Touches:
        vllm/v1/engine/input_processor.py:InputProcessor.assign_request_id
    """
    ours = re.compile(re.escape(name) + r"(-0)?(-[0-9a-f]{8})?")
    return [request for i, request in scheduler.requests.items() if ours.fullmatch(i)]


def num_landed_tokens(request: Request) -> int:
    """How many of its tokens are computed for certain, whatever steps in flight do."""
    return request.num_computed_tokens - request.num_in_flight_tokens

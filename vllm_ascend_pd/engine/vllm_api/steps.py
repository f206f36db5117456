# SPDX-License-Identifier: Apache-2.0
"""What a step tells the workers. Scheduler thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_pd.engine.vllm_api.process import vllm_version
from vllm_ascend_pd.engine.vllm_api.requests import is_seeded

if TYPE_CHECKING:
    from vllm_ascend_pd.engine.vllm_api.types import Scheduler, SchedulerOutput


def complete_new_requests(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Of what is new to the worker it hears all that it may need."""
    for new in output.scheduled_new_reqs:
        request = scheduler.requests[new.req_id]
        # vLLM keeps images of cached blocks from the worker, which is told once. Where their KV is
        # not to be had in the end, or is evicted, they are encoded after all.
        new.mm_features = request.mm_features
        if request.num_output_tokens:  # which another engine has sampled
            new.prefill_token_ids = list(request.all_token_ids)


def drop_padding(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Who starts with a single token gets rows for drafts that nobody has made: graphs want as many
    rows of each request. Refusing them draws from a seed, and its first token were not that of an
    engine that computes the whole prompt. Model Runner V2 of 0.30 has no graph for such a step, and
    verifies as drafts what is in these rows.
    """
    drafts = output.scheduled_spec_decode_tokens
    if not drafts:
        return
    is_verified = scheduler.use_v2_model_runner and vllm_version().startswith("0.30.")
    new = [request.req_id for request in output.scheduled_new_reqs]
    for request_id in (*new, *output.scheduled_cached_reqs.resumed_req_ids):
        params = scheduler.requests[request_id].sampling_params
        if request_id in drafts and params is not None and (is_verified or is_seeded(params)):
            num_rows = len(drafts.pop(request_id))
            output.num_scheduled_tokens[request_id] -= num_rows
            output.total_num_scheduled_tokens -= num_rows


def clear_blocks(output: SchedulerOutput, block_ids: list[int]) -> None:
    """Before the forward, these and no others."""
    output.new_block_ids_to_zero = block_ids or None

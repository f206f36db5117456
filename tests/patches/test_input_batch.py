# SPDX-License-Identifier: Apache-2.0
"""vLLM's batch of requests between two steps: nothing of a request stays in a row that it left."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

VOCAB_SIZE = 16
BEGINS, ENDS, THINKS = 5, 6, 9
REASONING: Any = SimpleNamespace(reasoning_start_token_ids=[BEGINS], reasoning_end_token_ids=[ENDS])


@pytest.fixture
def batch() -> InputBatch:
    up_to_031 = {"kernel_block_sizes": [16]}
    parameters = inspect.signature(InputBatch).parameters
    return InputBatch(
        max_num_reqs=4,
        max_model_len=32,
        max_num_batched_tokens=32,
        device=torch.device("cpu"),
        vocab_size=VOCAB_SIZE,
        block_sizes=[16],
        max_num_blocks_per_req=[2],
        logitsprocs=LogitsProcessors(),
        reasoning_config=REASONING,
        **{name: value for name, value in up_to_031.items() if name in parameters},
    )


def add(batch: InputBatch, req_id: str, **sampling: Any) -> None:
    batch.add_request(
        CachedRequestState(
            req_id=req_id,
            prompt_token_ids=[1, 2],
            mm_features=[],
            sampling_params=SamplingParams(temperature=0, **sampling),
            generator=None,
            block_ids=([0],),
            num_computed_tokens=0,
            output_token_ids=[],
        )
    )


def end_update(batch: InputBatch) -> None:
    batch.condense()
    batch.refresh_metadata()


def test_row_of_a_moved_request_keeps_nothing_of_what_it_may_sample(batch: InputBatch) -> None:
    add(batch, "first")
    add(batch, "restricted", allowed_token_ids=[7])
    end_update(batch)
    batch.remove_request("first")  # the restricted one moves to its row
    end_update(batch)
    add(batch, "free")  # and this one gets the row that it left
    end_update(batch)

    forbidden = batch.sampling_metadata.allowed_token_ids_mask
    assert batch.req_ids == ["restricted", "free"]
    assert forbidden is not None
    assert forbidden.sum(dim=1).tolist() == [VOCAB_SIZE - 1, 0]


def test_row_of_an_ended_request_keeps_nothing_of_how_long_it_may_think(batch: InputBatch) -> None:
    add(batch, "brief", thinking_token_budget=2)
    add(batch, "plain")
    end_update(batch)
    batch.remove_request("brief")  # and the other one moves to its row
    end_update(batch)

    given = batch.req_output_token_ids[0]
    assert batch.req_ids == ["plain"]
    assert given is not None
    given += [BEGINS, THINKS, THINKS, THINKS]
    end_update(batch)
    holder = batch.sampling_metadata.thinking_budget_state_holder
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, THINKS] = 1
    drafts = batch.sampling_metadata.spec_token_ids
    holder.update_state([given], drafts)
    assert holder.apply_to_logits(logits, False, drafts).argmax() == THINKS


def test_requests_that_change_places_keep_what_they_may_sample(batch: InputBatch) -> None:
    add(batch, "free")
    add(batch, "restricted", allowed_token_ids=[7])
    end_update(batch)
    batch.swap_states(0, 1)  # as for attention that takes decodes first
    end_update(batch)

    forbidden = batch.sampling_metadata.allowed_token_ids_mask
    assert batch.req_ids == ["restricted", "free"]
    assert forbidden is not None
    assert forbidden.sum(dim=1).tolist() == [VOCAB_SIZE - 1, 0]


def test_placeholders_of_earlier_steps_stay_when_a_neighbour_needs_output_tokens(
    batch: InputBatch,
) -> None:
    add(batch, "plain")
    end_update(batch)
    sampled_ahead = batch.req_output_token_ids[0]
    assert sampled_ahead is not None
    sampled_ahead.extend([-1, -1, -1])  # of three steps that nobody looked at
    add(batch, "penalised", repetition_penalty=1.5)
    end_update(batch)
    batch.prev_req_id_to_index = {"plain": 0}
    batch.set_async_sampled_token_ids(torch.tensor([[5]]), torch.Event())

    batch.update_async_output_token_ids()

    assert sampled_ahead == [-1, -1, 5]
